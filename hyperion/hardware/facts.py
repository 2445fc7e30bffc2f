"""Facts about a machine from torch and the operating system, and the fingerprint that a run stores of them.

All vendor-specific code works on `Facts`, so tests can run it with the facts of any machine.
"""

import dataclasses
import hashlib
import importlib.metadata
import os
import platform
import re
import socket
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import hyperion
from hyperion.forms import read_form
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
# Variables of other libraries that disable the same in-switch reductions.
_OTHER_SETTINGS = ("TORCH_SYMM_MEM_DISABLE_MULTICAST", "NVSHMEM_DISABLE_NVLS")
_HOST_SETTINGS = ("NCCL_COMM_ID", "NCCL_HOSTID")
# Switches, numbers, sizes, names of algorithms, links and adapters. Paths contain other characters.
_PLAIN = re.compile(r"[\w.,:;^=+ -]*", re.ASCII)
_ADDRESS = re.compile(r"\d+(\.\d+){3}|[0-9a-fA-F]*::")


@dataclass(frozen=True)
class GpuFacts:
    """One GPU as PyTorch enumerates it. Sizes in bytes, clocks in MHz; None if torch does not report it."""

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
    """Facts about a machine: software versions, visible GPUs, CPU, operating system. No paths, user names or host names."""

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
        """Return the facts as nested dicts and lists for `json.dumps`."""
        return dataclasses.asdict(self)


def collect_facts() -> Facts:
    """Read this machine. Imports torch; what cannot be read is None.

    If torch sees a GPU but cannot open it, `gpu_error` holds torch's message.
    """
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


def fingerprint(facts: Facts | None = None) -> dict:
    """Return the environment of a measurement as JSON. Host name and GPU UUIDs are hashed; there are no paths or user names.

    Keys: python, torch, cuda, hip, driver, collectives (nccl or rccl), collective_settings (its environment variables),
    packages, os, kernel, machine, cpu, gpus, visible_devices, host_hash, source (hash, commit, modified).
    """
    content = (facts or collect_facts()).to_json()
    for gpu in content["gpus"]:
        gpu["uuid"] = gpu["uuid"] and hashlib.sha256(gpu["uuid"].encode()).hexdigest()[:12]
    content["source"] = {"hash": source_hash(), **git_state()}
    return content


def facts_of(content: dict, place: str = "fingerprint") -> Facts:
    """Return the facts in a fingerprint, of this or another machine; UUIDs stay hashed.

    Args:
        content: the JSON that `fingerprint` returned.
        place: name of the fingerprint in errors.

    Raises:
        HyperionError: names a field that is unknown, missing or of another type.
    """
    return read_form(Facts, {name: value for name, value in content.items() if name != "source"}, place)


def package_folder() -> Path:
    """Return the folder of the running `hyperion` package."""
    return Path(hyperion.__file__).resolve().parent


def source_hash(folder: Path | None = None) -> str:
    """Return the sha256 of the names and contents of all .py and .toml files of the library, in sorted order."""
    folder = folder or package_folder()
    digest = hashlib.sha256()
    files = (*folder.rglob("*.py"), *folder.rglob("*.toml"))
    for name, file in sorted((file.relative_to(folder).as_posix(), file) for file in files):
        content = file.read_bytes()
        digest.update(f"{name}\0{len(content)}\0".encode())
        digest.update(content)
    return digest.hexdigest()


def git_state(root: Path | None = None, within: str = "hyperion") -> dict[str, str | bool | None]:
    """Return the commit of the checkout, and whether files below `within` differ from it.

    Without git, the commit is read from a file SOURCE_COMMIT in `root`. What is unknown is None; no error is raised.
    """
    root = root or package_folder().parent
    if (root / ".git").exists():
        commit = _git(root, "rev-parse", "HEAD")
        if commit:
            changes = _git(root, "status", "--porcelain", "--", within)
            return {"commit": commit, "modified": None if changes is None else bool(changes)}
    try:
        stated = (root / "SOURCE_COMMIT").read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError):
        stated = ""
    return {"commit": stated or None, "modified": None}


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
    """Return the PCI address as sysfs writes it, `domain:bus:device.function`; GPUs are function 0."""
    parts = [getattr(properties, f"pci_{part}_id", None) for part in ("domain", "bus", "device")]
    if any(part is None for part in parts):
        return None
    return "{:04x}:{:02x}:{:02x}.0".format(*parts)


def _driver_version() -> str | None:
    """Return the version of the GPU driver: NVIDIA's from its proc file, AMD's from its module (out-of-tree builds only)."""
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
    """Return the variables that configure collectives, by name.

    A value that may contain a path, a host or an address is hashed: rows can be published, and different values still differ.
    """
    names = sorted(name for name in variables if name.startswith(_PREFIXES) or name in _OTHER_SETTINGS)
    return {name: _hashed(variables[name]) if _private(name, variables[name]) else variables[name] for name in names}


def _private(name: str, value: str) -> bool:
    if name in _HOST_SETTINGS or not _PLAIN.fullmatch(value) or _ADDRESS.search(value):
        return True
    host = re.escape(socket.gethostname().partition(".")[0])
    return bool(host and re.search(rf"(?<![A-Za-z0-9]){host}(?![A-Za-z0-9])", value, re.IGNORECASE))


def _hashed(value: str) -> str:
    return f"hidden (sha256 {hashlib.sha256(value.encode(errors='surrogateescape')).hexdigest()[:12]})"


def _git(root: Path, *arguments: str) -> str | None:
    """Return git's output, or None if git is missing, times out or fails (no commit yet, a checkout of another owner)."""
    try:
        done = subprocess.run(["git", "-C", str(root), *arguments], capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()
