"""Preflight: compare what a workload needs with what this machine has."""

import re
import tomllib
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from hyperion.doctor.probes import package_version
from hyperion.doctor.state import State
from hyperion.engines.environments import ENVIRONMENTS, install_command, installed_versions
from hyperion.errors import HyperionError
from hyperion.install.advice import least_nvidia_driver, oldest_nvidia_driver
from hyperion.install.machine import decide
from hyperion.install.plan import CUDA_OF_PYPI, MINIMUM_PYTHON, MINIMUM_TORCH, older_cuda_wheel


@dataclass(frozen=True)
class Need:
    """One requirement of a workload, and whether this machine meets it.

    Args:
        what: what is needed.
        found: what this machine has.
        needed: the smallest sufficient value.
        result: 'ok', 'warn' (optional and missing), 'fail', or 'skip' (does not apply, or unknown).
        remedy: the next step for 'warn' and 'fail', else "".
    """

    what: str
    found: str
    needed: str
    result: Literal["ok", "warn", "fail", "skip"]
    remedy: str = ""


def workloads() -> dict[str, dict[str, Any]]:
    """Return a dict that maps the name of each workload to its requirements."""
    return tomllib.loads(Path(__file__).with_name("preflight.toml").read_text(encoding="utf-8"))


def installed_version(package: str) -> str | None:
    """Return the version of a package in its framework environment or in this environment, or None."""
    versions = installed_versions(package) if package in ENVIRONMENTS else {}
    return versions.get(package) or package_version(package)


def check_preflight(workload: str, state: State, version: Callable[[str], str | None] = installed_version) -> list[Need]:
    """Check every requirement of a workload, and return one result for each.

    All workloads need access to the device files, and sufficient versions of Python and PyTorch. These are always checked.

    Args:
        workload: name of the workload.
        state: the facts of the machine.
        version: function that returns the version of an installed package, or None.

    Raises:
        HyperionError: the workload is unknown.
    """
    if workload not in workloads():
        raise HyperionError(f"no workload {workload!r}", where="--preflight", next_step=f"use one of {', '.join(workloads())}")
    wanted = dict(workloads()[workload])
    optional = wanted.pop("optional", [])
    needs = [_permission(state), *_interpreter(state)]
    for name, least in wanted.items():
        found = _needs(name, least, state, version)
        soft = name in optional
        needs += [replace(need, result="warn") if soft and need.result == "fail" else need for need in found]
    return needs


def _needs(name: str, least: Any, state: State, version: Callable[[str], str | None]) -> list[Need]:
    """Return the results of one entry of preflight.toml."""
    match name:
        case "memory_gib":
            return [_at_least("host memory", _usable_memory(state), least, "GiB", "use a machine with more memory")]
        case "disk_gb":
            return [_disk(state, least)]
        case "shm_gib":
            return [_at_least("/dev/shm", state.shm_gib, least, "GiB", "start the container with --ipc=host or --shm-size=16g")]
        case "gpus":
            remedy = "use a machine with a GPU; if it has one, `hyperion doctor` says why torch does not see it"
            if state.device_archs:
                remedy = "use a machine with more GPUs, or unset the variable that masks some of them"
            return [_at_least("GPUs that torch sees", len(state.device_archs), least, "", remedy)]
        case "open_files":
            return [_at_least("open files", state.open_files, least, "", f"ulimit -n {least}")]
        case "rocm":
            return [_rocm(state, tuple(least))]
        case "nvidia_driver":
            return [_nvidia(state)]
        case "collectives":
            return [_present("NCCL or RCCL", state.collectives, "use a GPU build of torch")]
        case "mpi":
            return [_present("mpirun", state.mpi, "apt install openmpi-bin; pip install mpi4py")]
        case "packages":
            return [_present(package, version(package), _install(package)) for package in least]
    raise HyperionError(f"unknown need {name!r}", where="preflight.toml", next_step="use the names of its other entries")


def _install(package: str) -> str:
    return install_command(package) if package in ENVIRONMENTS else f"pip install {package}"


def _number(value: float) -> str:
    """Return a number as text: whole, or with four digits, and without an exponent."""
    if value == float("inf"):
        return "unlimited"
    return f"{value:.0f}" if value >= 1000 or value == round(value) else f"{value:.4g}"


