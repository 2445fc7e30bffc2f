"""Build, accelerator and arithmetic, on this machine and on injected ones."""

import pytest
import torch

from hyperion.doctor import checks
from hyperion.install.machine import DetectedAccelerator
from hyperion.install.plan import Build

CPU, CUDA, ROCM = Build("2.13.0+cpu"), Build("2.13.0", cuda="13.0"), Build("2.13.0+rocm7.2", hip="7.2.1")
NO_GPU = DetectedAccelerator("cpu", "no AMD or NVIDIA GPU with a driver")
AMD = DetectedAccelerator("rocm", "8 AMD GPU(s), gfx90a", rocm_version=(7, 2))


@pytest.mark.parametrize(
    ("build", "machine", "override", "status"),
    [
        (CPU, NO_GPU, "", "ok"),
        (ROCM, AMD, "", "ok"),
        (CPU, AMD, "", "fail"),
        (CUDA, AMD, "", "fail"),
        (CPU, AMD, "cpu", "ok"),
        (CPU, DetectedAccelerator("cpu", "no GPU", note="an AMD display without a driver"), "", "warn"),
        (ROCM, DetectedAccelerator("rocm", "gfx90a", problem="may not be opened", remedy="join render"), "", "fail"),
    ],
)
def test_the_build_against_the_machine(build, machine, override, status):
    result = checks.check_torch_build(build, machine, override)
    assert result.status == status and bool(result.remedy) == (status != "ok")
    if status == "fail":
        assert machine.evidence in result.evidence


def test_a_cpu_build_has_no_accelerator_to_check():
    assert checks.check_accelerator(CPU).status == "skip"


def test_visible_devices_are_named():
    result = checks.check_accelerator(ROCM, lambda: ["AMD Instinct MI250X"] * 8, {})
    assert (result.status, result.evidence) == ("ok", "8 visible: AMD Instinct MI250X")


def test_masked_devices_are_blamed_on_the_mask():
    result = checks.check_accelerator(ROCM, list, {"HIP_VISIBLE_DEVICES": "9", "HOME": "/root"})
    assert result.status == "fail" and "unset HIP_VISIBLE_DEVICES" in result.remedy


def test_torchs_own_words_are_kept():
    def names():
        raise RuntimeError("The NVIDIA driver on your system is too old")

    result = checks.check_accelerator(CUDA, names, {})
    assert result.status == "fail" and "too old" in result.evidence and "driver" in result.remedy


def test_this_device_copies_and_computes_right():
    result = checks.check_arithmetic()
    assert result.status == "ok" and "copied there and back" in result.evidence


def test_a_copy_that_drops_a_bit_is_caught():
    def copy(tensor, target):
        moved = tensor.clone()
        if moved.dtype == torch.uint8:
            moved[777] ^= 1
        return moved

    calls = iter([copy, lambda tensor, target: tensor])
    result = checks.check_arithmetic("cpu", lambda tensor, target: next(calls)(tensor, target))
    assert result.status == "fail" and "1 of 1048576 bytes" in result.evidence


@pytest.mark.parametrize(
    "multiply",
    [
        lambda a, b: a @ b * 1.001,
        lambda a, b: a.bfloat16().float() @ b.bfloat16().float(),
        lambda a, b: a @ b * float("nan"),
        lambda a, b: a @ b.T,
    ],
)
def test_a_wrong_or_imprecise_product_is_caught(multiply):
    result = checks.check_arithmetic("cpu", multiply=multiply)
    assert result.status == "fail" and "off by" in result.evidence and result.remedy
