"""Create, update and repair Hyperion's own environment, .venv in the checkout.

The environment is updated if its requirements change, and repaired if it is incomplete.
"""

import hashlib
import json
import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

from hyperion.errors import HyperionError
from hyperion.install import interpreter
from hyperion.install.machine import DetectedAccelerator
from hyperion.install.plan import ROCM_WHEELS, TORCH, TORCHVISION, Choice, check_build, plan_packages

STAMP = "hyperion-setup.json"
# Required disk space in GB, including pip's temporary copies. The CPU environment takes 2.1 GB, and GPU builds take much more.
NEEDED_GB = {"cpu": 4, "cuda": 14, "rocm": 24}


def ensure_environment(root: Path, machine: DetectedAccelerator, choice: Choice) -> Path:
    """Create, update or repair .venv if needed, and return its Python interpreter.

    Args:
        root: the checkout.
        machine: the accelerator of this machine.
        choice: the torch build to install.

    Raises:
        HyperionError: the environment cannot be created, or torch cannot use the machine's GPU.
    """
    folder = root / ".venv"
    python = folder / "bin/python"
    stamp, wanted = read_stamp(folder), fingerprint(root, choice)
    if stamp.get("fingerprint") == wanted and is_intact(folder, stamp):
        return python
    same_base = stamp.get("base") == base_facts(root, choice)
    if same_base and is_intact(folder, stamp):
        print("hyperion: requirements changed, updating .venv", flush=True)
    else:
        create(folder, stamp, choice)
    # If the installation is killed, this stamp remains, so the next call does not treat the environment as complete.
    write_stamp(folder, {"state": "building"})
    install_packages(root, python, choice)
    verify(python, machine, choice)
    # Written only after `verify`, because a stamp with the fingerprint proves that the environment works.
    write_stamp(
        folder, {"state": "complete", "fingerprint": wanted, "base": base_facts(root, choice), "entries": site_entries(folder)}
    )
    return python


def planned_actions(root: Path, choice: Choice) -> list[str]:
    """Return the actions that `ensure_environment` would take, one line each. Nothing is created, changed or downloaded.

    Commands are quoted for a shell. As in a real set-up, pip is asked which build of torch its configuration selects.
    """
    folder = root / ".venv"
    stamp = read_stamp(folder)
    if stamp.get("fingerprint") == fingerprint(root, choice) and is_intact(folder, stamp):
        return [f"nothing: {folder} is complete"]
    actions = []
    if not (stamp.get("base") == base_facts(root, choice) and is_intact(folder, stamp)):
        if folder.exists() and any(folder.iterdir()):
            own = (folder / STAMP).exists()
            actions.append(f"remove {folder}" if own else f"stop: {folder} has an environment that `make setup` did not make")
        actions.append(shlex.join([getattr(sys, "_base_executable", sys.executable), "-m", "venv", str(folder)]))
    packages = plan_packages(choice, lambda wanted: interpreter.pip_report(Path(sys.executable), ["--no-deps", *wanted])[0])
    pip = [f"{folder}/bin/python", "-m", "pip", "install"]
    index = ["--index-url", packages.index] if packages.index else ["--constraint", f"{root}/requirements.txt"]
    return [
        *actions,
        f"{shlex.join([*pip, *packages.requirements, *index])}    # {packages.reason}",
        shlex.join([*pip, "--requirement", f"{root}/requirements.txt", *packages.requirements]),
        shlex.join([*pip, "--no-deps", "--no-build-isolation", "--editable", str(root)]),
        "import torch and check that its build fits this machine",
    ]


def base_facts(root: Path, choice: Choice) -> dict:
    """Return the facts that cannot change in an existing environment: its interpreter, its location and its torch build.

    The location cannot change because the environment's scripts contain it.
    """
    return {"python": list(sys.version_info[:3]), "base": sys.base_prefix, "root": str(root), "choice": choice.label}


def fingerprint(root: Path, choice: Choice) -> str:
    """Return the sha256 of everything that determines what is installed."""
    texts = {name: (root / name).read_text(encoding="utf-8") for name in ("requirements.txt", "pyproject.toml")}
    pins = [TORCH, TORCHVISION, sorted((list(key), list(value)) for key, value in ROCM_WHEELS.items())]
    facts = json.dumps([texts, pins, base_facts(root, choice)], sort_keys=True)
    return hashlib.sha256(facts.encode()).hexdigest()


