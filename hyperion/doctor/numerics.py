"""Check the computations of this machine: compare training steps in every precision with float64 results that are stored in git.

The stored float64 results are called the pack. They come from two short training runs with fixed initial weights and data, which
must be the same on every platform and with every version of NumPy and torch. Therefore they are computed with exact arithmetic
from the raw 64-bit output of NumPy's PCG64, which NEP 19 keeps stable. (The output of NumPy's distributions and of torch's
generators may change.) They are rounded to float32, so that float32 and float64 computations start from the same numbers.

    python -m hyperion.commands.regenerate numerics            recompute the pack and compare it with the pack in git
    python -m hyperion.commands.regenerate numerics --write    recompute the pack and replace the pack in git

The pack is computed with plain PyTorch operations. It does not use the library's engines, precisions or fused kernels.

The tolerances are four to ten times the errors of correct devices. For comparison, the unit roundoffs are 2^-24 (fp32), 2^-11
(fp16), 2^-11 (tf32; 2^-10 on units that truncate) and 2^-8 (bf16). A test shows that a wrong mask, weight or activation in
float32 exceeds the tolerances. The gradients of the ResNet have larger tolerances: if a rounding error moves the input of a ReLU
across zero, the gradient changes by the whole contribution of this unit, so the error of the gradients decreases only with the
square root of the unit roundoff.
"""

import hashlib
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from rich.table import Table
from safetensors.numpy import load_file, save_file
from torch import Tensor, nn

from hyperion.hardware import Device, detect
from hyperion.models import TransformerConfig, TransformerLM, resnet18
from hyperion.training import (
    TRAINING_DTYPES,
    ImageEngine,
    LanguageEngine,
    Precision,
    TorchEngine,
    adamw,
    decay_groups,
    sgd_nesterov,
)

STEPS = 50
CLIP_NORM = 1.0
_VOCABULARY, _LENGTH, _WINDOWS = 64, 16, 4
_IMAGES, _SIDE, _CLASSES = 16, 16, 10
Batch = tuple[Tensor, Tensor]
PACK = Path(__file__).with_name("numerics.safetensors")
SAMPLED = 128  # maximum number of elements of each gradient in the pack, in addition to its norm
# float64 sums in another order differ by much less. A larger difference means other weights, data or operators.
TOLERANCE_OF_PACK = 1e-9
# Smallest divisor in `difference`.
_SMALLEST = 1e-3
_SCALE = 1024.0  # factor on the loss that keeps fp16 gradients out of the subnormal range; a power of two adds no rounding error
QUANTITIES = ("logits", "gradients", "losses")
# Relative errors of (logits, gradients, losses), in the order of QUANTITIES.
_TOLERANCES = {
    ("language", "fp32"): (5e-6, 2e-5, 1e-5),
    ("language", "tf32"): (8e-3, 2e-2, 2e-3),
    ("language", "fp16"): (4e-3, 1e-2, 1e-3),
    ("language", "bf16"): (4e-2, 1e-1, 5e-3),
    ("resnet18", "fp32"): (2e-5, 1e-4, 1e-3),
    ("resnet18", "tf32"): (2e-2, 3e-1, 1e-2),
    ("resnet18", "fp16"): (1e-2, 2e-1, 5e-3),
    ("resnet18", "bf16"): (8e-2, 5e-1, 2e-2),
}
# The matrix instructions of MI200 flush subnormal fp16 and bf16 inputs and outputs to zero. Therefore MIOpen and rocBLAS convert
# the operands of fp16 backward passes to bf16, which has a wider range and a lower precision. On MI300, subnormal numbers are not
# flushed, and operands are not converted.
# Source: AMD, MIOpen documentation, "MI200 MFMA behavior specifics".
_FLUSHING = ("gfx90a",)
_FLUSHED = 2  # factor by which bf16 tolerances are multiplied on these architectures
_MOST_SKIPPED = 16  # maximum number of steps that fp16 may skip until its loss scale is small enough


