"""Checks of this machine and of this installation. Each result has its evidence and, if something is wrong, a remedy."""

from hyperion.doctor.checks import CHECKS, CheckResult, run_checks
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
    "CHECKS",
    "CheckResult",
    "FloorReport",
    "FloorResult",
    "check_floors",
    "floor_frame",
    "floor_table",
    "floors_of",
    "floors_of_run",
    "judge",
    "run_checks",
]
