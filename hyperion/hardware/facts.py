"""Collect facts about a machine from torch and the operating system, detect its devices, and make its fingerprint for a run.

All vendor-specific code takes `MachineFacts` as its input, so that tests can run it with the facts of any machine.
"""

import hashlib
import importlib.metadata
import importlib.util
import os
import platform
import re
import runpy
import socket
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path

import hyperion
from hyperion.forms import read_form
from hyperion.hardware.cpu import CpuFacts, read_cpu, system_text
from hyperion.hardware.device import Device, HardwareError
from hyperion.hardware.specs import data_sheet_cache_bytes, lookup
from hyperion.hardware.telemetry import AMD_NAMES

VISIBLE_DEVICE_VARIABLES = (
    "CUDA_VISIBLE_DEVICES",
    "HIP_VISIBLE_DEVICES",
    "ROCR_VISIBLE_DEVICES",
    "GPU_DEVICE_ORDINAL",
    # This variable does not select devices, but determines how the GPUs are numbered.
    "CUDA_DEVICE_ORDER",
)
# Environment variables that select the visible devices. The first variable that is set is used. If HIP_VISIBLE_DEVICES is not
# set, ROCm uses CUDA_VISIBLE_DEVICES.
_VARIABLES = {"cuda": ("CUDA_VISIBLE_DEVICES",), "rocm": ("HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES")}
# Names of the distributions that contain Triton. The torch wheels for CUDA require the first; those for ROCm require the second
# since torch 2.10, and before required the third.
TRITON_PACKAGES = ("triton", "triton-rocm", "pytorch-triton-rocm")
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
    *TRITON_PACKAGES,
    "nvidia-ml-py",
    "deepspeed",
)
_PREFIXES = ("NCCL_", "RCCL_", "TORCH_NCCL_")
# Variables of other libraries that, like NCCL_NVLS_ENABLE=0, disable reductions in the NVLink switch.
_OTHER_SETTINGS = ("TORCH_SYMM_MEM_DISABLE_MULTICAST", "NVSHMEM_DISABLE_NVLS")
# Variables of NCCL whose values contain an address or the name of a host.
_HOST_SETTINGS = ("NCCL_COMM_ID", "NCCL_HOSTID")
# A value with only these characters is a switch, a number, a size, or a name of an algorithm, a link or an adapter. Paths contain
# other characters.
_PLAIN = re.compile(r"[\w.,:;^=+ -]*", re.ASCII)
_ADDRESS = re.compile(r"\d+(\.\d+){3}|[0-9a-fA-F]*::")


@dataclass(frozen=True)
class GpuFacts:
    """One GPU as PyTorch reports it. Sizes are in bytes and clocks in MHz. A value that torch does not report is None."""

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
class MachineFacts:
    """Facts about a machine: software versions, visible GPUs, CPU and operating system.

    The facts contain no paths, user names or host names.

    Args:
        python, torch, cuda, hip: versions. `cuda` or `hip` is None if torch was built without it.
        cpu: facts about the CPU.
        gpus: the visible GPUs, in the order of PyTorch.
        gpu_error: error message of torch if it finds a GPU but cannot use it, else None.
        driver: name and version of the GPU driver, or None.
        collectives: name and version of the library for collectives (NCCL or RCCL), or None.
        collective_settings: environment variables that configure this library; see `collective_settings`.
        packages: a dict that maps the name of a Python package to its version.
        os, kernel, machine: operating system, version of its kernel, and architecture, such as "x86_64".
        host_hash: hash of the host name.
        visible_devices: environment variables that select the visible GPUs.
    """

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


@dataclass(frozen=True)
class TorchBuild:
    """The installed build of PyTorch.

    Args:
        torch, cuda, hip: versions. `cuda` or `hip` is None if torch was built without it.
    """

    torch: str
    cuda: str | None
    hip: str | None


def torch_build() -> TorchBuild:
    """Return the versions of the installed PyTorch. It is not imported, because the import takes seconds.

    Raises:
        ImportError: PyTorch is not installed.
    """
    spec = None if "torch" in sys.modules else importlib.util.find_spec("torch")
    stated = Path(spec.origin).with_name("version.py") if spec is not None and spec.origin else None
    if stated is not None and stated.is_file():
        versions = runpy.run_path(str(stated))
        return TorchBuild(versions["__version__"], versions["cuda"], versions["hip"])
    import torch

    return TorchBuild(str(torch.__version__), torch.version.cuda, torch.version.hip)


