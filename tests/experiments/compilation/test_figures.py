"""What the compilation figures show, and the flat table."""

import io
import json

import numpy as np
import pandas as pd
import pytest

from hyperion.experiments.compilation.figures import (
    COLUMNS,
    break_even,
    compilation,
    compilation_csv,
    compilation_json,
    compilation_table,
)
from hyperion.figures.material import Material
from hyperion.figures.style import styled
from hyperion.results import Run
from tests.book.made_up.compilation import CHAPTER, MODELS, compilation_rows
from tests.book.made_up.run import GPU


@pytest.fixture(scope="module")
def material(tmp_path_factory):
    run = Run.create(tmp_path_factory.mktemp("compilation") / "run", {"environment": GPU})
    run.record(CHAPTER, "compilation", compilation_rows(), pd.DataFrame({"x": [1]}), input_hash="h")
    return Material(run)


def drawn(function, material):
    with styled():
        return function(material)


def texts(figure):
    found = [text.get_text() for axes in figure.axes for text in axes.texts]
    return " | ".join([*found, figure.get_supxlabel(), figure.get_suptitle()])


def test_times_have_their_speed_up_and_what_is_missing_its_reason(material):
    figure = drawn(compilation, material)
    assert len(figure.axes) == 4 and "NVIDIA Test GPU" in texts(figure)
    assert "0.280 ms  (4.68 ×)" in texts(figure)
    assert "lm_d768_h12_l4 reduce-overhead: not measured (the compiler failed: made up)" in texts(figure)
    lengths = [bar.get_width() for bar in figure.axes[0].patches]
    assert lengths == pytest.approx([point[0] for point in MODELS["resnet18_imagenet_stem"].values()])


def test_memory_shows_both_kinds_and_the_weights(material):
    figure = drawn(compilation, material)
    assert "0.0230 in tensors" in texts(figure) and "0.0600 held by the allocator" in texts(figure)
    assert "the weights, 0.0208 GiB" in figure.axes[1].get_title(loc="left") + figure.axes[1].get_title()


def test_lines_fall_below_eager_at_the_break_even_of_the_row(material):
    axes = drawn(break_even, material).axes[0]
    line = next(line for line in axes.lines if str(line.get_label()).startswith("max-autotune: pays from 30 k calls"))
    calls, ratio = line.get_data()
    crossing = np.interp(0.0, -np.log(ratio), np.log(calls))
    assert np.exp(crossing) == pytest.approx(31.0 / (1.31 - 0.28) * 1e3, rel=0.01)


def test_without_rows_there_is_no_figure(tmp_path):
    empty = Material(Run.create(tmp_path / "run", {}))
    assert compilation(empty) is None and break_even(empty) is None


def test_the_table_has_a_line_for_each_mode_and_says_why_one_is_empty():
    table = compilation_table(compilation_rows())
    assert tuple(table.columns) == COLUMNS and len(table) == 8
    best = table.query("model == 'resnet18_imagenet_stem' and variant == 'max-autotune'").iloc[0]
    assert best["time_ms"] == pytest.approx(0.28) and best["mem_gb"] == pytest.approx(0.023 * 2**30 / 1e9)
    assert best["speedup_ci_low"] < best["speedup"] < best["speedup_ci_high"]
    missing = table.query("model == 'lm_d768_h12_l4' and variant == 'reduce-overhead'").iloc[0]
    assert missing["time_ms"] is None and missing["reason"] == "the compiler failed: made up"


def test_csv_and_json_hold_the_same():
    rows = compilation_rows()
    from_csv = pd.read_csv(io.StringIO(compilation_csv(rows)))
    from_json = pd.DataFrame(json.loads(compilation_json(rows)))
    pd.testing.assert_frame_equal(from_csv, from_json, check_dtype=False, rtol=1e-14)
