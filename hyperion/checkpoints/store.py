"""Save and load one state that fits a process as a checkpoint. On many ranks rank 0's state is the one saved."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hyperion.checkpoints.folders import checkpoint_path, newest_good, saving, verify
from hyperion.checkpoints.ranks import agreed, on_rank_0
from hyperion.checkpoints.states import read_state, write_state


@dataclass(frozen=True)
class Checkpoint:
    """A verified checkpoint.

    Attributes:
        path: its folder.
        step: optimizer steps done when it was saved.
        state: what was saved, tensors on the CPU.
    """

    path: Path
    step: int
    state: dict[str, Any]


def save(folder: Path, step: int, state: dict[str, Any], keep: int = 2) -> Path:
    """Save a nested dict of tensors and JSON values as folder/step-<step>, and keep the newest `keep` checkpoints.

    Returns:
        The checkpoint's folder.

    Raises:
        CheckpointError: the state cannot be stored, or the folder cannot be written; earlier checkpoints stay as they
        were.
    """
    with saving(folder, step, keep) as new:
        on_rank_0(lambda: write_state(new, state))
    return checkpoint_path(folder, step)


def load(path: Path) -> Checkpoint:
    """Verify and read one checkpoint folder.

    Raises:
        CheckpointError: it is not what its manifest says, or a file is not of its format.
    """
    manifest = verify(path)
    return Checkpoint(Path(path), int(manifest["step"]), agreed(lambda: read_state(path)))


def load_latest(folder: Path) -> Checkpoint | None:
    """The newest good checkpoint of a folder, None when there is none at all (see `newest_good` for refusals)."""
    return newest_good(folder, load)
