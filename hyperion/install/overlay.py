"""Use an existing environment, whose Python interpreter the user names with PYTHON=.

The environment is never changed. Missing packages are installed into an overlay: the folder .overlay/<hash of the interpreter and
its packages>/, whose packages are imported through PYTHONPATH. When pip chooses the missing packages, the versions of all
installed packages are fixed, so torch, torchvision, numpy and the other installed packages do not change.
"""

import hashlib
import json
import os
import re
import shlex
import shutil
import tempfile
import time
import tomllib
from pathlib import Path
from typing import Any

from hyperion.errors import HyperionError
from hyperion.install import interpreter
from hyperion.install.environment import read_stamp, write_stamp
from hyperion.install.interpreter import Interpreter, in_range
from hyperion.install.machine import DetectedAccelerator
from hyperion.install.plan import Build, Choice, check_build
from hyperion.terminal import say

# Groups of pyproject.toml whose packages only some rows of chapters 2.12 and 2.13 need. If pip cannot get them, all other rows
# can still be measured.
CHAPTER_GROUPS = ("inference", "serving")
_SEPARATELY_S = 60.0  # time limit for trying these packages one by one
PROTECTED = ("torch", "torchvision", "numpy")  # an overlay never replaces them, because they are compiled against each other


def ensure_overlay(
    root: Path, python: Path, extras: list[str], machine: DetectedAccelerator, choice: Choice, retry: bool = False
) -> dict[str, str]:
    """Check an environment and install its missing packages in an overlay.

    If pip cannot get a package of `CHAPTER_GROUPS`, the package is named once, and the overlay is used without it.

    Args:
        root: the checkout.
        python: interpreter of the environment.
        extras: optional dependency groups of pyproject.toml that the next command needs.
        machine: the accelerator of this machine.
        choice: the torch build that the environment must have.
        retry: whether to try again to get the packages of `CHAPTER_GROUPS` that pip could not get before.

    Returns:
        The environment variables with which to run the interpreter.

    Raises:
        HyperionError: an installed version is out of range, torch cannot use the machine's GPU, or pip cannot get a missing
            package.
    """
    found = interpreter.inspect(python)
    build = _checked_build(found, machine, choice)
    lacking = missing(found, requirements(root, extras))
    optional = missing(found, chapter_requirements(root, found))
    folder = root / ".overlay" / _key(found)
    stamp = read_stamp(folder)
    # The requirements that the overlay already meets. `missing` lists them too, because it examines the environment without the
    # overlay.
    covered = set(stamp.get("covers", []))
    known_absent = set() if retry else set(stamp.get("absent", []))
    tried = [one for one in optional if one not in covered | known_absent]
    required = {*lacking, *covered}
    if tried or not set(lacking) <= covered:
        say(f"hyperion: asking pip for the packages that {python} lacks (1 to 2 minutes)")
    usable = _obtainable(root, found, sorted(required), tried) if tried else []
    if usable or not set(lacking) <= covered or (covered and not (folder / "packages").is_dir()):
        # Earlier requirements are installed again, because `_fill` replaces the whole overlay.
        _fill(root, folder, found, sorted({*required, *usable}))
        stamp = read_stamp(folder)
    old, stamp = stamp, {"covers": [], **stamp, "absent": sorted(known_absent | set(tried) - set(usable))}
    if stamp != old:  # a ready overlay may be in a checkout that this user cannot change
        write_stamp(folder, stamp)
    # Computed after the installation, because the variables depend on the content of the overlay.
    variables = environment_variables(root, folder, found.bytecode)
    # Importing torch takes seconds, so the result is remembered in the stamp.
    if choice.kind != "cpu" and not stamp.get("gpu_opened"):
        interpreter.check_gpu_opens(python, variables, build)
        write_stamp(folder, stamp | {"gpu_opened": True})
    _write_launcher(folder, python, variables)
    return variables


def planned_actions(root: Path, python: Path, extras: list[str]) -> list[str]:
    """Return the command with which `ensure_overlay` would install missing packages, quoted for a shell. Nothing is created or
    changed.

    Raises:
        HyperionError: the version of a package that must not be replaced is out of range.
    """
    found = interpreter.inspect(python)
    lacking = missing(found, requirements(root, extras) + chapter_requirements(root, found))
    folder = root / ".overlay" / _key(found)
    if set(lacking) <= set(read_stamp(folder).get("covers", [])):
        return [f"nothing: {python} and {folder} have all packages"]
    return [shlex.join([str(python), "-m", "pip", "install", "--target", str(folder / "packages"), *lacking])]


