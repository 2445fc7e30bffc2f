"""What the figures of mixed precision show: times with their speed-ups, memory, strays, and what is absent."""

import pytest

from hyperion.book.plots import draw
from hyperion.experiments.precision.figures import precision, precision_loss, speedups_over_tf32
from hyperion.figures.material import Material, memory_unit
from hyperion.figures.style import styled
from hyperion.results import Row, Run
from tests.book.made_up.precision import GIB, MILLISECONDS, PRECISION, variant_rows, variant_samples
from tests.book.made_up.run import GPU


@pytest.fixture(scope="module")
def material(tmp_path_factory):
    run = Run.create(tmp_path_factory.mktemp("precision") / "run", {"environment": GPU})
    run.record(PRECISION, "precision_variants", variant_rows(), variant_samples(), input_hash="h")
    return Material(run)


def drawn(function, material):
    with styled():
        return function(material)


def texts(figure):
    found = [text.get_text() for axes in figure.axes for text in axes.texts]
    return " | ".join([*found, figure.get_supxlabel(), figure.get_suptitle()])


def test_bars_are_the_rows_and_speed_ups_stand_beside_them(material):
    figure = drawn(precision, material)
    assert len(figure.axes) == 4
    assert [bar.get_width() for bar in figure.axes[0].patches] == pytest.approx(list(MILLISECONDS.values()))
    assert [bar.get_width() for bar in figure.axes[1].patches] == pytest.approx(list(GIB.values()))
    assert "28 ms  (5 × fp32)" in texts(figure) and "140 ms" in texts(figure)
    assert "fp32 is IEEE fp32, with TF32 off." in texts(figure)
    assert "fp16: unsupported: made up" in texts(figure) and "NVIDIA Test GPU" in texts(figure)


def test_a_speed_up_over_ieee_fp32_stands_beside_that_over_tf32():
    def ratio(variant, dtype, value, **params):
        columns = {"notebook": PRECISION, "experiment": "precision_variants", "metric": "speedup", "limit_source": "no limit"}
        return Row(variant=variant, dtype=dtype, value=value, params={"over": "fp32", **params}, **columns)

    eager = [ratio("lm", "tf32", 4.0), ratio("lm", "bf16", 8.0), ratio("lm", "fp16", 10.0)]
    graph = [ratio("lm", "tf32", 4.0, mode="graph"), ratio("lm", "bf16", 9.0, mode="graph")]
    assert speedups_over_tf32([*eager, *graph]) == [
        "The rows for fp32 are IEEE fp32, with TF32 off. By default, PyTorch computes convolutions in TF32.",
        "lm, as a graph: bf16 is 9 × as fast as IEEE fp32 and 2.25 × as fast as TF32.",
    ]
    assert speedups_over_tf32([ratio("lm", "bf16", 1.3)]) == []  # a CPU has no TF32
    default, caution = speedups_over_tf32(eager)  # the run of an older version, which had no graphs
    assert "TF32 off" in default and "do not describe the number formats alone" in caution


def test_strays_from_fp32_are_drawn_for_all_others_and_skips_are_told(material):
    figure = drawn(precision_loss, material)
    lines = {line.get_label(): line for line in figure.axes[0].lines if not line.get_label().startswith("_")}
    assert set(lines) == {"tf32", "bf16", "fp16"}
    assert lines["bf16"].get_ydata() == pytest.approx([1e-3] * 16)
    assert "2 of 16 steps skipped" in texts(figure) and "3 %" in texts(figure)


def test_small_models_are_read_in_mib():
    assert memory_unit([0.01, 0.02]) == (1024.0, "MiB") and memory_unit([8.0]) == (1.0, "GiB")


def test_nothing_measured_nothing_drawn(tmp_path):
    empty = Material(Run.create(tmp_path / "run", {}))
    assert draw("precision", empty) is None and draw("precision_loss", empty) is None


def test_the_note_explains_the_allocator_lines_only_if_they_are_drawn(tmp_path, material):
    assert "vertical lines are the peaks" in texts(drawn(precision, material))
    run = Run.create(tmp_path / "run", {"environment": GPU})
    rows = [row for row in variant_rows() if row.metric != "peak_memory_gib"]
    run.record(PRECISION, "precision_variants", rows, variant_samples(), input_hash="h")
    assert "vertical lines" not in texts(drawn(precision, Material(run)))
