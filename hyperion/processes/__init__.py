"""Processes: the Job contract, the torchrun launcher, process groups, and the roll call of ranks that stand still.

What needs torch is loaded when it is first asked for: a launcher and a plain worker may do without.
"""

from hyperion.processes.job import Job, JobError, run_job
from hyperion.processes.output import report_progress
from hyperion.processes.ranks import run_ranks
from hyperion.processes.verdict import RankError

_NEED_TORCH = ("RollCall", "World", "process_group", "roll_call", "wait_for_peers", "world")
__all__ = [
    "Job",
    "JobError",
    "RankError",
    "RollCall",
    "World",
    "process_group",
    "report_progress",
    "roll_call",
    "run_job",
    "run_ranks",
    "wait_for_peers",
    "world",
]


def __getattr__(name: str):
    if name not in _NEED_TORCH:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    # No module is named like what it exports: its import would put the module in the place of that.
    from hyperion.processes import group, standstill

    return getattr(group, name, None) or getattr(standstill, name)
