"""Hyperion's own environment, .venv in the checkout: made, updated when its requirements change, repaired when broken."""

import hashlib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

from hyperion.errors import HyperionError
from hyperion.install import interpreter
from hyperion.install.machine import DetectedAccelerator
from hyperion.install.plan import ROCM_WHEELS, TORCH, TORCHVISION, Choice, check_build, plan_packages

STAMP = "hyperion-setup.json"
# Size on disk with room for pip's temporary copies: the CPU environment takes 2.1 GB, GPU builds several times that.
NEEDED_GB = {"cpu": 4, "cuda": 14, "rocm": 24}


def ensure_environment(root: Path, machine: DetectedAccelerator, choice: Choice) -> Path:
    """Make, update or repair .venv for this choice if needed, and return its Python.

    Raises:
        HyperionError: the environment cannot be made, or does not fit the machine.
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
    write_stamp(folder, {"state": "building"})
    install_packages(root, python, choice)
    verify(python, machine, choice)
    write_stamp(
        folder, {"state": "complete", "fingerprint": wanted, "base": base_facts(root, choice), "entries": site_entries(folder)}
    )
    return python


def base_facts(root: Path, choice: Choice) -> dict:
    """Return what cannot change in place: the interpreter, the location (scripts contain it) and the torch build."""
    return {"python": list(sys.version_info[:3]), "base": sys.base_prefix, "root": str(root), "choice": choice.label}


def fingerprint(root: Path, choice: Choice) -> str:
    """Return the sha256 of everything that determines what is installed."""
    texts = {name: (root / name).read_text(encoding="utf-8") for name in ("requirements.txt", "pyproject.toml")}
    pins = [TORCH, TORCHVISION, sorted((list(key), list(value)) for key, value in ROCM_WHEELS.items())]
    facts = json.dumps([texts, pins, base_facts(root, choice)], sort_keys=True)
    return hashlib.sha256(facts.encode()).hexdigest()


def read_stamp(folder: Path) -> dict:
    """Return the stamp of an environment or overlay; empty if it is missing or unreadable, so that both are made anew."""
    try:
        stamp = json.loads((folder / STAMP).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return stamp if isinstance(stamp, dict) else {}


def write_stamp(folder: Path, content: dict) -> None:
    """Write the stamp of an environment or overlay, completely or not at all."""
    folder.mkdir(parents=True, exist_ok=True)
    temporary = folder / f"{STAMP}.{os.getpid()}"
    temporary.write_text(json.dumps(content), "utf-8")
    os.replace(temporary, folder / STAMP)


def site_entries(folder: Path) -> list[str]:
    """Return the names in site-packages, which show if a package is deleted later."""
    return sorted(entry.name for site in folder.glob("lib/python*/site-packages") for entry in site.iterdir())


def is_intact(folder: Path, stamp: dict) -> bool:
    """Return True if a finished environment still has its interpreter and all installed packages."""
    if stamp.get("state") != "complete" or not (folder / "bin/python").exists():
        return False
    return set(stamp["entries"]) <= set(site_entries(folder))


def create(folder: Path, stamp: dict, choice: Choice) -> None:
    """Make an empty environment; an earlier one that `make setup` made is removed.

    Raises:
        HyperionError: another environment is there, the disk is too full, or Python cannot make environments.
    """
    if folder.exists() and any(folder.iterdir()) and not (folder / STAMP).exists():
        raise HyperionError(
            "there is an environment here that `make setup` did not make",
            where=folder,
            next_step="use it with PYTHON=.venv/bin/python, or move it away",
        )
    if folder.exists():
        print(f"hyperion: {_reason(folder, stamp, choice)}, making .venv anew", flush=True)
        shutil.rmtree(folder)
    free_gb, needed_gb = shutil.disk_usage(folder.parent).free / 1e9, NEEDED_GB[choice.kind]
    if free_gb < needed_gb:
        raise HyperionError(
            f"{free_gb:.1f} GB free, {needed_gb} GB needed for the {choice.kind} environment",
            where=folder.parent,
            next_step="free some space, or check out on another disk",
        )
    # sys.executable may be a link inside the environment that was just removed.
    base_python = getattr(sys, "_base_executable", sys.executable)
    folder.mkdir()
    write_stamp(folder, {"state": "building"})  # first, so that the next call may remove an interrupted one
    done = subprocess.run([base_python, "-m", "venv", str(folder)], capture_output=True, text=True, errors="replace", check=False)
    if done.returncode:
        raise HyperionError(
            f"{base_python} cannot make a virtual environment: {(done.stdout + done.stderr).strip()[-400:]}",
            where=folder,
            next_step="on Debian or Ubuntu install python3-venv; or name another Python: make setup PYTHON=…",
        )


def _reason(folder: Path, stamp: dict, choice: Choice) -> str:
    if stamp.get("state") != "complete":
        return "an earlier set-up did not finish"
    if not is_intact(folder, stamp):
        return "packages of the environment are gone"
    if stamp["base"]["choice"] != choice.label:
        return f"the environment was for {stamp['base']['choice']}, this machine needs {choice.label}"
    return "its Python or its folder changed"


def install_packages(root: Path, python: Path, choice: Choice) -> None:
    """Install torch from its own source, then the other pinned packages from pip's configuration, then Hyperion itself."""
    requirements = str(root / "requirements.txt")
    packages = plan_packages(choice, lambda wanted: interpreter.pip_report(python, ["--no-deps", *wanted])[0])
    # PyTorch's indexes hold few versions of other packages, so pins fail there; they are applied afterwards.
    source = ["--index-url", packages.index] if packages.index else ["--constraint", requirements]
    purpose = f"torch for {choice.label} from {packages.reason}"
    interpreter.pip_install(python, [*packages.requirements, *source], purpose, progress=True)
    pins = ["--requirement", requirements, *packages.requirements]
    interpreter.pip_install(python, pins, "the pinned packages of requirements.txt (1 to 3 minutes)")
    interpreter.pip_install(python, ["--no-deps", "--no-build-isolation", "--editable", str(root)], "hyperion, editable")


def verify(python: Path, machine: DetectedAccelerator, choice: Choice) -> None:
    """Check that the installed build fits the machine and opens its GPU.

    Raises:
        HyperionError: torch is missing, has another build, or opens no GPU.
    """
    build = interpreter.inspect(python).torch
    if build is None:
        raise HyperionError("torch is missing after installation", where=python, next_step="make clean, then again")
    check_build(build, machine, choice)
    if choice.kind != "cpu" and not choice.staged:
        interpreter.check_gpu_opens(python, interpreter.pip_environment(), build)


def environment_variables() -> dict[str, str]:
    """Return the environment of processes in .venv: without the user's packages and without PYTHONPATH."""
    others = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONHOME")}
    return others | {"PYTHONNOUSERSITE": "1"}
