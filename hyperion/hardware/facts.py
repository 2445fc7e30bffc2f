"""Everything Hyperion reads about a machine from torch and the operating system, as one plain JSON-able record.

All vendor branches work on `Facts`, so every one of them is tested on any machine by injecting the facts of another.
"""

import dataclasses
import hashlib
import importlib.metadata
import os
import platform
import re
import socket
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from hyperion.hardware.cpu import CpuFacts, read_cpu

VISIBLE_DEVICE_VARIABLES = (
    "CUDA_VISIBLE_DEVICES",
    "HIP_VISIBLE_DEVICES",
    "ROCR_VISIBLE_DEVICES",
    "GPU_DEVICE_ORDINAL",
    "CUDA_DEVICE_ORDER",
)
PACKAGES = (
    "torchvision",
    "numpy",
    "transformers",
    "datasets",
    "tokenizers",
    "safetensors",
    "peft",
    "accelerate",
    "pandas",
    "pyarrow",
    "scipy",
    "matplotlib",
    "papermill",
    "triton",
    "pytorch-triton-rocm",
    "nvidia-ml-py",
    "deepspeed",
)
_PREFIXES = ("NCCL_", "RCCL_", "TORCH_NCCL_")
# Of other libraries, but they turn off the same in-switch reductions.
_BESIDE = ("TORCH_SYMM_MEM_DISABLE_MULTICAST", "NVSHMEM_DISABLE_NVLS")
_NAMES_A_HOST = ("NCCL_COMM_ID", "NCCL_HOSTID")
# Switches, numbers, sizes, names of algorithms, links and adapters; a path has other characters.
_PLAIN = re.compile(r"[\w.,:;^=+ -]*", re.ASCII)
_ADDRESS = re.compile(r"\d+(\.\d+){3}|[0-9a-fA-F]*::")


@dataclass(frozen=True)
class GpuFacts:
    """One GPU as PyTorch enumerates it. Sizes in bytes, clocks in MHz; None where torch does not tell."""

    name: str
    total_memory_bytes: int
    multi_processor_count: int
    major: int
    minor: int
    gcn_arch_name: str | None = None
    l2_cache_bytes: int | None = None
    uuid: str | None = None
    pci_address: str | None = None
    max_clock_mhz: float | None = None
    memory_clock_mhz: float | None = None
    memory_bus_bits: int | None = None


@dataclass(frozen=True)
class Facts:
    """A machine: software versions, visible GPUs, CPU, operating system. Holds no path and no user or host name."""

    python: str
    torch: str | None
    cuda: str | None
    hip: str | None
    cpu: CpuFacts
    gpus: tuple[GpuFacts, ...] = ()
    gpu_error: str | None = None
    driver: str | None = None
    collectives: str | None = None
    collective_settings: dict[str, str] = field(default_factory=dict)
    packages: dict[str, str] = field(default_factory=dict)
    os: str = ""
    kernel: str = ""
    machine: str = ""
    host_hash: str = ""
    visible_devices: dict[str, str] = field(default_factory=dict)

    def to_json(self) -> dict:
        """The facts as nested dicts and lists that `json.dumps` takes."""
        return dataclasses.asdict(self)


def collect_facts() -> Facts:
    """Read this machine. Imports torch; what cannot be read is None, and a GPU that torch sees but cannot open is told
    in `gpu_error` (the cause, for the message of `detect`)."""
    import torch

    gpus, gpu_error = _read_gpus(torch)
    return Facts(
        python=platform.python_version(),
        torch=torch.__version__,
        cuda=torch.version.cuda,
        hip=torch.version.hip,
        cpu=read_cpu(),
        gpus=gpus,
        gpu_error=gpu_error,
        driver=_driver_version(),
        collectives=_collectives_version(torch) if gpus else None,
        collective_settings=collective_settings(os.environ),
        packages=_package_versions(),
        os=_os_name(),
        kernel=platform.release(),
        machine=platform.machine(),
        host_hash=hashlib.sha256(socket.gethostname().encode()).hexdigest()[:12],
        visible_devices={name: os.environ[name] for name in VISIBLE_DEVICE_VARIABLES if name in os.environ},
    )


