"""Where commands print to."""

import errno

from rich.console import Console
from rich.text import Text

from hyperion.untrusted import printable


class PlainTextConsole(Console):
    """A console on which strings cannot control the terminal: control characters in them are escaped."""

    def render_str(self, text: str, **options) -> Text:
        return super().render_str(printable(text), **options)

    def on_broken_pipe(self) -> None:
        # The base class exits with code 1, which would say that a notebook failed, or that a regression was confirmed.
        raise BrokenPipeError(errno.EPIPE, "the reader of standard output has ended")


def console() -> Console:
    """Standard output; where it is no terminal, wide enough for its tables."""
    terminal = PlainTextConsole()
    return terminal if terminal.is_terminal else PlainTextConsole(width=160)