def collect_facts() -> MachineFacts:
    """Return the facts about this machine. Facts that cannot be read are None.

    torch is imported only if it was built for GPUs. If it finds a GPU but cannot use it, `gpu_error` contains its error message.
    """
    build = torch_build()
    gpus, gpu_error, collectives = _read_gpus() if build.cuda or build.hip else ((), None, None)
    return MachineFacts(
        python=platform.python_version(),
        torch=build.torch,
        cuda=build.cuda,
        hip=build.hip,
        cpu=read_cpu(),
        gpus=gpus,
        gpu_error=gpu_error,
        driver=_driver_version(),
        collectives=collectives,
        collective_settings=collective_settings(os.environ),
        packages=_package_versions(),
        os=_os_name(),
        kernel=platform.release(),
        machine=platform.machine(),
        host_hash=hashlib.sha256(socket.gethostname().encode()).hexdigest()[:12],
        visible_devices={name: os.environ[name] for name in VISIBLE_DEVICE_VARIABLES if name in os.environ},
    )


def detect(facts: MachineFacts | None = None, index: int = 0) -> Device:
    """Return the GPU with the number `index` if torch sees GPUs, else the CPU.

    Args:
        facts: facts about the machine. None reads the facts of this machine.
        index: PyTorch's device number, which counts visible devices only.

    Raises:
        HardwareError: there is no GPU with this index, or a GPU cannot be opened.
    """
    facts = facts or collect_facts()
    if facts.gpu_error:
        raise HardwareError(
            f"PyTorch sees a GPU but cannot open it: {facts.gpu_error}",
            where=f"torch {facts.torch}, driver {facts.driver}",
            next_step="Check the driver with nvidia-smi or rocm-smi, and that its version suits this PyTorch build.",
        )
    if not facts.gpus:
        return detect_cpu(facts)
    if not 0 <= index < len(facts.gpus):
        raise HardwareError(
            f"There is no GPU number {index}: PyTorch sees {len(facts.gpus)}.",
            where=f"visible-device variables: {facts.visible_devices or 'none set'}",
            next_step=f"Choose an index from 0 to {len(facts.gpus) - 1}, or change the visible-device variable.",
        )
    return _detect_gpu(facts, facts.gpus[index], index)


def detect_cpu(facts: MachineFacts | None = None) -> Device:
    """Return the CPU of this machine as a device, even if there are GPUs."""
    cpu = (facts or collect_facts()).cpu
    return Device(
        kind="cpu",
        index=0,
        name=cpu.name,
        arch=cpu.machine,
        memory_bytes=cpu.memory_bytes,
        compute_units=cpu.cores,
        last_level_cache_bytes=cpu.last_level_cache_bytes,
        torch_device="cpu",
        max_clock_mhz=cpu.max_clock_mhz,
        nominal_clock_mhz=cpu.nominal_clock_mhz,
        isa=cpu.flags,
        vendor=cpu.vendor,
        family=cpu.family,
    )


def one_at_a_time(device: Device, count: int, environment: Mapping[str, str]) -> list[dict[str, str]]:
    """Return the environment variables that make only one accelerator visible, for each independent accelerator.

    The list contains one dict per accelerator, and is empty for a CPU. The two dies of an MI250X module are not independent: they
    share a power budget, so work on one die slows down the other. Therefore the list contains only one die of each module.

    Args:
        device: the first visible device.
        count: number of visible devices.
        environment: current environment variables, which may select visible devices by number or by UUID.
    """
    variables = _VARIABLES.get(device.kind)
    if variables is None:
        return []
    named = next((environment[variable] for variable in variables if environment.get(variable)), "")
    names = [name.strip() for name in named.split(",")][:count] if named else [str(number) for number in range(count)]
    sheet, _ = lookup(device)
    if sheet is not None and "(one GCD)" in sheet.name:
        # HIP numbers the devices that ROCR_VISIBLE_DEVICES has left.
        left = [name.strip() for name in environment.get("ROCR_VISIBLE_DEVICES", "").split(",") if name.strip()]
        # Later entries of a dict replace earlier ones. In reversed order, the first die of each module remains.
        names = list({_module(place, name, left): name for place, name in reversed(list(enumerate(names)))}.values())[::-1]
    # All variables get the same value, because the build of torch determines which variable is read.
    return [dict.fromkeys(variables, name) for name in names]