@dataclass(frozen=True)
class Case:
    """One of the two short training runs.

    Attributes:
        name: name of the training run.
        shell: function that returns the model. Its weights are arbitrary, because `model` replaces them.
        batch: function that returns the batch of a step (counted from 0) on the CPU. Floating-point inputs are float32.
        learning_rate: learning rate of every step.
        optimizer: function that returns the library's optimizer for a model and a learning rate.
        engine: the library's engine class.
    """

    name: str
    shell: Callable[[], nn.Module]
    batch: Callable[[int], Batch]
    learning_rate: float
    optimizer: Callable[[nn.Module, float], torch.optim.Optimizer]
    engine: type[TorchEngine]

    def model(self) -> nn.Module:
        """Return the model with its fixed weights, in float32 on the CPU."""
        model = self.shell()
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter.copy_(torch.from_numpy(_weights(f"{self.name}/{name}", tuple(parameter.shape))))
        return model

    def start(self, dtype: str, device: Device) -> TorchEngine:
        """Return the library's engine with the model on this device."""
        model = self.model().to(device.torch_device)
        precision = Precision(dtype, "a check of the machine's numbers")
        optimizer = self.optimizer(model, self.learning_rate)
        return self.engine(model, optimizer, lambda step: self.learning_rate, precision, device, clip_norm=CLIP_NORM)


def uniform(name: str, shape: tuple[int, ...]) -> np.ndarray:
    """Return pseudorandom float32 values from -1 to 1 as float64. The same name and shape always give the same numbers."""
    raw = _raw(name, math.prod(shape))
    return (
        # The upper 53 bits become an exact float64 in [0, 1), which is scaled to [-1, 1). It is rounded to float32, so that both
        # computations use the same numbers.
        (2.0 * ((raw >> np.uint64(11)).astype(np.float64) * 2.0**-53) - 1.0).astype(np.float32).astype(np.float64).reshape(shape)
    )


def integers(name: str, shape: tuple[int, ...], below: int) -> np.ndarray:
    """Return pseudorandom int64 integers from 0 to `below` - 1. The same name and shape always give the same integers."""
    return (_raw(name, math.prod(shape)) % np.uint64(below)).astype(np.int64).reshape(shape)


def _raw(name: str, count: int) -> np.ndarray:
    seed = int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "little")
    return np.random.PCG64(seed).random_raw(count)


def _weights(name: str, shape: tuple[int, ...]) -> np.ndarray:
    """Return the fixed weights of a parameter.

    Matrices and convolution kernels have a variance of 1/fan-in, and embeddings have a variance of 0.1. The weights of norms are
    near 1, and biases are near 0. The biases of norms before a ReLU are near 2, so that few inputs of the ReLU are near zero,
    where a rounding error in any precision can change the gradient by the whole contribution of a unit.
    """
    numbers = uniform(name, shape)
    if len(shape) == 1:
        before_relu = name.startswith("resnet18") and "norm" in name
        middle = 1.0 if name.endswith("weight") else 2.0 if before_relu else 0.0
        numbers = (0.5 if before_relu else 0.1) * numbers + middle
    else:
        # A uniform number from -1 to 1 has the variance 1/3, so the factor sqrt(3 v) gives the variance v.
        numbers = numbers * math.sqrt(0.3 if "embedding" in name else 3.0 / math.prod(shape[1:]))
    return numbers.astype(np.float32)


def _tokens(step: int) -> Batch:
    windows = torch.from_numpy(integers(f"tokens {step}", (_WINDOWS, _LENGTH + 1), _VOCABULARY))
    return windows[:, :-1].contiguous(), windows[:, 1:].contiguous()


def _pictures(step: int) -> Batch:
    # Uniform numbers times 1.75 have a standard deviation of about 1, like normalised images.
    images = torch.from_numpy(uniform(f"images {step}", (_IMAGES, 3, _SIDE, _SIDE)) * 1.75).float()
    return images, torch.from_numpy(integers(f"labels {step}", (_IMAGES,), _CLASSES))


CASES = (
    Case(
        "language",
        lambda: TransformerLM(TransformerConfig(_VOCABULARY, _LENGTH, width=32, heads=2, layers=2)),
        _tokens,
        1e-3,
        adamw,
        LanguageEngine,
    ),
    Case("resnet18", lambda: resnet18(_CLASSES, width=4), _pictures, 2e-3, sgd_nesterov, ImageEngine),
)


