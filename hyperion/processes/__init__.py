"""Run jobs in worker processes and on ranks under torchrun, create process groups, and detect hangs.

Names that need torch are imported at their first use, so that a launcher or a worker without ranks starts without importing
torch. No submodule may have the same name as a function of this package, because importing the submodule would replace the
function.
"""

from typing import TYPE_CHECKING

from hyperion.processes.job import Job, JobError, report_progress, run_job
from hyperion.processes.rank_errors import RankError
from hyperion.processes.ranks import run_ranks
from hyperion.processes.this_rank import World, world

if TYPE_CHECKING:
    from hyperion.processes.group import process_group
    from hyperion.processes.hang_detection import RollCall, roll_call, wait_for_peers

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


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def __getattr__(name: str):
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from hyperion.processes import group, hang_detection

    return getattr(group, name, None) or getattr(hang_detection, name)