def read_stamp(folder: Path) -> dict:
    """Return the stamp of an environment or overlay, or {} if the stamp is missing or unreadable.

    The stamp is a file that records what was installed. Without a stamp, the environment or overlay is created again.
    """
    try:
        stamp = json.loads((folder / STAMP).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return stamp if isinstance(stamp, dict) else {}


def write_stamp(folder: Path, content: dict) -> None:
    """Write the stamp of an environment or overlay. The file is replaced atomically, so that it is never half-written."""
    folder.mkdir(parents=True, exist_ok=True)
    temporary = folder / f"{STAMP}.{os.getpid()}"
    temporary.write_text(json.dumps(content), "utf-8")
    os.replace(temporary, folder / STAMP)


def site_entries(folder: Path) -> list[str]:
    """Return the names in site-packages, which a later call compares to detect deleted packages."""
    return sorted(entry.name for site in folder.glob("lib/python*/site-packages") for entry in site.iterdir())


def is_intact(folder: Path, stamp: dict) -> bool:
    """Return True if the environment was completely set up, and its interpreter and all its packages still exist."""
    if stamp.get("state") != "complete" or not (folder / "bin/python").exists():
        return False
    return set(stamp["entries"]) <= set(site_entries(folder))


def create(folder: Path, stamp: dict, choice: Choice) -> None:
    """Create an empty environment. An existing environment in this folder is removed if `make setup` created it.

    Raises:
        HyperionError: the folder contains an environment that `make setup` did not create, the disk has too little space, or
            Python cannot create environments.
    """
    if folder.exists() and any(folder.iterdir()) and not (folder / STAMP).exists():
        raise HyperionError(
            "this folder has an environment that `make setup` did not make",
            where=folder,
            next_step="use this environment with PYTHON=.venv/bin/python, or move the folder .venv to another place",
        )
    if folder.exists():
        print(f"hyperion: {_reason(folder, stamp, choice)}; making .venv again", flush=True)
        shutil.rmtree(folder)
    free_gb, needed_gb = shutil.disk_usage(folder.parent).free / 1e9, NEEDED_GB[choice.kind]
    if free_gb < needed_gb:
        raise HyperionError(
            f"the {choice.kind} environment needs {needed_gb} GB, but the disk has only {free_gb:.1f} GB free",
            where=folder.parent,
            next_step="free some space, or make the checkout on another disk",
        )
    # sys.executable may be a link in the environment that was just removed.
    base_python = getattr(sys, "_base_executable", sys.executable)
    folder.mkdir()
    write_stamp(folder, {"state": "building"})  # written first, so that the next call may remove an unfinished environment
    done = subprocess.run([base_python, "-m", "venv", str(folder)], capture_output=True, text=True, errors="replace", check=False)
    if done.returncode:
        raise HyperionError(
            f"{base_python} cannot make a virtual environment: {(done.stdout + done.stderr).strip()[-400:]}",
            where=folder,
            next_step="install python3-venv on Debian or Ubuntu, or use another Python: make setup PYTHON=…",
        )


def _reason(folder: Path, stamp: dict, choice: Choice) -> str:
    if stamp.get("state") != "complete":
        return "an earlier set-up did not finish"
    if not is_intact(folder, stamp):
        return "packages of the environment were deleted"
    if stamp["base"]["choice"] != choice.label:
        return f"the environment is for {stamp['base']['choice']}, but this machine needs {choice.label}"
    return "the environment's Python or folder changed"


def install_packages(root: Path, python: Path, choice: Choice) -> None:
    """Install torch from its package index, then the other pinned packages from pip's configured index, then Hyperion."""
    requirements = str(root / "requirements.txt")
    packages = plan_packages(choice, lambda wanted: interpreter.pip_report(python, ["--no-deps", *wanted])[0])
    # PyTorch's indexes have few versions of other packages and lack the pinned ones, so these are installed afterwards.
    source = ["--index-url", packages.index] if packages.index else ["--constraint", requirements]
    purpose = f"torch for {choice.label} from {packages.reason}"
    interpreter.pip_install(python, [*packages.requirements, *source], purpose, progress=True)
    pins = ["--requirement", requirements, *packages.requirements]
    interpreter.pip_install(python, pins, "the pinned packages of requirements.txt (1 to 3 minutes)")
    interpreter.pip_install(python, ["--no-deps", "--no-build-isolation", "--editable", str(root)], "hyperion, editable")


def verify(python: Path, machine: DetectedAccelerator, choice: Choice) -> None:
    """Check that the installed torch build matches the machine and can use its GPU.

    Raises:
        HyperionError: torch is missing, another build is installed, or torch cannot use a GPU.
    """
    build = interpreter.inspect(python).torch
    if build is None:
        raise HyperionError("torch is missing after the installation", where=python, next_step="run `make clean`, then again")
    check_build(build, machine, choice)
    if choice.kind != "cpu" and not choice.staged:
        interpreter.check_gpu_opens(python, interpreter.pip_environment(), build)


def environment_variables() -> dict[str, str]:
    """Return the environment variables for processes in .venv. They exclude PYTHONPATH and the user's site-packages."""
    others = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONHOME")}
    return others | {"PYTHONNOUSERSITE": "1"}
