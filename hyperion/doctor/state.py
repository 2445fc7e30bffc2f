"""The facts about a machine that the rules of troubleshooting and the preflight use. Tests inject the facts of other machines.

A fact that cannot be read is None. The result of every rule that needs this fact is then 'skip', and never 'ok'.
"""

import errno
import os
import platform
import re
import resource
import shutil
import site
import socket
import sys
import sysconfig
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib.metadata import packages_distributions
from pathlib import Path
from typing import Any, TypeVar

import psutil
import torch

from hyperion.data.store.folders import DataError, processed_root, read_manifest
from hyperion.doctor.checks import cache_folders, installed_build, nearest_existing
from hyperion.hardware import Device, MachineFacts, collect_facts, detect, read
from hyperion.hardware.cpu import memory_limit_bytes, system_text
from hyperion.hardware.telemetry import nvml_uncorrected_errors
from hyperion.install.assignments import shell_assignments
from hyperion.install.machine import KernelFacts
from hyperion.install.machine import collect_facts as collect_kernel_facts
from hyperion.install.plan import Build
from hyperion.install.variables import Setting, minimal_environment, registry
from hyperion.kernels.availability import why_no_triton
from hyperion.paths import home_folder, results_folder
from hyperion.units import GIB

Value = TypeVar("Value")
_LOG_BYTES = 4 << 20  # number of bytes that are read from the end of a log


# Types of network file systems. If many ranks write small files there, they wait for each other.
NETWORK_FILE_SYSTEMS = ("nfs", "nfs4", "lustre", "beegfs", "gpfs", "cifs", "smbfs", "fuse.sshfs", "ceph", "wekafs")


@dataclass(frozen=True)
class DeviceState:
    """The state of one GPU.

    Args:
        free_gib, total_gib: memory.
        throttle: as in `Telemetry`, or None.
        temperature_c: temperature, or None.
        link: (current, largest) number of lanes of the PCIe link, or None. The link speed is not read, because idle GPUs lower
            it.
        uncorrected_errors: number of uncorrected memory errors since the driver was loaded, or None.
    """

    free_gib: float
    total_gib: float
    throttle: str | None = None
    temperature_c: float | None = None
    link: tuple[int, int] | None = None
    uncorrected_errors: int | None = None


@dataclass(frozen=True)
class State:
    """The facts about a machine. None means unknown. Sizes are in GiB, and disk sizes in GB.

    Args:
        variables: environment variables.
        kernel: driver, device files and PCI devices.
        python: version of Python.
        build: build of torch.
        archs: architectures that the build contains.
        device_error: error of torch when it opens a GPU, or "".
        device_archs: architecture of each GPU that torch sees.
        devices: state of each of these GPUs.
        denied_render: files in /dev/dri that this user may not open.
        mpi: path of mpirun, or "".
        collectives: version of NCCL or RCCL, or "".
        memory_gib, memory_available_gib, memory_limit_gib: memory of the host, its available part, and the limit of the
            container (infinity without one).
        swap_used_gib: used swap.
        shm_gib: size of /dev/shm.
        cores_allowed: number of cores that this process may use.
        disks: for each folder, (free GB, share of free inodes).
        file_systems: for each cache folder, the type of its file system.
        noexec: folders for compiled code whose file system forbids execution.
        memlock_gib, open_files: limits of this process.
        interfaces: names of the network interfaces.
        infiniband: whether there is an InfiniBand or RoCE adapter.
        port_used: whether the port in MASTER_PORT is used by another process. False without MASTER_PORT.
        own_address: address to which the own host name resolves; "" if it does not resolve.
        compiler: path of the C++ compiler that torch.compile takes, or "" if it does not exist.
        python_header: whether Python.h is installed.
        triton: reason why Triton cannot be used, or "".
        governor, clock_driver: governor of the CPU clock, and the driver of the kernel that sets the clock.
        numa_balancing: whether the kernel moves pages between NUMA nodes.
        kernel_command: command line of the kernel.
        user_site: whether packages in the user's site-packages are visible.
        library_shadows: folders in LD_LIBRARY_PATH with their own libraries of CUDA, ROCm or collectives.
        startup: settings in the start-up files of the login shell, as (file, name, value). Only variables of the registry whose
            value is known without running the file.
        absent_folders: variables with a folder that does not exist, as "NAME=folder".
        onnx_builds: installed distributions that contain ONNX Runtime.
        damaged_data: missing or truncated files of prepared data.
        log: end of the log of a program that failed.
    """

    variables: Mapping[str, str] = field(default_factory=dict)
    kernel: KernelFacts = field(default_factory=KernelFacts)
    python: str | None = None
    build: Build | None = None
    archs: tuple[str, ...] | None = None
    device_error: str | None = None
    device_archs: tuple[str, ...] = ()
    devices: tuple[DeviceState, ...] | None = None
    denied_render: tuple[str, ...] | None = None
    mpi: str | None = None
    collectives: str | None = None
    memory_gib: float | None = None
    memory_available_gib: float | None = None
    memory_limit_gib: float | None = None
    swap_used_gib: float | None = None
    shm_gib: float | None = None
    cores_allowed: float | None = None
    disks: Mapping[str, tuple[float, float]] | None = None
    file_systems: Mapping[str, str] | None = None
    noexec: tuple[str, ...] | None = None
    memlock_gib: float | None = None
    open_files: float | None = None
    interfaces: tuple[str, ...] | None = None
    infiniband: bool | None = None
    port_used: bool | None = None
    own_address: str | None = None
    compiler: str | None = None
    python_header: bool | None = None
    triton: str | None = None
    governor: str | None = None
    clock_driver: str | None = None
    numa_balancing: bool | None = None
    kernel_command: str | None = None
    user_site: bool | None = None
    library_shadows: tuple[str, ...] | None = None
    startup: tuple[tuple[str, str, str], ...] | None = None
    absent_folders: tuple[str, ...] | None = None
    onnx_builds: tuple[str, ...] | None = None
    damaged_data: tuple[str, ...] | None = None
    log: str | None = None


