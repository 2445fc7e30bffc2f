"""Checks of this machine and installation, each with its evidence and, where something is wrong, the remedy."""

from hyperion.doctor.checkup import CHECKS, run_checks
from hyperion.doctor.floor_table import floor_frame, floor_table
from hyperion.doctor.floors import FloorReport, Verdict, check_floors, floors_of, floors_of_run, judge
from hyperion.doctor.result import CheckResult

__all__ = [
    "CHECKS",
    "CheckResult",
    "FloorReport",
    "Verdict",
    "check_floors",
    "floor_frame",
    "floor_table",
    "floors_of",
    "floors_of_run",
    "judge",
    "run_checks",
]