def _read_gpus(torch) -> tuple[tuple[GpuFacts, ...], str | None]:
    if not torch.cuda.is_available():
        return (), None
    try:
        return tuple(_read_gpu(torch.cuda.get_device_properties(i)) for i in range(torch.cuda.device_count())), None
    except RuntimeError as error:
        return (), str(error).splitlines()[0]


def _read_gpu(properties) -> GpuFacts:
    clock_khz = getattr(properties, "clock_rate", None)
    memory_clock_khz = getattr(properties, "memory_clock_rate", None)
    uuid = getattr(properties, "uuid", None)
    return GpuFacts(
        name=properties.name,
        total_memory_bytes=properties.total_memory,
        multi_processor_count=properties.multi_processor_count,
        major=properties.major,
        minor=properties.minor,
        gcn_arch_name=getattr(properties, "gcnArchName", None),
        l2_cache_bytes=getattr(properties, "L2_cache_size", None),
        uuid=str(uuid) if uuid is not None else None,
        pci_address=_pci_address(properties),
        max_clock_mhz=clock_khz / 1000 if clock_khz else None,
        memory_clock_mhz=memory_clock_khz / 1000 if memory_clock_khz else None,
        memory_bus_bits=getattr(properties, "memory_bus_width", None) or None,
    )


def _pci_address(properties) -> str | None:
    """`domain:bus:device.function` as sysfs writes it; GPUs are function 0."""
    parts = [getattr(properties, f"pci_{part}_id", None) for part in ("domain", "bus", "device")]
    if any(part is None for part in parts):
        return None
    return "{:04x}:{:02x}:{:02x}.0".format(*parts)


def _driver_version() -> str | None:
    """The kernel's GPU driver: NVIDIA's from its proc file, AMD's from its module (out-of-tree builds only)."""
    nvidia = Path("/proc/driver/nvidia/version")
    if nvidia.is_file():
        found = re.search(r"(\d+\.\d+(?:\.\d+)?)\s", nvidia.read_text(errors="replace"))
        return f"nvidia {found.group(1)}" if found else None
    amdgpu = Path("/sys/module/amdgpu/version")
    return f"amdgpu {amdgpu.read_text().strip()}" if amdgpu.is_file() else None


def _collectives_version(torch) -> str | None:
    if not torch.distributed.is_available() or not torch.distributed.is_nccl_available():
        return None
    library = "rccl" if torch.version.hip else "nccl"
    return f"{library} " + ".".join(str(part) for part in torch.cuda.nccl.version())


def _package_versions() -> dict[str, str]:
    versions = {}
    for package in PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return versions


def _os_name() -> str:
    if sys.platform != "linux":
        return f"{platform.system()} {platform.release()}"
    try:
        return platform.freedesktop_os_release().get("PRETTY_NAME", "Linux")
    except OSError:
        return "Linux"


def collective_settings(variables: Mapping[str, str]) -> dict[str, str]:
    """The settings among environment variables, by name. A value that may tell a path, a host or an address is hashed, so
    that rows can be published and two runs still be told apart.
    """
    names = sorted(name for name in variables if name.startswith(_PREFIXES) or name in _BESIDE)
    return {name: _hashed(variables[name]) if _private(name, variables[name]) else variables[name] for name in names}


def _private(name: str, value: str) -> bool:
    if name in _NAMES_A_HOST or not _PLAIN.fullmatch(value) or _ADDRESS.search(value):
        return True
    host = re.escape(socket.gethostname().partition(".")[0])
    return bool(host and re.search(rf"(?<![A-Za-z0-9]){host}(?![A-Za-z0-9])", value, re.IGNORECASE))


def _hashed(value: str) -> str:
    return f"hidden (sha256 {hashlib.sha256(value.encode(errors='surrogateescape')).hexdigest()[:12]})"