def _checked_build(found: Interpreter, machine: DetectedAccelerator, choice: Choice) -> Build:
    """Return the installed torch build after checking that it matches the machine."""
    if found.torch is None or not found.torchvision:
        lacks = "torch" if found.torch is None else "torchvision"
        raise HyperionError(
            f"{found.python} has no {lacks}",
            next_step="install torch >= 2.9 and torchvision in this environment, or leave PYTHON out and run `make setup`",
        )
    check_build(found.torch, machine, choice)
    return found.torch


def requirements(root: Path, extras: list[str]) -> list[str]:
    """Return the requirements in pyproject.toml, including those of the named optional groups."""
    project = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    return project["dependencies"] + [line for extra in extras for line in project["optional-dependencies"][extra]]


def chapter_requirements(root: Path, found: Interpreter) -> list[str]:
    """Return the requirements of `CHAPTER_GROUPS`.

    Return an empty list if torch has no package metadata, as in some containers. There, pip would install a second torch as a
    dependency of these packages.
    """
    groups = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    return [line for name in CHAPTER_GROUPS for line in groups.get(name, ())] if "torch" in found.packages else []


def missing(found: Interpreter, wanted: list[str]) -> list[str]:
    """Return the requirements that the environment does not meet.

    Raises:
        HyperionError: the version of a package that must not be replaced is out of range.
    """
    lacking = []
    for requirement in wanted:
        name = _name(requirement)
        version = found.packages.get(name)
        # In a container, torch may have no package metadata. _checked_build has already checked that torch is installed.
        if (version is None and name in ("torch", "torchvision")) or (version and in_range(version, requirement)):
            continue
        if version and name in PROTECTED:
            raise HyperionError(
                f"{name} {version} in {found.python} is too old: {requirement} is needed",
                next_step=f"use an environment with a newer {name}; Hyperion does not replace it",
            )
        lacking.append(requirement)
    return lacking


def _key(found: Interpreter) -> str:
    """Return the name of the overlay's folder.

    It is a hash of the interpreter and its packages, so an environment gets a new overlay when its packages change.
    """
    facts = [str(found.python), list(found.version), sorted(found.packages.items())]
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:12]


def _obtainable(root: Path, found: Interpreter, required: list[str], optional: list[str]) -> list[str]:
    """Return the optional requirements that pip can install together with the required ones.

    Optional requirements that pip cannot install are printed with pip's last error.
    """
    report, messages = _resolve(root, found, [*required, *optional])
    if report.get("install"):
        return optional
    started = time.monotonic()
    usable = []
    for requirement in optional:
        # Without a network, pip waits for each requirement.
        if time.monotonic() - started > _SEPARATELY_S:
            break
        if _resolve(root, found, [requirement])[0].get("install"):
            usable.append(requirement)
    if usable and not _resolve(root, found, [*required, *usable])[0].get("install"):
        usable = []
    say(
        f"hyperion: pip cannot get {', '.join(one for one in optional if one not in usable)} ({_last_error(messages)}). The rows "
        f"that need them will state this. Next step: `make setup PYTHON={found.python}` tries again"
    )
    return usable


def _fill(root: Path, folder: Path, found: Interpreter, lacking: list[str]) -> None:
    """Install versions of the missing packages that are compatible with the installed packages into the overlay."""
    report, messages = _resolve(root, found, lacking)
    exact = [f"{item['metadata']['name']}=={item['metadata']['version']}" for item in report.get("install", ())]
    if not exact:
        command = [str(found.python), "-m", "pip", "install", *lacking]
        raise HyperionError(
            f"{found.python} lacks {', '.join(lacking)}, and pip cannot get these packages: {_last_error(messages)}",
            next_step="run the same make command again on a machine with a network that shares this folder (a login node); "
            f"or install the packages yourself: {shlex.join(command)}; or set PIP_FIND_LINKS to a folder of wheels",
        )
    # The packages are installed in a new folder, so that the old overlay stays usable if a download fails.
    new = folder.with_name(f"{folder.name}.new")
    shutil.rmtree(new, ignore_errors=True)
    new.mkdir(parents=True)
    # pip's report already contains all dependencies. Without this option, pip would add a second torch to the overlay.
    arguments = ["--no-deps", "--target", str(new / "packages"), *exact]
    interpreter.pip_install(found.python, arguments, f"{len(exact)} packages for {found.python}, in {folder}")
    write_stamp(new, {"covers": lacking})
    shutil.rmtree(folder, ignore_errors=True)
    new.rename(folder)


