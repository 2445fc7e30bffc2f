"""The way from peak to measured rate: factors by hand, their product for any input, and what is skipped when unknown."""

from math import ceil, prod

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hyperion.errors import HyperionError
from hyperion.hardware import Device
from hyperion.measure.products.dispatch import Product
from hyperion.measure.products.gap import TILES, NominalPeak, best_tiling, explain_gap, nominal_peak, tile

PEAK = NominalPeak(1000.0, 1800.0, 100, "a data sheet")


def square(size, dtype="bf16"):
    return Product("matmul", 1, size, size, size, dtype, "NT", 3 * size**2 * 2)


def factors(gap):
    return {step.name: step.factor for step in gap.factors}


def test_a_wave_that_is_not_full_leaves_units_idle():
    assert tile(1280, 1280, 1, 100, (128, 128)).share == 1.0
    last = tile(1280, 1408, 1, 100, (128, 128))
    assert (last.tiles, last.waves, last.share) == (110, 2, 0.55)
    assert tile(100, 128, 1, 1, (128, 128)).share == 100 / 128  # a tile that hangs over works on nothing there
    assert tile(128, 128, 1, 4, (128, 128), splits=4).share == 1.0
    assert str(last) == "110 tiles of 128 x 128 in 2 waves"


@given(st.integers(1, 5000), st.integers(1, 5000), st.integers(1, 300), st.integers(1, 64))
def test_no_tiling_fills_more_than_the_device(m, n, units, batch):
    best = best_tiling(m, n, units, batch)
    assert 0 < best.share <= 1 and best.tile in TILES
    assert best.waves == ceil(best.tiles / units)
    assert all(tile(m, n, batch, units, size).share <= best.share for size in TILES)


def test_a_larger_tile_is_worth_a_few_idle_units():
    strict, lenient = (best_tiling(8192, 8192, 132, tolerance=tolerance) for tolerance in (0.0, 0.03))
    assert strict.tile == (64, 64) and lenient.tile in ((256, 128), (128, 256))
    assert strict.share - 0.03 <= lenient.share <= strict.share
    assert best_tiling(1024, 1024, 132, tolerance=0.03).tile in ((128, 64), (64, 128))  # half the units are not a few


def test_every_factor_by_hand():
    product = Product("matmul", 1, 1280, 1408, 1024, "bf16", "NT", 10_000_000)
    gap = explain_gap(product, 50.0, PEAK, clock_mhz=1350.0, bandwidth_gb_s=1000.0, launch_time_s=1e-5)
    tiling = best_tiling(1280, 1408, 100, tolerance=0.03)
    roof = product.flops / 10_000_000 * 1000e9 / 1e12
    assert gap.factors[0].tflops == 750.0 and gap.factors[1].tflops == pytest.approx(750 * tiling.share)
    assert gap.factors[2].tflops == pytest.approx(roof) and roof < 750 * tiling.share
    work_s = product.flops / (roof * 1e12)
    assert factors(gap)["launch"] == pytest.approx(work_s / (work_s + 1e-5))
    assert gap.factors[-1].factor == pytest.approx(50.0 / gap.factors[3].tflops)
    assert [step.name for step in gap.factors] == ["clock", "tiles", "memory", "launch", "unexplained"]


def test_a_memory_that_is_fast_enough_takes_nothing():
    gap = explain_gap(square(8192), 500.0, PEAK, bandwidth_gb_s=4000.0)
    assert factors(gap)["memory"] == 1.0


_rates = st.floats(1e-3, 1e5)