def parse_gcn_arch(name: str) -> str:
    """Return the architecture in a gcnArchName, such as 'gfx90a' for 'gfx90a:sramecc+:xnack-'.

    Raises:
        HardwareError: the name does not begin with the name of a gfx architecture.
    """
    base = name.split(":", 1)[0]
    if not re.fullmatch(r"gfx[0-9a-f]{3,5}", base):
        raise HardwareError(
            f"{name!r} is not an AMD architecture name.",
            where="gcnArchName of the torch device properties",
            next_step="Check that this is a ROCm build: python -c 'import torch; print(torch.version.hip)'",
        )
    return base


def fingerprint(facts: MachineFacts | None = None) -> dict:
    """Return the environment of a measurement as JSON values.

    The host name and the UUIDs of GPUs are hashed, also in the variables that select GPUs. The fingerprint contains no paths and
    no user names.

    Keys: python, torch, cuda, hip, driver, collectives (version of NCCL or RCCL), collective_settings (environment variables of
    that library), packages, os, kernel, machine, cpu, gpus, visible_devices, host_hash, source (hash, commit, modified).
    """
    content = asdict(facts or collect_facts())
    for gpu in content["gpus"]:
        gpu["uuid"] = gpu["uuid"] and hashlib.sha256(gpu["uuid"].encode()).hexdigest()[:12]
    content["visible_devices"] = {name: _without_uuids(value) for name, value in content["visible_devices"].items()}
    content["source"] = {"hash": source_hash(), **git_state()}
    return content


def _without_uuids(selection: str) -> str:
    """Return a list of devices, such as "0,1" or "GPU-8f7a…", in which everything but numbers is hashed."""
    devices = (device.strip() for device in selection.split(","))
    return ",".join(one if re.fullmatch(r"-?\d*", one) else hashlib.sha256(one.encode()).hexdigest()[:12] for one in devices)


def facts_of(content: dict, place: str = "fingerprint") -> MachineFacts:
    """Return the facts in a fingerprint. The fingerprint may come from another machine. The UUIDs of GPUs stay hashed.

    Args:
        content: the JSON values that `fingerprint` returned.
        place: name of the fingerprint for error messages.

    Raises:
        HyperionError: a field is unknown, missing or of another type. The message names the field.
    """
    return read_form(MachineFacts, {name: value for name, value in content.items() if name != "source"}, place)


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
        # The length is hashed too, so that different sets of files cannot give the same byte sequence.
        digest.update(f"{name}\0{len(content)}\0".encode())
        digest.update(content)
    return digest.hexdigest()


def git_state(root: Path | None = None, within: str = "hyperion") -> dict[str, str | bool | None]:
    """Return the commit of the checkout, and whether files in the folder `within` differ from this commit.

    If git does not track `within`, the commit is read from the file SOURCE_COMMIT in `root`. Unknown values are None. This
    function raises no errors.

    Args:
        root: folder of the checkout; default: the checkout of this package.
        within: folder relative to `root`.
    """
    root = root or package_folder().parent
    if (root / ".git").exists():
        commit = _git(root, "rev-parse", "HEAD")
        if commit and _git(root, "ls-files", "--", within):  # otherwise the files are an untracked copy inside another repository
            changes = _git(root, "status", "--porcelain", "--", within)
            return {"commit": commit, "modified": None if changes is None else bool(changes)}
    try:
        stated = (root / "SOURCE_COMMIT").read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError):
        stated = ""
    return {"commit": stated or None, "modified": None}


def _detect_gpu(facts: MachineFacts, gpu: GpuFacts, index: int) -> Device:
    rocm = bool(facts.hip)
    arch = parse_gcn_arch(gpu.gcn_arch_name or "") if rocm else f"sm_{gpu.major}{gpu.minor}"
    # torch reports only the size of the L2 cache. An Infinity Cache (256 MiB on MI300X) is larger and must also be flushed.
    caches = [size for size in (gpu.l2_cache_bytes, data_sheet_cache_bytes(gpu.name, arch)) if size]
    return Device(
        kind="rocm" if rocm else "cuda",
        index=index,
        name=gpu.name,
        arch=arch,
        memory_bytes=gpu.total_memory_bytes,
        compute_units=gpu.multi_processor_count,
        last_level_cache_bytes=max(caches, default=None),
        torch_device=f"cuda:{index}",
        max_clock_mhz=gpu.max_clock_mhz,
        uuid=gpu.uuid,
        pci_address=gpu.pci_address,
        vendor="AMD" if rocm else "NVIDIA",
    )


