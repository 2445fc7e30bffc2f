"""Does this machine compute what it should? The library's own training step, in every precision, against float64 from git."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np
import torch

from hyperion.doctor.numerics_cases import CASES, STEPS, Case
from hyperion.doctor.numerics_pack import read_pack, sampled
from hyperion.doctor.numerics_tolerances import note, tolerances
from hyperion.hardware import Device, detect
from hyperion.training import TRAINING_DTYPES, TorchEngine

_SCALE = 1024.0  # of the loss, so that gradients are no subnormals in fp16; exact, being a power of two
_MOST_SKIPPED = 16  # steps that fp16 may skip until its scale is found


@dataclass(frozen=True)
class Finding:
    """One quantity of one case in one precision.

    Attributes:
        quantity: 'logits', 'gradients' or 'losses'.
        first: the first tensor, or step, that is further off than it may be; "" where none is.
        worst: the one that is furthest off.
        error, tolerance: of that one, relative.
        reason: why nothing was computed, "" where it was.
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
        """Whether it is as near as it must be, or nothing was computed."""
        return bool(self.reason) or self.error <= self.tolerance  # a NaN fails


@dataclass(frozen=True)
class NumericsReport:
    """All findings of one device."""

    device: str
    findings: tuple[Finding, ...]
    note: str = ""

    @property
    def passed(self) -> bool:
        return all(finding.passed for finding in self.findings)

    @property
    def conclusion(self) -> str:
        """One sentence for the end of the table; it names the first tensor that is off."""
        computed = [finding for finding in self.findings if not finding.reason]
        wrong = [finding for finding in computed if not finding.passed]
        if not wrong:
            return f"{self.device}: all {len(computed)} quantities are within their tolerance of float64"
        at = wrong[0]
        return (
            f"{self.device}: WRONG NUMBERS in {len(wrong)} of {len(computed)} quantities; the first tensor that is off: "
            f"{at.first} of {at.case} in {at.dtype} (worst {at.error:.2g}, tolerance {at.tolerance:.2g})"
        )


def check_numerics(
    device: Device | None = None, dtypes: Iterable[str] = TRAINING_DTYPES, on_line: Callable[[str], object] = lambda line: None
) -> NumericsReport:
    """Run both cases in each precision of the device and compare; a few seconds a precision on a CPU.

    Args:
        device: this machine's first one when left out.
        dtypes: of TRAINING_DTYPES.
        on_line: told what is being computed.
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
    """Logits and gradients of the first step, and the losses of all."""
    kept = {name.removeprefix(f"{case.name}/"): numbers for name, numbers in pack.items() if name.startswith(f"{case.name}/")}
    engine, allowed = case.start(dtype, device), tolerances(case.name, dtype, device)
    logits, gradients = _first_step(case, engine)
    errors = {
        "logits": {"the logits": _apart(logits, kept["logits"])},
        "gradients": _gradient_errors(gradients, kept),
        "losses": {
            f"the loss of step {step + 1}": abs(found / wanted - 1)
            for step, (found, wanted) in enumerate(zip(_losses(case, engine), kept["losses"], strict=True))
        },
    }
    return [_finding(case, dtype, quantity, found, allowed[quantity]) for quantity, found in errors.items()]


def _finding(case: Case, dtype: str, quantity: str, errors: dict[str, float], tolerance: float) -> Finding:
    # A NaN is the worst of all; max alone would pass over it.
    worst = max(errors, key=lambda name: errors[name] if errors[name] == errors[name] else float("inf"))
    first = next((name for name, error in errors.items() if not error <= tolerance), "")
    return Finding(case.name, dtype, quantity, worst, errors[worst], tolerance, first)


def _first_step(case: Case, engine: TorchEngine) -> tuple[np.ndarray, dict[str, tuple[np.ndarray, float]]]:
    """Logits [...] float64, and by parameter the kept numbers of its gradient and its norm; the weights stay."""
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
    """Of STEPS steps. A step that fp16 skipped, because its scale was too large at first, is made again."""
    losses, skipped = [], 0
    while len(losses) < STEPS:
        told = engine.train_step(_on_device(case, engine, len(losses)))
        if bool(told.skipped) and skipped < _MOST_SKIPPED:
            skipped += 1
        else:
            losses.append(float(told.loss))
    return losses


def _gradient_errors(found: dict[str, tuple[np.ndarray, float]], kept: dict[str, np.ndarray]) -> dict[str, float]:
    """How far each parameter's gradient is off: relative to it, but to the median of all parameters where it is less than
    that. The bias of attention's keys has none at all, since no output depends on it.
    """
    names = [name.removeprefix("norms/") for name in kept if name.startswith("norms/")]
    typical = float(np.median([kept[f"norms/{name}"][0] for name in names]))
    errors = {}
    for name in names:
        numbers, norm = found.get(name, (np.empty(0), float("nan")))
        wanted, size = kept[f"gradients/{name}"], float(kept[f"norms/{name}"][0])
        of_norm = abs(norm - size) / max(size, typical)
        errors[f"the gradient of {name}"] = max(_apart(numbers, wanted, typical), of_norm) if norm == norm else float("nan")
    return errors


def _apart(found: np.ndarray, wanted: np.ndarray, least: float = 0.0) -> float:
    """Norm of the difference over the norm of what is wanted, which counts as `least` where it is less."""
    if found.shape != wanted.shape:
        return float("inf")
    return float(np.linalg.norm(found - wanted) / max(float(np.linalg.norm(wanted)), least))


def _on_device(case: Case, engine: TorchEngine, step: int):
    return tuple(part.to(engine.device.torch_device) for part in case.batch(step))