def read_state(root: Path = Path("/"), log: Path | None = None, variables: Mapping[str, str] = os.environ) -> State:
    """Read the facts of this machine. Files of the system are read below `root`.

    Args:
        root: folder that contains proc/, sys/ and dev/.
        log: log of a program that failed. Only its end is read.
        variables: environment variables.
    """
    facts = collect_facts()
    home, temporary = nearest_existing(home_folder()), Path(tempfile.gettempdir())
    clock = root / "sys/devices/system/cpu/cpu0/cpufreq"
    memory, limits = psutil.virtual_memory(), {name: resource.getrlimit(name)[0] for name in (_MEMLOCK, _FILES)}
    unlimited = {name: float("inf") if value == resource.RLIM_INFINITY else value for name, value in limits.items()}
    balancing = system_text(root / "proc/sys/kernel/numa_balancing")
    return State(
        variables=dict(variables),
        kernel=collect_kernel_facts(root),
        python=platform.python_version(),
        build=installed_build(),
        archs=tuple(torch.cuda.get_arch_list()),
        device_error=_attempt(_open_devices) if installed_build().kind != "cpu" else "",
        device_archs=tuple(detect(facts, index).arch for index in range(len(facts.gpus))),
        devices=_attempt(lambda: _devices(facts, root)),
        denied_render=tuple(
            str(file) for file in sorted((root / "dev/dri").glob("renderD*")) if not os.access(file, os.R_OK | os.W_OK)
        ),
        mpi=shutil.which("mpirun") or "",
        collectives=facts.collectives or "",
        memory_gib=memory.total / GIB,
        memory_available_gib=memory.available / GIB,
        memory_limit_gib=(memory_limit_bytes(root) or float("inf")) / GIB,
        swap_used_gib=psutil.swap_memory().used / GIB,
        shm_gib=_attempt(lambda: shutil.disk_usage(root / "dev/shm").total / GIB),
        cores_allowed=facts.cpu.cores,
        disks={str(place): _disk(place) for place in (nearest_existing(results_folder()), home, temporary)},
        file_systems={name: _file_system(path) for name, path in cache_folders(variables, home_folder()).items()},
        noexec=tuple(str(place) for place in (temporary, home) if os.statvfs(place).f_flag & os.ST_NOEXEC),
        memlock_gib=unlimited[_MEMLOCK] / GIB,
        open_files=unlimited[_FILES],
        interfaces=tuple(name for _, name in socket.if_nameindex()),
        infiniband=any((root / "sys/class/infiniband").glob("*")),
        port_used=_port_used(variables.get("MASTER_PORT", "")),
        own_address=_attempt(lambda: socket.gethostbyname(socket.gethostname())) or "",
        compiler=_compiler(variables),
        python_header=Path(sysconfig.get_paths()["include"], "Python.h").is_file(),
        triton=why_no_triton(),
        governor=system_text(clock / "scaling_governor"),
        clock_driver=system_text(clock / "scaling_driver"),
        numa_balancing=None if balancing is None else balancing != "0",
        kernel_command=system_text(root / "proc/cmdline"),
        user_site=bool(site.ENABLE_USER_SITE) and Path(site.getusersitepackages()).is_dir(),
        library_shadows=_library_shadows(variables.get("LD_LIBRARY_PATH", "")),
        startup=_attempt(lambda: startup_settings(root, home_folder(), variables.get("SHELL", ""))),
        absent_folders=_absent_folders(variables),
        onnx_builds=_attempt(lambda: tuple(sorted(set(packages_distributions().get("onnxruntime", ()))))),
        damaged_data=_attempt(_damaged_data),
        log=_end_of(log) if log is not None else None,
    )


