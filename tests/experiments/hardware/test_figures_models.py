"""Figures of our models' products and of the gaps, drawn from rows of a GPU with many formats and of an unknown CPU."""

from itertools import combinations, pairwise

import numpy as np
import pandas as pd
import pytest

from hyperion.book.plots import draw
from hyperion.experiments.hardware.figures_models import Kernel, draw_kernels, model_products, named_kernels, products_roofline
from hyperion.experiments.hardware.figures_products import gap_waterfall, gaps_of, gemm_gap
from hyperion.figures.material import Material
from hyperion.figures.style import new_figure, png, styled
from hyperion.measure.products.dispatch import Product
from hyperion.measure.products.gap import NominalPeak, explain_gap
from hyperion.results import Run
from tests.book.made_up.hardware import HARDWARE, PEAKS, bandwidth_rows, gemm_rows
from tests.book.made_up.kernels import LIMITS, MAF, MODELS, gap_rows, model_products_rows
from tests.book.made_up.run import GPU


def made_up(folder, peaks, bandwidth, environment):
    random = np.random.default_rng(0)
    run = Run.create(folder / "run", {"environment": environment})
    frame = pd.DataFrame({"x": [1]})
    for notebook, experiment, rows in (
        (HARDWARE, "gemm", gemm_rows(random, peaks)),
        (HARDWARE, "bandwidth", bandwidth_rows(random, bandwidth)),
        (LIMITS, "model_products", model_products_rows(random, peaks)),
        (LIMITS, "gemm_gap", gap_rows(peaks)),
    ):
        run.record(notebook, experiment, rows, frame, input_hash="h")
    return Material(run)


@pytest.fixture(scope="module")
def gpu(tmp_path_factory):
    peaks = {dtype: PEAKS[dtype] for dtype in ("fp32", "tf32", "fp16", "bf16")}
    return made_up(tmp_path_factory.mktemp("gpu"), peaks, 4800.0, GPU)


@pytest.fixture(scope="module")
def cpu(tmp_path_factory):
    environment = GPU | {"gpus": [], "cuda": None}
    return made_up(tmp_path_factory.mktemp("cpu"), {"fp32": None}, None, environment)


def words(figure):
    found = [text.get_text() for axes in figure.axes for text in [*axes.texts, *axes.get_yticklabels(), axes.title]]
    found += [axes.get_title(loc="left") for axes in figure.axes]
    return " | ".join([*found, figure.get_supxlabel(), figure.get_suptitle()]).replace("\n", " ")


def drawn(picture, material, **options):
    with styled():
        return picture(material, **options)


def test_bars_of_peak_maf_and_taf_have_the_rows_lengths(gpu):
    figure = drawn(model_products, gpu)
    bf16 = next(axes for axes in figure.axes if axes.get_title(loc="left") == "bf16")
    lengths = [bar.get_width() for bar in bf16.patches]
    tafs = [row.value for row in gpu.of("model_products", metric="taf_tflops", dtype="bf16")]
    assert lengths == pytest.approx([PEAKS["bf16"], MAF * PEAKS["bf16"], *tafs])
    text = words(figure)
    assert "84 % of peak" in text and "timed in bf16: resnet50 96 %" in text and "fp8: unsupported: no units for it" in text
    assert text.count("% of MAF") == 4 * len(MODELS)


def test_without_a_peak_there_is_no_bar_for_it_and_a_note_says_why(cpu):
    figure = drawn(model_products, cpu)
    assert "data sheet" not in words(figure) and "fp32: no peak: unknown CPU" in words(figure)
    assert len(figure.axes[0].patches) == 1 + len(MODELS)


@pytest.mark.slow
@pytest.mark.parametrize("machine", ["gpu", "cpu"])
def test_every_model_has_its_panel_with_its_marks_at_intensity_and_rate(machine, request):
    material = request.getfixturevalue(machine)
    figure = drawn(products_roofline, material)
    titles = [axes.get_title(loc="left") for axes in figure.axes]
    assert [title.partition(",")[0] for title in titles] == list(MODELS) and all("83.0 %" in title for title in titles)
    rows = material.of("model_products", metric="gemm_tflops", variant="resnet50")
    shown = {tuple(point) for series in figure.axes[0].collections for point in series.get_offsets()}
    wanted = {(row.params["intensity"], row.value) for row in rows if row.params["precision"] == rows[-1].params["precision"]}
    assert shown == wanted and "resnet50: a: matmul 6304 x 3072 x 768" in words(figure)


