"""Which build of torch to install, from where, and whether an installed build fits the machine.

The only file that knows PyTorch's package indexes and the pinned versions of torch and torchvision.
"""

import platform
import re
from collections.abc import Callable
from dataclasses import dataclass

from hyperion.errors import HyperionError
from hyperion.install.machine import Machine

TORCH, TORCHVISION = "2.13.0", "0.28.0"
CPU_INDEX = "https://download.pytorch.org/whl/cpu"
ROCM_INDEX = "https://download.pytorch.org/whl/rocm{major}.{minor}"
# A wheel brings its own ROCm libraries; they work with amdgpu drivers about a year older or newer than they are (AMD's
# user and kernel-space support matrix). So: the newest wheel at or below the machine's ROCm, else the oldest of its
# major version.
ROCM_WHEELS = {(7, 2): (TORCH, TORCHVISION), (7, 1): (TORCH, TORCHVISION), (6, 4): ("2.9.1", "0.24.1")}
MINIMUM_TORCH, MINIMUM_PYTHON = (2, 9), (3, 11)


@dataclass(frozen=True)
class Choice:
    """What is wanted. Two machines with equal choices can share an environment."""

    kind: str  # cpu | cuda | rocm
    version: tuple[int, int] | None = None  # of ROCm; of CUDA only where TORCH= names it
    explicit: bool = False  # named by TORCH=, so a build without GPU support is consented to
    staged: bool = False  # TORCH= names the version as well: set up here for a machine with that GPU

    @property
    def label(self) -> str:
        return self.kind + (".".join(map(str, self.version)) if self.version else "")


@dataclass(frozen=True)
class Build:
    """An installed torch, as its torch/version.py tells."""

    version: str
    cuda: str | None = None
    hip: str | None = None

    @property
    def kind(self) -> str:
        return "rocm" if self.hip else "cuda" if self.cuda else "cpu"

    def __str__(self) -> str:
        detail = {"rocm": f"hip {self.hip}", "cuda": f"cuda {self.cuda}"}.get(self.kind, "cuda None, hip None")
        return f"torch {self.version} ({self.kind} build: torch.version has {detail})"


@dataclass(frozen=True)
class Packages:
    """What to hand to pip: exact requirements, and the one index to use instead of pip's own configuration."""

    requirements: tuple[str, ...]
    index: str | None
    reason: str


def choose(machine: Machine, override: str = "") -> Choice:
    """The build for this machine, or the one that TORCH= asks for.

    Raises:
        HyperionError: TORCH= is not a build, or the hardware it needs is not here or not usable.
    """
    if not override:
        if machine.problem:
            raise HyperionError(machine.problem, where=machine.evidence, next_step=machine.remedy)
        version = _wheel_for(machine.rocm_version) if machine.kind == "rocm" else None
        return Choice(machine.kind, version)
    match = re.fullmatch(r"(cpu|cuda|rocm)(?:(\d+)\.(\d+))?", override)
    if not match or (match[1] == "cpu" and match[2]):
        raise HyperionError(
            f"TORCH={override} is not a build of torch",
            next_step="use TORCH=cpu, TORCH=cuda or TORCH=rocm; with a version, as TORCH=rocm7.2, on a login node",
        )
    kind, version = match[1], (int(match[2]), int(match[3])) if match[2] else None
    if kind == "rocm" and version and version not in ROCM_WHEELS:
        raise HyperionError(
            f"no wheel for ROCm {match[2]}.{match[3]} is known",
            where=f"TORCH={override}",
            next_step="use one of TORCH=" + ", ".join(f"rocm{major}.{minor}" for major, minor in ROCM_WHEELS),
        )
    if kind == "cpu" or version:
        return Choice(kind, version, explicit=True, staged=version is not None)
    return _explicit_gpu(machine, kind)


def _explicit_gpu(machine: Machine, kind: str) -> Choice:
    """TORCH=cuda or TORCH=rocm: asked for, so the hardware must be here to tell which version fits."""
    second_vendor = machine.note is not None and f"TORCH={kind}" in machine.note
    if machine.kind != kind and not second_vendor:
        name = {"rocm": "AMD", "cuda": "NVIDIA"}[kind]
        example = "rocm7.2" if kind == "rocm" else "cuda13.0"
        raise HyperionError(
            f"TORCH={kind} was asked for, but this machine shows no {name} GPU with a driver",
            where=machine.evidence,
            next_step=f"leave TORCH out; to set up on a login node for a GPU node, name the version: TORCH={example}",
        )
    if machine.problem:
        raise HyperionError(machine.problem, where=machine.evidence, next_step=machine.remedy)
    return Choice(kind, _wheel_for(machine.rocm_version) if kind == "rocm" else None, explicit=True)