# Files that a shell reads when it starts, relative to the home folder. Every shell gets the files of the system too.
_STARTUP = {
    "bash": (".bash_profile", ".bash_login", ".profile", ".bashrc"),
    "zsh": (".zshenv", ".zprofile", ".zshrc", ".zlogin"),
    "fish": (".config/fish/config.fish",),
}
_STARTUP_CHARACTERS = 50_000  # number of characters that are read of each of these files
# Variables that name a folder, or several with ":" between them, which must exist.
_FOLDER_VARIABLES = ("ROCM_PATH", "ROCM_HOME", "HIP_PATH", "CUDA_HOME", "CUDA_PATH", "PYTHONPATH")
_MEMLOCK, _FILES = resource.RLIMIT_MEMLOCK, resource.RLIMIT_NOFILE


def _attempt(read_fact: Callable[[], Value]) -> Value | None:
    """Return a fact, or None if it cannot be read."""
    try:
        return read_fact()
    except Exception:  # a driver or a library may raise anything; an unknown fact is reported as unknown
        return None


def _open_devices() -> str:
    try:
        torch.cuda.init()
        return ""
    except RuntimeError as error:
        return str(error).splitlines()[0]


def _devices(facts: MachineFacts, root: Path) -> tuple[DeviceState, ...]:
    states = []
    for index in range(len(facts.gpus)):
        device = detect(facts, index)
        free, total = torch.cuda.mem_get_info(index)
        telemetry = read(device)
        pci = root / "sys/bus/pci/devices" / (device.pci_address or "-")
        states.append(
            DeviceState(
                free / GIB, total / GIB, telemetry.throttle, telemetry.temperature_c, pcie_link(pci), memory_errors(device, pci)
            )
        )
    return tuple(states)


def memory_errors(device: Device, folder: Path, nvml: Any = None) -> int | None:
    """Return the number of uncorrected memory errors of a GPU since its driver was loaded, or None if it is unknown.

    Args:
        device: the GPU.
        folder: folder of the device in sysfs, which is read for AMD GPUs.
        nvml: the module pynvml for NVIDIA GPUs, or None to import it.
    """
    if device.kind == "cuda":
        return nvml_uncorrected_errors(device, nvml)
    errors = system_text(folder / "ras/umc_err_count")  # "ue: 0\nce: 0"
    return int(errors.split()[1]) if errors and errors.startswith("ue:") else None


def pcie_link(folder: Path) -> tuple[int, int] | None:
    """Return (current, largest) number of lanes of the PCIe link of a device in sysfs, or None if it is unknown."""
    texts = [system_text(folder / f"{kind}_link_width") or "" for kind in ("current", "max")]
    return (int(texts[0]), int(texts[1])) if all(text.isdigit() and text != "0" for text in texts) else None


def _disk(place: Path) -> tuple[float, float]:
    status = os.statvfs(place)
    return status.f_bavail * status.f_frsize / 1e9, status.f_favail / status.f_files if status.f_files else 1.0


