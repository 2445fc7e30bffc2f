"""What a call shows while it works: live bars on a terminal, plain lines in a log."""

import threading
import time

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, ProgressColumn, Task, TextColumn
from rich.text import Text

from hyperion.reproduce.stopping import told

_PLAIN_EVERY_S = 30.0


class Display:
    """Bars over notebooks and cells with the time left; without a terminal, a line now and then.

    Args:
        console: where to; its `is_terminal` decides the form.
        expected_s: seconds each notebook still to be run is expected to take.
    """

    def __init__(self, console: Console, expected_s: dict[str, float]):
        self._console, self._expected = console, dict(expected_s)
        self._current: str | None = None
        self._started = time.monotonic()
        self._cells = self._done = self._finished = 0
        self._total = len(expected_s)
        self._progress = None
        self._closing = threading.Event()
        self._pulse = threading.Thread(target=self._beat, daemon=True)
        if console.is_terminal and not console.is_dumb_terminal:
            columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), _TimeLeft(self))
            self._progress = Progress(*columns, console=console, transient=True)
            self._book = self._progress.add_task("notebooks", total=self._total)
            self._notebook = self._progress.add_task("cells", total=None)

    def __enter__(self) -> "Display":
        (self._progress or self._pulse).start()
        return self

    def __exit__(self, *exception) -> None:
        self._closing.set()
        if self._progress:
            self._progress.stop()
        else:
            self._pulse.join()

    def start(self, stem: str, cells: int) -> None:
        """A notebook starts, with so many code cells."""
        self._current, self._cells, self._done = stem, cells, 0
        self._started = time.monotonic()
        if self._progress:
            self._progress.reset(self._notebook, total=cells, description=f"  {stem}")
        else:
            about = told(self._expected.get(stem, 0))
            self.say(f"[{self._finished + 1}/{self._total}] {stem}: started, {cells} cells, about {about}")

    def cell(self, done: int) -> None:
        """So many cells of the current notebook are done."""
        self._done = done
        if self._progress:
            self._progress.update(self._notebook, completed=done)

    def finish(self, line: str) -> None:
        """The current notebook ended; `line` says how."""
        self._expected.pop(self._current, None)
        self._current, self._finished = None, self._finished + 1
        if self._progress:
            self._progress.update(self._book, completed=self._finished)
        self.say(line)

    def drop(self, stem: str) -> None:
        """A notebook that will not be run after all (blocked, skipped)."""
        self._expected.pop(stem, None)

    def say(self, line: str) -> None:
        """A line that stays, above the bars if there are any; it is out when this returns."""
        self._console.print(line, markup=False, highlight=False, soft_wrap=True)
        self._console.file.flush()

    def _beat(self) -> None:
        """In a log, a line now and then, also while one cell takes minutes: a silent job looks like a hung one."""
        while not self._closing.wait(_PLAIN_EVERY_S):
            if self._current:
                spent = told(time.monotonic() - self._started)
                left = told(self.left_s())
                self.say(
                    f"    {self._current}: cell {self._done + 1}/{self._cells}, {spent} so far, about {left} left in all"
                )

    def left_s(self) -> float:
        """Expected seconds until all is done; a notebook that overruns its expectation counts as about to finish."""
        spent = time.monotonic() - self._started if self._current else 0.0
        current = max(self._expected.get(self._current, 0.0) - spent, 0.0)
        return current + sum(seconds for stem, seconds in self._expected.items() if stem != self._current)


class _TimeLeft(ProgressColumn):
    def __init__(self, display: Display):
        super().__init__()
        self._display = display

    def render(self, task: Task) -> Text:
        return Text(f"{told(self._display.left_s())} left") if task.id == 0 else Text("")
