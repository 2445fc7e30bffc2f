"""Check the numbers of this machine: compare the library's training step in every precision with stored float64 numbers.

The tolerances are the largest relative errors of a correct device. Unit roundoffs are 2^-24 (fp32), 2^-11 (fp16; tf32, whose
units may truncate: 2^-10) and 2^-8 (bf16). The tolerances are four to ten times the errors of correct devices; a wrong mask,
weight or activation in float32 exceeds them (tested). Gradients of a ResNet have larger tolerances: if a rounding error moves a
unit across the kink of ReLU, the gradient changes by the whole contribution of the unit, so the error falls only with the
square root of the unit roundoff.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np
import torch
from rich.table import Table

from hyperion.doctor.numerics_reference import CASES, STEPS, Case, read_pack, sampled
from hyperion.hardware import Device, detect
from hyperion.training import TRAINING_DTYPES, TorchEngine

_SCALE = 1024.0  # factor on the loss that keeps fp16 gradients out of the subnormal range; exact, because a power of two
QUANTITIES = ("logits", "gradients", "losses")
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
# The matrix instructions of MI200 flush subnormal fp16 and bf16 inputs and outputs to zero. For this reason MIOpen and rocBLAS
# convert the operands of fp16 backward passes to bf16, which has a wider range and a lower accuracy. MI300 does neither.
# Source: AMD, MIOpen documentation, "MI200 MFMA behavior specifics".
_FLUSHING = ("gfx90a",)
_FLUSHED = 2
_MOST_SKIPPED = 16  # steps that fp16 may skip until its loss scale fits


@dataclass(frozen=True)
class Finding:
    """The error of one quantity of one case in one precision.

    Attributes:
        quantity: 'logits', 'gradients' or 'losses'.
        worst: the tensor or step with the largest error.
        error, tolerance: relative error of `worst`, and the largest one allowed.
        first: the first tensor or step whose error exceeds the tolerance; "" if there is none.
        reason: why nothing was computed, or "".
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
        """True if the error is within the tolerance, or nothing was computed."""
        return bool(self.reason) or self.error <= self.tolerance  # a NaN fails


@dataclass(frozen=True)
class NumericsReport:
    """All errors of one device."""

    device: str
    findings: tuple[Finding, ...]
    note: str = ""

    @property
    def passed(self) -> bool:
        """True if every quantity passed."""
        return all(finding.passed for finding in self.findings)

    @property
    def conclusion(self) -> str:
        """The conclusion in one sentence, with the first wrong tensor."""
        computed = [finding for finding in self.findings if not finding.reason]
        wrong = [finding for finding in computed if not finding.passed]
        if not wrong:
            return f"{self.device}: all {len(computed)} quantities are within their tolerance of float64"
        at = wrong[0]
        return (
            f"{self.device}: WRONG NUMBERS in {len(wrong)} of {len(computed)} quantities; the first wrong tensor: "
            f"{at.first} of {at.case} in {at.dtype} (worst {at.error:.2g}, tolerance {at.tolerance:.2g})"
        )


def check_numerics(
    device: Device | None = None, dtypes: Iterable[str] = TRAINING_DTYPES, on_line: Callable[[str], object] = lambda line: None
) -> NumericsReport:
    """Run both cases in each precision of the device and compare; takes a few seconds per precision on a CPU.

    Args:
        device: default: the first device of this machine.
        dtypes: names from TRAINING_DTYPES.
        on_line: called with a line about each computation.
    """
    device, pack, findings = device or detect(), read_pack(), []
    for dtype in dtypes:
        possible, how = device.supports(dtype)
        for case in CASES:
            if not possible:
                findings.append(Finding(case.name, dtype, "all", reason=how))
                continue
            on_line(f"{case.name} in {dtype}")
            findings += compare(case, dtype, device, pack)
    return NumericsReport(device.name, tuple(findings), note(device))


def compare(case: Case, dtype: str, device: Device, pack: dict[str, np.ndarray]) -> list[Finding]:
    """Compare the logits and gradients of the first step and the losses of all steps with the reference numbers in `pack`."""
    reference = {
        name.removeprefix(f"{case.name}/"): numbers for name, numbers in pack.items() if name.startswith(f"{case.name}/")
    }
    engine, allowed = case.start(dtype, device), tolerances(case.name, dtype, device)
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
    """Return one line per quantity, or the reason why this device cannot compute it."""
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
    """Return the largest relative error that a correct device of this architecture may have, by quantity."""
    numbers = _TOLERANCES[case, dtype]
    if device.arch in _FLUSHING and dtype in ("fp16", "bf16"):
        # An output of zeros has an error of 1, so a tolerance must stay clearly below.
        numbers = [min(0.8, _FLUSHED * number) for number in _TOLERANCES[case, "bf16"]]
    return dict(zip(QUANTITIES, numbers, strict=True))


def note(device: Device) -> str:
    """Return a remark on the precision of this architecture, or ""."""
    if device.arch not in _FLUSHING:
        return ""
    return (
        f"{device.arch} flushes subnormal fp16 and bf16 numbers to zero in its matrix units, and fp16 backward passes "
        f"multiply bf16 operands: both formats may have {_FLUSHED} times the error of bf16 on other devices"
    )


def _finding(case: Case, dtype: str, quantity: str, errors: dict[str, float], tolerance: float) -> Finding:
    # A NaN counts as the largest error; max alone would ignore it.
    worst = max(errors, key=lambda name: errors[name] if errors[name] == errors[name] else float("inf"))
    first = next((name for name, error in errors.items() if not error <= tolerance), "")
    return Finding(case.name, dtype, quantity, worst, errors[worst], tolerance, first)


def _first_step(case: Case, engine: TorchEngine) -> tuple[np.ndarray, dict[str, tuple[np.ndarray, float]]]:
    """Return the logits (float64) and, by parameter, sampled numbers and norm of its gradient. Weights are not updated."""
    inputs, targets = batch = _on_device(case, engine, 0)
    engine.model.train()
    with torch.no_grad(), engine.precision.autocast(engine.device):
        logits = engine.model(inputs)
    with engine.precision.products():
        with engine.precision.autocast(engine.device):
            loss = engine.summed_loss(batch) / targets.numel()
        (loss * _SCALE).backward()
    gradients = {}
    for name, parameter in engine.model.named_parameters():
        assert parameter.grad is not None, name
        gradient = parameter.grad.double() / _SCALE
        gradients[name] = sampled(name, gradient), gradient.norm().item()
    engine.optimizer.zero_grad()
    return logits.double().cpu().numpy(), gradients


def _losses(case: Case, engine: TorchEngine) -> list[float]:
    """Return the losses of STEPS steps. A step that fp16 skipped, because its loss scale was too large, is repeated."""
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

    The median is needed for gradients that are zero, such as the bias of attention's keys, on which no output depends.
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
    """Return the norm of the difference over the norm of `expected`, or over `least` if that is larger."""
    if computed.shape != expected.shape:
        return float("inf")
    return float(np.linalg.norm(computed - expected) / max(float(np.linalg.norm(expected)), least))


def _on_device(case: Case, engine: TorchEngine, step: int):
    return tuple(part.to(engine.device.torch_device) for part in case.batch(step))
