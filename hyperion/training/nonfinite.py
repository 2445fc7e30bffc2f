"""Detection of losses, gradients and weights that are infinite or NaN; the batch of the step is saved as evidence."""

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
    """A loss, gradient or weight is infinite or NaN."""


def is_finite(numbers: Sequence[float]) -> bool:
    """Return True if the numbers of a step (loss, gradient norm, the rank's own loss) are all finite."""
    return all(map(math.isfinite, numbers))


def non_finite_tensor(state: Any) -> str | None:
    """Return the path of the first floating-point tensor of a nested state with an infinity or a NaN, None if all are finite.

    Of sharded tensors only this rank's shards are checked. Waits for the device once.
    """
    tensors: list[tuple[str, Tensor]] = []
    _collect("", state, tensors)
    if not tensors:
        return None
    device = tensors[0][1].device  # an optimizer may keep its step counters on the CPU
    finite = torch.stack([tensor.isfinite().all().to(device) for _, tensor in tensors]).tolist()
    return next((path for (path, _), ok in zip(tensors, finite, strict=True) if not ok), None)


def require_finite(state: dict[str, Any], where: object, kind: type[HyperionError], next_step: str) -> None:
    """Raise `kind` if the model or optimizer tensors of an engine's state contain an infinity or a NaN."""
    if name := non_finite_tensor({part: state[part] for part in ("model", "optimizer")}):
        raise kind(f"{name} contains an infinity or a NaN", where=where, next_step=next_step)


def _collect(path: str, value: Any, tensors: list[tuple[str, Tensor]]) -> None:
    if isinstance(value, Tensor):
        local = value.to_local() if isinstance(value, DTensor) else value
        if local.is_floating_point():
            tensors.append((path, local.detach()))
    elif isinstance(value, dict):
        for key, item in value.items():
            _collect(f"{path}/{key}" if path else str(key), item, tensors)
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            _collect(f"{path}/{index}", item, tensors)


def non_finite(folder: Path | None, first: int, numbers: Sequence[Sequence[float]], batches: list) -> NonFiniteError:
    """Save the batch of the first bad step of any rank, and return the error. All ranks call it and get the same error.

    The error names the ranks whose own loss is not finite, and these save their batch. If only the gradient is not finite,
    its origin is unknown, and all ranks save their batch.

    Args:
        folder: for the evidence; None for a temporary folder.
        first: step of the first row.
        numbers: loss, gradient norm and this rank's own loss of some steps; at least one is not finite on some rank.
        batches: of the same steps.
    """
    rank, size = rank_and_size()
    bad = [first + index for index, row in enumerate(numbers) if not is_finite(row)]
    step = min(number for number in gathered(bad[0] if bad else None) if number is not None)
    loss, norm, own_loss = numbers[step - first]
    sources = [source for source, finite in enumerate(gathered(math.isfinite(own_loss))) if not finite] or [*range(size)]
    evidence = {"step": step, "rank": rank, "loss": str(loss), "gradient_norm": str(norm), "rank_loss": str(own_loss)}

    def save() -> str | None:
        return _save_evidence(folder, evidence | {"batch": batches[step - first]}, size) if rank in sources else None

    places = [place for place in gathered(agreed(save)) if place is not None]
    ranks = "" if size == 1 else f" on rank {sources[0]}" if len(sources) == 1 else f" on ranks {sources}"
    return NonFiniteError(
        f"step {step}{ranks}: loss {loss}, gradient norm {norm}; training stopped, and the batch of the step was saved",
        where=Path(places[0]),
        next_step="lower the learning rate or inspect that batch; earlier checkpoints are unchanged",
    )


def _save_evidence(folder: Path | None, evidence: dict[str, Any], ranks: int) -> str:
    place = Path(folder or tempfile.mkdtemp(prefix="hyperion-")) / f"nonfinite-step-{evidence['step']:08d}"
    if ranks > 1:
        place /= f"rank-{evidence['rank']:05d}"
    place.mkdir(parents=True, exist_ok=True)
    write_state(place, evidence)
    return str(place / "tensors.safetensors")
