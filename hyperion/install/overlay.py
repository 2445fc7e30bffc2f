"""An environment that is already there (PYTHON=…): checked against ranges, never changed; what it lacks is laid over.

Missing packages go to .overlay/<hash of the interpreter and its packages>/ and are found through PYTHONPATH. pip
chooses them with everything installed held fixed, so torch, torchvision, numpy and the rest stay what they are.
"""

import hashlib
import json
import os
import re
import shlex
import shutil
import tempfile
import tomllib
from pathlib import Path

from hyperion.errors import HyperionError
from hyperion.install import interpreter, pip
from hyperion.install.environment import read_stamp, write_stamp
from hyperion.install.interpreter import Interpreter, in_range
from hyperion.install.machine import Machine
from hyperion.install.plan import Choice, check_build

PROTECTED = ("torch", "torchvision", "numpy")  # compiled against each other: never laid over


def ensure_overlay(root: Path, python: Path, extras: list[str], machine: Machine, choice: Choice) -> dict[str, str]:
    """Check the environment, lay over what it lacks, and return the variables to run it with.

    Args:
        extras: optional groups of pyproject.toml that the coming command needs too.

    Raises:
        HyperionError: it is out of range, does not fit the machine, or packages are missing and cannot be fetched.
    """
    found = interpreter.inspect(python)
    _check_torch(found, machine, choice)
    wanted = requirements(root, extras)
    lacking = missing(found, wanted)
    folder = root / ".overlay" / _key(found)
    stamp = read_stamp(folder)
    covered = set(stamp.get("covers", []))
    if not set(lacking) <= covered or (covered and not (folder / "packages").is_dir()):
        _fill(root, folder, found, sorted(set(lacking) | covered))
        stamp = read_stamp(folder)
    # Only now: which variables are needed depends on what the overlay holds.
    variables = environment_variables(root, folder)
    if choice.kind != "cpu" and not stamp.get("gpu_opened"):
        interpreter.check_gpu_opens(python, variables, found.torch)
        stamp["gpu_opened"] = True
    write_stamp(folder, {"covers": [], **stamp})
    _write_launcher(folder, python, variables)
    return variables


def _check_torch(found: Interpreter, machine: Machine, choice: Choice) -> None:
    if found.torch is None or not found.torchvision:
        lacks = "torch" if found.torch is None else "torchvision"
        raise HyperionError(
            f"{found.python} has no {lacks}",
            next_step="install torch >= 2.9 and its torchvision there, or leave PYTHON out and let `make setup` do it",
        )
    check_build(found.torch, machine, choice)


def requirements(root: Path, extras: list[str]) -> list[str]:
    """The ranges of pyproject.toml: what Hyperion needs, and the named optional groups."""
    project = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    return project["dependencies"] + [line for extra in extras for line in project["optional-dependencies"][extra]]


def missing(found: Interpreter, wanted: list[str]) -> list[str]:
    """Requirements that the environment does not meet.

    Raises:
        HyperionError: one of the packages that must not be replaced is out of range.
    """
    lacking = []
    for requirement in wanted:
        name = _name(requirement)
        version = found.packages.get(name)
        # torch in a container may be built without package metadata; _check_torch has looked at the module itself.
        if (version is None and name in ("torch", "torchvision")) or (version and in_range(version, requirement)):
            continue
        if version and name in PROTECTED:
            raise HyperionError(
                f"{name} {version} in {found.python} is out of range: {requirement} is needed",
                next_step="use a newer environment: Hyperion replaces nothing that torch is built on",
            )
        lacking.append(requirement)
    return lacking


def _key(found: Interpreter) -> str:
    """A folder name for this interpreter with these packages: a changed environment gets a new overlay."""
    facts = [str(found.python), list(found.version), sorted(found.packages.items())]
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:12]


