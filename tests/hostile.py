"""What the tests of hostile files share: a watchdog, a snapshot of a folder, and values that no file of ours holds."""

import contextlib
import hashlib
import os
import signal
import stat
import sys
from collections.abc import Iterator
from pathlib import Path

from hypothesis import HealthCheck, settings

from hyperion.cli import main
from hyperion.errors import HyperionError
from hyperion.untrusted import printable

HANG_S = 10
# Replacements for any value of a JSON document, as text of JSON.
JUNK = (
    "null",
    "true",
    "-1",
    "0",
    "1e308",
    "-1e308",
    "1e999",
    "NaN",
    "Infinity",
    "9" * 400,
    '""',
    '"x"',
    "[]",
    "{}",
    "[1]",
    '{"a": 1, "a": 2}',
    "[" * 2000 + "]" * 2000,
    '"\\ud800"',
    '"\\u001b[2J\\u0007\\u202e"',
    '"<script>alert(1)</script>"',
    '"../../outside/file"',
    '"/etc/passwd"',
    '"a|b\\n](http://x)"',
    '"$x$"',
)


def determined(examples: int) -> settings:
    """The same examples in every run: no seed of the clock, no database; a slow machine changes nothing."""
    return settings(
        max_examples=examples,
        derandomize=True,
        database=None,
        deadline=None,
        suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
    )


class HangError(BaseException):
    """A reader took longer than it may; no `except Exception` hides it."""


@contextlib.contextmanager
def watched() -> Iterator[None]:
    """Raise HangError in a block that takes longer than `HANG_S`."""

    def bark(number: int, frame: object) -> None:
        raise HangError(f"longer than {HANG_S} s")

    before = signal.signal(signal.SIGALRM, bark)
    signal.alarm(HANG_S)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def snapshot(folder: Path) -> dict[str, tuple]:
    """Every path below `folder` with its kind, time of change, and content or target."""
    found = {}
    for path in [folder, *sorted(folder.rglob("*"))]:
        status = path.lstat()
        content: object = None
        if stat.S_ISLNK(status.st_mode):
            content = os.readlink(path)
        elif stat.S_ISREG(status.st_mode):
            content = status.st_size if status.st_size > 2**24 else hashlib.sha256(path.read_bytes()).hexdigest()
        found[str(path.relative_to(folder))] = (status.st_mode, status.st_mtime_ns, status.st_ino, content)
    return found


def refused(function) -> bool:
    """Whether it raises a HyperionError, which must say what to do next; any other exception is the test's failure."""
    try:
        with watched():
            function()
    except HyperionError as error:
        assert error.what
        return True
    return False


def command(monkeypatch, capsys, *arguments: object) -> tuple[int, str]:
    """Exit code and output of a `hyperion` command in this process; nothing in the output controls a terminal."""
    monkeypatch.setattr(sys, "argv", ["hyperion", *map(str, arguments)])
    with watched():
        code = main()
    captured = capsys.readouterr()
    assert printable(captured.out + captured.err) == captured.out + captured.err
    return code, captured.out + captured.err


def spoil(path: Path, how: str, outside: Path) -> None:
    """Do to a file what a truncated copy, an editor or an attacker does.

    Args:
        how: a key of `SPOILED`.
        outside: a file that nobody may touch.
    """
    content = path.read_bytes()
    path.unlink()
    SPOILED[how](path, content, outside)


SPOILED = {
    "missing": lambda path, content, outside: None,
    "empty": lambda path, content, outside: path.write_bytes(b""),
    "truncated": lambda path, content, outside: path.write_bytes(content[: len(content) // 2]),
    "extended": lambda path, content, outside: path.write_bytes(content + b"\n"),
    "a bit flipped": lambda path, content, outside: path.write_bytes(content[:-1] + bytes([content[-1] ^ 1])),
    "noise": lambda path, content, outside: path.write_bytes(hashlib.sha512(content).digest() * 8),
    "no UTF-8": lambda path, content, outside: path.write_bytes(b"\xff\xfe" + content),
    "sparse": lambda path, content, outside: (path.touch(), os.truncate(path, 2**40)),
    "a pipe": lambda path, content, outside: os.mkfifo(path),
    "a folder": lambda path, content, outside: path.mkdir(),
    "a link out": lambda path, content, outside: path.symlink_to(outside),
    "a dangling link": lambda path, content, outside: path.symlink_to(outside.with_name("none")),
    "an endless device": lambda path, content, outside: path.symlink_to("/dev/zero"),
    "a link to itself": lambda path, content, outside: path.symlink_to(path.name),
}
