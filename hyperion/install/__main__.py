"""The command line of the set-up, `python3 -m hyperion.install`."""

import argparse
import errno
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from hyperion.errors import HyperionError
from hyperion.install import environment, overlay
from hyperion.install.machine import collect_facts, decide
from hyperion.install.plan import choose
from hyperion.locks import FileLock
from hyperion.terminal import run_command, say

ROOT = Path(__file__).resolve().parent.parent.parent
_READ_ONLY = (errno.EROFS, errno.EACCES, errno.EPERM)


def main(arguments: list[str] | None = None) -> int:
    """Set up the environment if needed. With `run`, replace this process with the named module.

    Returns:
        The exit code. `run` returns only if the set-up fails.
    """
    options = parse(arguments)
    return run_command(lambda: _execute(options), "hyperion: set-up failed")


def _execute(options: argparse.Namespace) -> int:
    if options.dry_run:
        for line in planned_actions(options.python, options.torch, options.extra):
            say(line)
        return 0
    try:
        python, variables = set_up(options.python, options.torch, options.extra, quiet=options.command == "run")
    except KeyboardInterrupt:
        print("hyperion: the set-up was interrupted; the next call continues or repairs it", file=sys.stderr)
        raise
    if options.command == "setup":
        return 0
    sys.stdout.flush()
    # exec instead of a child process: the command receives the signals and the terminal, and its exit code is returned.
    os.execve(python, [str(python), "-m", *options.module], variables)


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """Parse the command line. This function uses argparse, because typer may not be installed yet."""
    parser = argparse.ArgumentParser(prog="python3 -m hyperion.install", description=__doc__)
    parser.add_argument(
        "--python", default=os.environ.get("PYTHON", ""), help="Python of an existing environment, to use instead of .venv"
    )
    parser.add_argument(
        "--torch",
        default=os.environ.get("TORCH", ""),
        help="build of torch: cpu, cuda or rocm, or with a version such as rocm7.2",
    )
    parser.add_argument(
        "--extra", action="append", default=[], help="optional group of packages that the command needs (with --python)"
    )
    parser.add_argument("--dry-run", action="store_true", help="with setup: print every action, and do nothing")
    parser.add_argument(
        "command", choices=("setup", "run"), help="setup: set up the environment. run: set up if needed, then run a module in it"
    )
    parser.add_argument("module", nargs=argparse.REMAINDER, help="with run: the module and its arguments")
    options = parser.parse_args(arguments)
    if options.command == "run" and not options.module:
        parser.error("run needs a module")
    if options.dry_run and options.command == "run":
        parser.error("--dry-run needs setup")
    return options


def planned_actions(python: str, torch: str, extras: list[str]) -> list[str]:
    """Return the actions that `set_up` would take with the same arguments, one line each. Nothing is created or changed."""
    machine = decide(collect_facts())
    choice = choose(machine, torch)
    lines = [f"detected: {machine.evidence}; build {choice.label}{' (TORCH=)' if choice.explicit else ''}"]
    if python:
        return lines + overlay.planned_actions(ROOT, Path(os.path.abspath(python)), extras)
    return lines + environment.planned_actions(ROOT, choice)


def set_up(python: str, torch: str, extras: list[str], quiet: bool = False) -> tuple[Path, dict[str, str]]:
    """Create or check the environment for this machine.

    Args:
        python: interpreter of an existing environment. "" means .venv of this checkout.
        torch: torch build, with the names that TORCH= accepts. "" chooses the build for this machine.
        extras: optional dependency groups of pyproject.toml that must be installed.
        quiet: if True, do not print the choice and the interpreter.

    Returns:
        The interpreter of the environment, and the environment variables with which to run it.
    """
    machine = decide(collect_facts())
    choice = choose(machine, torch)
    if not quiet:
        say(f"hyperion: {machine.evidence}; build {choice.label}{' (TORCH=)' if choice.explicit else ''}")
    if machine.note and not choice.explicit:
        print(f"hyperion: {machine.note}", file=sys.stderr)
    with _one_set_up():
        if python:
            # Do not resolve links, because the python of a virtual environment is a link to a Python without its packages.
            chosen = Path(os.path.abspath(python))
            variables = overlay.ensure_overlay(ROOT, chosen, extras, machine, choice, retry=not quiet)
        else:
            chosen = environment.ensure_environment(ROOT, machine, choice)
            variables = environment.environment_variables()
    if not quiet:
        say(f"hyperion: ready, {chosen}")
    return chosen, variables


@contextmanager
def _one_set_up() -> Iterator[None]:
    """Context manager that allows one set-up at a time in this checkout. A second one waits until the first has finished.

    In a checkout that this user may not change, a ready environment is used without the lock.

    Raises:
        HyperionError: the environment is not ready, and this user may not change the checkout.
    """
    lock = FileLock(ROOT / ".setup.lock")
    try:
        acquired = lock.acquire(wait=False)
    except OSError as error:
        # In a folder that can be changed, the lock is needed: it may be the lock file of another user that cannot be opened.
        if error.errno not in _READ_ONLY or os.access(ROOT, os.W_OK):
            raise
        with _nothing_to_write():
            yield
        return
    if not acquired:
        print("hyperion: waiting for another set-up in this checkout", file=sys.stderr, flush=True)
        lock.acquire()
    try:
        yield
    finally:
        lock.release()


@contextmanager
def _nothing_to_write() -> Iterator[None]:
    """Context manager in which an attempt to write is an error that says who can set up this checkout."""
    try:
        yield
    except OSError as error:
        if error.errno not in _READ_ONLY:
            raise
        raise HyperionError(
            f"the environment is not ready, and this user may not change the checkout: {error}",
            where=ROOT,
            next_step="let the owner of the checkout run the same make command once, or make a checkout of your own",
        ) from error


if __name__ == "__main__":
    sys.exit(main())