def _module(place: int, name: str, left: list[str]) -> int:
    """Return the number of the MI250X module to which a die belongs. Module n contains the dies 2n and 2n + 1.

    Args:
        place: index of the die in the list of visible dies. It is used if `name` is not a number.
        name: number or UUID of the die.
        left: numbers or UUIDs of the dies that ROCR_VISIBLE_DEVICES makes visible, or an empty list for all dies.
    """
    number = int(name) if name.isdecimal() else place
    if number < len(left) and left[number].isdecimal():
        number = int(left[number])
    return number // 2


def _read_gpus() -> tuple[tuple[GpuFacts, ...], str | None, str | None]:
    """Return the visible GPUs, torch's error message if it cannot use them, and the version of the collectives library."""
    import torch

    if not torch.cuda.is_available():
        return (), None, None
    try:
        gpus = tuple(_read_gpu(torch.cuda.get_device_properties(i)) for i in range(torch.cuda.device_count()))
    except RuntimeError as error:
        return (), str(error).splitlines()[0], None
    return gpus, None, _collectives_version(torch) if gpus else None


def _read_gpu(properties, root: Path = Path("/")) -> GpuFacts:
    clock_khz = getattr(properties, "clock_rate", None)
    memory_clock_khz = getattr(properties, "memory_clock_rate", None)
    uuid = getattr(properties, "uuid", None)
    name: str = properties.name
    address = _pci_address(properties)
    if name.strip() in ("", "AMD Radeon Graphics") and address:
        name = AMD_NAMES.get(system_text(root / "sys/bus/pci/devices" / address / "device") or "", name)
    return GpuFacts(
        name=name,
        total_memory_bytes=properties.total_memory,
        multi_processor_count=properties.multi_processor_count,
        major=properties.major,
        minor=properties.minor,
        gcn_arch_name=getattr(properties, "gcnArchName", None),
        l2_cache_bytes=getattr(properties, "L2_cache_size", None),
        uuid=str(uuid) if uuid is not None else None,
        pci_address=address,
        max_clock_mhz=clock_khz / 1000 if clock_khz else None,
        memory_clock_mhz=memory_clock_khz / 1000 if memory_clock_khz else None,
        memory_bus_bits=getattr(properties, "memory_bus_width", None) or None,
    )


def _pci_address(properties) -> str | None:
    """Return the PCI address as sysfs writes it: `domain:bus:device.function`. The function of a GPU is 0."""
    parts = [getattr(properties, f"pci_{part}_id", None) for part in ("domain", "bus", "device")]
    if any(part is None for part in parts):
        return None
    return "{:04x}:{:02x}:{:02x}.0".format(*parts)


def _driver_version() -> str | None:
    """Return the version of the GPU driver, or None if it is unknown.

    NVIDIA's driver reports its version in /proc. AMD's driver reports it in /sys, but only if it was built out of tree.
    """
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
    """Return the environment variables that configure collectives, as a dict that maps names to values.

    A value that may contain a path, a host name or an address is replaced by its hash, because the result may be published.
    Different values have different hashes.
    """
    names = sorted(name for name in variables if name.startswith(_PREFIXES) or name in _OTHER_SETTINGS)
    return {name: _hashed(variables[name]) if _private(name, variables[name]) else variables[name] for name in names}


def _private(name: str, value: str) -> bool:
    if name in _HOST_SETTINGS or not _PLAIN.fullmatch(value) or _ADDRESS.search(value):
        return True
    # The host name must be a whole word: a host named "a" must not hide every value with this letter.
    host = re.escape(socket.gethostname().partition(".")[0])
    return bool(host and re.search(rf"(?<![A-Za-z0-9]){host}(?![A-Za-z0-9])", value, re.IGNORECASE))


def _hashed(value: str) -> str:
    return f"hidden (sha256 {hashlib.sha256(value.encode(errors='surrogateescape')).hexdigest()[:12]})"


def _git(root: Path, *arguments: str) -> str | None:
    """Return the output of a git command, or None if git is not installed, times out or fails.

    For example, git fails if there is no commit yet, or if the checkout belongs to another user.
    """
    try:
        done = subprocess.run(["git", "-C", str(root), *arguments], capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()
