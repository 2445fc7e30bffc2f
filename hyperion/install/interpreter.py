"""What a Python environment holds, asked from its own interpreter without importing torch."""

import json
import os
import re
import subprocess
from dataclasses import dataclass
from pathlib import Path

from hyperion.errors import HyperionError
from hyperion.install.plan import MINIMUM_PYTHON, Build

# torch/version.py is executed instead of `import torch`: milliseconds, and it works when the libraries do not load.
_INSPECT = """
import importlib.metadata, importlib.util, json, os, sys
found = {"version": sys.version_info[:3], "base": sys.base_prefix, "torch": None, "torchvision": False, "packages": {}}
spec = importlib.util.find_spec("torch")
if spec and spec.submodule_search_locations:
    facts = {}
    with open(os.path.join(list(spec.submodule_search_locations)[0], "version.py"), encoding="utf-8") as file:
        exec(file.read(), facts)
    found["torch"] = {"version": str(facts["__version__"]), "cuda": facts.get("cuda"), "hip": facts.get("hip")}
found["torchvision"] = importlib.util.find_spec("torchvision") is not None
for distribution in importlib.metadata.distributions():
    name = distribution.metadata["Name"]
    if name:
        found["packages"].setdefault(name.lower().replace("_", "-").replace(".", "-"), distribution.version)
print(json.dumps(found))
"""
_USE = "import json, torch; print(json.dumps([torch.cuda.is_available(), torch.cuda.device_count()]))"


@dataclass(frozen=True)
class Interpreter:
    python: Path
    version: tuple[int, ...]
    base: str  # the installation a virtual environment was made from
    torch: Build | None
    torchvision: bool
    packages: dict[str, str]  # normalized name -> version


def inspect(python: Path) -> Interpreter:
    """Ask an interpreter what it holds.

    Raises:
        HyperionError: it does not run, or is older than Python 3.11.
    """
    environment = os.environ | {"PYTHONNOUSERSITE": "1"}
    try:
        command = [str(python), "-c", _INSPECT]
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", env=environment, check=False)
    except OSError as error:
        raise HyperionError(
            f"{python} cannot be run: {error.strerror}", next_step="name a Python >= 3.11: PYTHON=/path/to/python3"
        ) from error
    if done.returncode:
        raise HyperionError(f"{python} does not work: {done.stderr.strip()[-300:]}", next_step="name another Python")
    found = json.loads(done.stdout.splitlines()[-1])
    version = tuple(found["version"])
    if version < MINIMUM_PYTHON:
        raise HyperionError(f"{python} is Python {'.'.join(map(str, version))}", next_step="use Python 3.11 or newer")
    build = Build(**found["torch"]) if found["torch"] else None
    return Interpreter(python, version, found["base"], build, found["torchvision"], found["packages"])


def check_gpu_opens(python: Path, environment: dict[str, str], build: Build) -> None:
    """Import torch there once and see whether it opens the GPU its build is for.

    Raises:
        HyperionError: with torch's own words, such as a driver too old for its CUDA.
    """
    command = [str(python), "-c", _USE]
    done = subprocess.run(command, capture_output=True, text=True, errors="replace", env=environment, check=False)
    lines = done.stdout.splitlines()
    if done.returncode == 0 and lines and json.loads(lines[-1])[0]:
        return
    masks = {name: os.environ[name] for name in os.environ if name.endswith("_VISIBLE_DEVICES")}
    words = done.stderr.strip()[-600:] or "torch.cuda.is_available() is False"
    raise HyperionError(
        f"{build} is installed but opens no GPU: {words}",
        where=f"{python}; device masks set: {masks or 'none'}",
        next_step="update the GPU driver to what this build needs, clear the masks, or run on the CPU with TORCH=cpu",
    )


def release(version: str) -> tuple[int, ...]:
    """The release numbers of a version: '2.13.0+cpu' -> (2, 13, 0)."""
    match = re.match(r"(?:\d+!)?(\d+(?:\.\d+)*)", version)
    return tuple(int(part) for part in match[1].split(".")) if match else ()


def in_range(version: str, requirement: str) -> bool:
    """Whether a version satisfies one of pyproject.toml's requirements, which are all `name>=lower`."""
    lower, got = release(requirement.partition(">=")[2]), release(version)
    width = max(len(lower), len(got))
    return got + (0,) * (width - len(got)) >= lower + (0,) * (width - len(lower))
