"""Execute one notebook with papermill and report the result, or stop it early.

Signals, the call's time budget, and the time limits of cells and notebooks stop it.
"""

import asyncio
import contextlib
import math
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hyperion.reproduce.kernels import KERNEL, kernel_manager_class
from hyperion.reproduce.notebooks import Notebook

_COLOURS = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
# Longer than a kernel takes to end: it is interrupted, then asked to shut down, then killed.
SHUTDOWN_S = 10.0
# (cell, notebook) by profile: at least four times the expected time of the slowest chapter.
_LIMITS_S = {
    "smoke": (15 * 60, 30 * 60),
    "full": (20 * 60, 40 * 60),
    "study": (6 * 3600, 12 * 3600),
    "replay": (10 * 60, 20 * 60),
}


@dataclass(frozen=True)
class NotebookFailure:
    """Why a notebook failed.

    Args:
        summary: the error; its first line is a short form.
        cell: number of the failed cell as the executed copy shows it, In [n]; None when no cell failed.
        traceback: text of the kernel's traceback; "" when there is none or it only repeats the summary.
    """

    summary: str
    cell: int | None = None
    traceback: str = ""


@dataclass(frozen=True)
class Outcome:
    """An executed notebook.

    Args:
        document: an nbformat node; None when the kernel never started.
        failure: why it failed; None when it did not.
        not_evaluated: one sentence for each cell that could not be evaluated because a refused row has no value.
    """

    document: object | None
    failure: NotebookFailure | None
    not_evaluated: tuple[str, ...] = ()


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


class Interruption:
    """Stops a notebook in another thread as a signal stops the main thread: raises `Stopped` inside its event loop."""

    def __init__(self):
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stop: Stopped | None = None

    def reaches(self, loop: asyncio.AbstractEventLoop) -> None:
        """Set the event loop of the executing thread; raise a stop that was requested earlier."""
        self._loop = loop
        if self._stop is not None:
            raise self._stop

    def __call__(self, stop: Stopped) -> None:
        self._stop = own = Stopped(stop.number)  # an exception object must not be raised in two threads
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(_raise, own)


def execute(
    notebook: Notebook,
    parameters: dict,
    scratch: Path,
    environment: dict[str, str],
    *,
    on_cell: Callable[[int], object],
    on_line: Callable[[str], object],
    interruption: Interruption,
    limits: Limits,
    lacks_rows: Callable[[], bool],
) -> Outcome:
    """Run a notebook from a fresh kernel, in its own folder as JupyterLab does.

    Args:
        parameters: values for the cell tagged `parameters`.
        scratch: node-local folder for the kernel's files.
        environment: variables of the kernel in addition to this process's.
        on_cell: called before each cell with the number of finished code cells.
        on_line: called with each line of output that the driver must show.
        interruption: stops the execution from another thread.
        limits: time limits; they end the notebook even in the middle of a cell.
        lacks_rows: returns True once an unexpected row has lost its value. From then on, a cell that raises counts as one
            that cannot be evaluated, and the notebook continues.

    Raises:
        BudgetSpent: the deadline of `limits` has passed.
    """
    import papermill
    from jupyter_core.utils import ensure_event_loop
    from nbclient.exceptions import CellTimeoutError, DeadKernelError
    from papermill.exceptions import PapermillExecutionError

    copy = scratch / notebook.path.name
    done = 0
    loop = ensure_event_loop()
    loop.set_exception_handler(_ignore_abandoned_tasks)
    interruption.reaches(loop)
    alarm, not_evaluated = Alarm(limits, loop), []

    def cell_starts(cell: Any, cell_index: int) -> None:
        on_cell(done)
        if cell.cell_type == "code" and cell.source.strip():
            alarm.set(done + 1)

    def cell_executed(cell: Any, cell_index: int, execute_reply: dict[str, Any]) -> None:
        nonlocal done
        alarm.cancel()
        done += 1
        reply = execute_reply["content"]
        if reply["status"] == "error" and lacks_rows():
            error = f"{reply['ename']}: {reply['evalue']}".partition("\n")[0]
            not_evaluated.append(f"cell [{done}] cannot be evaluated without the values that were refused: {error}")
            on_line(f"UNEXPECTED: {not_evaluated[-1]}")
            _turn_errors_into_text(cell)

    try:
        papermill.execute_notebook(
            notebook.path,
            copy,
            parameters=parameters,
            kernel_name=KERNEL,
            progress_bar=False,
            autosave_cell_every=0,
            stdout_file=LineFilter(on_line),
            stderr_file=LineFilter(on_line),
            kernel_manager_class=kernel_manager_class(scratch, environment, notebook.path.parent),
            on_cell_start=cell_starts,
            on_cell_executed=cell_executed,
            on_notebook_error=lambda notebook: alarm.cancel(),
        )
        failure = None
    except PapermillExecutionError as error:
        trace = _COLOURS.sub("", "\n".join(error.traceback))
        summary = f"{error.ename}: {error.evalue}".strip()
        # A HyperionError has no traceback in a notebook but its message (see hyperion.errors).
        failure = NotebookFailure(summary, error.exec_count, "" if trace.strip() == summary else trace)
    except LimitExceeded as limit:
        failure = NotebookFailure(str(limit))
    except (DeadKernelError, CellTimeoutError) as error:
        text = f"the kernel died: {error}. If memory ran out, `dmesg` and the batch system's log show it."
        failure = NotebookFailure(text, done + 1)
    except RuntimeError as error:  # from nbclient: the kernel did not start
        failure = NotebookFailure(f"the kernel did not start: {error}")
    return Outcome(_read(copy), failure, tuple(not_evaluated))


