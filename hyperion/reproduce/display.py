"""The output of `hyperion reproduce`: progress while notebooks run, failure reports, and a summary table at the end."""

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, ProgressColumn, Task, TaskID, TextColumn
from rich.table import Table
from rich.text import Text

from hyperion.reproduce.execution import NotebookFailure, format_duration
from hyperion.reproduce.notebooks import Notebook
from hyperion.results import Row

_LOG_INTERVAL_S = 30.0
# Expected times are scaled by the ratio of measured to expected times of the finished notebooks. This ratio is computed as if
# another notebook with this expected time, in seconds, had taken exactly as long as expected.
_PRIOR_S = 30.0
_LINES_OF_TRACEBACK = 40
_STYLES = {
    "done": "green",
    "up to date": "green",
    "failed": "red",
    "unexpected": "red",
    "blocked": "yellow",
    "interrupted": "yellow",
}


class Display:
    """Shows the progress of the notebooks.

    A terminal shows progress bars with the remaining time. Other outputs, such as a log file, get a line every 30 s.

    Args:
        console: the console to print to. Bars are drawn if it is a terminal.
        expected_s: expected seconds of each notebook that will run. The keys are stems (file names without .ipynb).
        total_s: function that computes the total seconds of several notebooks from a dict that maps stems to seconds; default:
            the sum. If notebooks run at the same time, the total is less than the sum.
    """

    def __init__(
        self,
        console: Console,
        expected_s: dict[str, float],
        total_s: Callable[[dict[str, float]], float] = lambda seconds: sum(seconds.values()),
    ):
        self._console, self._expected, self._total_s = console, dict(expected_s), total_s
        self._running: dict[str, _RunningNotebook] = {}
        self._finished, self._total = 0, len(expected_s)
        self._spent_so_far = self._expected_so_far = 0.0
        self._bars: Progress | None = None
        self._closing = threading.Event()
        self._log_thread = threading.Thread(target=self._log_progress, daemon=True)
        if console.is_terminal and not console.is_dumb_terminal:
            columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), _TimeLeft(self))
            # The bars disappear at the end, so that only the lines and the table remain on the screen.
            self._bars = Progress(*columns, console=console, transient=True)
            self._book_bar = self._bars.add_task("notebooks", total=self._total)

    def __enter__(self) -> "Display":
        (self._bars or self._log_thread).start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._closing.set()
        if self._bars:
            self._bars.stop()
        else:
            self._log_thread.join()

    def start(self, stem: str, cells: int, why_again: str = "") -> None:
        """Show that a notebook with `cells` code cells starts."""
        running = _RunningNotebook(cells)
        if self._bars:
            running.bar = self._bars.add_task(f"  {stem}", total=cells)
        else:
            about, number = format_duration(self._expected.get(stem, 0)), self._finished + len(self._running) + 1
            self.say(
                f"[{number}/{self._total}] {stem}: started, {cells} cells, about {about}"
                + (f", {why_again}" if why_again else "")
            )
        self._running[stem] = running

    def cell(self, stem: str, done: int) -> None:
        """Show the number of finished cells of a running notebook."""
        running = self._running[stem]
        running.done = done
        if self._bars and running.bar is not None:
            self._bars.update(running.bar, completed=done)

    def finish(self, stem: str, line: str, whole: bool = False) -> None:
        """Print `line`, which reports how a notebook ended, and remove its bar.

        Args:
            stem: stem of the notebook.
            line: the line to print.
            whole: whether all experiments of the notebook ran. In this case, its time is used to estimate the remaining time.
        """
        expected, running = self._expected.pop(stem, 0.0), self._running.pop(stem)
        if whole:
            self._expected_so_far += expected
            self._spent_so_far += time.monotonic() - running.started
        self._finished += 1
        if self._bars and running.bar is not None:
            self._bars.remove_task(running.bar)
            self._bars.update(self._book_bar, completed=self._finished)
        self.say(line)

    def drop(self, stem: str) -> None:
        """Remove a notebook that does not run from the estimate of the remaining time.

        Such a notebook is blocked, skipped or up to date.
        """
        self._expected.pop(stem, None)

    def say(self, line: str) -> None:
        """Print a line above the bars and flush the output."""
        # Markup is disabled, because file names and error messages may contain square brackets.
        self._console.print(line, markup=False, highlight=False, soft_wrap=True)
        self._console.file.flush()

    def left_s(self) -> float:
        """Return the expected seconds until all notebooks are done.

        The expected times are scaled by the ratio of measured to expected times of the notebooks so far. A notebook that has
        exceeded its expected time is assumed to need at least another quarter of the time that it has already taken.
        """
        now, left = time.monotonic(), {}
        # The dict is copied, because another thread may change it while this one draws.
        spent_s = {stem: now - running.started for stem, running in list(self._running.items())}
        late = {stem: spent for stem, spent in spent_s.items() if spent > self._expected.get(stem, 0.0)}
        # A notebook that is already late is included in the ratio before it has ended.
        took = _PRIOR_S + self._spent_so_far + sum(late.values())
        pace = took / (_PRIOR_S + self._expected_so_far + sum(self._expected.get(stem, 0.0) for stem in late))
        for stem, seconds in list(self._expected.items()):
            spent = spent_s.get(stem, 0.0)
            # The notebook is late by an unknown factor. Adding a constant fraction bounds the relative error of its total time.
            left[stem] = max(pace * seconds - spent, spent / (4 if stem in late else 10))
        return self._total_s(left)

    def _log_progress(self) -> None:
        # Print a line even if a single cell takes minutes, because a job without output seems to hang.
        while not self._closing.wait(_LOG_INTERVAL_S):
            for stem, running in list(self._running.items()):
                spent, left = format_duration(time.monotonic() - running.started), format_duration(self.left_s())
                cell = min(running.done + 1, running.cells)  # after the last cell, the notebook still writes its page
                self.say(f"    {stem}: cell {cell}/{running.cells}, {spent} so far, about {left} left in all")