@dataclass(frozen=True)
class NumericsFinding:
    """The error of one quantity in one training run and one precision.

    Attributes:
        case: name of the training run.
        dtype: name of the precision.
        quantity: 'logits', 'gradients' or 'losses'. 'all' if nothing was computed.
        worst: name of the tensor or step with the largest error.
        error: relative error of `worst`.
        tolerance: largest allowed relative error.
        first: name of the first tensor or step whose error exceeds the tolerance, or "".
        reason: reason why nothing was computed, or "".
    """

    case: str
    dtype: str
    quantity: str
    worst: str = ""
    error: float = float("nan")
    tolerance: float = float("nan")
    first: str = ""
    reason: str = ""

    @property
    def passed(self) -> bool:
        """True if the error is within the tolerance, or if nothing was computed."""
        return bool(self.reason) or self.error <= self.tolerance  # a NaN fails


@dataclass(frozen=True)
class NumericsReport:
    """The errors of all quantities on one device.

    Attributes:
        device: name of the device.
        findings: one result per training run, precision and quantity.
        note: remark on the precision of the device, or "".
    """

    device: str
    findings: tuple[NumericsFinding, ...]
    note: str = ""

    @property
    def passed(self) -> bool:
        """True if every quantity passed."""
        return all(finding.passed for finding in self.findings)

    @property
    def conclusion(self) -> str:
        """The conclusion in one sentence. It names the first wrong tensor, if there is one."""
        computed = [finding for finding in self.findings if not finding.reason]
        wrong = [finding for finding in computed if not finding.passed]
        if not wrong:
            return f"{self.device}: all {len(computed)} quantities agree with float64 within their tolerances"
        at = wrong[0]
        return (
            f"{self.device}: WRONG NUMBERS in {len(wrong)} of {len(computed)} quantities; the first wrong tensor: "
            f"{at.first} of {at.case} in {at.dtype} (largest error {at.error:.2g}, tolerance {at.tolerance:.2g})"
        )


def check_numerics(
    device: Device | None = None, dtypes: Iterable[str] = TRAINING_DTYPES, on_line: Callable[[str], object] = lambda line: None
) -> NumericsReport:
    """Execute both training runs in each precision that the device supports, and compare the results with the pack.

    On a CPU, this takes a few seconds per precision.

    Args:
        device: the device to check; default: the first device of this machine.
        dtypes: names from TRAINING_DTYPES.
        on_line: function that is called with a line of text before each training run.
    """
    device, pack, findings = device or detect(), read_pack(), []
    for dtype in dtypes:
        possible, how = device.supports(dtype)
        for case in CASES:
            if not possible:
                findings.append(NumericsFinding(case.name, dtype, "all", reason=how))
                continue
            on_line(f"{case.name} in {dtype}")
            findings += compare(case, dtype, device, pack)
    return NumericsReport(device.name, tuple(findings), note(device))


def compare(case: Case, dtype: str, device: Device, pack: dict[str, np.ndarray]) -> list[NumericsFinding]:
    """Compare the logits and gradients of the first step, and the losses of all steps, with the numbers in `pack`."""
    reference = {
        name.removeprefix(f"{case.name}/"): numbers for name, numbers in pack.items() if name.startswith(f"{case.name}/")
    }
    engine, allowed = case.start(dtype, device), tolerances(case.name, dtype, device)
    # The order matters: `_first_step` does not change the weights, and `_losses` then trains them.
    logits, gradients = _first_step(case, engine)
    errors = {
        "logits": {"the logits": _distance(logits, reference["logits"])},
        "gradients": _gradient_errors(gradients, reference),
        "losses": {
            f"the loss of step {step + 1}": abs(computed / expected - 1)
            for step, (computed, expected) in enumerate(zip(_losses(case, engine), reference["losses"], strict=True))
        },
    }
    return [_finding(case, dtype, quantity, by_name, allowed[quantity]) for quantity, by_name in errors.items()]


def numerics_table(report: NumericsReport) -> Table:
    """Return a table with one line per quantity.

    A line contains the error of the quantity, or the reason why the device computed nothing.
    """
    table = Table("model", "precision", "compared with float64", "error", "tolerance", "", "largest error in", pad_edge=False)
    for finding in report.findings:
        if finding.reason:
            table.add_row(finding.case, finding.dtype, finding.reason, "", "", "not here", "")
        else:
            numbers = (f"{finding.error:.1e}", f"{finding.tolerance:.0e}")
            table.add_row(
                finding.case,
                finding.dtype,
                finding.quantity,
                *numbers,
                "[green]ok[/]" if finding.passed else "[red]WRONG[/]",
                finding.worst,
            )
    return table


