"""Checks of this machine and of this installation.

Each result says what the check observed. If something is wrong, it also says how to fix it.
"""

from hyperion.doctor.checks import CheckResult
from hyperion.doctor.components import check_components
from hyperion.doctor.floors import (
    FloorReport,
    FloorResult,
    check_floors,
    floor_frame,
    floor_table,
    floors_of,
    floors_of_run,
    judge,
)

__all__ = [
    "CheckResult",
    "FloorReport",
    "FloorResult",
    "check_components",
    "check_floors",
    "floor_frame",
    "floor_table",
    "floors_of",
    "floors_of_run",
    "judge",
]
