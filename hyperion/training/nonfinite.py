"""A loss, gradient or weight that is no number: which step, which rank, and the batch kept as evidence."""

import math
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from hyperion.checkpoints import agreed, gathered, rank_and_size, write_state
from hyperion.errors import HyperionError


class NonFiniteError(HyperionError):
    """A loss, gradient or weight that is infinite or no number."""


def is_finite(numbers: Sequence[float]) -> bool:
    """Whether loss, gradient norm and the rank's own loss of a step all are numbers."""
    return all(map(math.isfinite, numbers))


def non_finite_tensor(state: Any) -> str | None:
    """The path of the first floating-point tensor of a nested state that holds an infinity or a NaN, None where all are
    finite. Of sharded tensors this rank's shards are looked at. One wait for the device.
    """
    found: list[tuple[str, Tensor]] = []
    _collect("", state, found)
    if not found:
        return None
    device = found[0][1].device  # an optimizer may keep its counters of steps on the CPU
    sound = torch.stack([tensor.isfinite().all().to(device) for _, tensor in found]).tolist()
    return next((path for (path, _), finite in zip(found, sound, strict=True) if not finite), None)


def require_finite(state: dict[str, Any], where: object, kind: type[HyperionError], next_step: str) -> None:
    """Raises `kind` when weights or moments of an engine's state hold an infinity or a NaN."""
    if name := non_finite_tensor({part: state[part] for part in ("model", "optimizer")}):
        raise kind(f"{name} holds an infinity or a NaN", where=where, next_step=next_step)


def _collect(path: str, value: Any, found: list[tuple[str, Tensor]]) -> None:
    if isinstance(value, Tensor):
        local = value.to_local() if isinstance(value, DTensor) else value
        if local.is_floating_point():
            found.append((path, local.detach()))
    elif isinstance(value, dict):
        for key, item in value.items():
            _collect(f"{path}/{key}" if path else str(key), item, found)
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            _collect(f"{path}/{index}", item, found)


def non_finite(folder: Path | None, first: int, numbers: Sequence[Sequence[float]], batches: list) -> NonFiniteError:
    """The error for the first bad step of any rank, once the batch is on the disk. All ranks call it and get the same.

    To blame are the ranks whose own loss is no number; where every loss is finite and the gradient is not, it came to
    be on a rank that cannot be told any more, and each keeps its batch.

    Args:
        folder: of the evidence; None for a temporary one.
        first: step that the first row is of.
        numbers: loss, gradient norm and this rank's own loss of some steps, of which at least one is bad on some rank.
        batches: of the same steps.
    """
    rank, size = rank_and_size()
    bad = [first + index for index, row in enumerate(numbers) if not is_finite(row)]
    step = min(found for found in gathered(bad[0] if bad else None) if found is not None)
    loss, norm, own_loss = numbers[step - first]
    guilty = [number for number, sound in enumerate(gathered(math.isfinite(own_loss))) if not sound] or [*range(size)]
    evidence = {"step": step, "rank": rank, "loss": str(loss), "gradient_norm": str(norm), "rank_loss": str(own_loss)}

    def keep() -> str | None:
        return _written(folder, evidence | {"batch": batches[step - first]}, size) if rank in guilty else None

    places = [place for place in gathered(agreed(keep)) if place is not None]
    named = "" if size == 1 else f" on rank {guilty[0]}" if len(guilty) == 1 else f" on ranks {guilty}"
    return NonFiniteError(
        f"step {step}{named}: loss {loss}, gradient norm {norm}; training stopped, and the batch of the step was saved",
        where=Path(places[0]),
        next_step="lower the learning rate or look at that batch; checkpoints from before the step are untouched",
    )


def _written(folder: Path | None, evidence: dict[str, Any], ranks: int) -> str:
    place = Path(folder or tempfile.mkdtemp(prefix="hyperion-")) / f"nonfinite-step-{evidence['step']:08d}"
    if ranks > 1:
        place /= f"rank-{evidence['rank']:05d}"
    place.mkdir(parents=True, exist_ok=True)
    write_state(place, evidence)
    return str(place / "tensors.safetensors")