def tolerances(case: str, dtype: str, device: Device) -> dict[str, float]:
    """Return, for each quantity, the largest relative error that a correct device of this architecture may have."""
    numbers = _TOLERANCES[case, dtype]
    if device.arch in _FLUSHING and dtype in ("fp16", "bf16"):
        # Tolerances must be clearly below 1, because an output of zeros has an error of 1.
        numbers = [min(0.8, _FLUSHED * number) for number in _TOLERANCES[case, "bf16"]]
    return dict(zip(QUANTITIES, numbers, strict=True))


def note(device: Device) -> str:
    """Return a remark about the precision of the device's architecture, or ""."""
    if device.arch not in _FLUSHING:
        return ""
    return (
        f"{device.arch} flushes subnormal fp16 and bf16 numbers to zero in its matrix units, and fp16 backward passes "
        f"multiply bf16 operands. Therefore both formats may have {_FLUSHED} times the error of bf16 on other devices."
    )


def _finding(case: Case, dtype: str, quantity: str, errors: dict[str, float], tolerance: float) -> NumericsFinding:
    # A NaN counts as the largest error. Otherwise, max() could ignore it.
    worst = max(errors, key=lambda name: errors[name] if errors[name] == errors[name] else float("inf"))
    first = next((name for name, error in errors.items() if not error <= tolerance), "")
    return NumericsFinding(case.name, dtype, quantity, worst, errors[worst], tolerance, first)


def _first_step(case: Case, engine: TorchEngine) -> tuple[np.ndarray, dict[str, tuple[np.ndarray, float]]]:
    """Compute the forward and backward pass of the first step. The weights are not updated.

    Returns:
        The logits in float64, and a dict that maps the name of a parameter to (sampled elements of its gradient, norm of its
        gradient).
    """
    inputs, targets = batch = _on_device(case, engine, 0)
    engine.model.train()
    # The logits need a separate forward pass, because `summed_loss` returns only the loss.
    with torch.no_grad(), engine.precision.autocast(engine.device):
        logits = engine.model(inputs)
    with engine.precision.products():
        with engine.precision.autocast(engine.device):
            loss = engine.summed_loss(batch) / targets.numel()
        (loss * _SCALE).backward()
    gradients = {}
    for name, parameter in engine.model.named_parameters():
        assert parameter.grad is not None, name
        # Computed in float64, so that the division and the norm add no rounding error of the tested format.
        gradient = parameter.grad.double() / _SCALE
        gradients[name] = sampled(name, gradient), gradient.norm().item()
    engine.optimizer.zero_grad()
    return logits.double().cpu().numpy(), gradients


def _losses(case: Case, engine: TorchEngine) -> list[float]:
    """Return the losses of STEPS steps. An fp16 step that was skipped because its loss scale was too large is repeated."""
    losses, skipped = [], 0
    while len(losses) < STEPS:
        outcome = engine.train_step(_on_device(case, engine, len(losses)))
        if bool(outcome.skipped) and skipped < _MOST_SKIPPED:
            skipped += 1
        else:
            losses.append(float(outcome.loss))
    return losses


def _gradient_errors(gradients: dict[str, tuple[np.ndarray, float]], reference: dict[str, np.ndarray]) -> dict[str, float]:
    """Return the error of each parameter's gradient, relative to its norm or to the median norm, whichever is larger.

    The median norm is needed for gradients that are zero, such as that of the bias of the attention keys, on which the output
    does not depend.
    """
    names = [name.removeprefix("norms/") for name in reference if name.startswith("norms/")]
    typical = float(np.median([reference[f"norms/{name}"][0] for name in names]))
    errors = {}
    for name in names:
        numbers, norm = gradients.get(name, (np.empty(0), float("nan")))
        expected, size = reference[f"gradients/{name}"], float(reference[f"norms/{name}"][0])
        norm_error = abs(norm - size) / max(size, typical)
        errors[f"the gradient of {name}"] = (
            max(_distance(numbers, expected, typical), norm_error) if norm == norm else float("nan")
        )
    return errors


