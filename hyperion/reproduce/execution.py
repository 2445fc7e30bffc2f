"""Execute one notebook with papermill and return the result.

The execution stops early on a signal, at the end of the call's time budget, or at the time limit of a cell or of the notebook.
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
# Maximum seconds in which a kernel ends: it is first interrupted, then asked to shut down, and finally killed.
SHUTDOWN_S = 10.0
# Time limits (of a cell, of a notebook) in seconds by profile: at least four times the expected time of the slowest chapter.
_LIMITS_S = {
    "smoke": (15 * 60, 30 * 60),
    "full": (30 * 60, 60 * 60),
    "study": (6 * 3600, 12 * 3600),
    "replay": (10 * 60, 20 * 60),
}


@dataclass(frozen=True)
class NotebookFailure:
    """The failure of a notebook.

    Args:
        summary: the error message. Its first line is a short form.
        cell: number n of the failed cell, which the executed copy shows as In [n]. None if no cell failed.
        traceback: the kernel's traceback. "" if there is none, or if it only repeats the summary.
    """

    summary: str
    cell: int | None = None
    traceback: str = ""


@dataclass(frozen=True)
class Outcome:
    """The result of an execution.

    Args:
        document: the executed notebook as an nbformat node. None if the kernel did not start.
        failure: the failure of the notebook. None if it did not fail.
        not_evaluated: one sentence for each cell that could not be evaluated because the value of a row was refused.
    """

    document: object | None
    failure: NotebookFailure | None
    not_evaluated: tuple[str, ...] = ()


class Stopped(KeyboardInterrupt):
    """Raised when a signal asks this call to stop.

    It is a KeyboardInterrupt, because asyncio catches other exceptions that a callback raises.
    """

    def __init__(self, number: int):
        self.number = number
        super().__init__(signal.Signals(number).name)

    @property
    def exit_code(self) -> int:
        """Exit code of this process: 130 after Ctrl-C and 143 after SIGTERM, as shells report them."""
        return 128 + self.number


class BudgetSpent(KeyboardInterrupt):
    """Raised when the call's time budget ends inside a notebook. It is a KeyboardInterrupt for the same reason as `Stopped`."""


class LimitExceeded(KeyboardInterrupt):
    """Raised when a cell or a notebook exceeds its time limit. It is a KeyboardInterrupt for the same reason as `Stopped`."""


@dataclass(frozen=True)
class Limits:
    """Time limits of a notebook and of each of its cells.

    Args:
        cell_s: limit for one cell, in seconds.
        notebook_s: limit for all cells in total, in seconds.
        deadline: time of `time.monotonic` at which the call's time budget ends. None if there is no budget.
    """

    cell_s: float
    notebook_s: float
    deadline: float | None = None


class Interruption:
    """Stops a notebook that another thread executes, by raising `Stopped` inside the event loop of that thread."""

    def __init__(self):
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stop: Stopped | None = None

    def reaches(self, loop: asyncio.AbstractEventLoop) -> None:
        """Set the event loop of the executing thread.

        Raises:
            Stopped: a stop was requested before this call.
        """
        self._loop = loop
        if self._stop is not None:
            raise self._stop

    def __call__(self, stop: Stopped) -> None:
        self._stop = own = Stopped(stop.number)  # a new object, because two threads must not raise the same exception object
        if self._loop is not None and not self._loop.is_closed():
            # An event loop has no other method that a different thread may call.
            self._loop.call_soon_threadsafe(_raise, own)


def execute(
    notebook: Notebook,
    parameters: dict,
    scratch: Path,
    environment: dict[str, str],
    *,
    on_cell: Callable[[int], object],
    on_line: Callable[[str], object],
    announced: set[tuple[str, ...]],
    interruption: Interruption,
    limits: Limits,
    lacks_rows: Callable[[], bool],
) -> Outcome:
    """Run a notebook in a new kernel. As in JupyterLab, the working folder is that of the notebook.

    Args:
        notebook: the notebook to run.
        parameters: values for the cell tagged `parameters`.
        scratch: node-local folder for the kernel's files.
        environment: environment variables of the kernel, in addition to those of this process.
        on_cell: function that is called before each cell with the number of finished code cells.
        on_line: function that is called with each line of output that the driver must show.
        announced: blocks of output that `on_line` has already received in this call; see `LineFilter`.
        interruption: stops the execution from another thread.
        limits: time limits. They end the notebook even in the middle of a cell.
        lacks_rows: function that returns True after the value of a row has been refused. From then on, a cell that raises an
            exception is recorded as a cell that cannot be evaluated, and the notebook continues.

    Raises:
        BudgetSpent: the deadline of `limits` has passed.
        Stopped: `interruption` stopped the execution.
    """
    import papermill
    from jupyter_core.utils import ensure_event_loop
    from nbclient.exceptions import CellTimeoutError, DeadKernelError
    from papermill.exceptions import PapermillExecutionError

    from hyperion.reproduce import engine

    done, document = 0, None
    # nbclient runs its coroutines in the event loop of the calling thread. Each notebook has its own thread and loop.
    loop = ensure_event_loop()
    loop.set_exception_handler(_ignore_abandoned_tasks)
    interruption.reaches(loop)
    alarm, not_evaluated = Alarm(limits, loop), []

    def starts(executed: Any) -> None:
        nonlocal document
        document = executed

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
            None,
            engine_name=engine.NAME,
            on_start=starts,
            parameters=parameters,
            kernel_name=KERNEL,
            language="python",  # a notebook that was not written by Jupyter may not state it
            progress_bar=False,
            autosave_cell_every=0,
            stdout_file=LineFilter(on_line, announced),
            stderr_file=LineFilter(on_line, announced),
            kernel_manager_class=kernel_manager_class(scratch, environment, notebook.path.parent),
            on_cell_start=cell_starts,
            on_cell_executed=cell_executed,
            on_notebook_error=lambda notebook: alarm.cancel(),
        )
        failure = None
    except PapermillExecutionError as error:
        trace = _COLOURS.sub("", "\n".join(error.traceback))
        summary = f"{error.ename}: {error.evalue}".strip()
        # In a notebook, the traceback of a HyperionError is only its message (see hyperion.errors).
        failure = NotebookFailure(summary, error.exec_count, "" if trace.strip() == summary else trace)
    except LimitExceeded as limit:
        failure = NotebookFailure(str(limit))
    except (DeadKernelError, CellTimeoutError) as error:
        text = f"the kernel died: {error}. If memory ran out, `dmesg` and the batch system's log show it."
        failure = NotebookFailure(text, done + 1)
    except RuntimeError as error:  # nbclient raises it if the kernel did not start
        failure = NotebookFailure(f"the kernel did not start: {error}")
    return Outcome(document, failure, tuple(not_evaluated))