def _wheel_for(installed: tuple[int, int] | None) -> tuple[int, int]:
    """The ROCm wheel for the machine's ROCm; the newest of all when it does not tell its version."""
    if installed is None:
        return max(ROCM_WHEELS)
    same_major = [wheel for wheel in ROCM_WHEELS if wheel[0] == installed[0]]
    at_or_below = [wheel for wheel in same_major or ROCM_WHEELS if wheel <= installed]
    if at_or_below:
        return max(at_or_below)
    if not same_major:
        oldest = ".".join(map(str, min(ROCM_WHEELS)))
        raise HyperionError(
            f"ROCm {'.'.join(map(str, installed))} is older than any wheel with torch >= 2.9 (ROCm {oldest})",
            where="/opt/rocm/.info/version",
            next_step="use a container or module that brings its own torch: make reproduce PYTHON=/path/to/python",
        )
    return min(same_major)


def plan_packages(choice: Choice, resolve: Callable[[tuple[str, ...]], dict]) -> Packages:
    """The packages for a choice.

    Args:
        choice: the wanted build.
        resolve: given requirements, returns pip's installation report for them under pip's own configuration
            (`pip install --dry-run --no-deps --report`), or an empty dict when pip finds none.
    """
    torch, torchvision = ROCM_WHEELS[choice.version] if choice.kind == "rocm" else (TORCH, TORCHVISION)
    requirements = (f"torch=={torch}", f"torchvision=={torchvision}")
    if choice.kind == "rocm":
        major, minor = choice.version
        return Packages(requirements, ROCM_INDEX.format(major=major, minor=minor), f"ROCm {major}.{minor} wheels")
    if choice.kind == "cuda":
        return Packages(requirements, None, "pip's own configuration, whose torch for Linux is a CUDA build")
    if platform.system() != "Linux" or is_cpu_build(resolve(requirements[:1])):
        return Packages(requirements, None, "pip's own configuration, which resolves to a CPU build")
    return Packages(requirements, CPU_INDEX, "PyTorch's CPU index, since pip's own configuration gives no CPU build")


def is_cpu_build(report: dict) -> bool:
    """Whether pip's report names a torch without GPU packages: local version +cpu, or none of NVIDIA's or ROCm's."""
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


def check_build(build: Build, machine: Machine, choice: Choice) -> None:
    """Refuse a build that does not match the hardware.

    Raises:
        HyperionError: with the build, the hardware seen and the way out.
    """
    version = tuple(int(part) for part in re.findall(r"\d+", build.version)[:2])
    if version < MINIMUM_TORCH:
        raise HyperionError(f"{build} is older than torch 2.9", next_step="use an environment with torch >= 2.9")
    if choice.staged:
        got = build.hip if choice.kind == "rocm" else build.cuda
        if build.kind != choice.kind or not (got or "").startswith(".".join(map(str, choice.version))):
            raise HyperionError(
                f"TORCH={choice.label} was asked for, but what is installed is {build}",
                next_step="look at `pip config list` for a find-links or index that gives another build of torch",
            )
        return
    if choice.kind == build.kind or (choice.explicit and choice.kind == "cpu"):
        return
    if choice.kind == "cpu":
        missing = "AMD" if build.kind == "rocm" else "NVIDIA"
        raise HyperionError(
            f"{build}, but this machine shows no {missing} GPU with a driver",
            where=machine.evidence,
            next_step="run on a GPU node, or say that the CPU is meant: TORCH=cpu",
        )
    name = "AMD" if choice.kind == "rocm" else "NVIDIA"
    raise HyperionError(
        f"{build} cannot use this machine's {name} GPU",
        where=machine.evidence,
        next_step=f"with PYTHON=, name an environment with a {choice.kind} build; without, look at `pip config list` "
        "for a find-links or index that gives another build; or say that the CPU is meant: TORCH=cpu",
    )
