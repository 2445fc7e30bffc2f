"""Products are right, and a wrong one is caught by the check that every production measurement runs."""

import numpy as np
import pytest
import torch

from hyperion.hardware import detect_cpu
from hyperion.measure import (
    FORMATS,
    Gemm,
    OutputMismatchError,
    error_of_rows,
    largest_error,
    matmul_precision,
    relative_error,
    verify_product,
)


@pytest.fixture(scope="module")
def cpu():
    return detect_cpu()


@pytest.mark.parametrize("dtype", ["fp64", "fp32", "fp16", "bf16"])
def test_every_format_agrees_with_float64_within_its_tolerance(cpu, dtype):
    product = Gemm(96, 80, 112, dtype, cpu)
    verification = product.verify()
    assert verification.passed
    # The tolerance is no blank cheque: it lies within a hundred rounding steps of the format.
    assert verification.tolerance <= 100 * torch.finfo(FORMATS[dtype].storage).eps


def test_counts_two_operations_for_each_pair(cpu):
    assert Gemm(3, 5, 7, "fp32", cpu).flops == 2 * 3 * 5 * 7


def test_measuring_verifies_what_the_timed_calls_left(cpu):
    timing, verification = Gemm(64, 64, 64, "fp32", cpu).measure(time_limit_s=0.05)
    assert verification.passed and len(timing.samples_s) >= 30 and timing.cold


@pytest.mark.parametrize(
    "fault",
    [
        lambda c: c.mul_(1.01),
        lambda c: c[-1].zero_(),
        lambda c: c[:, -1].fill_(float("nan")),
        lambda c: c.copy_(torch.zeros_like(c)),
        lambda c: c.copy_(c.T.clone()),
    ],
    ids=["scaled", "last row unwritten", "a NaN column", "never written", "transposed"],
)
def test_planted_faults_are_caught(cpu, fault):
    product = Gemm(64, 64, 64, "fp32", cpu)
    product()
    fault(product.c_MN)
    assert not verify_product(product.a_MK, product.b_KN, product.c_MN, FORMATS["fp32"].gemm_tolerance).passed


def test_precision_flags_are_given_back(cpu):
    switches = torch.backends.cuda.matmul, torch.backends.cudnn.conv
    before = [switch.fp32_precision for switch in switches]
    for name, allowed in (("tf32", "tf32"), ("fp32", "ieee")):
        with matmul_precision(FORMATS[name]):
            assert [switch.fp32_precision for switch in switches] == [allowed, allowed]
    assert [switch.fp32_precision for switch in switches] == before


def test_relative_error_of_nothing_and_of_nan():
    assert relative_error(torch.zeros(3), torch.zeros(3)) == 0
    wave = torch.randn(8, 8, dtype=torch.complex128)
    real = torch.complex(wave.real, torch.zeros(8, 8, dtype=torch.float64))
    lost = (wave.imag.norm() / wave.norm()).item()
    assert relative_error(real, wave) == relative_error(real.real, wave) == pytest.approx(lost)  # an imaginary part that is lost
    assert error_of_rows(real.to(torch.complex64), wave, 1e-3) >= lost - 1e-6
    for output, reference in ((torch.ones(1, 8), torch.ones(64, 8)), (torch.ones(8, 1), torch.ones(8))):
        for compare in (relative_error, lambda *pair: error_of_rows(*pair, 0.1)):
            with pytest.raises(OutputMismatchError, match="has the shape"):
                compare(output, reference)
    with pytest.raises(OutputMismatchError, match="the output is a ndarray and no tensor"):
        relative_error(np.ones(3), torch.ones(3))
    assert not relative_error(torch.tensor([float("nan")]), torch.ones(1)) <= 1e9
    assert not largest_error([0.1, float("nan")]) <= 1e9 and largest_error([0.1, 0.2]) == 0.2


def test_one_wrong_row_is_caught():
    right = torch.ones(10000, 3)
    wrong = right.clone()
    wrong[-1] = 0
    assert relative_error(wrong, right) < 0.02 and error_of_rows(wrong, right, 0.02) == 1
    assert error_of_rows(1.001 * right, right, 0.02) == pytest.approx(0.001, rel=1e-3)


@pytest.mark.parametrize("dtype", ["fp32", "fp16", "bf16"])
def test_one_wrong_element_is_caught_wherever_it_is(cpu, dtype):
    product, tolerance = Gemm(400, 500, 64, dtype, cpu), FORMATS[dtype].gemm_tolerance
    product()
    whole = product.c_MN.clone()
    for row, column in ((0, 0), (123, 321), (399, 499), (7, 458)):
        product.c_MN.copy_(whole)
        product.c_MN[row, column] += 0.5 * whole.float().std().to(whole.dtype)
        found = verify_product(product.a_MK, product.b_KN, product.c_MN, tolerance)
        assert not found.passed and found.error > tolerance
        assert dtype != "bf16" or relative_error(product.c_MN, whole) < tolerance, "its norm alone lets it pass"
    assert verify_product(product.a_MK, product.b_KN, whole, tolerance).passed