class LineFilter:
    """A file-like object that passes only the important lines of a cell's output to `on_line`.

    A line is important if it starts with BANNER, WARNING or UNEXPECTED, or if it is in a block between two lines of `=`. Such a
    block announces the data source. Every experiment that uses the data announces the source, so repeated blocks are omitted.

    Args:
        on_line: function that is called with each important line.
        announced: the blocks that have already been passed on. New blocks are added.
    """

    def __init__(self, on_line: Callable[[str], object], announced: set[tuple[str, ...]]):
        self._on_line, self._announced = on_line, announced
        self._rest, self._block = "", []

    def write(self, text: str) -> None:
        # Output arrives in pieces of any length. The end may be an incomplete line, so it is kept for the next call.
        *lines, self._rest = (self._rest + text).split("\n")
        for line in lines:
            fence = len(line) >= 40 and not line.strip("=")
            if line.startswith(("BANNER", "WARNING", "UNEXPECTED")):
                self._on_line(line)
            elif fence or self._block:
                self._block.append(line)
                if fence and len(self._block) > 1:
                    self._pass_block()

    def _pass_block(self) -> None:
        block, self._block = tuple(self._block), []
        if block not in self._announced:
            self._announced.add(block)
            for line in block:
                self._on_line(line)

    def flush(self) -> None:
        """Do nothing, because `write` passes on every complete line immediately."""


def limits_of(profile: str, cell_s: float | None, notebook_s: float | None, deadline: float | None) -> Limits:
    """Return the time limits of a notebook. A limit that is None or 0 is replaced by the limit of the profile."""
    own_cell_s, own_notebook_s = _LIMITS_S[profile]
    # If the requested limit for a cell exceeds the profile's limit for a notebook, it is also the limit for the notebook.
    return Limits(cell_s or own_cell_s, notebook_s or max(own_notebook_s, cell_s or 0.0), deadline)


class Alarm:
    """A timer that raises `LimitExceeded` or `BudgetSpent` inside the event loop that waits for the current cell."""

    def __init__(self, limits: Limits, loop: asyncio.AbstractEventLoop):
        self._limits, self._loop = limits, loop
        self._timer: asyncio.TimerHandle | None = None
        self._ends = time.monotonic() + limits.notebook_s

    def set(self, cell: int) -> None:
        """Start the timer for the cell with number `cell`.

        Raises:
            LimitExceeded: the notebook has already used its time.
            BudgetSpent: the call's time budget has already ended.
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
        """Stop the timer, because the cell has ended."""
        if self._timer is not None:
            self._timer.cancel()


def _exceeded(what: str, limit_s: float, variable: str) -> LimitExceeded:
    return LimitExceeded(
        f"{what} exceeded its limit of {format_duration(limit_s)}\n"
        "Rows of finished experiments are kept, and the next call continues after them. "
        f"To allow more time, set {variable}, for example {variable}=2h."
    )


@contextlib.contextmanager
def stoppable() -> Iterator[None]:
    """Raise `Stopped` on SIGINT and SIGTERM inside the block.

    After the first signal, further signals are ignored for `SHUTDOWN_S` seconds, so that kernels can shut down.
    """
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
    """Format a duration: '25 s', '4.2 min', '1.5 h'."""
    if seconds < 60:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.1f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


def _raise(end: BaseException) -> None:
    raise end


def _turn_errors_into_text(cell: Any) -> None:
    """Replace the error output of a cell with printed text, so that papermill continues with the next cell."""
    import nbformat

    # nbclient continues after a failed cell only if the cell has this tag. At the end of the notebook, papermill raises an
    # exception for every output of type `error`.
    cell.metadata["tags"] = [*cell.metadata.get("tags", []), "raises-exception"]
    for number, output in enumerate(cell.outputs):
        if output.output_type == "error":
            text = "\n".join(output.traceback) + "\n"
            cell.outputs[number] = nbformat.v4.new_output("stream", name="stderr", text=_COLOURS.sub("", text))


def _ignore_abandoned_tasks(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """Handle errors of the event loop without reporting the errors of abandoned tasks.

    A stop abandons the task that waits for the cell and then ends the kernel, so this task always fails.
    """
    message = context.get("message", "")
    if not ("never retrieved" in message or "destroyed but it is pending" in message):
        loop.default_exception_handler(context)
