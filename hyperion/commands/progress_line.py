"""The progress line of a run: step, loss and time left."""

import math
import time
from collections.abc import Callable

from rich.console import Console
from rich.live import Live
from rich.text import Text

from hyperion.frameworks.plan import Plan
from hyperion.frameworks.progress import Progress
from hyperion.reproduce.execution import format_duration
from hyperion.terminal import say

_INTERVAL_S = 10.0


class ProgressLine:
    """Shows the latest step of a run. A terminal shows one line that changes. Other outputs get a line every 10 s.

    Args:
        console: the console to print to.
        clock: function that returns the time in seconds.
    """

    def __init__(self, console: Console, clock: Callable[[], float] = time.monotonic):
        self._console, self._clock, self._said_s = console, clock, -math.inf
        # Without a refresh thread, which would take time from ranks on the CPU.
        self._live = Live(console=console, auto_refresh=False, transient=True)

    def __enter__(self) -> "ProgressLine":
        return self

    def __exit__(self, *error: object) -> None:
        self.clear()

    def show(self, plan: Plan, progress: Progress) -> None:
        """Show the progress of a run."""
        loss = "" if progress.loss is None else f", loss {progress.loss:.4f}"
        left = "" if progress.left_s is None else f", about {format_duration(progress.left_s)} left"
        line = f"{plan.framework} {plan.model}: step {progress.step}/{progress.steps}{loss}{left}"
        if self._console.is_terminal and not self._console.is_dumb_terminal:
            self._live.start()
            self._live.update(Text(line, no_wrap=True, overflow="ellipsis"), refresh=True)
        elif self._clock() - self._said_s >= _INTERVAL_S:
            self._said_s = self._clock()
            say(f"  {line}")

    def clear(self) -> None:
        """Remove the line from a terminal. The next run starts another one."""
        self._live.stop()
        self._said_s = -math.inf
