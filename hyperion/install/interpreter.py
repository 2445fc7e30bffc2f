"""Inspect another Python environment without importing torch, and run pip in it."""

import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hyperion.errors import HyperionError
from hyperion.install.plan import MINIMUM_PYTHON, Build

# The script executes torch/version.py instead of importing torch. This takes milliseconds, and works even if torch cannot load
# its libraries.
_INSPECT = """
import importlib.metadata, importlib.util, json, os, sys
found = {"version": sys.version_info[:3], "base": sys.base_prefix, "torch": None, "torchvision": False, "packages": {}}
found["bytecode"] = True
spec = importlib.util.find_spec("torch")
if spec and spec.submodule_search_locations:
    facts = {}
    folder = list(spec.submodule_search_locations)[0]
    with open(os.path.join(folder, "version.py"), encoding="utf-8") as file:
        exec(file.read(), facts)
    stored = os.path.exists(importlib.util.cache_from_source(os.path.join(folder, "__init__.py")))
    found["bytecode"] = stored or (not sys.dont_write_bytecode and os.access(folder, os.W_OK))
    found["torch"] = {"version": str(facts["__version__"]), "cuda": facts.get("cuda"), "hip": facts.get("hip")}
found["torchvision"] = importlib.util.find_spec("torchvision") is not None
for distribution in importlib.metadata.distributions():
    name = distribution.metadata["Name"]
    if name:
        found["packages"].setdefault(name.lower().replace("_", "-").replace(".", "-"), distribution.version)
print(json.dumps(found))
"""
_OPEN_GPU = "import json, torch; print(json.dumps([torch.cuda.is_available(), torch.cuda.device_count()]))"
_NOTE_S = 15.0  # while pip runs, a line is printed at this interval, because pip is silent while it copies files
# With these options, pip fails within seconds if the index does not answer. Downloads use pip's default timeouts.
_DRY_RUN = ("--dry-run", "--quiet", "--retries", "1", "--timeout", "8")


@dataclass(frozen=True)
class Interpreter:
    """A Python environment.

    Args:
        python: interpreter of the environment.
        version: version of Python.
        base: folder of the Python installation from which the environment was created.
        torch: installed torch build; None if torch is not installed.
        torchvision: whether torchvision is installed.
        packages: a dict that maps the normalized name of an installed package to its version.
        bytecode: True if the compiled modules of torch are stored in the environment, or will be after the first import. False in
            containers that set PYTHONDONTWRITEBYTECODE or make the folder of torch read-only.
    """

    python: Path
    version: tuple[int, ...]
    base: str
    torch: Build | None
    torchvision: bool
    packages: dict[str, str]
    bytecode: bool = True


def inspect(python: Path) -> Interpreter:
    """Run an interpreter and return a description of its environment.

    Raises:
        HyperionError: the interpreter does not run, or is older than Python 3.11.
    """
    try:
        done = _run([str(python), "-c", _INSPECT], os.environ | {"PYTHONNOUSERSITE": "1"})
    except OSError as error:
        raise HyperionError(
            f"{python} cannot be run: {error.strerror}", next_step="use Python 3.11 or newer: PYTHON=/path/to/python3"
        ) from error
    if done.returncode:
        raise HyperionError(
            f"{python} does not work: {done.stderr.strip()[-300:]}", next_step="use another Python: PYTHON=/path/to/python3"
        )
    # Parse the last line, because startup files of the environment may print other lines before it.
    found = json.loads(done.stdout.splitlines()[-1])
    version = tuple(found["version"])
    if version < MINIMUM_PYTHON:
        raise HyperionError(f"{python} is Python {'.'.join(map(str, version))}", next_step="use Python 3.11 or newer")
    build = Build(**found["torch"]) if found["torch"] else None
    return Interpreter(python, version, found["base"], build, found["torchvision"], found["packages"], found["bytecode"])


