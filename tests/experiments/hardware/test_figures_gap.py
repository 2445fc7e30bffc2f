"""What the gap waterfall and the roofline of a model's products show: bars and marks where the numbers say."""

from itertools import pairwise

import pytest

from hyperion.experiments.hardware.figures_gap import gap_waterfall
from hyperion.experiments.hardware.figures_kernels import Kernel, kernels_of, kernels_roofline
from hyperion.figures.style import png, styled
from hyperion.measure.products.gap import NominalPeak, explain_gap
from hyperion.measure.products.product_formulas import Product
from hyperion.measure.products.taf import CapturedGemms, taf
from hyperion.results import Estimate

PEAK = NominalPeak(1000.0, 1800.0, 100, "a data sheet")
PRODUCT = Product("matmul", 1, 1280, 1408, 1024, "bf16", "NT", 10_000_000)


def texts(figure):
    found = [text.get_text() for axes in figure.axes for text in axes.texts]
    return " | ".join([*found, figure.get_supxlabel(), figure.get_suptitle()])


def waterfall(measured=50.0, **known):
    gap = explain_gap(PRODUCT, measured, PEAK, **known)
    with styled():
        return gap, gap_waterfall(gap, "a machine", str(PRODUCT))


def test_every_bar_reaches_from_the_rate_before_to_the_rate_after():
    gap, figure = waterfall(clock_mhz=1350.0, bandwidth_gb_s=1000.0, launch_time_s=1e-5)
    ends = [end for bar in figure.axes[0].patches for end in (bar.get_x(), bar.get_x() + bar.get_width())]
    rates = [1000.0, *(step.tflops for step in gap.factors)]
    stairs = [end for pair in pairwise(rates) for end in sorted(pair)]
    assert ends == pytest.approx([0, 1000.0, *stairs, 0, 50.0])
    labels = [label.get_text() for label in figure.axes[0].get_yticklabels()]
    assert labels == ["data sheet", "clock", "tiles", "memory", "launch", "unexplained", "measured"]
    assert "× 0.750" in texts(figure) and "1350 MHz measured" in texts(figure) and "a machine" in texts(figure)


def test_what_was_skipped_has_no_bar_and_is_named_with_its_reason():
    _, figure = waterfall(bandwidth_gb_s=1000.0)
    labels = [label.get_text() for label in figure.axes[0].get_yticklabels()]
    assert labels == ["data sheet", "tiles", "memory", "unexplained", "measured"]
    assert "clock (the clock was not readable), launch (no launch time given)" in texts(figure).replace("\n", " ")


def test_a_gain_looks_unlike_a_loss_and_more_than_allowed_stays_inside_of_the_panel():
    gap, figure = waterfall(measured=1500.0, clock_mhz=1980.0)
    colours = [bar.get_facecolor() for bar in figure.axes[0].patches]
    assert gap.unexplained > 1 and len(set(colours[:4])) == 4
    assert figure.axes[0].get_xlim()[1] > 1500.0 and "more was reached" in texts(figure)
    assert "× 1, not a limit here" in texts(waterfall(bandwidth_gb_s=1e6)[1])


def test_a_waterfall_is_the_same_picture_each_time():
    first, second = (png(waterfall()[1]) for _ in range(2))
    assert first == second and first.startswith(b"\x89PNG")


KERNELS = [
    Kernel("large", "matmul", "bf16", 500.0, 600.0, 0.7),
    Kernel("thin", "attention", "bf16", 20.0, 30.0, 0.1),
    Kernel("image", "convolution", "fp32", 100.0, 40.0, 0.15),
]


def roofline(kernels):
    with styled():
        return kernels_roofline(kernels, {"bf16": 700.0, "fp32": 50.0, "fp64": 60.0}, 4000.0, "a machine", "a model")


def test_marks_stand_at_intensity_and_rate_and_their_area_grows_with_the_share():
    figure = roofline(KERNELS)
    marks = {
        tuple(offset): area
        for series in figure.axes[0].collections
        for offset, area in zip(series.get_offsets(), series.get_sizes(), strict=True)
    }
    assert set(marks) == {(500.0, 600.0), (20.0, 30.0), (100.0, 40.0)}
    assert marks[500.0, 600.0] > marks[100.0, 40.0] > marks[20.0, 30.0]
    low, high = figure.axes[0].get_xlim()
    assert low < 50.0 * 1e3 / 4000 and high > 500
    assert "have 95.0 % of them" in texts(figure).replace("\n", " ") and "a: large, 70.0 %" in texts(figure)


def test_roofs_meet_the_slope_and_those_of_unused_dtypes_are_not_drawn():
    figure = roofline(KERNELS)
    roofs = {line.get_ydata()[0]: line.get_xdata()[0] for line in figure.axes[0].lines if len(set(line.get_ydata())) == 1}
    assert roofs == pytest.approx({700.0: 175.0, 50.0: 12.5})
    assert "bf16 700" in texts(figure) and "fp64" not in texts(figure)


def test_without_products_there_is_no_picture():
    assert roofline([]) is None


def test_products_that_were_timed_as_one_are_one_mark():
    a, b = (Product("matmul", 1, 64, 64, 64, "bf16", lies, 3 * 64 * 64 * 2) for lies in ("NT", "NN"))
    c = Product("attention", 8, 16, 16, 4, "bf16", "NT", 2048)
    rate = Estimate(5.0, 4.9, 5.1, 30)
    found = kernels_of(taf(CapturedGemms({a: 1, b: 2, c: 1}, {}), {a: rate, b: rate, c: rate}))
    assert [(kernel.name, kernel.tflops) for kernel in found] == [
        ("matmul 64 x 64 x 64 bf16", 5.0),
        ("attention 8 of 16 x 16 x 4 bf16", 5.0),
    ]
    assert sum(kernel.share for kernel in found) == pytest.approx(1.0) and found[0].share > 0.9
