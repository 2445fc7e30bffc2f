"""The choice of a build, where it comes from, and the refusal of builds that do not fit the machine."""

import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hyperion.errors import HyperionError
from hyperion.install import environment, plan
from hyperion.install.machine import DetectedAccelerator
from hyperion.install.plan import Build, Choice, check_build, choose, plan_packages

ROOT = Path(__file__).resolve().parents[2]
CPU, CUDA, ROCM = Build("2.13.0+cpu"), Build("2.13.0", cuda="13.0"), Build("2.13.0+rocm7.2", hip="7.2.53211")
NO_GPU = DetectedAccelerator("cpu", "no AMD or NVIDIA GPU with a driver")
AMD = DetectedAccelerator("rocm", "8 AMD GPU(s), gfx90a", rocm_version=(7, 1))
NVIDIA = DetectedAccelerator("cuda", "NVIDIA driver 580.159.04", nvidia_driver="580.159.04")


def report(version: str, needs: list[str] | None = None) -> dict:
    """What `pip install --dry-run --report` writes, cut to the fields that are read."""
    metadata = {"name": "torch", "version": version, "requires_dist": needs or []}
    return {"version": "1", "install": [{"metadata": metadata}]}


CUDA_NEEDS = ["filelock", "nvidia-nccl-cu13==2.29.3; platform_system == 'Linux'", "triton==3.7.1"]


@pytest.mark.parametrize(
    ("found", "index"),
    [
        (report("2.13.0+cpu"), None),
        (report("2.13.0", ["filelock", "sympy>=1.13.3", 'optree>=0.13; extra == "optree"']), None),
        (report("2.13.0", CUDA_NEEDS), plan.CPU_INDEX),
        (report("2.13.0+cu130"), plan.CPU_INDEX),
        (report("2.13.0+rocm7.2"), plan.CPU_INDEX),
        ({}, plan.CPU_INDEX),
        ({"install": []}, plan.CPU_INDEX),
    ],
)
def test_a_cpu_setup_trusts_pips_configuration_only_for_a_cpu_build(found, index):
    asked = []
    packages = plan_packages(Choice("cpu"), lambda wanted: asked.append(wanted) or found)
    assert packages.index == index
    assert asked == [(f"torch=={plan.TORCH}",)]
    assert packages.requirements == (f"torch=={plan.TORCH}", f"torchvision=={plan.TORCHVISION}")


def test_gpu_plans_ask_pip_nothing():
    def refuse(wanted):
        raise AssertionError(f"pip was asked for {wanted}")

    assert plan_packages(Choice("cuda"), refuse).index is None
    rocm = plan_packages(Choice("rocm", (6, 4)), refuse)
    assert rocm.index.endswith("/rocm6.4") and rocm.requirements == ("torch==2.9.1", "torchvision==0.24.1")


@pytest.mark.parametrize(
    ("driver", "label", "index"),
    [
        ("580.65.06", "cuda", None),
        ("600.1", "cuda", None),
        ("579.99", "cuda12.6", plan.CUDA_INDEX.format(major=12, minor=6)),
        ("525.60.13", "cuda12.6", plan.CUDA_INDEX.format(major=12, minor=6)),
        ("524.99", "cuda", None),  # no wheel runs with it, unless a container brings a newer CUDA driver library
        ("", "cuda", None),
        (None, "cuda", None),
    ],
)
@pytest.mark.parametrize("override", ["", "cuda"])
def test_an_older_nvidia_driver_gets_the_wheels_of_an_older_cuda(driver, label, index, override):
    choice = choose(replace(NVIDIA, nvidia_driver=driver), override)
    assert choice.label == label and not choice.staged
    packages = plan_packages(choice, lambda wanted: {})
    assert packages.requirements == (f"torch=={plan.TORCH}", f"torchvision=={plan.TORCHVISION}")
    assert packages.index == index


def test_wheels_of_an_older_cuda_are_chosen_only_for_the_releases_that_have_them(monkeypatch):
    monkeypatch.setattr(plan, "TORCH", "2.99.0")
    assert choose(replace(NVIDIA, nvidia_driver="550.90")).version is None


def test_a_staged_build_for_an_older_cuda_comes_from_its_index():
    assert plan_packages(choose(NO_GPU, "cuda12.6"), lambda wanted: {}).index.endswith("/cu126")
    assert plan_packages(choose(NO_GPU, "cuda13.0"), lambda wanted: {}).index is None
    with pytest.raises(HyperionError, match=r"no known wheel for CUDA 12\.8") as caught:
        choose(NO_GPU, "cuda12.8")
    assert "TORCH=cuda13.0, cuda12.6" in caught.value.next_step


