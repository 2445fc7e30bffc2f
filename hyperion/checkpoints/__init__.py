"""Checkpoints that are whole or not there, are verified by hash before use, and cannot execute anything when loaded.

On many ranks all of them call these functions together (write_state and read_state apart, which handle one process's own
files): rank 0 makes and verifies the folder, each rank writes its shards, and an error on one is raised on all.
"""

from hyperion.checkpoints.adapters import frozen_sha256, load_adapter, save_adapter
from hyperion.checkpoints.export import export_model, full_state
from hyperion.checkpoints.folders import checkpoint_path, newest_good, require_writable, saving, verify
from hyperion.checkpoints.ranks import agreed, gathered, on_rank_0, rank_and_size
from hyperion.checkpoints.sharded import read_sharded, write_sharded
from hyperion.checkpoints.states import CheckpointError, read_state, write_state
from hyperion.checkpoints.store import Checkpoint, load, load_latest, save

__all__ = [
    "Checkpoint",
    "CheckpointError",
    "agreed",
    "checkpoint_path",
    "export_model",
    "frozen_sha256",
    "full_state",
    "gathered",
    "load",
    "load_adapter",
    "load_latest",
    "newest_good",
    "on_rank_0",
    "rank_and_size",
    "read_sharded",
    "read_state",
    "require_writable",
    "save",
    "save_adapter",
    "saving",
    "verify",
    "write_sharded",
    "write_state",
]