class LineFilter:
    """A file-like object that passes on the important lines of a cell's output.

    These are lines that start with BANNER, WARNING or UNEXPECTED, and blocks between lines of `=`, which announce the data
    source.
    """

    def __init__(self, on_line: Callable[[str], object]):
        self._on_line, self._rest, self._fenced = on_line, "", False

    def write(self, text: str) -> None:
        *lines, self._rest = (self._rest + text).split("\n")
        for line in lines:
            fence = len(line) >= 40 and not line.strip("=")
            if fence or self._fenced or line.startswith(("BANNER", "WARNING", "UNEXPECTED")):
                self._on_line(line)
            self._fenced = self._fenced != fence

    def flush(self) -> None:
        """Do nothing: complete lines are passed on at once."""


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
        self._timer = self._loop.call_later(at - now, _raise, end)

    def cancel(self) -> None:
        """Stop the timer: the cell has ended."""
        if self._timer is not None:
            self._timer.cancel()


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


def format_duration(seconds: float) -> str:
    """Return a duration as text: '25 s', '4.2 min', '1.5 h'."""
    if seconds < 60:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.1f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


def _raise(end: BaseException) -> None:
    raise end


def _turn_errors_into_text(cell: Any) -> None:
    """Let papermill continue after a cell that raised: turn the cell's traceback into printed output."""
    import nbformat

    # After the cell, nbclient looks for this tag; at the end of the notebook, papermill looks for outputs of type `error`.
    cell.metadata["tags"] = [*cell.metadata.get("tags", []), "raises-exception"]
    for number, output in enumerate(cell.outputs):
        if output.output_type == "error":
            text = "\n".join(output.traceback) + "\n"
            cell.outputs[number] = nbformat.v4.new_output("stream", name="stderr", text=_COLOURS.sub("", text))


def _ignore_abandoned_tasks(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """Report no errors of abandoned tasks: a stop abandons the task that waits for the cell, then ends its kernel."""
    if "never retrieved" not in context.get("message", ""):
        loop.default_exception_handler(context)


def _read(copy: Path) -> object | None:
    import nbformat

    return nbformat.read(copy, as_version=4) if copy.is_file() else None
