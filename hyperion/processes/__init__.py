"""Processes: the Job contract for work that needs processes of its own, and the group that ranks talk through."""

from hyperion.processes.group import World, process_group, world
from hyperion.processes.job import Job, JobError, report_progress, run_job
from hyperion.processes.ranks import RankError, run_ranks
from hyperion.processes.roll_call import RollCall, roll_call

__all__ = [
    "Job", "JobError", "RankError", "RollCall", "World", "process_group", "report_progress", "roll_call", "run_job",
    "run_ranks", "world",
]  # fmt: skip
