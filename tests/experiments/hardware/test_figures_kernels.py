"""Pictures of our models' products and of the gaps, drawn from rows of a GPU with many formats and of an unknown CPU."""

import numpy as np
import pandas as pd
import pytest

from hyperion.book.plots import draw
from hyperion.experiments.hardware.figures_gap import gaps_of, gemm_gap
from hyperion.experiments.hardware.figures_model_products import model_products, products_roofline
from hyperion.figures.material import Material
from hyperion.figures.style import styled
from hyperion.results import Run
from tests.book.made_up import GPU
from tests.book.made_up_hardware import HARDWARE, PEAKS, bandwidth_rows, gemm_rows
from tests.book.made_up_kernels import LIMITS, MAF, MODELS, gap_rows, model_products_rows


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
    told = words(figure)
    assert "84 % of peak" in told and "timed in bf16: resnet50 96 %" in told and "fp8: unsupported: no units for it" in told
    assert told.count("% of MAF") == 4 * len(MODELS)


def test_without_a_peak_there_is_no_bar_for_it_and_a_note_says_why(cpu):
    figure = drawn(model_products, cpu)
    assert "data sheet" not in words(figure) and "fp32: no peak: unknown CPU" in words(figure)
    assert len(figure.axes[0].patches) == 1 + len(MODELS)


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


def test_all_formats_share_a_picture_and_one_alone_tells_its_reasons(gpu, cpu):
    told = words(drawn(gemm_gap, gpu))
    assert told.count("unexplained |") == 4 and "fp8: unsupported" in told
    assert "launch (no launch time given)" in told and "8192 x 4096 x 8192 tf32" in told
    alone = words(drawn(gemm_gap, gpu, dtype="bf16"))
    assert "Clock: why clock" in alone and "× 0.930" in alone and "tf32" not in alone
    assert drawn(gemm_gap, cpu) is None


def test_the_only_waterfall_of_a_cpu_names_the_formats_that_have_none(cpu_material):
    told = words(drawn(gemm_gap, cpu_material))
    assert "8192 x 4096 x 8192 fp32" in told and "fp64, bf16: no peak: no data sheet entry" in told


def test_pictures_are_the_same_each_time(gpu):
    for name in ("model_products", "products_roofline", "gemm_gap"):
        first = draw(name, gpu)
        assert first.startswith(b"\x89PNG") and draw(name, gpu) == first