def _resolve(root: Path, found: Interpreter, lacking: list[str]) -> tuple[dict, str]:
    """Return pip's report about the missing packages, and pip's messages.

    The versions of all installed packages are fixed. Missing packages get the versions in requirements.txt, unless they conflict
    with the installed packages.
    """
    replaced = {_name(requirement) for requirement in lacking}
    frozen = {name: version for name, version in found.packages.items() if name not in replaced}
    lines = (root / "requirements.txt").read_text(encoding="utf-8").splitlines()
    pins = dict(line.split("==") for line in lines if "==" in line)
    pins = {_name(name): version for name, version in pins.items()}
    report: dict[str, Any] = {}
    messages = ""
    # Try the tested versions first. If they conflict with installed packages, constrain only the installed packages.
    for constraints in (pins | frozen, frozen):
        with tempfile.TemporaryDirectory() as temporary:
            path = Path(temporary) / "constraints.txt"
            path.write_text("".join(f"{name}=={version}\n" for name, version in sorted(constraints.items())), "utf-8")
            report, messages = interpreter.pip_report(found.python, ["--constraint", str(path), *lacking])
        if report or "conflict" not in messages:
            break
    return report, messages


def _name(requirement: str) -> str:
    """Return the normalized package name of a requirement, such as 'huggingface-hub' for 'huggingface_hub>=1'."""
    return re.sub(r"[-_.]+", "-", re.split(r"[\[<>=!~ ]", requirement)[0]).lower()


def _last_error(messages: str) -> str:
    errors = [line for line in messages.splitlines() if line.startswith("ERROR")] or messages.splitlines() or ["no message"]
    return errors[-1]


def environment_variables(root: Path, folder: Path, bytecode: bool) -> dict[str, str]:
    """Return the environment variables for processes in this environment. PYTHONPATH starts with the checkout and the overlay.

    Args:
        root: the checkout.
        folder: folder of the overlay.
        bytecode: whether the environment stores compiled modules, see `Interpreter`. If not, Python stores them in the overlay,
            and looks for them only there. Otherwise each process would compile the sources of torch again, which takes several
            times as long as the import itself.
    """
    packages = folder / "packages"
    existing = [part for part in os.environ.get("PYTHONPATH", "").split(os.pathsep) if part]
    path = [str(root), str(packages), *[part for part in existing if part not in (str(root), str(packages))]]
    variables = os.environ | {"PYTHONPATH": os.pathsep.join(path), "PYTHONNOUSERSITE": "1"}
    if not bytecode:
        variables.pop("PYTHONDONTWRITEBYTECODE", None)
        variables["PYTHONPYCACHEPREFIX"] = str(folder / "bytecode")
    if packages.is_dir():
        # `pip --target` puts Jupyter's kernels, templates and pages into the overlay, where Jupyter finds them only with this
        # variable.
        shared = [str(packages / "share/jupyter"), os.environ.get("JUPYTER_PATH", "")]
        variables["JUPYTER_PATH"] = os.pathsep.join(part for part in shared if part)
        if (packages / "share/jupyter/lab").is_dir():
            variables["JUPYTERLAB_DIR"] = str(packages / "share/jupyter/lab")
    return variables


def _write_launcher(folder: Path, python: Path, variables: dict[str, str]) -> None:
    """Write the script .overlay/<hash>/hyperion, which runs the `hyperion` command in this environment without make."""
    names = ("PYTHONPATH", "PYTHONNOUSERSITE", "PYTHONPYCACHEPREFIX", "JUPYTER_PATH", "JUPYTERLAB_DIR")
    lines = ["unset PYTHONDONTWRITEBYTECODE"] if "PYTHONPYCACHEPREFIX" in variables else []
    lines += [f"export {name}={shlex.quote(variables[name])}" for name in names if name in variables]
    launcher = folder / "hyperion"
    text = "\n".join(["#!/bin/sh", *lines, f'exec {shlex.quote(str(python))} -m hyperion "$@"', ""])
    # The variables contain those of the user who calls, but the overlay may be in a checkout that this user cannot change.
    if launcher.is_file() and not os.access(launcher, os.W_OK):
        return
    launcher.write_text(text, "utf-8")
    launcher.chmod(0o755)
