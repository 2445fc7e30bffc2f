"""Environments for frameworks whose packages are large or conflict with those of this library.

Each environment is a folder with its own Python interpreter, which can also import the packages of the interpreter that created
it. So torch is never installed twice, and its version stays fixed while pip chooses the other versions.
"""

import hashlib
import importlib.metadata
import json
import os
import shutil
import subprocess
import sys
import sysconfig
import venv
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path

from hyperion.errors import HyperionError
from hyperion.paths import data_folder

_STAMP = "hyperion-framework.json"
# Packages that pip must not change, because they are compiled for this machine or shared with this library.
_FIXED = ("torch", "torchvision", "numpy", "transformers", "accelerate", "triton")


@dataclass(frozen=True)
class Environment:
    """Requirements of a framework and options for their installation.

    Args:
        requirements: pip requirements with exact versions.
        options: further options for pip.
        build: packages that are installed first. The requirements need them, because they are built without isolation.
        variables: environment variables for the installation.
        if_absent: requirements that are installed only if the current interpreter cannot import the package.
    """

    requirements: tuple[str, ...]
    options: tuple[str, ...] = ()
    build: tuple[str, ...] = ()
    variables: dict[str, str] = field(default_factory=dict)
    if_absent: tuple[str, ...] = ()


ENVIRONMENTS = {
    "fabric": Environment(("lightning-fabric==2.6.6",)),
    # DeepSpeed's setup imports torch, which an isolated build would install again. DS_BUILD_OPS=0 compiles no operators.
    "deepspeed": Environment(
        ("deepspeed==0.19.8",),
        options=("--no-build-isolation",),
        build=("setuptools>=77", "wheel"),
        variables={"DS_BUILD_OPS": "0", "DS_IGNORE_CUDA_DETECTION": "1"},
    ),
    # torchtitan imports triton on every device. The GPU builds of torch include it.
    "torchtitan": Environment(("torchtitan==0.2.2",), if_absent=("triton==3.7.1",)),
    "megatron-core": Environment(("megatron-core==0.16.1",)),
}


def environment_folder(name: str) -> Path:
    """Return the folder of an environment. Its name depends on its requirements, the Python installation and torch's version."""
    facts = [ENVIRONMENTS[name].requirements, sys.version_info[:2], importlib.metadata.version("torch"), sys.prefix]
    key = hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:12]
    return data_folder() / "frameworks" / f"{name}-{key}"


def is_environment(folder: Path) -> bool:
    """Return True if `install` created this folder, perhaps in an installation that was interrupted."""
    name, _, key = folder.name.rpartition("-")
    known = name in ENVIRONMENTS and len(key) == 12
    return known and not folder.is_symlink() and (folder / "pyvenv.cfg").is_file()


def why_not_installed(name: str) -> str:
    """Return why an environment cannot be used and the command that installs it, or "" if it is installed."""
    if (environment_folder(name) / _STAMP).is_file():
        return ""
    wanted = " ".join(ENVIRONMENTS[name].requirements)
    return f"unavailable: {wanted} not installed; next step: {install_command(name)}"


def install_command(name: str) -> str:
    """Return the command that installs an environment."""
    return f"hyperion frameworks install {name}"


def installed_versions(name: str) -> dict[str, str]:
    """Return the version of each requirement of an environment, or an empty dict if the environment is not installed."""
    stamp = environment_folder(name) / _STAMP
    return json.loads(stamp.read_text("utf-8"))["versions"] if stamp.is_file() else {}


def absent_environments() -> list[str]:
    """Return the names of the environments that are not installed."""
    return [name for name in ENVIRONMENTS if why_not_installed(name)]


def installed_python(name: str) -> str:
    """Return the interpreter of an environment, or of this process if the name is empty."""
    return str(environment_folder(name) / "bin" / "python") if name else sys.executable


def install(name: str, on_line: Callable[[str], object] = print) -> Path:
    """Create an environment and install its packages. An environment that is already installed is not changed.

    Args:
        name: name of the environment.
        on_line: called with each line of pip's output.

    Raises:
        HyperionError: pip failed, or it installed a second torch. In both cases, the environment is removed.
    """
    folder, environment = environment_folder(name), ENVIRONMENTS[name]
    if not why_not_installed(name):
        return folder
    shutil.rmtree(folder, ignore_errors=True)  # left by an interrupted installation
    folder.parent.mkdir(parents=True, exist_ok=True)
    # The new environment inherits pip if there is one: pip installs into the environment of the interpreter that runs it, and
    # installing another pip would take several seconds. The test for pip searches the metadata instead of calling
    # find_spec("pip"), after which setuptools could not be imported any more.
    venv.create(folder, with_pip=not any(importlib.metadata.distributions(name="pip")), symlinks=True)
    try:
        python = installed_python(name)
        _inherit(folder)
        constraints = folder / "constraints.txt"
        constraints.write_text("".join(f"{line}\n" for line in _constraints()), "utf-8")
        pip = [python, "-m", "pip", "--disable-pip-version-check", "install"]
        if environment.build:
            _run([*pip, *environment.build], {}, on_line, name)
        options = ["--constraint", str(constraints), *environment.options]
        further = [wanted for wanted in environment.if_absent if find_spec(wanted.split("==")[0]) is None]
        _run([*pip, *options, *environment.requirements, *further], environment.variables, on_line, name)
        _require_one_torch(folder, name)
        versions = {requirement.split("==")[0]: requirement.split("==")[1] for requirement in environment.requirements}
        (folder / _STAMP).write_text(json.dumps({"versions": versions, "parent": sys.prefix}), "utf-8")
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    return folder


def _inherit(folder: Path) -> None:
    """Make the packages of the current environment importable in a new one, after its own packages.

    venv's option --system-site-packages does not do this: in a virtual environment, it inherits from the base Python.
    """
    site = Path(sysconfig.get_path("purelib", vars={"base": str(folder), "platbase": str(folder)}))
    own = {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}
    (site / "hyperion-parent.pth").write_text("".join(f"{path}\n" for path in sorted(own)), "utf-8")


def _constraints() -> list[str]:
    lines = []
    for name in _FIXED:
        try:
            lines.append(f"{name}=={importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            continue
    return lines


def _run(command: list[str], variables: dict[str, str], on_line: Callable[[str], object], name: str) -> None:
    environment = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "PYTHONHOME")}
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace", env=environment | variables
    ) as process:
        last = ""
        for line in process.stdout or ():
            on_line(line.rstrip("\n"))
            last = line.strip() or last
    if process.returncode != 0:
        raise HyperionError(
            f"pip failed with exit code {process.returncode}: {last:.300}",
            where=f"environment {name!r}: {' '.join(ENVIRONMENTS[name].requirements)}",
            next_step="read pip's output above; on a node without network, run `make fetch FRAMEWORKS=all` on a login node first",
        )


def _require_one_torch(folder: Path, name: str) -> None:
    second = sorted(path.name for path in folder.glob("lib/python*/site-packages/torch-*.dist-info"))
    if second:
        raise HyperionError(
            f"pip installed a second torch: {', '.join(second)}",
            where=f"environment {name!r}",
            next_step="the requirements of this framework do not fit the installed torch; use another version of one of them",
        )
