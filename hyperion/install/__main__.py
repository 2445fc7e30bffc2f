"""`python3 -m hyperion.install`: see --help."""

import argparse
import fcntl
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from hyperion.errors import HyperionError
from hyperion.install import environment, overlay
from hyperion.install.machine import collect_facts, decide
from hyperion.install.plan import choose

ROOT = Path(__file__).resolve().parent.parent.parent


def main(arguments: list[str] | None = None) -> int:
    """Set up if needed; with `run`, become the named module in the environment. Returns an exit code on failure."""
    options = parse(arguments)
    try:
        python, variables = set_up(options.python, options.torch, options.extra, quiet=options.command == "run")
    except HyperionError as error:
        print(f"hyperion: set-up failed: {error}", file=sys.stderr)
        return error.exit_code
    except OSError as error:
        print(f"hyperion: set-up failed: {error}\n  next:  check out where this user may write", file=sys.stderr)
        return HyperionError.exit_code
    except KeyboardInterrupt:
        print("hyperion: set-up interrupted; the next call continues or repairs it", file=sys.stderr)
        return 130
    if options.command == "setup":
        return 0
    sys.stdout.flush()
    # exec, not a child: signals, the terminal and the exit code are the command's own.
    os.execve(python, [str(python), "-m", *options.module], variables)


def parse(arguments: list[str] | None) -> argparse.Namespace:
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
    """An environment that fits this machine: its interpreter and the variables to run it with."""
    machine = decide(collect_facts())
    choice = choose(machine, torch)
    if not quiet:
        print(f"hyperion: {machine.evidence}; build {choice.label}{' (TORCH=)' if choice.explicit else ''}")
    if machine.note and not choice.explicit:
        print(f"hyperion: {machine.note}", file=sys.stderr)
    with _alone():
        if python:
            # abspath, not resolve: a virtual environment's python is a link to one without its packages.
            chosen = Path(os.path.abspath(python))
            variables = overlay.ensure_overlay(ROOT, chosen, extras, machine, choice)
        else:
            chosen = environment.ensure_environment(ROOT, machine, choice)
            variables = environment.environment_variables()
    if not quiet:
        print(f"hyperion: ready, {chosen}", flush=True)
    return chosen, variables


@contextmanager
def _alone() -> Iterator[None]:
    """One set-up at a time in this checkout: a second one waits, then finds the work done."""
    with open(ROOT / ".setup.lock", "w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print("hyperion: another set-up is running here, waiting for it", file=sys.stderr, flush=True)
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


if __name__ == "__main__":
    sys.exit(main())
