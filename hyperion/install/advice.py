"""Recommend how to install PyTorch on this machine: from a wheel, in a container, with conda, or natively.

The recommendation depends on the driver, the GPU, and a dated table of the GPUs that vendors support.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any, Literal

from hyperion.errors import HyperionError
from hyperion.install.machine import ROCM_WHEEL_ARCHS, KernelFacts, decide
from hyperion.install.plan import (
    CPU_INDEX,
    CUDA_INDEX,
    CUDA_OF_PYPI,
    MINIMUM_PYTHON,
    MINIMUM_TORCH,
    ROCM_INDEX,
    ROCM_WHEELS,
    TORCH,
    TORCHVISION,
    choose,
    newest_cuda,
    older_cuda_wheel,
    support_tables,
)

_CONDA = "PyTorch itself publishes no conda packages since 2.6 (pytorch/pytorch issue 138506)"


@dataclass(frozen=True)
class Support:
    """What the vendor states about one architecture.

    Args:
        arch: architecture.
        level: 'supported', 'deprecated', 'unsupported', or 'unknown' if our table does not list the architecture.
        wheel: whether PyTorch's ROCm wheels have code for it.
        evidence: products, version, source and date of the statement.
    """

    arch: str
    level: Literal["supported", "deprecated", "unsupported", "unknown"]
    wheel: bool
    evidence: str


@dataclass(frozen=True)
class Way:
    """One way to install PyTorch, and whether it works on this machine.

    Args:
        kind: 'wheel', 'container', 'conda' or 'native'.
        verdict: 'recommended', 'possible', 'impossible' or 'unknown'.
        command: the command, or "".
        why: the reason for the verdict.
    """

    kind: Literal["wheel", "container", "conda", "native"]
    verdict: Literal["recommended", "possible", "impossible", "unknown"]
    command: str
    why: str


@dataclass(frozen=True)
class TrainingImage:
    """Description of a container image that a vendor documents for training. Hyperion never downloads an image.

    Args:
        name: name and tag of the image.
        archs, products: architectures and products for which it is documented.
        rocm, torch, python: versions in the image.
        pretraining, finetuning: models that the vendor has optimised in this image.
        source, date: document with these statements, and its date.
    """

    name: str
    archs: list[str]
    products: str
    rocm: str
    torch: str
    python: str
    pretraining: list[str]
    finetuning: list[str]
    source: str
    date: str

    @property
    def runs_hyperion(self) -> bool:
        """True if the Python and the torch in the image are new enough for this library."""
        return _version(self.python) >= MINIMUM_PYTHON and _version(self.torch) >= MINIMUM_TORCH


def oldest_nvidia_driver() -> int:
    """Return the oldest driver for which the table names a version of CUDA."""
    return min(entry["driver"] for entry in support_tables()["cuda"]["drivers"])


def support_of(arch: str) -> Support:
    """Return what AMD states about an architecture. An architecture that the table does not list is 'unknown'."""
    wheel = arch in ROCM_WHEEL_ARCHS
    for table in support_tables()["amd"]:
        for entry in table["archs"]:
            if entry["arch"] == arch:
                evidence = f"{entry['products']}: ROCm {table['rocm']}, {table['source']}, {table['date']}"
                return Support(arch, entry["level"], wheel, evidence)
    return Support(arch, "unknown", wheel, "not in the table support.toml")


def training_images(archs: Iterable[str]) -> list[TrainingImage]:
    """Return the images that a vendor documents for training on one of these architectures."""
    images = [TrainingImage(**entry) for entry in support_tables()["image"]]
    return [image for image in images if set(image.archs) & set(archs)]


def _version(text: str) -> tuple[int, ...]:
    return tuple(map(int, re.findall(r"\d+", text)[:2]))


def advise(facts: KernelFacts) -> list[Way]:
    """Return each way to install PyTorch on this machine, with a verdict and its reason. Nothing is installed or downloaded.

    Args:
        facts: facts about driver and GPUs.
    """
    machine = decide(facts)
    if machine.problem:
        why = f"{machine.problem}; {machine.remedy}"
        return [Way(kind, "impossible", "", why) for kind in ("wheel", "container", "conda", "native")]
    if machine.kind == "cuda":
        return _advise_nvidia(facts, machine.note or "")
    if facts.amd_archs:
        return _advise_amd(facts)
    # The machine has no GPU, or the driver of its GPU is not installed.
    note = machine.note or machine.evidence
    return [
        Way("wheel", "recommended", _pip(CPU_INDEX, TORCH, TORCHVISION), f"{note}; the CPU build"),
        Way("container", "possible", "", "any image with Python 3.11 or newer; a GPU image gains nothing"),
        Way("conda", "possible", "conda install pytorch-cpu -c conda-forge", f"{_CONDA}; conda-forge does"),
        Way("native", "possible", "", "packages of a distribution are often older than torch 2.9"),
    ]


def _pip(index: str, torch: str, torchvision: str) -> str:
    return f"pip install torch=={torch} torchvision=={torchvision} --index-url {index}"


def _advise_amd(facts: KernelFacts) -> list[Way]:
    archs = [support_of(arch) for arch in sorted(set(facts.amd_archs))]
    usable, lacking = [one for one in archs if one.wheel], [one.arch for one in archs if not one.wheel]
    stated = "; ".join(f"{one.arch} is {one.level} ({one.evidence})" for one in usable or archs)
    levels = {one.level for one in usable}
    image = "docker run --device=/dev/kfd --device=/dev/dri --group-add video --group-add render --ipc=host rocm/pytorch:latest"
    conda = Way("conda", "unknown", "", f"{_CONDA}; the wheel also works inside a conda environment")
    if not usable:
        return [
            Way("wheel", "impossible", "", f"PyTorch's ROCm wheels have no code for {', '.join(lacking)}; {stated}"),
            Way("container", "unknown", image, f"whether the image has code for {', '.join(lacking)} is unknown"),
            conda,
            Way("native", "unknown", f"PYTORCH_ROCM_ARCH={';'.join(lacking)} python setup.py develop", "a build from source"),
        ]
    if lacking:
        stated += f"; ignored, because the wheels have no code for it: {', '.join(lacking)}"
    try:
        version = choose(decide(facts)).version
    except HyperionError as error:
        wheel = Way("wheel", "impossible", "", f"{error.what}; {error.next_step}")
        return [wheel, Way("container", "possible", image, stated), conda, Way("native", "possible", "", "a build from source")]
    assert version is not None  # every ROCm choice has a version
    command = _pip(ROCM_INDEX.format(major=version[0], minor=version[1]), *ROCM_WHEELS[version])
    verdict = "recommended" if levels == {"supported"} else "unknown" if "unknown" in levels else "possible"
    return [
        Way("wheel", verdict, command, f"{stated}; PyPI has no ROCm wheel of torch, so the index is needed"),
        Way("container", "possible", image, "the image contains its own ROCm; it is never downloaded by Hyperion"),
        conda,
        Way("native", "possible", "", "ROCm in /opt/rocm is needed to compile extensions, not to run the wheel"),
    ]


def least_nvidia_driver(cuda: str) -> int | None:
    """Return the least driver of a version of CUDA, such as 580 for "13.0", or None if the table does not contain it."""
    major = int(cuda.split(".")[0])
    return next((entry["driver"] for entry in support_tables()["cuda"]["drivers"] if entry["major"] == major), None)


def _advise_nvidia(facts: KernelFacts, note: str) -> list[Way]:
    """Return the ways for a machine with an NVIDIA driver. `note` is a remark about other GPUs, or ""."""
    wheel = _cuda_wheel(facts.nvidia_driver or "")
    return [
        replace(wheel, why="; ".join(filter(None, (wheel.why, note)))),
        Way("container", "possible", "docker run --gpus all --ipc=host pytorch/pytorch", "needs nvidia-container-toolkit"),
        Way("conda", "possible", "conda install pytorch-gpu -c conda-forge", f"{_CONDA}; conda-forge does"),
        Way("native", "possible", "", "a CUDA toolkit is needed to compile extensions, not to run the wheel"),
    ]


def _cuda_wheel(driver: str) -> Way:
    """Return the advice about PyTorch's wheels for a version of the NVIDIA driver, which is "" if it is unknown."""
    if not driver:
        return Way("wheel", "unknown", "", "the version of the NVIDIA driver is unknown")
    major = newest_cuda(driver)
    if major is None:
        why = f"driver {driver} is older than {oldest_nvidia_driver()}, the least for CUDA 12: update it"
        return Way("wheel", "impossible", "", why)
    table = support_tables()["cuda"]
    why = f"driver {driver} runs CUDA {major}.x ({table['source']}, {table['date']})"
    older = older_cuda_wheel(driver)
    if older is None:
        return Way("wheel", "recommended", f"pip install torch=={TORCH} torchvision=={TORCHVISION}", why)
    why += f"; the wheels on PyPI need CUDA {CUDA_OF_PYPI}, so update the driver, or use PyTorch's index for CUDA {major}"
    return _older_cuda_way(older, why)


def _older_cuda_way(wheel: dict[str, Any], why: str) -> Way:
    """Return the advice about the wheels for a CUDA that is older than that of the wheels on PyPI.

    Args:
        wheel: entry of the table.
        why: reason for these wheels.
    """
    major, minor = wheel["cuda"].split(".")
    index = CUDA_INDEX.format(major=major, minor=minor)
    stated = f"{wheel['source']}, {wheel['date']}"
    if ".".join(TORCH.split(".")[:2]) not in wheel["releases"]:
        why += f": whether {index} contains torch {TORCH} is unknown, so look there for its newest version ({stated})"
        return Way("wheel", "unknown", "", why)
    return Way("wheel", "possible", _pip(index, TORCH, TORCHVISION), f"{why}; code for {wheel['archs']} ({stated})")
