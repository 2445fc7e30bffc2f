"""Choose the torch build to install and its package index, and check whether an installed build matches the machine.

Only this file contains PyTorch's package indexes and the pinned versions of torch and torchvision. The table support.toml states
which NVIDIA driver runs which CUDA, and for which CUDA there are wheels.
"""

import functools
import platform
import re
import tomllib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hyperion.errors import HyperionError
from hyperion.install.machine import DetectedAccelerator

TORCH, TORCHVISION = "2.13.0", "0.28.0"
CPU_INDEX = "https://download.pytorch.org/whl/cpu"
ROCM_INDEX = "https://download.pytorch.org/whl/rocm{major}.{minor}"
CUDA_INDEX = "https://download.pytorch.org/whl/cu{major}{minor}"  # the wheels for the newest CUDA are on PyPI, too
CUDA_OF_PYPI = 13  # CUDA major version of the torch 2.13 wheels on PyPI
# Versions of (torch, torchvision) by ROCm version. A wheel contains its own ROCm libraries, which work with amdgpu drivers that
# are up to about one year older or newer (AMD's user and kernel-space support matrix). Among the wheels with the major version of
# the machine's ROCm, the newest one that is not newer is chosen, else the oldest one. If there is no such wheel, the newest older
# wheel is chosen.
ROCM_WHEELS = {(7, 2): (TORCH, TORCHVISION), (7, 1): (TORCH, TORCHVISION), (6, 4): ("2.9.1", "0.24.1")}
MINIMUM_TORCH, MINIMUM_PYTHON = (2, 9), (3, 11)


@dataclass(frozen=True)
class Choice:
    """The chosen torch build. Machines with equal choices can share an environment."""

    kind: str  # cpu | cuda | rocm
    version: tuple[int, int] | None = None  # version of ROCm or CUDA; None on CUDA means the wheels on PyPI
    explicit: bool = False  # whether the user requested the build with TORCH=
    staged: bool = False  # whether TORCH= contains a version: the environment is then for another machine with such a GPU

    @property
    def label(self) -> str:
        """The build as a value of TORCH=, such as cpu, cuda or rocm7.2."""
        return self.kind + (".".join(map(str, self.version)) if self.version else "")


@dataclass(frozen=True)
class Build:
    """The build of an installed torch, read from its torch/version.py.

    Attributes:
        version: version of torch.
        cuda: CUDA version, or None if the build is not for CUDA.
        hip: HIP version, or None if the build is not for ROCm.
    """

    version: str
    cuda: str | None = None
    hip: str | None = None

    @property
    def kind(self) -> str:
        """Kind of accelerator for which torch is built: rocm, cuda or cpu."""
        return "rocm" if self.hip else "cuda" if self.cuda else "cpu"

    def __str__(self) -> str:
        detail = {"rocm": f"hip {self.hip}", "cuda": f"cuda {self.cuda}"}.get(self.kind, "cuda None, hip None")
        return f"torch {self.version} ({self.kind} build: torch.version has {detail})"


@dataclass(frozen=True)
class Packages:
    """Packages to install with pip.

    Attributes:
        requirements: requirements with exact versions.
        index: package index to use. None means that of pip's own configuration.
        reason: description of the source of the packages, for the user.
    """

    requirements: tuple[str, ...]
    index: str | None
    reason: str