def _file_system(folder: Path) -> str:
    place = nearest_existing(folder.resolve())  # the folder, or a folder above it, may be a link to another file system
    mounts = sorted(psutil.disk_partitions(all=True), key=lambda mount: len(mount.mountpoint))
    return next((mount.fstype for mount in reversed(mounts) if place.is_relative_to(mount.mountpoint)), "")


def _compiler(variables: Mapping[str, str]) -> str:
    # torch/_inductor/cpp_builder.py runs the value of CXX as one path, even if it is "ccache g++", and tries no other compiler.
    return shutil.which(variables.get("CXX", "clang++" if sys.platform == "darwin" else "g++")) or ""


def _port_used(port: str) -> bool | None:
    if not is_port(port):
        return None if port else False
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", int(port)))
        except OSError as error:
            return error.errno == errno.EADDRINUSE or None
    return False


def is_port(text: str) -> bool:
    """Return True if a text is the number of a port."""
    return re.fullmatch("[0-9]{1,5}", text) is not None and 0 < int(text) < 1 << 16


def _library_shadows(path: str) -> tuple[str, ...]:
    names = ("libcudart.so*", "libcublas.so*", "libnccl.so*", "libamdhip64.so*", "librccl.so*", "libtorch.so*")
    folders = [Path(part) for part in path.split(":") if part]
    return tuple(str(folder) for folder in folders if any(any(folder.glob(name)) for name in names))


def startup_settings(root: Path, home: Path, shell: str) -> tuple[tuple[str, str, str], ...]:
    """Return the settings in the start-up files of a shell, as (file, name, value): only variables of the registry.

    Args:
        root: folder that contains etc/.
        home: home folder of the user.
        shell: path of the login shell. If it is unknown, the files of bash are read.
    """
    files = [root / "etc/environment", *sorted((root / "etc/profile.d").glob("*.sh"))]
    files += [home / name for name in _STARTUP.get(Path(shell).name, _STARTUP["bash"])]
    last = {}
    for file in files:
        pairs = shell_assignments((system_text(file) or "")[:_STARTUP_CHARACTERS])
        # A value with a `$` is known only when the file runs.
        last |= {name: (str(file), name, value) for name, value in pairs if name in registry() and "$" not in value}
    return tuple(last.values())


def _absent_folders(variables: Mapping[str, str]) -> tuple[str, ...]:
    named = [(name, part) for name in _FOLDER_VARIABLES for part in variables.get(name, "").split(":") if part]
    return tuple(f"{name}={part}" for name, part in named if not os.path.exists(part))


def _damaged_data() -> tuple[str, ...]:
    damaged = []
    for folder in sorted(path for path in processed_root().glob("[!._]*") if path.is_dir()):
        try:
            manifest = read_manifest(folder)
        except DataError as error:
            damaged.append(f"{folder.name}: {error.what}")
            continue
        # Only sizes are compared, because hashing large data sets takes minutes. `hyperion data verify` reads all bytes.
        for name, entry in manifest.files.items() if manifest else ():
            file = folder / name
            if not file.is_file() or file.stat().st_size != entry["bytes"]:
                damaged.append(f"{folder.name}/{name}")
    return tuple(damaged)


def _end_of(log: Path) -> str:
    with open(log, "rb") as file:
        if file.seekable():
            file.seek(0, os.SEEK_END)
            file.seek(max(0, file.tell() - _LOG_BYTES))
            return file.read().decode(errors="replace")
        end = b""
        while part := file.read(_LOG_BYTES):  # a pipe, such as /dev/stdin, can only be read from its beginning
            end = (end + part)[-_LOG_BYTES:]
        return end.decode(errors="replace")


def machine_settings(state: State | None = None) -> list[Setting]:
    """Return the environment variables that a machine needs. See `minimal_environment`."""
    state = state or read_state()
    on_network = [name for name, kind in (state.file_systems or {}).items() if kind in NETWORK_FILE_SYSTEMS]
    # Only compile caches are moved to this node. HF_HOME stays on the network file system, because its data and models are large
    # and are read only once.
    local = {
        name: os.path.join(tempfile.gettempdir(), f"{name.lower()}-{os.getuid()}") for name in on_network if name != "HF_HOME"
    }
    return minimal_environment(int(state.cores_allowed or 1), len(state.device_archs), local)
