"""Stop a call or one of its notebooks early: signals, the time budget, and the time limits of cells and notebooks."""

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

# Longer than a kernel takes to end: it is interrupted, then asked to shut down, then killed.
SHUTDOWN_S = 10.0


class Stopped(KeyboardInterrupt):
    """A signal asked this call to stop. A KeyboardInterrupt, because asyncio lets this exception out of its callbacks."""

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
    """A cell or a notebook exceeded its time limit. A KeyboardInterrupt for the same reason as `Stopped`."""


@dataclass(frozen=True)
class Limits:
    """Time limits of a notebook and each of its cells.

    Args:
        cell_s: seconds for one cell.
        notebook_s: seconds for all cells together.
        deadline: end of the call's time budget, on the clock of `time.monotonic`; None without a budget.
    """

    cell_s: float
    notebook_s: float
    deadline: float | None = None


# (cell, notebook) by profile: at least four times the expected time of the slowest chapter.
_LIMITS_S = {
    "smoke": (15 * 60, 30 * 60),
    "full": (20 * 60, 40 * 60),
    "study": (6 * 3600, 12 * 3600),
    "replay": (10 * 60, 20 * 60),
}


def limits_of(profile: str, cell_s: float | None, notebook_s: float | None, deadline: float | None) -> Limits:
    """Return the requested limits, and those of the profile where none is requested."""
    own_cell_s, own_notebook_s = _LIMITS_S[profile]
    # A cell limit above the notebook's limit extends the notebook's limit.
    return Limits(cell_s or own_cell_s, notebook_s or max(own_notebook_s, cell_s or 0.0), deadline)


class Alarm:
    """A timer that raises `LimitExceeded` or `BudgetSpent` inside the event loop that waits for a cell."""

    def __init__(self, limits: Limits, loop: asyncio.AbstractEventLoop):
        self._limits, self._loop = limits, loop
        self._timer: asyncio.TimerHandle | None = None
        self._ends = time.monotonic() + limits.notebook_s

    def set(self, cell: int) -> None:
        """Start the timer for the cell with this number.

        Raises:
            LimitExceeded, BudgetSpent: there is no time left.
        """
        self.cancel()
        now, limits = time.monotonic(), self._limits
        ends: list[tuple[float, BaseException]] = [
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
        """Stop the timer: the cell has ended."""
        if self._timer is not None:
            self._timer.cancel()

    @staticmethod
    def _raise(end: BaseException) -> None:
        raise end


def _exceeded(what: str, limit_s: float, variable: str) -> LimitExceeded:
    return LimitExceeded(
        f"{what} exceeded its limit of {format_duration(limit_s)}\n"
        "Rows of finished experiments are kept, and the next call continues from them. "
        f"If it needs more time, set {variable}, as {variable}=2h."
    )


@contextlib.contextmanager
def stoppable() -> Iterator[None]:
    """Turn SIGINT and SIGTERM into `Stopped`; further ones are ignored for `SHUTDOWN_S`, while kernels are shut down."""
    if threading.current_thread() is not threading.main_thread():
        yield  # Python handles signals in the main thread only
        return
    numbers = (signal.SIGINT, signal.SIGTERM)
    first = -math.inf

    def stop(number: int, frame: object) -> None:
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


def parse_duration(text: str, variable: str) -> float:
    """Return the seconds of a duration written as 90, 90s, 6m, 1.5h or 1h30m.

    Args:
        variable: name of the option or variable, for the error message.

    Raises:
        HyperionError: it is malformed or not positive.
    """
    match = _DURATION.fullmatch(text.strip().lower())
    parts = [float(part) if part else 0.0 for part in match.groups()] if match else [0.0]
    seconds = sum(part * unit for part, unit in zip(parts, (3600, 60, 1), strict=False))
    if not match or seconds <= 0:
        raise HyperionError(
            f"{text!r} is no duration", where=variable, next_step=f"write {variable}=360, {variable}=6m or {variable}=1h30m"
        )
    return seconds


def format_duration(seconds: float) -> str:
    """Return a duration as text: '25 s', '4.2 min', '1.5 h'."""
    if seconds < 60:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.1f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