def choose(machine: DetectedAccelerator, override: str = "") -> Choice:
    """Choose the build for this machine, or the build requested by TORCH=.

    Args:
        machine: the accelerator of this machine.
        override: value of TORCH=; "" if TORCH= is not given.

    Raises:
        HyperionError: TORCH= does not name a build, or the machine has no usable GPU for the build.
    """
    if not override:
        if machine.problem:
            raise HyperionError(machine.problem, where=machine.evidence, next_step=machine.remedy)
        return Choice(machine.kind, _version_for(machine, machine.kind))
    match = re.fullmatch(r"(cpu|cuda|rocm)(?:(\d+)\.(\d+))?", override)
    if not match or (match[1] == "cpu" and match[2]):
        raise HyperionError(
            f"TORCH={override} is not a build of torch",
            next_step="use TORCH=cpu, TORCH=cuda or TORCH=rocm; on a login node, add a version, for example TORCH=rocm7.2",
        )
    kind, version = match[1], (int(match[2]), int(match[3])) if match[2] else None
    if kind == "rocm" and version and version not in ROCM_WHEELS:
        raise HyperionError(
            f"there is no known wheel for ROCm {match[2]}.{match[3]}",
            where=f"TORCH={override}",
            next_step="use one of TORCH=" + ", ".join(f"rocm{major}.{minor}" for major, minor in ROCM_WHEELS),
        )
    older_cudas = [entry["cuda"] for entry in support_tables()["cuda_wheel"]]
    if kind == "cuda" and version and version[0] != CUDA_OF_PYPI and f"{match[2]}.{match[3]}" not in older_cudas:
        raise HyperionError(
            f"there is no known wheel for CUDA {match[2]}.{match[3]}",
            where=f"TORCH={override}",
            next_step="use one of TORCH=" + ", ".join(f"cuda{cuda}" for cuda in (f"{CUDA_OF_PYPI}.0", *older_cudas)),
        )
    if kind == "cpu" or version:
        return Choice(kind, version, explicit=True, staged=version is not None)
    return _explicit_gpu(machine, kind)


def _explicit_gpu(machine: DetectedAccelerator, kind: str) -> Choice:
    """Choose the build for TORCH=cuda or TORCH=rocm without a version, depending on the hardware of this machine."""
    second_vendor = machine.note is not None and f"TORCH={kind}" in machine.note
    if machine.kind != kind and not second_vendor:
        name = {"rocm": "AMD", "cuda": "NVIDIA"}[kind]
        example = "rocm7.2" if kind == "rocm" else "cuda13.0"
        raise HyperionError(
            f"TORCH={kind} was requested, but this machine has no {name} GPU with a driver",
            where=machine.evidence,
            next_step=f"leave TORCH out; to set up on a login node for a GPU node, add the version: TORCH={example}",
        )
    if machine.problem:
        raise HyperionError(machine.problem, where=machine.evidence, next_step=machine.remedy)
    return Choice(kind, _version_for(machine, kind), explicit=True)


def _version_for(machine: DetectedAccelerator, kind: str) -> tuple[int, int] | None:
    """Return the version of ROCm or CUDA of the torch wheels for this machine. None on CUDA means the wheels on PyPI."""
    if kind == "rocm":
        return _rocm_wheel_for(machine.rocm_version)
    wheel = older_cuda_wheel(machine.nvidia_driver or "") if kind == "cuda" else None
    return _two_parts(wheel["cuda"]) if wheel and _two_parts(TORCH) in map(_two_parts, wheel["releases"]) else None


def _two_parts(version: str) -> tuple[int, int]:
    major, minor = version.split(".")[:2]
    return int(major), int(minor)


@functools.cache
def support_tables() -> dict[str, Any]:
    """Return the content of support.toml."""
    return tomllib.loads(Path(__file__).with_name("support.toml").read_text(encoding="utf-8"))


def newest_cuda(driver: str) -> int | None:
    """Return the newest major version of CUDA that runs with an NVIDIA driver, or None if the table contains none.

    Args:
        driver: version of the driver, such as "580.159.04".
    """
    major = int(driver.split(".")[0])
    return next((entry["major"] for entry in support_tables()["cuda"]["drivers"] if major >= entry["driver"]), None)


def older_cuda_wheel(driver: str) -> dict[str, Any] | None:
    """Return the wheels for an NVIDIA driver on which the wheels on PyPI do not run, as an entry of the table.

    Args:
        driver: version of the driver, or "" if it is unknown.

    Returns:
        The entry, or None if the driver runs the wheels on PyPI, is unknown, or is too old for all wheels.
    """
    cuda = newest_cuda(driver) if driver else None
    if cuda is None or cuda == CUDA_OF_PYPI:
        return None
    return next((entry for entry in support_tables()["cuda_wheel"] if entry["cuda"].startswith(f"{cuda}.")), None)


