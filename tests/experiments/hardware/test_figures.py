"""What the hardware figures show: limits, notes, coordinates."""

from dataclasses import replace

import numpy as np
import pandas as pd
import pytest

from hyperion.experiments.hardware.figures import bandwidth, gemm, gemm_intensity, gemm_rows, roofline, stream_intensity
from hyperion.figures.material import Material
from hyperion.figures.style import styled
from hyperion.results import Run
from tests.book.made_up.hardware import HARDWARE
from tests.book.made_up.run import GPU


def texts(figure):
    found = [text.get_text() for axes in figure.axes for text in axes.texts]
    return " | ".join([*found, figure.get_supxlabel(), figure.get_suptitle()])


def drawn(function, material, **options):
    with styled():
        return function(material, **options)


def test_gemm_shows_each_limit_once_and_names_the_device(material):
    shown = texts(drawn(gemm, material))
    assert "fp64, fp32 limit 66.90" in shown and "fp16, bf16 limit 989.5" in shown and "tf32 limit 494.7" in shown
    assert "NVIDIA Test GPU" in shown and "fp8: not measured (unsupported" in shown


def test_gemm_without_limits_has_no_share_and_says_why(cpu_material):
    figure = drawn(gemm, cpu_material)
    assert len(figure.axes) == 1 and "no limit: no data sheet entry" in texts(figure)


def test_gemm_shares_are_the_rows_fractions(material):
    lines = drawn(gemm, material).axes[1].lines
    heights = np.concatenate([line.get_ydata() for line in lines if len(line.get_ydata()) == 5])
    assert sorted(heights) == pytest.approx(sorted(100 * r.fraction_of_limit for r in gemm_rows(material) if r.value))


def test_only_clocks_that_were_held_down_for_a_reason_are_dotted(tmp_path, material):
    def state(row):
        clock = {16384: 1500.0, 8192: 1970.0}.get(row.params["m"], 1980.0)
        return replace(row, clock_mhz=clock, throttle="hw_thermal+sw_power_cap" if clock < 1980 else "none")

    rows = [state(row) for row in gemm_rows(material)]
    run = Run.create(tmp_path / "run", {"environment": GPU})
    run.record(HARDWARE, "gemm", rows, pd.DataFrame({"time_s": [0.1]}), input_hash="h")
    figure = drawn(gemm, Material(run))
    dots = [line for line in figure.axes[1].lines if line.get_marker() == "."]
    slowed = [row for row in rows if row.value is not None and row.params["m"] == 16384]
    assert sorted(y for line in dots for y in line.get_ydata()) == pytest.approx(
        sorted(100 * row.fraction_of_limit for row in slowed)
    )
    assert [text.get_text() for text in figure.axes[1].get_legend().get_texts()] == ["hw thermal, power cap"]
    assert "more than 2 %. The lowest clock was 1,500 MHz" in texts(figure)


def test_without_a_lowered_clock_there_are_no_dots(material, cpu_material):
    assert "Dots" not in texts(drawn(gemm, material)) and "Dots" not in texts(drawn(gemm, cpu_material))


def test_the_cross_check_is_no_part_of_the_sweep(material):
    assert {row.variant for row in gemm_rows(material)} == {"torch.mm"}


def test_bandwidth_shows_its_limit_and_where_there_is_none(material):
    shown = texts(drawn(bandwidth, material))
    assert "limit 4,800 GB/s (device memory)" in shown and "10 M; 20 M: no limit" in shown


def test_published_numbers_are_marked_as_anothers(material):
    for function in (gemm, bandwidth):
        shown = texts(drawn(function, material, published=True))
        assert "MI250X as published, other machine" in shown and "without warm-up" in shown


def test_no_point_lies_above_its_roof(material):
    """A measured point above the measured roof would mean a wrong count of bytes or FLOP."""
    streams = [r for r in material.of("bandwidth", metric="bandwidth_gb_s") if r.value]
    slope = max(r.value for r in streams)
    for row in gemm_rows(material):
        if row.value is not None:
            assert row.value <= gemm_intensity(row) * slope / 1e3 or row.value <= row.limit
    assert "4,462 GB/s measured" in texts(drawn(roofline, material))


def test_the_roofline_explains_dotted_lines_only_if_it_has_some(material, cpu_material):
    assert "Dotted lines: datasheet limits" in texts(drawn(roofline, material))
    assert "Dotted" not in texts(drawn(roofline, cpu_material))


def test_arithmetic_intensity(material):
    row = next(r for r in gemm_rows(material) if (r.dtype, r.params["m"]) == ("bf16", 1024))
    assert gemm_intensity(row) == pytest.approx(1024 / 3)  # 2 n^3 / (3 n^2 * 2 bytes)
    triad = next(r for r in material.of("bandwidth") if r.variant == "triad")
    assert stream_intensity(triad) == pytest.approx(2 / 12)
