"""Detect the accelerator of this machine from files of the Linux kernel, without torch or vendor tools."""

import os
import platform
import re
from dataclasses import dataclass
from pathlib import Path

AMD, NVIDIA = "0x1002", "0x10de"
# PCI display classes (PCI Code and ID Assignment): VGA 0x0300, 3D 0x0302, other display 0x0380, accelerator 0x1200.
DISPLAY_CLASSES = ("0x0300", "0x0302", "0x0380", "0x1200")
COMPUTE_CLASSES = ("0x0302", "0x0380", "0x1200")  # classes of data-centre GPUs

# Architectures in PyTorch's ROCm wheels: PYTORCH_ROCM_ARCH in pytorch/pytorch, branch release/2.13, .ci/docker/manywheel/build.sh
# (read on 2026-11-28). gfx1103 is new in 2.13.
ROCM_WHEEL_ARCHS = {
    "gfx900",
    "gfx906",
    "gfx908",
    "gfx90a",
    "gfx942",
    "gfx950",
    "gfx1030",
    "gfx1100",
    "gfx1101",
    "gfx1102",
    "gfx1103",
    "gfx1150",
    "gfx1151",
    "gfx1200",
    "gfx1201",
}


@dataclass(frozen=True)
class KernelFacts:
    """Facts about the accelerators of a machine, read from files."""

    system: str = "Linux"
    amd_archs: tuple[str, ...] = ()  # architecture of each GPU that the amdgpu driver lists, e.g. ("gfx90a", "gfx90a")
    kfd: str = "absent"  # state of /dev/kfd, which every ROCm program opens: "absent", "ok" or "denied"
    rocm_version: tuple[int, int] | None = None  # version of the installed ROCm, e.g. (7, 1)
    nvidia_driver: str | None = None  # e.g. "580.159.04"; "" if the driver is loaded but its version is unknown
    pci: tuple[tuple[str, str], ...] = ()  # (vendor, class) of each display device on the PCI bus


@dataclass(frozen=True)
class DetectedAccelerator:
    """The accelerator of this machine, for which a torch build is chosen. Its kind is "cpu" if there is no accelerator."""

    kind: str  # rocm | cuda | cpu
    evidence: str
    rocm_version: tuple[int, int] | None = None
    nvidia_driver: str | None = None  # "" if its version is unknown
    note: str | None = None  # remark for the user, for example that a GPU of another vendor is also present
    problem: str | None = None  # reason why the GPU of the machine cannot be used
    remedy: str | None = None  # how to solve the problem


def collect_facts(root: Path = Path("/"), system: str | None = None) -> KernelFacts:
    """Read the facts from the files below `root`. By default, these are the files of this machine."""
    return KernelFacts(
        system=system or platform.system(),
        amd_archs=_kfd_archs(root),
        kfd=_kfd_access(root / "dev/kfd"),
        rocm_version=_rocm_version(root),
        nvidia_driver=_nvidia_driver(root),
        pci=_pci_displays(root),
    )


def _read(path: Path) -> str:
    """Return the text of a file, or "" if it is missing or unreadable."""
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""


def _kfd_archs(root: Path) -> tuple[str, ...]:
    """Return the architectures of the GPUs in the amdgpu driver's topology.

    A node with SIMD units is a GPU. The driver writes the architecture as a number: 90010 means gfx90a.
    """
    archs = []
    for properties in sorted(root.glob("sys/class/kfd/kfd/topology/nodes/*/properties")):
        values = dict(line.split(None, 1) for line in _read(properties).splitlines() if " " in line)
        version = int(values.get("gfx_target_version", "0"))
        if int(values.get("simd_count", "0")) and version:
            archs.append(f"gfx{version // 10000}{version // 100 % 100}{version % 100:x}")  # the stepping is hexadecimal
    return tuple(archs)


def _kfd_access(path: Path) -> str:
    if not path.exists():
        return "absent"
    return "ok" if os.access(path, os.R_OK | os.W_OK) else "denied"


