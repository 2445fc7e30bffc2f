"""What a call shows while it works: live bars on a terminal, plain lines in a log."""

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, ProgressColumn, Task, TextColumn
from rich.text import Text

from hyperion.reproduce.stopping import told

_PLAIN_EVERY_S = 30.0


@dataclass
class _Current:
    """A notebook that runs."""

    cells: int
    done: int = 0
    started: float = field(default_factory=time.monotonic)
    bar: int | None = None


class Display:
    """Bars over notebooks and cells with the time left; without a terminal, a line now and then.

    Args:
        console: where to; its `is_terminal` decides the form.
        expected_s: seconds each notebook still to be run is expected to take.
        lasting_s: how long notebooks of so many seconds take together; one after the other when left out.
    """

    def __init__(
        self,
        console: Console,
        expected_s: dict[str, float],
        lasting_s: Callable[[dict[str, float]], float] = lambda seconds: sum(seconds.values()),
    ):
        self._console, self._expected, self._lasting_s = console, dict(expected_s), lasting_s
        self._current: dict[str, _Current] = {}
        self._finished, self._total = 0, len(expected_s)
        self._progress = None
        self._closing = threading.Event()
        self._pulse = threading.Thread(target=self._beat, daemon=True)
        if console.is_terminal and not console.is_dumb_terminal:
            columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), _TimeLeft(self))
            self._progress = Progress(*columns, console=console, transient=True)
            self._book = self._progress.add_task("notebooks", total=self._total)

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
        current = _Current(cells)
        if self._progress:
            current.bar = self._progress.add_task(f"  {stem}", total=cells)
        else:
            about, number = told(self._expected.get(stem, 0)), self._finished + len(self._current) + 1
            self.say(f"[{number}/{self._total}] {stem}: started, {cells} cells, about {about}")
        self._current[stem] = current

    def cell(self, stem: str, done: int) -> None:
        """So many cells of a notebook that runs are done."""
        current = self._current[stem]
        current.done = done
        if self._progress:
            self._progress.update(current.bar, completed=done)

    def finish(self, stem: str, line: str) -> None:
        """A notebook that ran ended; `line` says how."""
        self._expected.pop(stem, None)
        current = self._current.pop(stem)
        self._finished += 1
        if self._progress:
            self._progress.remove_task(current.bar)
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
            for stem, current in list(self._current.items()):
                spent, left = told(time.monotonic() - current.started), told(self.left_s())
                cell = min(current.done + 1, current.cells)  # after the last one the page is written
                self.say(f"    {stem}: cell {cell}/{current.cells}, {spent} so far, about {left} left in all")

    def left_s(self) -> float:
        """Expected seconds until all is done; a notebook that overruns its expectation counts as about to finish."""
        now, left = time.monotonic(), {}
        for stem, seconds in list(self._expected.items()):
            current = self._current.get(stem)
            spent = 0.0 if current is None else now - current.started
            left[stem] = max(seconds - spent, 0.0)
        return self._lasting_s(left)


class _TimeLeft(ProgressColumn):
    def __init__(self, display: Display):
        super().__init__()
        self._display = display

    def render(self, task: Task) -> Text:
        return Text(f"{told(self._display.left_s())} left") if task.id == 0 else Text("")
