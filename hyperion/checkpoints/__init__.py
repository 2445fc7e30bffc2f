"""Checkpoints of training runs.

A checkpoint is written completely or not at all. Its hashes are verified before use, and loading it cannot execute code.

With several ranks, all ranks must call these functions together, except write_state and read_state, which handle the files of one
process. Rank 0 creates and verifies the folder. Each rank writes its own shards. An error on one rank is raised on all ranks.
"""

from hyperion.checkpoints.folders import checkpoint_path, newest_good, require_writable, saving, sole_use, verify
from hyperion.checkpoints.sharded import agreed, gathered, on_rank_0, rank_and_size, read_sharded, write_sharded
from hyperion.checkpoints.states import CheckpointError, read_state, write_state
from hyperion.checkpoints.weights import Weights, export_model, full_state, read_weights

__all__ = [
    "CheckpointError",
    "Weights",
    "agreed",
    "checkpoint_path",
    "export_model",
    "full_state",
    "gathered",
    "newest_good",
    "on_rank_0",
    "rank_and_size",
    "read_sharded",
    "read_state",
    "read_weights",
    "require_writable",
    "saving",
    "sole_use",
    "verify",
    "write_sharded",
    "write_state",
]
