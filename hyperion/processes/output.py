"""What a worker prints: lines for people, and reports of progress among them."""

import json
from collections.abc import Callable

_PROGRESS = "@progress "
_TAIL = 40


def report_progress(done: int, total: int, note: str = "") -> None:
    """Called within a worker: tell the launcher how far the work is."""
    print(_PROGRESS + json.dumps([done, total, note]), flush=True)


class Listener:
    """The launcher's ear: passes lines and progress on, and keeps the last lines.

    Args:
        on_line: called with each line, without its end.
        on_progress: called with (done, total, note) for each report.
    """

    def __init__(self, on_line: Callable[[str], object], on_progress: Callable[[int, int, str], object]):
        self.on_line, self.on_progress = on_line, on_progress
        self.tail: list[str] = []

    def hear(self, line: str) -> None:
        """One line of the worker, with its end."""
        if line.startswith(_PROGRESS):
            self.on_progress(*json.loads(line.removeprefix(_PROGRESS)))
            return
        self.tail.append(line)
        del self.tail[:-_TAIL]
        self.on_line(line.rstrip("\n"))


def last_lines(log: str) -> str:
    """The end of a log, without reports of progress and without what C++ and Python add to an error for their makers."""
    noise = (_PROGRESS, "frame #", "Extension modules:")
    return "".join([line for line in log.splitlines(keepends=True) if not line.startswith(noise)][-_TAIL:])