@dataclass
class _RunningNotebook:
    cells: int
    done: int = 0
    started: float = field(default_factory=lambda: time.monotonic())
    bar: TaskID | None = None


class _TimeLeft(ProgressColumn):
    def __init__(self, display: Display):
        super().__init__()
        self._display = display

    def render(self, task: Task) -> Text:
        return Text(f"{format_duration(self._display.left_s())} left") if task.id == 0 else Text("")


def show_failure(say: Callable[[str], object], notebook: Notebook, failure: NotebookFailure, folder: Path) -> None:
    """Print the failure of a notebook: the error, the cell, the end of the traceback, and the path of the executed copy."""
    cell = "" if failure.cell is None else f", cell In [{failure.cell}]"
    summary, *rest = failure.summary.splitlines()
    say(f"FAILED {notebook.path.parent.name}/{notebook.path.name}{cell}: {summary}")
    for line in rest:
        say(f"    {line}")
    for line in failure.traceback.splitlines()[-_LINES_OF_TRACEBACK:]:
        say(f"    {line}")
    say(f"    the executed copy: {folder / 'notebooks' / notebook.path.name}")


@dataclass(frozen=True)
class TableLine:
    """The line of one notebook in the summary table.

    Args:
        status: done, up to date, unexpected, failed, blocked, skipped, unfinished or interrupted.
        seconds: wall time of the latest execution of the notebook, or None if it never ran.
        rows: the notebook's rows in the run.
        note: the reason for the status; "" if the status needs no reason.
    """

    status: str
    seconds: float | None
    rows: list[Row]
    note: str = ""


def show_table(console: Console, lines: dict[str, TableLine]) -> None:
    """Print the summary table. If the output is not a terminal, the table is 160 characters wide."""
    table = Table(title=None, pad_edge=False)
    for heading in ("notebook", "status"):
        table.add_column(heading, no_wrap=True)
    for heading in ("time", "rows"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("best fraction of limit")
    table.add_column("note")
    for stem, line in lines.items():
        status = f"[{_STYLES[line.status]}]{line.status}[/]" if line.status in _STYLES else line.status
        seconds = "" if line.seconds is None else format_duration(line.seconds)
        rows = str(len(line.rows)) if line.rows else ""
        table.add_row(stem, status, seconds, rows, best_fraction(line.rows), line.note.replace("[", "\\["))
    (console if console.is_terminal else Console(file=console.file, width=160)).print(table)
    console.file.flush()


def best_fraction(rows: list[Row]) -> str:
    """Return the highest fraction of a limit that a rate reaches, with the name of the rate: "93% (gemm_tflops bfloat16)".

    Return "" if no rate has a limit.
    """
    rates = [(row.fraction_of_limit, row) for row in rows if _is_rate(row) and row.fraction_of_limit is not None]
    if not rates:
        return ""
    fraction, row = max(rates, key=lambda rate: rate[0])
    return f"{fraction:.0%} ({' '.join(filter(None, [row.metric, row.dtype]))})"


def _is_rate(row: Row) -> bool:
    metric = row.definition
    return metric.direction == "higher" and (metric.unit.endswith("/s") or metric.unit == "TFLOPS")
