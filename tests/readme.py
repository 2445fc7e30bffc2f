"""Text and commands of the README and of the pages it links to, for the tests that run them."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text()
PAGES = {
    name: (ROOT / name).read_text()
    for name in ("README.md", "docs/running.md", "docs/comparing.md", "docs/headlines.md", "docs/claims.md")
}
LONGEST_S = 3600


def commands() -> list[str]:
    """Lines of the pages' shell blocks, comments cut off, in their order."""
    blocks = [block for page in PAGES.values() for block in re.findall(r"```sh\n(.*?)```", page, re.DOTALL)]
    return [line.split("  #")[0].strip() for block in blocks for line in block.splitlines() if line.strip()]


def commands_in_sentences() -> list[str]:
    """Commands of `hyperion` that the README names in its sentences, in backticks."""
    return re.findall(r"`(\.venv/bin/hyperion [^`\n]+)`", README)


def needs_the_book(command: str) -> bool:
    """Whether a command is `make reproduce`, or works with what that leaves."""
    return command.startswith(("make reproduce", "make report")) or command.endswith((" latest", "data verify"))


def reproduces() -> list[str]:
    """The variants of `make reproduce`. Those that name a profile start a run of their own, the others go on with the book's."""
    return [command for command in commands() if command.startswith("make reproduce") and command != "make reproduce"]


def folders(folder: Path) -> dict[str, str]:
    """The environment with results and data in a folder of their own, and this interpreter as the one that is there.

    The number of threads that conftest sets for the tests is removed: the commands run as a reader runs them.
    """
    of_tests = ("OMP_NUM_THREADS", "HYPERION_TESTS_SET_THREADS") if "HYPERION_TESTS_SET_THREADS" in os.environ else ()
    inherited = {name: value for name, value in os.environ.items() if name not in of_tests}
    return inherited | {
        "HYPERION_RESULTS": str(folder / "results"),
        "HYPERION_DATA": str(folder / "data"),
        "PYTHON": sys.executable,
    }


def run(command: str, environment: dict) -> subprocess.CompletedProcess:
    """A command as printed, from the repository's root, in a shell that knows nothing of the environment."""
    words = shlex.split(command)
    while re.match(r"[A-Z_]+=", words[0]):
        name, _, value = words.pop(0).partition("=")
        environment = environment | {name: value}
    # `.venv` is the environment that `make setup` makes. A checkout without it, as in a container, has only the interpreter that
    # runs the tests.
    here = {"hyperion": ["-m", "hyperion"], "torchrun": ["-m", "torch.distributed.run"], "python": []}
    place, _, name = words[0].rpartition("/")
    if place == ".venv/bin" and not (ROOT / words[0]).is_file():
        words = [sys.executable, *here[name], *words[1:]]
    scripts = str(Path(sys.executable).parent)
    path = os.pathsep.join(folder for folder in environment["PATH"].split(os.pathsep) if folder != scripts)
    bare = {name: value for name, value in environment.items() if name != "VIRTUAL_ENV"} | {"PATH": path}
    return subprocess.run(words, cwd=ROOT, env=bare, capture_output=True, text=True, timeout=LONGEST_S)
