"""The precision is chosen by what the device has, and says why."""

from dataclasses import replace

import pytest
import torch

from hyperion.errors import HyperionError
from hyperion.hardware import detect_cpu
from hyperion.training import choose_precision

CPU = replace(detect_cpu(), isa=("avx2",))


def gpu(kind, arch):
    return replace(CPU, kind=kind, arch=arch, torch_device="cuda:0")


@pytest.mark.parametrize(
    "device, dtype, reason",
    [
        (gpu("cuda", "sm_90"), "bf16", "tensor cores of sm_90"),
        (gpu("cuda", "sm_70"), "fp32", "would not be faster"),
        (gpu("rocm", "gfx90a"), "bf16", "matrix instructions of gfx90a"),
        (CPU, "fp32", "reference precision"),
    ],
)
def test_auto(device, dtype, reason):
    found = choose_precision(device)
    assert found.dtype == dtype
    assert reason in found.reason and reason in str(found)


def test_requests_are_honoured():
    assert choose_precision(gpu("cuda", "sm_90"), "fp32").dtype == "fp32"
    emulated = choose_precision(CPU, "bf16")
    assert emulated.dtype == "bf16" and "emulated" in emulated.reason


def test_unknown_and_impossible_requests_are_refused():
    with pytest.raises(HyperionError, match="'fp12'"):
        choose_precision(CPU, "fp12")


def test_autocast_computes_in_that_type():
    a = torch.ones(2, 2)
    with choose_precision(CPU, "bf16").autocast(CPU):
        assert (a @ a).dtype == torch.bfloat16
    with choose_precision(CPU).autocast(CPU):
        assert (a @ a).dtype == torch.float32
