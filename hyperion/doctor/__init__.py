"""Checks of this machine and installation, each with its evidence and, where something is wrong, the remedy."""

from hyperion.doctor.checkup import CHECKS, run_checks
from hyperion.doctor.result import CheckResult

__all__ = ["CHECKS", "CheckResult", "run_checks"]
