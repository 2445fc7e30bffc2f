"""Write and read the files of a training run: checkpoints, and batches of steps with an infinite or NaN loss or gradient.

A checkpoint contains the shards of the engine, the state that all ranks share, and the state of each rank.
"""

import math
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from hyperion.checkpoints import (
    CheckpointError,
    agreed,
    gathered,
    on_rank_0,
    rank_and_size,
    read_state,
    saving,
    verify,
    write_state,
)
from hyperion.checkpoints.states import EARLIER, STATE, reading
from hyperion.training.engine import Engine, NonFiniteError
from hyperion.training.recipe import require_rng_state

_NUMBER = (int, float)
# Types of the fields in the shared state and in the state of each rank. Only losses may be negative.
_SHARED = {
    "step": int,
    "ranks": int,
    "steps_in_epoch": int,
    "learning_rate": _NUMBER,
    "history": dict,
    "batches": dict,
    "seed": int,
    "items_in_epoch": int,
}
_OWN = {"rng": dict, "meter": dict, "losses": list, "earlier_items": int}
_METER = {
    "items": int,
    "timed_items": int,
    "timed_steps": int,
    "time_s": _NUMBER,
    "waited_s": _NUMBER,
    "metric": str,
    "gib": (*_NUMBER, type(None)),
    "reserved_gib": (*_NUMBER, type(None)),
    "wall_s": _NUMBER,
}
_HISTORY = {"item": str, "losses": torch.Tensor, "epochs": list, "resumed_at": list, "rank_epochs": list}
_OPTIONAL = (*_NUMBER, type(None))
_RECORD = {
    "epoch": int,
    "step": int,
    "steps": int,
    "loss": _NUMBER,
    "learning_rate": _NUMBER,
    "items": int,
    "time_s": _NUMBER,
    "timed_steps": int,
    "items_per_s": _OPTIONAL,
    "peak_memory_metric": str,
    "peak_memory_gib": _OPTIONAL,
    "evaluation": (dict, type(None)),
    "rank": (int, type(None)),
    "waited_s": _NUMBER,
    "reserved_memory_gib": _OPTIONAL,
    "wall_s": _NUMBER,
}


def write_run(folder: Path, step: int, keep: int, engine: Engine, shared: dict, own: dict) -> None:
    """Save a checkpoint of a run. All ranks must call this function.

    Args:
        folder: folder that contains the checkpoints of the run.
        step: number of optimizer steps done.
        keep: number of checkpoints to keep, including the new one.
        engine: engine whose state is saved.
        shared: state that is the same on all ranks. Rank 0 writes it.
        own: state of this rank only. Each rank writes its own state.

    Raises:
        CheckpointError: the checkpoint cannot be written (see `saving`).
    """
    rank, size = rank_and_size()
    with saving(folder, step, keep) as new:
        # The other ranks wait here until rank 0 has created the folder.
        on_rank_0((new / "engine").mkdir)
        engine.save(new / "engine")
        _write(new / _rank_folder(rank), own)
        if rank == 0:
            _write(new / "loop", shared | {"step": step, "ranks": size})


def read_run(path: Path, engine: Engine, total_steps: int) -> tuple[dict, dict | None]:
    """Verify a checkpoint and load it into the engine. All ranks must call this function.

    Returns:
        The pair (shared state, state of this rank). The shared state has the additional entries "step" and "ranks"; its entry
        "history" is the state of a History. The state of this rank is None if the checkpoint was saved on another number of
        ranks.

    Raises:
        CheckpointError: the checkpoint is damaged, belongs to another model, or has more steps than the plan. The error is
            raised on all ranks.
    """
    manifest = verify(path)
    shared = agreed(lambda: _read_shared(path / "loop", manifest["step"], engine.item))
    if shared["step"] > total_steps:
        raise CheckpointError(
            f"the checkpoint is at step {shared['step']}, after the end of the plan at step {total_steps}",
            where=path,
            next_step="train longer, or choose another checkpoint folder",
        )
    rank, size = rank_and_size()
    # Read this state before the engine is loaded, so that a damaged file is found before any tensor changes.
    own = agreed(lambda: _read_own(path / _rank_folder(rank), shared)) if shared["ranks"] == size else None
    engine.load(path / "engine")
    return shared, own


