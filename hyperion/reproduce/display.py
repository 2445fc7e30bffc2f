"""What a call prints: progress while notebooks run, the report of a failure, and the closing table."""

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
    """Progress of the notebooks: bars with the time left on a terminal, else a line every 30 s.

    Args:
        console: its `is_terminal` decides the form.
        expected_s: expected seconds of each notebook that is still to run.
        total_s: time that the given notebooks (seconds by name) take together; the default is their sum.
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
        self._bars: Progress | None = None
        self._closing = threading.Event()
        self._log_thread = threading.Thread(target=self._log_progress, daemon=True)
        if console.is_terminal and not console.is_dumb_terminal:
            columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), _TimeLeft(self))
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

    def start(self, stem: str, cells: int) -> None:
        """Show that a notebook with this number of code cells starts."""
        running = _RunningNotebook(cells)
        if self._bars:
            running.bar = self._bars.add_task(f"  {stem}", total=cells)
        else:
            about, number = format_duration(self._expected.get(stem, 0)), self._finished + len(self._running) + 1
            self.say(f"[{number}/{self._total}] {stem}: started, {cells} cells, about {about}")
        self._running[stem] = running

    def cell(self, stem: str, done: int) -> None:
        """Show the number of finished cells of a running notebook."""
        running = self._running[stem]
        running.done = done
        if self._bars and running.bar is not None:
            self._bars.update(running.bar, completed=done)

    def finish(self, stem: str, line: str) -> None:
        """Show that a notebook ended; `line` says how."""
        self._expected.pop(stem, None)
        running = self._running.pop(stem)
        self._finished += 1
        if self._bars and running.bar is not None:
            self._bars.remove_task(running.bar)
            self._bars.update(self._book_bar, completed=self._finished)
        self.say(line)

    def drop(self, stem: str) -> None:
        """Remove a notebook that is not run (blocked, skipped, up to date) from the remaining time."""
        self._expected.pop(stem, None)

    def say(self, line: str) -> None:
        """Print a line above the bars, and flush it."""
        self._console.print(line, markup=False, highlight=False, soft_wrap=True)
        self._console.file.flush()

    def left_s(self) -> float:
        """Return the expected seconds until all notebooks are done; a notebook that takes longer than expected counts as 0."""
        now, left = time.monotonic(), {}
        for stem, seconds in list(self._expected.items()):
            running = self._running.get(stem)
            spent = 0.0 if running is None else now - running.started
            left[stem] = max(seconds - spent, 0.0)
        return self._total_s(left)

    def _log_progress(self) -> None:
        # Also while one cell takes minutes: a silent job looks like a hung one.
        while not self._closing.wait(_LOG_INTERVAL_S):
            for stem, running in list(self._running.items()):
                spent, left = format_duration(time.monotonic() - running.started), format_duration(self.left_s())
                cell = min(running.done + 1, running.cells)  # after the last cell, the page is written
                self.say(f"    {stem}: cell {cell}/{running.cells}, {spent} so far, about {left} left in all")


@dataclass
class _RunningNotebook:
    cells: int
    done: int = 0
    started: float = field(default_factory=time.monotonic)
    bar: TaskID | None = None


class _TimeLeft(ProgressColumn):
    def __init__(self, display: Display):
        super().__init__()
        self._display = display

    def render(self, task: Task) -> Text:
        return Text(f"{format_duration(self._display.left_s())} left") if task.id == 0 else Text("")


def show_failure(say: Callable[[str], object], notebook: Notebook, failure: NotebookFailure, folder: Path) -> None:
    """Print the error, the cell, the last lines of the traceback and the path of the executed copy."""
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
    """A notebook's line in the closing table.

    Args:
        status: done, up to date, unexpected, failed, blocked, skipped, unfinished or interrupted.
        seconds: wall time of the latest run of the notebook; None when it never ran.
        rows: its rows in the run.
        note: the reason, where the status needs one.
    """

    status: str
    seconds: float | None
    rows: list[Row]
    note: str = ""


def show_table(console: Console, lines: dict[str, TableLine]) -> None:
    """Print the closing table; without a terminal it is wide enough for its text."""
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
    """Return the rate nearest to its limit, as "93% (gemm_tflops bfloat16)"; "" where no rate has a limit."""
    rates = [(row.fraction_of_limit, row) for row in rows if _is_rate(row) and row.fraction_of_limit is not None]
    if not rates:
        return ""
    fraction, row = max(rates, key=lambda rate: rate[0])
    return f"{fraction:.0%} ({' '.join(filter(None, [row.metric, row.dtype]))})"


def _is_rate(row: Row) -> bool:
    metric = row.definition
    return metric.direction == "higher" and (metric.unit.endswith("/s") or metric.unit == "TFLOPS")
