"""Preflight: compare what a workload needs with what this machine has."""

import re
import tomllib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from hyperion.doctor.probes import package_version
from hyperion.doctor.state import State
from hyperion.errors import HyperionError
from hyperion.install.machine import decide


@dataclass(frozen=True)
class Need:
    """One need of a workload.

    Args:
        what: what is needed.
        found: what this machine has.
        needed: the least value.
        result: 'ok', 'warn' (optional and missing), 'fail', or 'skip' (does not apply, or unknown).
        remedy: the next step for 'warn' and 'fail', else "".
    """

    what: str
    found: str
    needed: str
    result: Literal["ok", "warn", "fail", "skip"]
    remedy: str = ""


def workloads() -> dict[str, dict[str, Any]]:
    """Return the needs of each workload."""
    return tomllib.loads(Path(__file__).with_name("preflight.toml").read_text(encoding="utf-8"))


def check_preflight(workload: str, state: State, version: Callable[[str], str | None] = package_version) -> list[Need]:
    """Return one result for each need of a workload. Permissions of device files are always checked.

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
    needs = [_permission(state)]
    for name, least in wanted.items():
        checks: dict[str, Callable[[], list[Need]]] = {
            "memory_gib": lambda least=least: [
                _at_least("host memory", _usable_memory(state), least, "GiB", "use a machine with more memory")
            ],
            "disk_gb": lambda least=least: [_disk(state, least)],
            "shm_gib": lambda least=least: [
                _at_least("/dev/shm", state.shm_gib, least, "GiB", "start the container with --ipc=host or --shm-size=16g")
            ],
            "gpus": lambda least=least: [
                _at_least("GPUs that torch sees", len(state.device_archs), least, "", "run `hyperion doctor`: a rule says why")
            ],
            "open_files": lambda least=least: [_at_least("open files", state.open_files, least, "", f"ulimit -n {least}")],
            "rocm": lambda least=least: [_rocm(state, tuple(least))],
            "nvidia_driver": lambda least=least: [_nvidia(state, least)],
            "collectives": lambda: [_present("NCCL or RCCL", state.collectives, "use a GPU build of torch")],
            "mpi": lambda: [_present("mpirun", state.mpi, "apt install openmpi-bin; pip install mpi4py")],
            "packages": lambda least=least: [_present(name, version(name), f"pip install {name}") for name in least],
        }
        for need in checks[name]():
            soft = need.result == "fail" and name in optional
            needs.append(Need(need.what, need.found, need.needed, "warn", need.remedy) if soft else need)
    return needs


def _at_least(what: str, found: float | None, least: float, unit: str, remedy: str) -> Need:
    needed = f"{least:g} {unit}".rstrip()
    if found is None:
        return Need(what, "unknown", needed, "skip")
    enough = found >= least
    return Need(what, f"{found:.4g} {unit}".rstrip(), needed, "ok" if enough else "fail", "" if enough else remedy)


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
    return Need("permission on the GPU", problem or "device files can be opened", "the right to open its device files",
                "fail" if problem else "ok", remedy)  # fmt: skip


def _rocm(state: State, least: tuple[int, ...]) -> Need:
    needed = ".".join(map(str, least))
    if not state.kernel.amd_archs:
        return Need("ROCm", "no AMD GPU", needed, "skip")
    hip = state.build.hip if state.build else None  # a wheel contains its own ROCm
    found = tuple(map(int, re.findall(r"\d+", hip)[:2])) if hip else state.kernel.rocm_version
    if found is None:
        return Need("ROCm", "none", needed, "fail", "install a ROCm build of torch: make setup")
    enough = found >= least
    return Need("ROCm", ".".join(map(str, found)), needed, "ok" if enough else "fail", "" if enough else "install a newer ROCm")


def _nvidia(state: State, least: int) -> Need:
    driver = state.kernel.nvidia_driver
    if driver is None:
        return Need("NVIDIA driver", "no NVIDIA GPU", str(least), "skip")
    major = driver.split(".")[0]
    return _at_least("NVIDIA driver", int(major) if major.isdigit() else None, least, "", "update the driver")
