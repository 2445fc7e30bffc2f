"""Checks of the doctor for a test that interrupts them. A process of their own imports them, so they import little."""

import time
from pathlib import Path

from hyperion.doctor.checks import CheckResult


def begin_and_hang(folder: str) -> CheckResult:
    (Path(folder) / "began").touch()
    time.sleep(600)
    return leave_a_file(folder)


def leave_a_file(folder: str) -> CheckResult:
    (Path(folder) / "next").touch()
    return CheckResult("fine", "ok", "as expected")
