"""Text and commands of the README and of the pages it links to, for the tests that run them."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text()
PAGES = {name: (ROOT / name).read_text() for name in ("README.md", "docs/running.md", "docs/comparing.md", "docs/headlines.md")}
LONGEST_S = 1500


def commands() -> list[str]:
    """Lines of the pages' shell blocks, comments cut off, in their order."""
    blocks = [block for page in PAGES.values() for block in re.findall(r"```sh\n(.*?)```", page, re.DOTALL)]
    return [line.split("  #")[0].strip() for block in blocks for line in block.splitlines() if line.strip()]


def needs_the_book(command: str) -> bool:
    """Whether a command is `make reproduce`, or works with what that leaves."""
    return command.startswith(("make reproduce", "make report")) or command.endswith((" latest", "data verify"))


def folders(folder: Path) -> dict[str, str]:
    """The environment with results and data in a folder of their own, and this interpreter as the one that is there."""
    return os.environ | {
        "HYPERION_RESULTS": str(folder / "results"),
        "HYPERION_DATA": str(folder / "data"),
        "PYTHON": sys.executable,
    }


def run(command: str, environment: dict) -> subprocess.CompletedProcess:
    """A command as printed, from the repository's root."""
    # `.venv` is the README's environment; here the commands use the one that runs the tests.
    words = shlex.split(command)
    here = {".venv/bin/hyperion": ["-m", "hyperion"], "torchrun": ["-m", "torch.distributed.run"], "python": []}
    if words[0] in here:
        words = [sys.executable, *here[words[0]], *words[1:]]
    return subprocess.run(words, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=LONGEST_S)
