"""Checkpoints of a state that one process holds, for the tests of the folders."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hyperion.checkpoints import checkpoint_path, newest_good, read_state, saving, verify, write_state


@dataclass(frozen=True)
class Checkpoint:
    """A verified checkpoint: its folder, its step, and the saved state."""

    path: Path
    step: int
    state: dict[str, Any]


def save(folder: Path, step: int, state: dict[str, Any], keep: int = 2) -> Path:
    """Save a state as folder/step-<step>, and return the folder of the new checkpoint."""
    with saving(folder, step, keep) as new:
        write_state(new, state)
    return checkpoint_path(folder, step)


def load(path: Path) -> Checkpoint:
    """Verify a checkpoint folder and read its state."""
    manifest = verify(path)
    return Checkpoint(Path(path), int(manifest["step"]), read_state(path))


def load_latest(folder: Path) -> Checkpoint | None:
    """Return the newest checkpoint of a folder that can be used, or None if there is no checkpoint."""
    return newest_good(folder, load)