def _distance(computed: np.ndarray, expected: np.ndarray, least: float = 0.0) -> float:
    """Return the norm of the difference divided by the norm of `expected`, or by `least` if that is larger."""
    if computed.shape != expected.shape:
        return float("inf")
    return float(np.linalg.norm(computed - expected) / max(float(np.linalg.norm(expected)), least))


def _on_device(case: Case, engine: TorchEngine, step: int):
    return tuple(part.to(engine.device.torch_device) for part in case.batch(step))


def read_pack() -> dict[str, np.ndarray]:
    """Return the pack that is stored in git.

    Its float64 arrays are "<case>/logits", "<case>/losses" [STEPS], "<case>/gradients/<parameter>" [at most SAMPLED] and
    "<case>/norms/<parameter>" [1].
    """
    return load_file(PACK)


def make_pack() -> dict[str, np.ndarray]:
    """Recompute the pack in float64 on the CPU. This takes a few seconds."""
    pack = {}
    for case in CASES:
        for name, numbers in _reference(case).items():
            pack[f"{case.name}/{name}"] = np.ascontiguousarray(numbers)
    return pack


def sampled(name: str, gradient: Tensor) -> np.ndarray:
    """Return the elements of a parameter's gradient that the pack contains, float64 [at most SAMPLED].

    All elements are returned if there are at most SAMPLED.
    """
    flat = gradient.detach().double().cpu().contiguous().view(-1).numpy()
    return flat.copy() if flat.size <= SAMPLED else flat[integers(f"places in {name}", (SAMPLED,), flat.size)]


def _reference(case: Case) -> dict[str, np.ndarray]:
    model = case.model().double().train()
    optimizer, losses, pack = _optimizer(case, model), [], {}
    for step in range(STEPS):
        inputs, targets = case.batch(step)
        logits = model(inputs.double() if inputs.is_floating_point() else inputs)
        loss = F.cross_entropy(logits.flatten(0, -2), targets.flatten())
        optimizer.zero_grad()
        loss.backward()
        losses.append(loss.item())
        gradients = {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}
        norm = torch.stack([gradient.square().sum() for gradient in gradients.values()]).sum().sqrt()
        if step == 0:
            pack["logits"] = logits.detach().numpy()
            for name, gradient in gradients.items():
                pack[f"gradients/{name}"] = sampled(name, gradient)
                pack[f"norms/{name}"] = np.array([gradient.norm().item()])
        for gradient in gradients.values():
            # This is the formula of `clip_grad_norm_`, written out so that the pack does not depend on its implementation.
            gradient.mul_(min(1.0, CLIP_NORM / (norm.item() + 1e-6)))
        optimizer.step()
    return pack | {"losses": np.array(losses)}


def _optimizer(case: Case, model: nn.Module) -> torch.optim.Optimizer:
    """Return a PyTorch optimizer with the settings of the library's optimizer, but without fused kernels."""
    plain = case.optimizer(case.model(), case.learning_rate)
    settings = {name: plain.defaults[name] for name in ("lr", "betas", "eps", "momentum", "nesterov") if name in plain.defaults}
    groups = decay_groups(model, plain.param_groups[0]["weight_decay"])
    kind = torch.optim.AdamW if isinstance(plain, torch.optim.AdamW) else torch.optim.SGD
    # The plain loop over parameters is the simplest implementation to trust.
    return kind(groups, **settings, foreach=False, fused=False)


def write_pack() -> None:
    """Recompute the pack and replace the pack in git."""
    made_by = "python -m hyperion.commands.regenerate numerics --write"
    save_file(make_pack(), PACK, metadata={"made by": made_by, "torch": torch.__version__})


def difference_from_pack() -> tuple[float, str]:
    """Recompute the pack. Return its largest difference from the pack in git, and the name of the array that has it."""
    pack, stored = make_pack(), read_pack()
    if pack.keys() != stored.keys():
        return np.inf, "names"
    return max((difference(pack[name], stored[name]), name) for name in stored)


def difference(computed: np.ndarray, stored: np.ndarray) -> float:
    """Return the largest absolute difference divided by the largest absolute stored number.

    The divisor is at least `_SMALLEST`, for gradients that should be zero.
    """
    if computed.shape != stored.shape:
        return float("inf")
    return float(np.abs(computed - stored).max() / max(float(np.abs(stored).max()), _SMALLEST))
