"""Hyperion's own environment, .venv in the checkout: made whole, kept when nothing changed, repaired when broken."""

import hashlib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

from hyperion.errors import HyperionError
from hyperion.install import interpreter, pip
from hyperion.install.machine import Machine
from hyperion.install.plan import ROCM_WHEELS, TORCH, TORCHVISION, Choice, check_build, plan_packages

STAMP = "hyperion-setup.json"
# On disk after installation (CPU 2.1 GB seen; GPU builds several times that) with room for pip's temporary copies.
NEEDED_GB = {"cpu": 4, "cuda": 14, "rocm": 24}


def ensure_environment(root: Path, machine: Machine, choice: Choice) -> Path:
    """The Python of a complete .venv for this choice; made, updated or repaired when it has to be.

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
    """What an environment cannot change in place: its interpreter, its location (scripts hold it), its torch build."""
    return {"python": list(sys.version_info[:3]), "base": sys.base_prefix, "root": str(root), "choice": choice.label}


def fingerprint(root: Path, choice: Choice) -> str:
    """sha256 over everything that decides what gets installed."""
    texts = {name: (root / name).read_text(encoding="utf-8") for name in ("requirements.txt", "pyproject.toml")}
    pins = [TORCH, TORCHVISION, sorted((list(key), list(value)) for key, value in ROCM_WHEELS.items())]
    facts = json.dumps([texts, pins, base_facts(root, choice)], sort_keys=True)
    return hashlib.sha256(facts.encode()).hexdigest()


def read_stamp(folder: Path) -> dict:
    """Return the stamp of an environment or overlay; empty when there is none, or none that can be read: both are made anew."""
    try:
        stamp = json.loads((folder / STAMP).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return stamp if isinstance(stamp, dict) else {}


def write_stamp(folder: Path, content: dict) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    temporary = folder / f"{STAMP}.{os.getpid()}"
    temporary.write_text(json.dumps(content), "utf-8")
    os.replace(temporary, folder / STAMP)


def site_entries(folder: Path) -> list[str]:
    """Names in site-packages, enough to notice a package deleted later."""
    return sorted(entry.name for site in folder.glob("lib/python*/site-packages") for entry in site.iterdir())


def is_intact(folder: Path, stamp: dict) -> bool:
    """Whether a finished environment still has its interpreter and all that was installed."""
    if stamp.get("state") != "complete" or not (folder / "bin/python").exists():
        return False
    return set(stamp["entries"]) <= set(site_entries(folder))


def create(folder: Path, stamp: dict, choice: Choice) -> None:
    """An empty environment in place of a broken, half-finished or unfitting one of ours."""
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
    # sys.executable may be the link that was just removed with the old environment.
    base_python = getattr(sys, "_base_executable", sys.executable)
    folder.mkdir()
    write_stamp(folder, {"state": "building"})  # before anything else, so that an interrupted one is known as ours
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
    """torch from its own source, then the pinned rest from pip's configuration, then Hyperion itself."""
    requirements = str(root / "requirements.txt")
    packages = plan_packages(choice, lambda wanted: pip.report(python, ["--no-deps", *wanted])[0])
    # PyTorch's indexes hold few versions of the common packages: there, pins would find nothing and are applied after.
    source = ["--index-url", packages.index] if packages.index else ["--constraint", requirements]
    purpose = f"torch for {choice.label} from {packages.reason}"
    pip.install(python, [*packages.requirements, *source], purpose, progress=True)
    pins = ["--requirement", requirements, *packages.requirements]
    pip.install(python, pins, "the pinned packages of requirements.txt (1 to 3 minutes)")
    pip.install(python, ["--no-deps", "--no-build-isolation", "--editable", str(root)], "hyperion, editable")


def verify(python: Path, machine: Machine, choice: Choice) -> None:
    """The installed build fits the machine and, where a GPU is expected here, opens it."""
    build = interpreter.inspect(python).torch
    if build is None:
        raise HyperionError("torch is not there after installation", where=python, next_step="make clean, then again")
    check_build(build, machine, choice)
    if choice.kind != "cpu" and not choice.staged:
        interpreter.check_gpu_opens(python, pip.clean_environment(), build)


def environment_variables() -> dict[str, str]:
    """For a process in .venv: complete in itself, so neither the user's packages nor a module's path are seen."""
    kept = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONHOME")}
    return kept | {"PYTHONNOUSERSITE": "1"}