def _at_least(what: str, found: float | None, least: float, unit: str, remedy: str) -> Need:
    needed = f"{_number(least)} {unit}".rstrip()
    if found is None:
        return Need(what, "unknown", needed, "skip")
    enough = found >= least
    return Need(what, f"{_number(found)} {unit}".rstrip(), needed, "ok" if enough else "fail", "" if enough else remedy)


def _present(what: str, found: str | None, remedy: str) -> Need:
    return Need(what, found or "none", "installed", "ok" if found else "fail", "" if found else remedy)


def _usable_memory(state: State) -> float | None:
    if state.memory_gib is None:
        return None
    # A machine sold with 32 GiB reports a few percent less, because firmware reserves memory.
    return min(state.memory_gib * 1.05, state.memory_limit_gib or float("inf"))


def _disk(state: State, least: float) -> Need:
    free = next(iter(state.disks.values()))[0] if state.disks else None  # the first is the folder of results
    return _at_least("disk of the results", free, least, "GB", "set HYPERION_RESULTS to a folder on another disk")


def _permission(state: State) -> Need:
    machine = decide(state.kernel)
    if machine.kind == "cpu":
        return Need("permission on the GPU", "no GPU", "the right to open its device files", "skip")
    problem = machine.problem or (f"{', '.join(state.denied_render)} may not be opened" if state.denied_render else "")
    remedy = machine.remedy or ("add the user to the group render" if problem else "")
    return Need(
        "permission on the GPU",
        problem or "device files can be opened",
        "the right to open its device files",
        "fail" if problem else "ok",
        remedy,
    )


def _interpreter(state: State) -> list[Need]:
    """Compare the versions of Python and PyTorch with the minimum versions in pyproject.toml, and return the results."""
    torch = state.build.version if state.build else None
    newer = f"install Python {'.'.join(map(str, MINIMUM_PYTHON))} or newer, then `make setup`"
    return [
        _version("Python", state.python, MINIMUM_PYTHON, newer),
        _version("PyTorch", torch, MINIMUM_TORCH, "install a newer torch: `make setup`"),
    ]


def _version(what: str, found: str | None, least: tuple[int, ...], remedy: str) -> Need:
    needed = ".".join(map(str, least))
    if found is None:
        return Need(what, "unknown", needed, "skip")
    enough = tuple(map(int, re.findall(r"\d+", found)[: len(least)])) >= least
    return Need(what, found, needed, "ok" if enough else "fail", "" if enough else remedy)


def _rocm(state: State, least: tuple[int, ...]) -> Need:
    needed = ".".join(map(str, least))
    if not state.kernel.amd_archs:
        return Need("ROCm", "no AMD GPU", needed, "skip")
    hip = state.build.hip if state.build else None  # a wheel contains its own ROCm
    found = re.findall(r"\d+", hip)[:2] if hip else state.kernel.rocm_version
    if found is None:
        return Need("ROCm", "none", needed, "fail", "install a ROCm build of torch: make setup")
    return _version("ROCm", ".".join(map(str, found)), least, "install a newer ROCm")


def _nvidia(state: State) -> Need:
    driver = state.kernel.nvidia_driver
    # `make setup` replaces a build without CUDA before the workload runs.
    older = older_cuda_wheel(driver or "")
    cuda = (state.build.cuda if state.build else None) or (older["cuda"] if older else str(CUDA_OF_PYPI))
    least = least_nvidia_driver(cuda)
    needed = f"{least} for CUDA {cuda}" if least else f"unknown for CUDA {cuda}"
    if driver is None:
        return Need("NVIDIA driver", "no NVIDIA GPU", needed, "skip")
    major = driver.split(".")[0]
    if not major.isdigit() or least is None:
        return Need("NVIDIA driver", driver or "unknown", needed, "skip")
    if int(major) >= least:
        return Need("NVIDIA driver", driver, needed, "ok")
    runs_older = int(major) >= oldest_nvidia_driver()
    remedy = "update the driver, or install the build that `hyperion env --install` names" if runs_older else "update the driver"
    return Need("NVIDIA driver", driver, needed, "fail", remedy)