@pytest.mark.parametrize(
    ("installed", "wheel"),
    [
        ((7, 2), (7, 2)),
        ((7, 9), (7, 2)),
        ((7, 1), (7, 1)),
        ((7, 0), (7, 1)),
        ((6, 4), (6, 4)),
        ((6, 2), (6, 4)),
        ((10, 1), (7, 2)),
        (None, (7, 2)),
    ],
)
def test_the_rocm_wheel_is_the_newest_at_or_below_the_machines_rocm_or_the_nearest_of_its_major(installed, wheel):
    assert choose(replace(AMD, rocm_version=installed)).version == wheel


def test_a_rocm_too_old_for_any_wheel_is_refused_with_the_way_out():
    with pytest.raises(HyperionError, match=r"ROCm 5\.7 is too old") as caught:
        choose(replace(AMD, rocm_version=(5, 7)))
    assert "PYTHON=" in caught.value.next_step


@pytest.mark.parametrize(("machine", "override"), [(NO_GPU, "rocm"), (NVIDIA, "rocm"), (NO_GPU, "cuda"), (AMD, "cuda")])
def test_a_gpu_build_asked_for_without_that_gpu_is_refused(machine, override):
    with pytest.raises(HyperionError, match=r"no (AMD|NVIDIA) GPU with a driver"):
        choose(machine, override)


@pytest.mark.parametrize("override", ["rocm7.2", "rocm6.4", "cuda13.0"])
def test_a_build_named_with_its_version_is_staged_on_a_login_node(override):
    choice = choose(NO_GPU, override)
    assert choice.staged and choice.label == override


def test_staging_and_the_gpu_node_share_one_environment():
    staged, found = choose(NO_GPU, "rocm7.1"), choose(AMD)
    assert environment.fingerprint(ROOT, staged) == environment.fingerprint(ROOT, found)


@given(st.text(alphabet="cpudaromx0123456789.+ ", max_size=10))
def test_any_other_override_is_refused_naming_it(text):
    if text in ("", "cpu", "cuda", "rocm"):
        return
    try:
        choice = choose(NO_GPU, text)
    except HyperionError as error:
        assert text in str(error)
    else:
        assert choice.staged and text.startswith(choice.kind)


@pytest.mark.parametrize(
    ("build", "machine", "override"),
    [
        (CPU, NO_GPU, ""),
        (CPU, AMD, "cpu"),
        (CUDA, NO_GPU, "cpu"),
        (CUDA, NVIDIA, ""),
        (ROCM, AMD, ""),
        (ROCM, NO_GPU, "rocm7.2"),
        (CUDA, NO_GPU, "cuda13.0"),
    ],
)
def test_a_fitting_build_passes(build, machine, override):
    check_build(build, machine, choose(machine, override))


@pytest.mark.parametrize(
    ("build", "machine", "override", "cause"),
    [
        (CPU, AMD, "", r"cuda None, hip None.* cannot use this machine's AMD GPU"),
        (CPU, NVIDIA, "", "cannot use this machine's NVIDIA GPU"),
        (CUDA, AMD, "", r"cuda build.*cannot use this machine's AMD GPU"),
        (CUDA, NO_GPU, "", "has no NVIDIA GPU with a driver"),
        (ROCM, NO_GPU, "", "has no AMD GPU with a driver"),
        (CPU, NO_GPU, "rocm7.2", r"TORCH=rocm7\.2 was requested"),
        (ROCM, NO_GPU, "rocm7.1", r"TORCH=rocm7\.1 was requested"),
        (Build("2.8.0+cpu"), NO_GPU, "", "older than torch 2.9"),
    ],
)
def test_a_build_that_does_not_fit_is_refused_with_the_cause(build, machine, override, cause):
    with pytest.raises(HyperionError, match=cause) as caught:
        check_build(build, machine, choose(machine, override))
    assert caught.value.next_step


def test_the_indexes_of_pytorch_stand_in_one_file():
    command = ["git", "ls-files", "-co", "--exclude-standard", "*.py", "*.txt", "*.toml", "*.sh", "*.yml", "Makefile", ".ci"]
    names = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()
    address = "download." + "pytorch.org"
    assert [name for name in names if address in (ROOT / name).read_text()] == ["hyperion/install/plan.py"]
