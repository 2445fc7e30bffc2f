"""How a call ends before its end: signals, and a budget of time."""

import contextlib
import math
import re
import signal
import threading
import time
from collections.abc import Iterator

from hyperion.errors import HyperionError

# Longer than a kernel takes to end after it was interrupted, asked and killed.
SHUTDOWN_S = 10.0


class Stopped(KeyboardInterrupt):
    """A signal asked this call to stop. A KeyboardInterrupt, because that is what asyncio lets out of its callbacks."""

    def __init__(self, number: int):
        self.number = number
        super().__init__(signal.Signals(number).name)

    @property
    def exit_code(self) -> int:
        """130 for Ctrl-C, 143 for SIGTERM, as a shell reports them."""
        return 128 + self.number


class BudgetSpent(BaseException):
    """The call's time budget ran out inside a notebook; raised between two cells."""


@contextlib.contextmanager
def stoppable() -> Iterator[None]:
    """Turn SIGINT or SIGTERM into `Stopped`; those that follow at once are ignored while the kernel is being shut down."""
    if threading.current_thread() is not threading.main_thread():
        yield  # only the main thread may handle signals: whoever runs a call elsewhere keeps its own handling
        return
    numbers = (signal.SIGINT, signal.SIGTERM)

    first = -math.inf

    def stop(number: int, frame) -> None:
        nonlocal first
        if time.monotonic() - first > SHUTDOWN_S:
            first = time.monotonic()
            raise Stopped(number)

    before = {number: signal.signal(number, stop) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


_DURATION = re.compile(r"(?:(\d+(?:\.\d+)?)h)?(?:(\d+(?:\.\d+)?)m)?(?:(\d+(?:\.\d+)?)s?)?")


def seconds_of(text: str) -> float:
    """Seconds of a duration written as 90, 90s, 6m, 1.5h or 1h30m.

    Raises:
        HyperionError: it is written otherwise, or is not positive.
    """
    match = _DURATION.fullmatch(text.strip().lower())
    parts = [float(part) if part else 0.0 for part in match.groups()] if match else [0.0]
    seconds = sum(part * unit for part, unit in zip(parts, (3600, 60, 1), strict=False))
    if not match or seconds <= 0:
        raise HyperionError(
            f"{text!r} is no duration", next_step="write TIME_BUDGET=360, TIME_BUDGET=6m or TIME_BUDGET=1h30m"
        )
    return seconds


def told(seconds: float) -> str:
    """A duration for people: '25 s', '4.2 min', '1.5 h'."""
    if seconds < 60:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.1f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
