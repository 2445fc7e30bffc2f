"""The console on which commands print, and functions to run typer applications with Hyperion's exit codes."""

import errno
import io
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import typer
from rich.console import Console
from rich.text import Text

from hyperion.errors import HyperionError
from hyperion.paths import expanded
from hyperion.terminal import INTERRUPTED
from hyperion.untrusted import printable

# Errors in options are subclasses of click's ClickException. It is not imported from click, because newer versions of typer
# contain their own copy of click.
UsageError: Any = next(kind for kind in typer.BadParameter.__mro__ if kind.__name__ == "ClickException")
LONGEST_S = 3650 * 86400  # the system refuses much longer waits
_DURATION = re.compile(r"(?:(\d+(?:\.\d+)?)h)?(?:(\d+(?:\.\d+)?)m)?(?:(\d+(?:\.\d+)?)s?)?")


class PlainTextConsole(Console):
    """A console that escapes control characters, so that printed strings cannot control the terminal."""

    def render_str(self, text: str, **options: Any) -> Text:
        return super().render_str(printable(text), **options)

    def on_broken_pipe(self) -> None:
        # The base class exits with code 1, which here means a failed notebook or a confirmed regression.
        raise BrokenPipeError(errno.EPIPE, "the reader of standard output has ended")


def console() -> Console:
    """Return a console on standard output, which is 160 characters wide if standard output is not a terminal."""
    terminal = PlainTextConsole()
    return terminal if terminal.is_terminal else PlainTextConsole(width=160)


def one_of(choices: Sequence[str]) -> Callable[[Any], Any]:
    """Return a callback for a typer option that raises an error for every value that is not in `choices`."""

    def check(given: Any) -> Any:
        for value in given if isinstance(given, list | tuple) else (given,):
            if value is not None and value not in choices:
                raise typer.BadParameter(f"{value!r} is not one of {', '.join(choices)}")
        return given

    return check


def parse_duration(text: str, variable: str) -> float:
    """Return the number of seconds of a duration.

    Args:
        text: the duration, such as 90, 90s, 6m, 1.5h or 1h30m. A number without a unit is in seconds.
        variable: name of the option or variable, for the error message.

    Raises:
        HyperionError: the text is not a duration, or the duration is not positive or longer than `LONGEST_S`.
    """
    match = _DURATION.fullmatch(text.strip().lower())
    parts = [float(part) if part else 0.0 for part in match.groups()] if match else [0.0]
    seconds = sum(part * unit for part, unit in zip(parts, (3600, 60, 1), strict=False))
    if not match or not 0 < seconds <= LONGEST_S:
        raise HyperionError(
            f"{text[:40]!r} is not a duration above 0 and at most {LONGEST_S // 86400} days",
            where=variable,
            next_step=f"write {variable}=360, {variable}=6m or {variable}=1h30m",
        )
    return seconds


def run_app(app: typer.Typer, program: str, arguments: Sequence[str]) -> int:
    """Run a typer application and return its exit code. Errors in options are printed to standard error."""
    command = typer.main.get_command(app)
    try:
        # app() is not used, because it returns exit code 1 if standard output is closed. Here, exit code 1 means a regression.
        with command.make_context(program, list(arguments)) as context:
            command.invoke(context)
    except typer.Exit as ending:
        return ending.exit_code
    except typer.Abort:
        return INTERRUPTED
    except UsageError as error:
        shown = io.StringIO()
        error.show(shown)
        print(printable(shown.getvalue()), end="", file=sys.stderr)
        return error.exit_code
    return 0


def existing_folder(given: Path | str) -> Path:
    """Return the absolute path of the folder named by an option.

    Raises:
        typer.BadParameter: there is no such folder.
    """
    path = expanded(str(given)).resolve()
    if not path.is_dir():
        raise typer.BadParameter(f"{str(given)!r} is not a folder; create it, or use another folder")
    return path
