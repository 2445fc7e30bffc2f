"""A run's checkpoint: the engine's shards, what all ranks share, and what each rank has of its own."""

from pathlib import Path

from hyperion.checkpoints import (
    CheckpointError,
    agreed,
    on_rank_0,
    rank_and_size,
    read_state,
    saving,
    verify,
    write_state,
)
from hyperion.training.engine import Engine


def write_run(folder: Path, step: int, keep: int, engine: Engine, shared: dict, own: dict) -> None:
    """Save a run. All ranks call it.

    Args:
        shared: the same on all ranks; rank 0's is stored.
        own: this rank's.

    Raises:
        CheckpointError: see `saving`.
    """
    rank, size = rank_and_size()
    with saving(folder, step, keep) as new:
        on_rank_0((new / "engine").mkdir)
        engine.save(new / "engine")
        _write(new / _rank_folder(rank), own)
        if rank == 0:
            _write(new / "loop", shared | {"step": step, "ranks": size})


def read_run(path: Path, engine: Engine, total_steps: int) -> tuple[dict, dict | None]:
    """Verify one checkpoint and load it into the engine. All ranks call it.

    Returns:
        What all ranks share, with "step" and "ranks"; and what this rank stored of its own, None where another number
        of ranks saved.

    Raises:
        CheckpointError: on all ranks: it is bad, of another model, or beyond the plan's end.
    """
    verify(path)
    shared = agreed(lambda: read_state(path / "loop"))
    if shared["step"] > total_steps:
        raise CheckpointError(
            f"it is at step {shared['step']}, after the end of the plan at {total_steps}",
            where=path,
            next_step="train longer, or name another checkpoint folder",
        )
    rank, size = rank_and_size()
    own = agreed(lambda: read_state(path / _rank_folder(rank))) if shared["ranks"] == size else None
    engine.load(path / "engine")
    return shared, own


def _write(folder: Path, state: dict) -> None:
    folder.mkdir()
    write_state(folder, state)


def _rank_folder(rank: int) -> str:
    return f"rank-{rank:05d}"
