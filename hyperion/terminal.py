"""Print text safely to the standard streams, and end commands without a traceback, even if a stream is closed.

Except for `progress_bar`, this module uses only the standard library, because `hyperion.install` needs it before other packages
are installed.
"""

import functools
import html
import io
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import TYPE_CHECKING, Any

from hyperion.errors import HyperionError
from hyperion.paths import NO_HOME
from hyperion.untrusted import printable

if TYPE_CHECKING:
    from tqdm import tqdm

LINE_INTERVAL_S = 10.0  # between two lines of a progress bar outside of terminals
INTERRUPTED, READER_GONE = 130, 141  # the exit codes that shells report for SIGINT and SIGPIPE


def say(text: str) -> None:
    """Print a line. Control characters are escaped, because the text may come from files or other users."""
    print(printable(text), flush=True)


@functools.cache
def notice(text: str) -> None:
    """Print a notice to standard error. Control characters are escaped, and each text is printed only once per process."""
    _print_error(f"hyperion: NOTICE: {text}")


def progress_bar(**options: Any) -> "tqdm":
    """Return a tqdm progress bar with these options.

    In a notebook, the bar is a single output that is updated in place, and that is empty after a bar with `leave=False`. It is no
    widget, because a saved notebook shows an error message in place of each widget when it is opened again. If standard error is
    no terminal, the bar is a line every 10 s.
    """
    from tqdm import tqdm

    if _in_notebook():
        options = {"file": _UpdatedOutput(), "ncols": 100, **options}
    elif not sys.stderr.isatty():
        options = {"file": _RareLines(), "ncols": 100, **options}
    return tqdm(**options)


def _in_notebook() -> bool:
    """Return True if a Jupyter kernel runs this process. A terminal with IPython is no notebook."""
    ipython = sys.modules.get("IPython")
    return ipython is not None and hasattr(ipython.get_ipython(), "kernel")


class _UpdatedOutput:
    """A file-like object that shows the latest line of a progress bar as an output of the current cell."""

    encoding = "utf-8"  # without it, tqdm draws its bar with ASCII characters

    def __init__(self):
        self._handle: Any = None

    def write(self, text: str) -> None:
        from IPython.display import display

        if not text.startswith("\r"):  # tqdm moves the cursor of a terminal, for example to the next line at the end
            return
        line = text.strip()
        # JupyterLab gives an empty text a line of its own, but not an empty HTML element.
        bundle = {"text/html": f'<pre style="margin:0">{html.escape(line)}</pre>' if line else "", "text/plain": line}
        if self._handle is None:
            self._handle = display(bundle, raw=True, display_id=True)
        else:
            self._handle.update(bundle, raw=True)

    def flush(self) -> None:
        """Do nothing, because `write` shows each line immediately."""


class _RareLines:
    """A file-like object that prints the latest line of a progress bar to standard error, at most every 10 s and at the end."""

    encoding = "utf-8"  # as in _UpdatedOutput

    def __init__(self):
        self._line, self._printed_s = "", time.monotonic()

    def write(self, text: str) -> None:
        self._line = text.strip() or self._line
        ended = text == "\n"  # tqdm leaves a bar with this text, and removes one with spaces
        if self._line and (ended or time.monotonic() - self._printed_s >= LINE_INTERVAL_S):
            print(self._line, file=sys.stderr, flush=True)
            self._line, self._printed_s = "", time.monotonic()

    def flush(self) -> None:
        """Do nothing, because `write` prints whole lines."""


def run_command(command: Callable[[], int], prefix: str = "hyperion") -> int:
    """Run a command and return its exit code. Errors that a user can correct are printed with their next step.

    Closed streams are replaced by os.devnull. Characters that the terminal cannot encode are printed as escapes. If the process
    that reads standard output ends first, as in `| head -1`, the command ends silently with exit code 141.

    If SIGTERM has its default effect, it ends the command as an exception (SystemExit with the code 143), so that the command
    removes its temporary files and ends its child processes. A command can install its own handler.

    Args:
        command: function that runs the command and returns its exit code.
        prefix: prefix of error messages.
    """
    _prepare_streams()
    _prepare_home()
    # Python installs signal handlers in the main thread only.
    default = threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    if default:
        signal.signal(signal.SIGTERM, exit_on_sigterm)
    try:
        code = command()
        sys.stdout.flush()
        return code
    except HyperionError as error:
        _print_error(f"{prefix}: {error}")
        return error.exit_code
    except KeyboardInterrupt:
        return INTERRUPTED
    except OSError as error:
        gone = isinstance(error, BrokenPipeError) and _reader_gone()
        _drop_output()
        if gone:
            return READER_GONE
        may_use = "check that this user may read and write this file or folder, and that the disk is not full"
        next_step = _WRONG_PATH.get(type(error), may_use)
        _print_error(f"{prefix}: {error}\n  next:  {next_step}")
        return HyperionError.exit_code
    finally:
        if default:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)


def exit_on_sigterm(number: int, frame: FrameType | None) -> None:
    """Signal handler of `run_command`: raise SystemExit with the exit code that shells report for the signal."""
    raise SystemExit(128 + number)


_WRONG_PATH = {
    FileNotFoundError: "name a file that exists, or create the folder of a new file first",
    IsADirectoryError: "name a file instead of this folder",
    NotADirectoryError: "name a path whose parents are folders",
}


def _print_error(text: str) -> None:
    print(printable(text), file=sys.stderr)


def _prepare_streams() -> None:
    # Otherwise, a file opened later would get the descriptor of a closed stream, and child processes would print into this file.
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(descriptor, True)
    os.close(descriptor)
    for number, (name, mode) in enumerate((("stdin", "r"), ("stdout", "w"), ("stderr", "w"))):
        if getattr(sys, name) is None:
            stream = open(number, mode, encoding="utf-8", closefd=False)  # noqa: SIM115 - stays open until the process ends
            setattr(sys, name, stream)
            setattr(sys, f"__{name}__", stream)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # tests and notebooks replace the streams with other objects
            stream.reconfigure(errors="backslashreplace")


def _prepare_home() -> None:
    """Set HOME if it is unknown, because the import of Jupyter and other libraries would fail without it."""
    if os.path.expanduser("~") == "~":
        os.environ["HOME"] = NO_HOME


def _reader_gone() -> bool:
    poll = select.poll()
    poll.register(1, select.POLLOUT)
    return any(event & (select.POLLERR | select.POLLHUP) for _, event in poll.poll(0))


def _drop_output() -> None:
    """Redirect standard output to os.devnull if it cannot be flushed. Otherwise, Python's flush at exit would fail too."""
    try:
        sys.stdout.flush()
    except OSError:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, 1)
        os.close(nowhere)