def _rocm_wheel_for(installed: tuple[int, int] | None) -> tuple[int, int]:
    """Return the ROCm version of the torch wheel that fits this machine.

    If the ROCm version of the machine is unknown, return the ROCm version of the newest wheel.

    Raises:
        HyperionError: no wheel fits, because the ROCm of this machine is too old.
    """
    if installed is None:
        return max(ROCM_WHEELS)
    same_major = [wheel for wheel in ROCM_WHEELS if wheel[0] == installed[0]]
    at_or_below = [wheel for wheel in same_major or ROCM_WHEELS if wheel <= installed]
    if at_or_below:
        return max(at_or_below)
    if not same_major:
        oldest = ".".join(map(str, min(ROCM_WHEELS)))
        raise HyperionError(
            f"ROCm {'.'.join(map(str, installed))} is too old: the oldest wheel with torch >= 2.9 needs ROCm {oldest}",
            where="/opt/rocm/.info/version",
            next_step="use a container or module that contains torch: make reproduce PYTHON=/path/to/python",
        )
    return min(same_major)


def plan_packages(choice: Choice, resolve: Callable[[tuple[str, ...]], dict]) -> Packages:
    """Return the packages to install for a choice.

    Args:
        choice: the chosen build.
        resolve: function that takes requirements and returns the report of a pip dry run (`pip install --dry-run --no-deps
            --report`) with pip's own configuration. It returns {} if pip finds no package.
    """
    if choice.kind == "rocm":
        assert choice.version is not None, "every ROCm build that choose() returns has a version"
        torch, torchvision = ROCM_WHEELS[choice.version]
        major, minor = choice.version
        index = ROCM_INDEX.format(major=major, minor=minor)
        return Packages((f"torch=={torch}", f"torchvision=={torchvision}"), index, f"ROCm {major}.{minor} wheels")
    requirements = (f"torch=={TORCH}", f"torchvision=={TORCHVISION}")
    if choice.kind == "cuda" and choice.version and choice.version[0] != CUDA_OF_PYPI:
        major, minor = choice.version
        return Packages(requirements, CUDA_INDEX.format(major=major, minor=minor), f"CUDA {major}.{minor} wheels")
    if choice.kind == "cuda":
        return Packages(requirements, None, "pip's own configuration, whose torch for Linux is a CUDA build")
    if platform.system() != "Linux" or is_cpu_build(resolve(requirements[:1])):
        return Packages(requirements, None, "pip's own configuration, which resolves to a CPU build")
    return Packages(requirements, CPU_INDEX, "PyTorch's CPU index, because pip's own configuration gives no CPU build")


def is_cpu_build(report: dict) -> bool:
    """Return True if the torch in pip's report is a CPU build: its local version starts with cpu, or it needs no GPU packages."""
    for item in report.get("install", ()):
        metadata = item["metadata"]
        if metadata["name"] != "torch":
            continue
        local = metadata["version"].partition("+")[2]
        if local:
            return local.startswith("cpu")
        needs = [need for need in metadata.get("requires_dist", ()) if "extra ==" not in need]
        return not any(re.match(r"(nvidia|cuda|triton|pytorch-triton|rocm)", need) for need in needs)
    return False


def check_build(build: Build, machine: DetectedAccelerator, choice: Choice) -> None:
    """Check that a build matches the hardware.

    Raises:
        HyperionError: they do not match. The message names the build, the detected hardware and the next step.
    """
    version = tuple(int(part) for part in re.findall(r"\d+", build.version)[:2])
    if version < MINIMUM_TORCH:
        raise HyperionError(f"{build} is older than torch 2.9", next_step="use an environment with torch >= 2.9")
    if choice.staged:
        installed = (build.hip if choice.kind == "rocm" else build.cuda) or ""
        requested = choice.label.removeprefix(choice.kind)
        if build.kind != choice.kind or not installed.startswith(requested):
            raise HyperionError(
                f"TORCH={choice.label} was requested, but {build} is installed",
                next_step="check `pip config list` for a find-links or index option that gives another build of torch",
            )
        return
    if choice.kind == build.kind or (choice.explicit and choice.kind == "cpu"):
        return
    if choice.kind == "cpu":
        missing = "AMD" if build.kind == "rocm" else "NVIDIA"
        raise HyperionError(
            f"{build} is installed, but this machine has no {missing} GPU with a driver",
            where=machine.evidence,
            next_step="run on a GPU node, or use the CPU: TORCH=cpu",
        )
    name = "AMD" if choice.kind == "rocm" else "NVIDIA"
    raise HyperionError(
        f"{build} cannot use this machine's {name} GPU",
        where=machine.evidence,
        next_step=f"if PYTHON= is set, use an environment with a {choice.kind} build; if not, check `pip config list` for a "
        "find-links or index option that gives another build; or use the CPU: TORCH=cpu",
    )