def _read_shared(folder: Path, step: int, item: str) -> dict[str, Any]:
    """Read the state that all ranks share. The types of all values are checked, and the numbers of steps must agree."""
    shared, place = read_state(folder), folder / STATE
    _require_fields(shared, _SHARED, "the state of the loop", place)
    history = shared["history"]
    _require_fields(history, _HISTORY, "the history", place)
    epochs, losses, resumed_at = history["epochs"], history["losses"], history["resumed_at"]
    for record in [*epochs, *history["rank_epochs"]]:
        _require_fields(record, _RECORD, "a record of the history", place)
    for what, valid in (
        (f"step {shared['step']}, but the manifest has step {step}", shared["step"] == step),
        (f"a history that counts {history['item']!r}, but the engine counts {item!r}", history["item"] == item),
        (f"{losses.numel()} losses of {step} steps", losses.dtype == torch.float64 and losses.shape == (step,)),
        ("a loss that is not finite", bool(losses.isfinite().all())),
        (f"resumed_at {resumed_at!r}", all(type(at) is int and 0 <= at <= step for at in resumed_at)),
        (f"an epoch that ended after step {step}", all(0 < record["step"] <= step for record in epochs)),
        (f"{shared['steps_in_epoch']} steps in the epoch", shared["steps_in_epoch"] <= step),
        ("0 ranks", shared["ranks"] > 0),
    ):
        if not valid:
            raise CheckpointError(f"the state of the loop has {what}", where=place, next_step=EARLIER)
    return shared


def _read_own(folder: Path, shared: dict) -> dict[str, Any]:
    """Read the state of this rank. The types of all values and the states of the random generators are checked."""
    own, place = read_state(folder), folder / STATE
    _require_fields(own, _OWN, "the state of the rank", place)
    _require_fields(own["meter"], _METER, "the state of the meter", place)
    losses = own["losses"]
    if len(losses) > shared["steps_in_epoch"] or not all(type(loss) in _NUMBER for loss in losses):
        raise CheckpointError(
            f"there are {len(losses)} losses of the {shared['steps_in_epoch']} steps in the epoch, or one is not a number",
            where=place,
            next_step=EARLIER,
        )
    with reading(place, "holds no state of the random generators"):
        require_rng_state(own["rng"])
    return own


def _require_fields(state: Any, fields: Mapping[str, type | tuple[type, ...]], what: str, where: Path) -> None:
    if not isinstance(state, dict):
        raise CheckpointError(f"{what} is {state!r:.80}", where=where, next_step=EARLIER)
    if state.keys() != fields.keys():
        wrong = sorted(state.keys() ^ fields.keys())[0]
        problem = "has the unknown field" if wrong in state else "lacks the field"
        raise CheckpointError(f"{what} {problem} {wrong!r}", where=where, next_step=EARLIER)
    for name, kinds in fields.items():
        value = state[name]
        negative = isinstance(value, int | float) and value < 0 and name != "loss"
        if isinstance(value, bool) or not isinstance(value, kinds) or negative:
            raise CheckpointError(f"{name} of {what} is {value!r:.80}", where=where, next_step=EARLIER)


def _write(folder: Path, state: dict) -> None:
    folder.mkdir()
    write_state(folder, state)


def _rank_folder(rank: int) -> str:
    return f"rank-{rank:05d}"


def is_finite(numbers: Sequence[float]) -> bool:
    """Return True if all numbers of a step are finite: loss, gradient norm, and the loss of this rank."""
    return all(map(math.isfinite, numbers))


def non_finite(folder: Path | None, first: int, numbers: Sequence[Sequence[float]], batches: list) -> NonFiniteError:
    """Save the batch of the first step with an infinite or NaN loss or gradient norm, and return the error to raise.

    All ranks must call this function, and get the same error. The error names the ranks whose own loss is not finite, and these
    ranks save their batch. If only the gradient norm is not finite, its origin is unknown, and all ranks save their batch.

    Args:
        folder: folder in which the batch is saved; None for a temporary folder.
        first: number of the first step in `numbers`.
        numbers: for each step, the loss, the gradient norm and the loss of this rank. On some rank at least one number is not
            finite.
        batches: the batches of the same steps.
    """
    rank, size = rank_and_size()
    bad = [first + index for index, row in enumerate(numbers) if not is_finite(row)]
    # All ranks report the same step: the first step with a number that is not finite on any rank.
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
        next_step="lower the learning rate or inspect the saved batch; earlier checkpoints are unchanged",
    )


def _save_evidence(folder: Path | None, evidence: dict[str, Any], ranks: int) -> str:
    place = Path(folder or tempfile.mkdtemp(prefix="hyperion-")) / f"nonfinite-step-{evidence['step']:08d}"
    if ranks > 1:
        place /= f"rank-{evidence['rank']:05d}"
    place.mkdir(parents=True, exist_ok=True)
    write_state(place, evidence)
    return str(place / "tensors.safetensors")