def _fill(root: Path, folder: Path, found: Interpreter, lacking: list[str]) -> None:
    """Resolve against what is there, then install exactly the answer beside it, without dependencies."""
    report, words = _resolve(root, found, lacking)
    exact = [f"{item['metadata']['name']}=={item['metadata']['version']}" for item in report.get("install", ())]
    if not exact:
        command = [str(found.python), "-m", "pip", "install", *lacking]
        raise HyperionError(
            f"{found.python} lacks {', '.join(lacking)}, and pip cannot get them here: {_last_error(words)}",
            next_step="with a network: run the same make command again (a login node sharing this folder will do), or "
            f"install them there yourself: {shlex.join(command)}; without: point PIP_FIND_LINKS at a folder of wheels",
        )
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    packages = folder / "packages"
    arguments = ["--no-deps", "--target", str(packages), *exact]
    pip.install(found.python, arguments, f"{len(exact)} packages beside {found.python}, in {folder}")
    write_stamp(folder, {"covers": lacking})


def _resolve(root: Path, found: Interpreter, lacking: list[str]) -> tuple[dict, str]:
    """pip's answer with everything installed held fixed; our pins are preferred and given up when they conflict."""
    replaced = {_name(requirement) for requirement in lacking}
    frozen = {name: version for name, version in found.packages.items() if name not in replaced}
    lines = (root / "requirements.txt").read_text(encoding="utf-8").splitlines()
    pins = dict(line.split("==") for line in lines if "==" in line)
    pins = {_name(name): version for name, version in pins.items()}
    report, words = {}, ""
    for constraints in (pins | frozen, frozen):
        with tempfile.TemporaryDirectory() as temporary:
            path = Path(temporary) / "constraints.txt"
            path.write_text("".join(f"{name}=={version}\n" for name, version in sorted(constraints.items())), "utf-8")
            report, words = pip.report(found.python, ["--constraint", str(path), *lacking])
        if report or "conflict" not in words:
            break
    return report, words


def _name(requirement: str) -> str:
    """The normalized name in a requirement: 'huggingface_hub>=1' -> 'huggingface-hub'."""
    return re.sub(r"[-_.]+", "-", re.split(r"[<>=!~ ]", requirement)[0]).lower()


def _last_error(words: str) -> str:
    errors = [line for line in words.splitlines() if line.startswith("ERROR")] or words.splitlines() or ["no message"]
    return errors[-1]


def environment_variables(root: Path, folder: Path) -> dict[str, str]:
    """For a process over this environment: the checkout and overlay first, then what a cluster's modules had set."""
    packages = folder / "packages"
    before = [part for part in os.environ.get("PYTHONPATH", "").split(os.pathsep) if part]
    path = [str(root), str(packages), *[part for part in before if part not in (str(root), str(packages))]]
    variables = os.environ | {"PYTHONPATH": os.pathsep.join(path), "PYTHONNOUSERSITE": "1"}
    if packages.is_dir():
        # --target puts Jupyter's kernels, templates and pages below the overlay, where Jupyter does not look by itself.
        shared = [str(packages / "share/jupyter"), os.environ.get("JUPYTER_PATH", "")]
        variables["JUPYTER_PATH"] = os.pathsep.join(part for part in shared if part)
        if (packages / "share/jupyter/lab").is_dir():
            variables["JUPYTERLAB_DIR"] = str(packages / "share/jupyter/lab")
    return variables


def _write_launcher(folder: Path, python: Path, variables: dict[str, str]) -> None:
    """Write .overlay/<hash>/hyperion, the command for use outside make."""
    names = ("PYTHONPATH", "PYTHONNOUSERSITE", "JUPYTER_PATH", "JUPYTERLAB_DIR")
    lines = [f"export {name}={shlex.quote(variables[name])}" for name in names if name in variables]
    launcher = folder / "hyperion"
    launcher.write_text("\n".join(["#!/bin/sh", *lines, f'exec {shlex.quote(str(python))} -m hyperion "$@"', ""]), "utf-8")
    launcher.chmod(0o755)
