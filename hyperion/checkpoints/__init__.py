"""Checkpoints that are whole or not there, are verified by hash before use, and cannot execute anything when loaded."""

from hyperion.checkpoints.folders import checkpoint_path, newest_good, saving, verify
from hyperion.checkpoints.states import CheckpointError, read_state, write_state
from hyperion.checkpoints.store import Checkpoint, load, load_latest, save

__all__ = [
    "Checkpoint",
    "CheckpointError",
    "checkpoint_path",
    "load",
    "load_latest",
    "newest_good",
    "read_state",
    "save",
    "saving",
    "verify",
    "write_state",
]