@given(
    st.integers(1, 20_000),
    st.integers(1, 20_000),
    st.integers(1, 20_000),
    st.integers(1, 100),
    _rates,
    _rates,
    st.none() | st.floats(1, 5000),
    st.none() | st.floats(1, 5000),
    st.none() | st.integers(1, 400),
    st.none() | _rates,
    st.none() | st.floats(0, 1),
)
def test_the_factors_multiply_to_the_measured_share_of_the_peak(
    m, n, k, batch, measured, peak, clock, sheet_clock, units, bandwidth, launch
):
    product = Product("matmul", batch, m, n, k, "bf16", "NT", 2 * batch * (m * k + k * n + m * n))
    gap = explain_gap(
        product,
        measured,
        NominalPeak(peak, sheet_clock, units, "any"),
        clock_mhz=clock,
        bandwidth_gb_s=bandwidth,
        launch_time_s=launch,
    )
    known = [step.factor for step in gap.factors if step.factor is not None]
    assert prod(known) == pytest.approx(measured / peak, rel=1e-12)
    assert all(step.factor > 0 for step in gap.factors if step.factor is not None)
    assert gap.factors[-1].tflops == measured


def test_what_is_unknown_is_skipped_with_the_reason_and_falls_to_the_residual():
    peak = NominalPeak(1000.0, None, None, "a data sheet")
    gap = explain_gap(square(4096), 700.0, peak, clock_mhz=1500.0)
    reasons = {step.name: step.reason for step in gap.factors if step.factor is None}
    assert reasons == {
        "clock": "the data sheet names no clock",
        "tiles": "the number of compute units is unknown",
        "memory": "no bandwidth was measured",
        "launch": "no launch time given",
    }
    assert gap.factors[-1].factor == pytest.approx(0.7) and [step.tflops for step in gap.factors] == [1000.0] * 4 + [700.0]
    unread = explain_gap(square(4096), 700.0, PEAK)
    assert unread.factors[0].reason == "the clock was not readable" and "skipped clock" in str(unread)


def test_more_than_the_limits_allow_is_said():
    gap = explain_gap(square(4096), 990.0, PEAK, clock_mhz=900.0)
    assert gap.factors[-1].factor > 1 and "more was reached" in gap.factors[-1].reason
    assert "no limit named here" in explain_gap(square(4096), 100.0, PEAK).factors[-1].reason


@pytest.mark.parametrize(
    "wrong", [{"clock_mhz": 0.0}, {"bandwidth_gb_s": -1.0}, {"launch_time_s": -1e-6}, {"clock_mhz": float("nan")}]
)
def test_an_input_that_is_no_number_of_its_kind_is_refused(wrong):
    with pytest.raises(HyperionError, match=next(iter(wrong))):
        explain_gap(square(64), 1.0, PEAK, **wrong)


def test_peaks_of_known_devices_come_with_their_clock_and_units():
    h200 = Device(
        kind="cuda",
        index=0,
        name="NVIDIA H200",
        arch="sm_90",
        memory_bytes=int(139.8 * 2**30),
        compute_units=132,
        last_level_cache_bytes=50 * 2**20,
        torch_device="cuda:0",
        max_clock_mhz=1980.0,
        vendor="NVIDIA",
    )
    bf16, reason = nominal_peak(h200, "bf16")
    assert (bf16.tflops, bf16.units, reason) == (989.4, 132, "") and bf16.clock_mhz < 1980
    assert nominal_peak(h200, "fp64")[0].clock_mhz == 1980.0
    gcd = Device(
        kind="rocm",
        index=0,
        name="AMD Instinct MI250X",
        arch="gfx90a",
        memory_bytes=64 * 2**30,
        compute_units=110,
        last_level_cache_bytes=8 * 2**20,
        torch_device="cuda:0",
        vendor="AMD",
    )
    assert nominal_peak(gcd, "fp16")[0] == NominalPeak(191.5, 1700, 110, nominal_peak(gcd, "fp16")[0].source)
    assert nominal_peak(gcd, "tf32") == (None, "CDNA 2 has no TF32 or XF32 instructions")
    assert nominal_peak(gcd, "fp8")[0] is None


def test_an_unknown_device_has_no_peak_to_explain():
    stranger = Device(
        kind="cuda",
        index=0,
        name="A card of tomorrow",
        arch="sm_200",
        memory_bytes=1,
        compute_units=1,
        last_level_cache_bytes=None,
        torch_device="cuda:0",
    )
    peak, reason = nominal_peak(stranger, "bf16")
    assert peak is None and reason
