"""What the hardware figures show: limits, notes, coordinates."""

import numpy as np
import pytest

from hyperion.book.intensity import gemm_intensity, stream_intensity
from hyperion.book.plots_hardware import bandwidth, gemm, gemm_rows, roofline
from hyperion.book.style import styled


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


def test_the_cross_check_is_no_part_of_the_sweep(material):
    assert {row.variant for row in gemm_rows(material)} == {"torch.mm"}


def test_bandwidth_shows_its_limit_and_where_there_is_none(material):
    shown = texts(drawn(bandwidth, material))
    assert "limit 4,800 GB/s (device memory)" in shown and "10 M, 20 M: no limit" in shown


def test_published_numbers_are_marked_as_anothers(material):
    for function in (gemm, bandwidth):
        shown = texts(drawn(function, material, published=True))
        assert "published, other machine" in shown and "without warm-up" in shown


def test_no_point_lies_above_its_roof(material):
    """A measured point above the measured roof would mean a wrong count of bytes or FLOP."""
    streams = [r for r in material.of("bandwidth", metric="bandwidth_gb_s") if r.value]
    slope = max(r.value for r in streams)
    for row in gemm_rows(material):
        if row.value is not None:
            assert row.value <= gemm_intensity(row) * slope / 1e3 or row.value <= row.limit
    assert "4,462 GB/s measured" in texts(drawn(roofline, material))


def test_arithmetic_intensity(material):
    row = next(r for r in gemm_rows(material) if (r.dtype, r.params["m"]) == ("bf16", 1024))
    assert gemm_intensity(row) == pytest.approx(1024 / 3)  # 2 n^3 / (3 n^2 * 2 bytes)
    triad = next(r for r in material.of("bandwidth") if r.variant == "triad")
    assert stream_intensity(triad) == pytest.approx(2 / 12)