def _rocm_version(root: Path) -> tuple[int, int] | None:
    """Return the major and minor version of the newest ROCm in /opt, or None if there is none."""
    texts = [_read(path) for path in root.glob("opt/rocm*/.info/version")]
    versions = [match for match in (re.match(r"(\d+)\.(\d+)", text) for text in texts) if match]
    return max(((int(match[1]), int(match[2])) for match in versions), default=None)


def _nvidia_driver(root: Path) -> str | None:
    match = re.search(r"Kernel Module\b.*?\s(\d+\.[\d.]+)\s", _read(root / "proc/driver/nvidia/version"))
    if match:
        return match[1]
    return "" if (root / "dev/nvidia0").exists() or (root / "proc/driver/nvidia/gpus").is_dir() else None


def _pci_displays(root: Path) -> tuple[tuple[str, str], ...]:
    displays = []
    for device in sorted(root.glob("sys/bus/pci/devices/*")):
        vendor, kind = _read(device / "vendor").strip(), _read(device / "class").strip()[:6]
        if vendor in (AMD, NVIDIA) and kind in DISPLAY_CLASSES:
            displays.append((vendor, kind))
    return tuple(displays)


def decide(facts: KernelFacts) -> DetectedAccelerator:
    """Decide which accelerator to use.

    If the machine has a data-centre GPU that cannot be used, the CPU is not chosen, and the attribute `problem` of the result
    says why the GPU cannot be used.
    """
    if facts.system != "Linux":
        return DetectedAccelerator("cpu", f"{facts.system}: GPU builds are set up on Linux only")
    usable = sorted({arch for arch in facts.amd_archs if arch in ROCM_WHEEL_ARCHS})
    if facts.nvidia_driver is not None:
        note = f"there is also an AMD GPU ({', '.join(usable)}): TORCH=rocm chooses it" if usable else None
        evidence = f"NVIDIA driver {facts.nvidia_driver or 'loaded'}"
        return DetectedAccelerator("cuda", evidence, nvidia_driver=facts.nvidia_driver, note=note)
    if usable:
        return _decide_amd(facts, f"{len(facts.amd_archs)} AMD GPU(s), {', '.join(usable)}")
    note = None
    if facts.amd_archs:
        note = f"PyTorch's ROCm wheels do not support {', '.join(sorted(set(facts.amd_archs)))}, so the CPU is used"
    return _decide_without_driver(facts, note)


def _decide_amd(facts: KernelFacts, evidence: str) -> DetectedAccelerator:
    problem = remedy = None
    if facts.kfd == "denied":
        problem = "this user may not open /dev/kfd, the device file of the AMD GPU"
        remedy = "add the user to the groups render and video and log in again, or run on the CPU with TORCH=cpu"
    elif facts.kfd == "absent":
        problem = "the amdgpu driver lists an AMD GPU, but /dev/kfd does not exist"
        remedy = "start the container with --device=/dev/kfd --device=/dev/dri, or run on the CPU with TORCH=cpu"
    return DetectedAccelerator("rocm", evidence, rocm_version=facts.rocm_version, problem=problem, remedy=remedy)


def _decide_without_driver(facts: KernelFacts, note: str | None) -> DetectedAccelerator:
    """Choose the accelerator of a machine on which no GPU driver is loaded.

    If a data-centre GPU is on the PCI bus, the result names this GPU, and its `problem` says that the driver is missing. If there
    is only a desktop display card, the result is the CPU with a `note`.
    """
    for vendor, kind in facts.pci:
        name, flags = ("AMD", "--device=/dev/kfd --device=/dev/dri") if vendor == AMD else ("NVIDIA", "--gpus all")
        if kind in COMPUTE_CLASSES and not facts.amd_archs:
            return DetectedAccelerator(
                "rocm" if vendor == AMD else "cuda",
                f"PCI device of vendor {vendor}, class {kind}",
                rocm_version=facts.rocm_version,
                problem=f"an {name} GPU is on the PCI bus, but its driver is not visible here",
                remedy=f"load the driver, start the container with {flags}, or run on the CPU with TORCH=cpu",
            )
        note = note or f"an {name} display card is on the PCI bus, but it has no compute driver, so the CPU is used"
    return DetectedAccelerator("cpu", "no AMD or NVIDIA GPU with a driver", note=note)
