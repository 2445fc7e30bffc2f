"""Transforms and a stencil: every row is checked, a wrong twiddle factor or weight has no value, and passes are predicted."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import ndimage

from hyperion.chapter import Context, experiment_named
from hyperion.experiments.hardware import fp64_kernels
from hyperion.experiments.hardware.fp64_kernels import COUPLING, eigenfunction, heat_step, verify_step, verify_transforms
from hyperion.hardware import detect
from tests.chapter.toy import perform, toy_context
from tests.hardware.machines import facts

SIZES = {"points": 4096, "lengths_1d": [64], "lengths_2d": [16], "grid": 8, "time_limit_s": 0.01}


@pytest.fixture
def context(tmp_path):
    return toy_context("fp64_kernels", SIZES, tmp_path)


def judged(context):
    """The rows by variant and metric, as a chapter stores them: without the values whose check failed."""
    rows = experiment_named("fp64_kernels").run(context, lambda done, total, note="": None).rows
    return {(row.variant, row.metric): row.without_failed_value() for row in rows}


def test_each_kernel_has_a_checked_rate_of_its_least_bytes(context, tmp_path):
    result = perform(context, tmp_path)
    rows = {(row.variant, row.metric): row for row in result.rows}
    assert [row.params["count"] for row in rows.values()] == [64, 64, 16, 16, 1]
    assert all(row.value > 0 and row.check_error <= row.check_tolerance < 1e-14 for row in rows.values())
    for variant, points in (("fft 1d", 64), ("fft 2d", 256)):
        # 5 N log2 N FLOPs for 32 N bytes
        ratio = rows[variant, "fft_tflops"].value / rows[variant, "bandwidth_gb_s"].value
        assert ratio == pytest.approx(5 * math.log2(points) / 32 / 1e3)
    time_s = result.samples.groupby("variant").time_s.median()
    least_bytes = {"fft 1d": 32 * 4096, "fft 2d": 32 * 4096, "7-point stencil": 16 * 8**3}
    for variant, moved in least_bytes.items():
        assert rows[variant, "bandwidth_gb_s"].value == pytest.approx(moved / time_s[variant] / 1e9)


@pytest.mark.parametrize(
    ("sign", "wrong", "refused"),
    [(-1, 0.0, False), (-1, 1e-10, True), (1, 0.0, True)],
    ids=["right", "tenth digit", "sign, which Parseval does not see"],
)
def test_a_wrong_twiddle_factor_is_refused(context, monkeypatch, sign, wrong, refused):
    """The last step of a transform by radix 2 has wrong twiddle factors."""
    original = torch.fft.fftn

    def radix_2(x, dim):
        if x.ndim > 2:
            return original(x, dim=dim)
        n = x.shape[-1]
        twiddles = torch.exp(sign * 2j * torch.pi * torch.arange(n // 2, dtype=torch.float64) / n)
        twiddles[-1] += wrong
        even, odd = (original(x[..., start::2], dim=(1,)) for start in (0, 1))
        return torch.cat((even + twiddles * odd, even - twiddles * odd), -1)

    monkeypatch.setattr(torch.fft, "fftn", radix_2)
    rows = judged(context)
    assert {rows["fft 1d", metric].is_unexpected for metric in ("bandwidth_gb_s", "fft_tflops")} == {refused}
    assert not rows["fft 2d", "fft_tflops"].is_unexpected


def test_parseval_sees_a_transform_that_is_not_compared_with_numpy(monkeypatch):
    monkeypatch.setattr(fp64_kernels, "_COMPARED_POINTS", 64)
    signals = torch.randn(4, 64, dtype=torch.complex128)
    spectra = torch.fft.fft(signals)
    assert verify_transforms(signals, spectra).passed
    spectra[3] *= 1 + 1e-13
    assert not verify_transforms(signals, spectra).passed


def test_a_transform_that_computes_only_in_its_first_call_is_refused(context, monkeypatch):
    original, first = torch.fft.fftn, {}
    monkeypatch.setattr(torch.fft, "fftn", lambda x, dim: first.setdefault(x.shape, original(x, dim=dim)))
    assert judged(context)["fft 1d", "bandwidth_gb_s"].is_unexpected


def test_a_number_that_no_call_writes_is_refused():
    signals = torch.randn(4, 64, dtype=torch.complex128)
    spectra = torch.fft.fft(signals)
    spectra[2, 5] = math.nan
    assert not verify_transforms(signals, spectra).passed


@settings(max_examples=20, deadline=None)
@given(length=st.integers(2, 12), seed=st.integers(0, 1000))
def test_a_step_is_the_sum_over_six_neighbours(length, seed):
    grid = torch.randn([length + 2] * 3, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    output = torch.full([length] * 3, math.nan, dtype=torch.float64)
    heat_step(grid, output)
    assert verify_step(grid, output).passed
    u, (z, y, x) = grid.numpy(), np.random.default_rng(seed).integers(1, length + 1, 3)
    neighbours = [u[z - 1, y, x], u[z + 1, y, x], u[z, y - 1, x], u[z, y + 1, x], u[z, y, x - 1], u[z, y, x + 1]]
    exact = u[z, y, x] + COUPLING * sum(neighbour - u[z, y, x] for neighbour in neighbours)
    assert output[z - 1, y - 1, x - 1].item() == pytest.approx(exact, rel=1e-13, abs=1e-14)


@pytest.mark.parametrize("fault", ["weight", "neighbour", "boundary"])
def test_a_wrong_stencil_is_refused(context, monkeypatch, fault):
    original = heat_step

    def wrong(grid, output):
        original(grid, output)
        if fault == "weight":
            output.add_(grid[1:-1, 1:-1, 2:], alpha=1e-10)
        elif fault == "neighbour":  # the upper neighbour in z counts twice, and the lower one not at all
            output.add_(grid[2:, 1:-1, 1:-1] - grid[:-2, 1:-1, 1:-1], alpha=COUPLING)
        else:
            output[-1, -1, -1] = grid[-2, -2, -2]

    assert not judged(context)["7-point stencil", "bandwidth_gb_s"].is_unexpected
    monkeypatch.setattr(fp64_kernels, "heat_step", wrong)
    assert judged(context)["7-point stencil", "bandwidth_gb_s"].is_unexpected


def test_the_known_factor_finds_a_step_whose_reference_has_the_same_fault(monkeypatch):
    grid, output = torch.randn(10, 10, 10, dtype=torch.float64), torch.empty(8, 8, 8, dtype=torch.float64)
    original = heat_step

    def wrong(grid, output):
        original(grid, output)
        output.add_(grid[1:-1, 1:-1, 2:], alpha=1e-10)

    def correlate(grid, weights):
        exact = torch.empty(8, 8, 8, dtype=torch.float64)
        wrong(torch.from_numpy(grid), exact)
        return np.pad(exact.numpy(), 1)

    monkeypatch.setattr(fp64_kernels, "heat_step", wrong)
    monkeypatch.setattr(ndimage, "correlate", correlate)
    wrong(grid, output)
    assert not verify_step(grid, output).passed


@pytest.mark.parametrize("wrong", [math.nan, 1.0])
def test_one_wrong_point_of_the_timed_output_is_refused(wrong):
    grid, output = torch.randn(10, 10, 10, dtype=torch.float64), torch.empty(8, 8, 8, dtype=torch.float64)
    heat_step(grid, output)
    output[4, 5, 6] = wrong
    assert not verify_step(grid, output).passed


def test_a_long_wave_decays_as_the_heat_equation_says():
    _, factor = eigenfunction(100)
    squares = sum((waves * math.pi / 101) ** 2 for waves in (1, 2, 3))
    assert factor == pytest.approx(1 - COUPLING * squares, abs=1e-6)  # the next term is COUPLING k⁴ / 12


def test_rates_are_predicted_from_a_copy_and_the_passes(context, monkeypatch):
    device = detect(facts("H200"))
    monkeypatch.setattr(Context, "device", property(lambda self: device))
    sizes = {"points": 2**25, "lengths_1d": [1024, 65536], "lengths_2d": [1024], "grid": 384}
    context.sizes.update(sizes)
    predicted = experiment_named("fp64_kernels").forecast(context)
    assert all(forecast.ceiling == pytest.approx(6016 / 8 * 6.402) for forecast in predicted)  # bits of the bus x transfers
    # The stencil moves fewer bytes, so its copy is another point of the same curve.
    one, two, two_dimensions, stencil = (forecast.estimate for forecast in predicted)
    assert one == pytest.approx(2 * two) == pytest.approx(2 * two_dimensions)
    assert stencil == pytest.approx(one / 10, rel=0.05)
    assert all(forecast.low < forecast.estimate < forecast.high for forecast in predicted)
    assert "10 passes" in predicted[-1].basis