def check_gpu_opens(python: Path, environment: dict[str, str], build: Build) -> None:
    """Import torch in an environment and check that torch can use a GPU.

    Args:
        python: interpreter of the environment.
        environment: environment variables of the process that imports torch.
        build: the installed torch build.

    Raises:
        HyperionError: torch cannot be imported, or cannot use a GPU. The error contains torch's message, for example that the
            driver is too old.
    """
    done = _run([str(python), "-c", _OPEN_GPU], environment)
    if done.returncode:
        raise HyperionError(
            f"{build} is installed, but cannot be imported: {done.stderr.strip()[-600:]}",
            where=python,
            next_step="read the last line: unset the environment variable that it is about, or install torch again",
        )
    lines = done.stdout.splitlines()
    if lines and json.loads(lines[-1])[0]:
        return
    masks = {name: os.environ[name] for name in os.environ if name.endswith("_VISIBLE_DEVICES")}
    message = done.stderr.strip()[-600:] or "torch.cuda.is_available() is False"
    raise HyperionError(
        f"{build} is installed, but torch cannot use a GPU: {message}",
        where=f"{python}; environment variables that hide GPUs: {masks or 'none'}",
        next_step="update the GPU driver to the version that this build needs, unset these variables, or run on the CPU with "
        "TORCH=cpu",
    )


def pip_install(python: Path, arguments: Sequence[str], purpose: str, progress: bool = False) -> None:
    """Run `pip install`. pip's errors are shown on the terminal, and every `_NOTE_S` seconds a line says that pip still runs.

    Args:
        python: interpreter of the environment.
        arguments: arguments of `pip install`.
        purpose: what is installed, for a message to the user.
        progress: if True and the output is a terminal, show all output of pip.

    Raises:
        HyperionError: pip failed.
    """
    print(f"hyperion: {purpose}", flush=True)
    volume = [] if progress and sys.stdout.isatty() else ["-qq"]
    command = [str(python), "-m", "pip", "install", *volume, *arguments]
    if _run_with_notes(command):
        raise HyperionError(
            f"pip could not install: {purpose}",
            where=" ".join(command),
            next_step="read the message of pip above; without a network, use an existing environment: "
            "make reproduce PYTHON=/path/to/python",
        )


def _run_with_notes(command: list[str]) -> int:
    """Run a command of pip, print regularly that it still runs, and return its exit code."""
    started = time.monotonic()
    with subprocess.Popen(command, env=pip_environment()) as process:
        try:
            while True:
                try:
                    return process.wait(_NOTE_S)
                except subprocess.TimeoutExpired:
                    print(f"hyperion: still installing, {time.monotonic() - started:.0f} s so far", flush=True)
        except BaseException:  # KeyboardInterrupt, for example
            process.kill()
            raise


def pip_report(python: Path, arguments: Sequence[str]) -> tuple[dict[str, Any], str]:
    """Return the JSON report of a `pip install` dry run, and pip's error messages. The report is {} if pip fails."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "report.json"
        command = [str(python), "-m", "pip", "install", *_DRY_RUN, "--report", str(path), *arguments]
        done = _run(command, pip_environment())
        if done.returncode or not path.is_file():
            return {}, done.stderr
        return json.loads(path.read_text(encoding="utf-8")), done.stderr


def pip_environment() -> dict[str, str]:
    """Return the environment variables for pip.

    Variables that make pip install packages elsewhere, or use the user's site-packages, are removed.
    """
    dropped = ("PYTHONPATH", "PYTHONHOME", "PIP_TARGET", "PIP_USER", "PIP_PREFIX")
    others = {name: value for name, value in os.environ.items() if name not in dropped}
    return others | {"PYTHONNOUSERSITE": "1", "PIP_DISABLE_PIP_VERSION_CHECK": "1"}


def in_range(version: str, requirement: str) -> bool:
    """Return True if a version satisfies a requirement in pyproject.toml. All requirements have the form `name>=lower`."""
    lower, actual = _release(requirement.partition(">=")[2]), _release(version)
    # Pad shorter versions with zeros, so that 2.9 equals 2.9.0.
    width = max(len(lower), len(actual))
    return actual + (0,) * (width - len(actual)) >= lower + (0,) * (width - len(lower))


def _release(version: str) -> tuple[int, ...]:
    """Return the release numbers of a version, such as (2, 13, 0) for '2.13.0+cpu'."""
    match = re.match(r"(?:\d+!)?(\d+(?:\.\d+)*)", version)
    return tuple(int(part) for part in match[1].split(".")) if match else ()


def _run(command: list[str], environment: dict[str, str]) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(command, capture_output=True, text=True, errors="replace", env=environment, check=False)
