"""`python3 -m hyperion.install`: see --help."""

import argparse
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from hyperion.install import environment, overlay
from hyperion.install.machine import collect_facts, decide
from hyperion.install.plan import choose
from hyperion.locks import FileLock
from hyperion.terminal import run_command, say

ROOT = Path(__file__).resolve().parent.parent.parent


def main(arguments: list[str] | None = None) -> int:
    """Set up if needed; with `run`, replace this process by the named module. Return an exit code on failure."""
    options = parse(arguments)
    return run_command(lambda: _execute(options), "hyperion: set-up failed")


def _execute(options: argparse.Namespace) -> int:
    try:
        python, variables = set_up(options.python, options.torch, options.extra, quiet=options.command == "run")
    except KeyboardInterrupt:
        print("hyperion: set-up interrupted; the next call continues or repairs it", file=sys.stderr)
        raise
    if options.command == "setup":
        return 0
    sys.stdout.flush()
    # exec, not a child: signals, the terminal and the exit code are those of the command.
    os.execve(python, [str(python), "-m", *options.module], variables)


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """Read the command line. argparse, since there may be no typer yet."""
    parser = argparse.ArgumentParser(prog="python3 -m hyperion.install", description=__doc__)
    parser.add_argument("--python", default=os.environ.get("PYTHON", ""), help="use this environment instead of .venv")
    parser.add_argument("--torch", default=os.environ.get("TORCH", ""), help="cpu, cuda, rocm, or rocm7.2")
    parser.add_argument("--extra", action="append", default=[], help="optional group the command needs (with --python)")
    parser.add_argument("command", choices=("setup", "run"), help="set up; or set up if needed and run a module there")
    parser.add_argument("module", nargs=argparse.REMAINDER, help="module and its arguments, for run")
    options = parser.parse_args(arguments)
    if options.command == "run" and not options.module:
        parser.error("run needs a module")
    return options


def set_up(python: str, torch: str, extras: list[str], quiet: bool = False) -> tuple[Path, dict[str, str]]:
    """Make or check the environment for this machine; return its interpreter and the variables to run it with."""
    machine = decide(collect_facts())
    choice = choose(machine, torch)
    if not quiet:
        say(f"hyperion: {machine.evidence}; build {choice.label}{' (TORCH=)' if choice.explicit else ''}")
    if machine.note and not choice.explicit:
        print(f"hyperion: {machine.note}", file=sys.stderr)
    with _one_set_up():
        if python:
            # abspath, not resolve: a virtual environment's python is a link to one without its packages.
            chosen = Path(os.path.abspath(python))
            variables = overlay.ensure_overlay(ROOT, chosen, extras, machine, choice)
        else:
            chosen = environment.ensure_environment(ROOT, machine, choice)
            variables = environment.environment_variables()
    if not quiet:
        say(f"hyperion: ready, {chosen}")
    return chosen, variables


@contextmanager
def _one_set_up() -> Iterator[None]:
    """Allow one set-up at a time in this checkout: a second one waits, then finds the environment complete."""
    lock = FileLock(ROOT / ".setup.lock")
    if not lock.acquire(wait=False):
        print("hyperion: another set-up is running here, waiting for it", file=sys.stderr, flush=True)
        lock.acquire()
    try:
        yield
    finally:
        lock.release()


if __name__ == "__main__":
    sys.exit(main())
