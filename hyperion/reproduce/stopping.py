"""How a call, or one notebook of it, ends before its end: signals, a budget of time, limits of a cell and of a notebook."""

import asyncio
import contextlib
import math
import re
import signal
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass

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


class BudgetSpent(KeyboardInterrupt):
    """The call's time budget ran out inside a notebook. A KeyboardInterrupt for the same reason as `Stopped`."""


class LimitExceeded(KeyboardInterrupt):
    """A cell, or a notebook, took longer than it may. A KeyboardInterrupt for the same reason as `Stopped`."""


@dataclass(frozen=True)
class Limits:
    """How long a notebook and each of its cells may take.

    Args:
        cell_s: seconds of one cell.
        notebook_s: seconds of all cells together.
        deadline: end of the call's time budget, on the clock of `time.monotonic`; None without one.
    """

    cell_s: float
    notebook_s: float
    deadline: float | None = None


# (cell, notebook) by profile: at least four times what the slowest chapter of the book is expected to take in it.
_LIMITS_S = {
    "smoke": (15 * 60, 30 * 60),
    "full": (20 * 60, 40 * 60),
    "study": (6 * 3600, 12 * 3600),
    "replay": (10 * 60, 20 * 60),
}


def limits_of(profile: str, cell_s: float | None, notebook_s: float | None, deadline: float | None) -> Limits:
    """The limits asked for; where none is, the profile's own."""
    own_cell_s, own_notebook_s = _LIMITS_S[profile]
    # A cell that may take longer than its notebook may asks for a longer notebook.
    return Limits(cell_s or own_cell_s, notebook_s or max(own_notebook_s, cell_s or 0.0), deadline)


class Alarm:
    """Ends a notebook in the middle of a cell: raises `LimitExceeded` or `BudgetSpent` inside the loop that waits for it."""

    def __init__(self, limits: Limits, loop: asyncio.AbstractEventLoop):
        self._limits, self._loop, self._timer = limits, loop, None
        self._ends = time.monotonic() + limits.notebook_s

    def set(self, cell: int) -> None:
        """The cell of this number starts.

        Raises:
            LimitExceeded, BudgetSpent: there is no time left for it.
        """
        self.cancel()
        now, limits = time.monotonic(), self._limits
        ends = [
            (now + limits.cell_s, _exceeded(f"cell [{cell}]", limits.cell_s, "CELL_TIMEOUT")),
            (self._ends, _exceeded(f"the notebook, in cell [{cell}],", limits.notebook_s, "NOTEBOOK_TIMEOUT")),
        ]
        if limits.deadline is not None:
            ends.append((limits.deadline, BudgetSpent()))
        at, end = min(ends, key=lambda pair: pair[0])
        if at <= now:
            raise end
        self._timer = self._loop.call_later(at - now, self._raise, end)

    def cancel(self) -> None:
        """The cell has ended."""
        if self._timer is not None:
            self._timer.cancel()

    @staticmethod
    def _raise(end: BaseException) -> None:
        raise end


def _exceeded(what: str, limit_s: float, variable: str) -> LimitExceeded:
    return LimitExceeded(
        f"{what} exceeded its limit of {told(limit_s)}\nRows of finished experiments stay, and the next call goes on from "
        f"them. If it needs more time, set {variable}, as {variable}=2h."
    )


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


def seconds_of(text: str, variable: str) -> float:
    """Seconds of a duration written as 90, 90s, 6m, 1.5h or 1h30m.

    Args:
        variable: where it was given, for the message.

    Raises:
        HyperionError: it is written otherwise, or is not positive.
    """
    match = _DURATION.fullmatch(text.strip().lower())
    parts = [float(part) if part else 0.0 for part in match.groups()] if match else [0.0]
    seconds = sum(part * unit for part, unit in zip(parts, (3600, 60, 1), strict=False))
    if not match or seconds <= 0:
        raise HyperionError(
            f"{text!r} is no duration", where=variable, next_step=f"write {variable}=360, {variable}=6m or {variable}=1h30m"
        )
    return seconds


def told(seconds: float) -> str:
    """A duration for people: '25 s', '4.2 min', '1.5 h'."""
    if seconds < 60:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.1f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