def test_a_gap_from_rows_multiplies_to_what_was_measured_and_is_that_of_the_search(gpu):
    for gap in gaps_of(gpu.of("gemm_gap")):
        assert gap.measured_tflops == pytest.approx(0.8 * gap.peak.tflops)
        assert gap.factors[-1].tflops == pytest.approx(gap.measured_tflops)
        assert [step.name for step in gap.factors] == ["clock", "tiles", "memory", "launch", "unexplained"]


@pytest.mark.slow
def test_all_formats_share_a_picture_and_one_alone_tells_its_reasons(gpu, cpu):
    text = words(drawn(gemm_gap, gpu))
    assert text.count("unexplained |") == 4 and "fp8: unsupported" in text
    assert "launch (no launch time given)" in text and "8192 x 4096 x 8192 tf32" in text
    alone = words(drawn(gemm_gap, gpu, dtype="bf16"))
    assert "Clock: why clock" in alone and "× 0.930" in alone and "tf32" not in alone
    assert drawn(gemm_gap, cpu) is None


@pytest.mark.slow
def test_the_only_waterfall_of_a_cpu_names_the_formats_that_have_none(cpu_material):
    text = words(drawn(gemm_gap, cpu_material))
    assert "8192 x 4096 x 8192 fp32" in text and "fp64, bf16: no peak: no data sheet entry" in text


@pytest.mark.slow
@pytest.mark.long
def test_pictures_are_the_same_each_time(gpu):
    for name in ("model_products", "products_roofline", "gemm_gap"):
        first = draw(name, gpu)
        assert first.startswith(b"\x89PNG") and draw(name, gpu) == first


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
    assert "× 0.750" in words(figure) and "1350 MHz measured" in words(figure) and "a machine" in words(figure)


def test_what_was_skipped_has_no_bar_and_is_named_with_its_reason():
    _, figure = waterfall(bandwidth_gb_s=1000.0)
    labels = [label.get_text() for label in figure.axes[0].get_yticklabels()]
    assert labels == ["data sheet", "tiles", "memory", "unexplained", "measured"]
    assert "clock (the clock was not readable), launch (no launch time given)" in words(figure).replace("\n", " ")


def test_a_gain_looks_unlike_a_loss_and_more_than_allowed_stays_inside_of_the_panel():
    gap, figure = waterfall(measured=1500.0, clock_mhz=1980.0)
    colours = [bar.get_facecolor() for bar in figure.axes[0].patches]
    assert gap.factors[-1].factor > 1 and len(set(colours[:4])) == 4
    assert figure.axes[0].get_xlim()[1] > 1500.0 and "more was reached" in words(figure)
    assert "× 1, not a limit here" in words(waterfall(bandwidth_gb_s=1e6)[1])


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
        figure, (axes,) = new_figure("Products", "a machine")
        draw_kernels(axes, kernels, {"bf16": 700.0, "fp32": 50.0, "fp64": 60.0}, 4000.0)
    return figure


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
    assert named_kernels(KERNELS).startswith("a: large, 70.0 %")


def test_roofs_meet_the_slope_and_those_of_unused_dtypes_are_not_drawn():
    figure = roofline(KERNELS)
    roofs = {line.get_ydata()[0]: line.get_xdata()[0] for line in figure.axes[0].lines if len(set(line.get_ydata())) == 1}
    assert roofs == pytest.approx({700.0: 175.0, 50.0: 12.5})
    assert "bf16 700" in words(figure) and "fp64" not in words(figure)


def test_letters_of_products_at_the_same_place_do_not_overlap():
    together = [Kernel(f"product {n}", "matmul", "bf16", 500.0, 600.0 + n, 0.3) for n in range(3)]
    figure = roofline(together)
    png(figure)
    boxes = {text.get_text(): text.get_window_extent() for text in figure.axes[0].texts if text.get_text() in "abc"}
    assert len(boxes) == 3
    assert not any(one.overlaps(other) for one, other in combinations(boxes.values(), 2))
