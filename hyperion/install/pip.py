"""Calls of pip, each in a process of the environment it changes."""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from hyperion.errors import HyperionError

# A silent network is noticed in seconds when only asking; a real download keeps pip's own patience.
ASKING = ("--dry-run", "--quiet", "--retries", "1", "--timeout", "8")


def install(python: Path, arguments: Sequence[str], purpose: str, progress: bool = False) -> None:
    """`pip install`, showing its errors, and with `progress` on a terminal all it says.

    Raises:
        HyperionError: pip failed; its own last words stand above on the terminal.
    """
    print(f"hyperion: {purpose}", flush=True)
    volume = [] if progress and sys.stdout.isatty() else ["-qq"]
    command = [str(python), "-m", "pip", "install", *volume, *arguments]
    done = subprocess.run(command, env=clean_environment(), check=False)
    if done.returncode:
        raise HyperionError(
            f"pip could not install: {purpose}",
            where=" ".join(command),
            next_step="read pip's message above; without a network, set up where there is one, or use an environment "
            "that is already there: make reproduce PYTHON=/path/to/python",
        )


def report(python: Path, arguments: Sequence[str]) -> tuple[dict, str]:
    """What `pip install` would do: its JSON report (empty when it finds no solution) and its messages."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "report.json"
        command = [str(python), "-m", "pip", "install", *ASKING, "--report", str(path), *arguments]
        done = subprocess.run(command, env=clean_environment(), capture_output=True, text=True, errors="replace", check=False)
        if done.returncode or not path.is_file():
            return {}, done.stderr
        return json.loads(path.read_text(encoding="utf-8")), done.stderr


def clean_environment() -> dict[str, str]:
    """This process's environment without what would make pip install elsewhere or see the user's own packages."""
    dropped = ("PYTHONPATH", "PYTHONHOME", "PIP_TARGET", "PIP_USER", "PIP_PREFIX")
    kept = {name: value for name, value in os.environ.items() if name not in dropped}
    return kept | {"PYTHONNOUSERSITE": "1", "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
