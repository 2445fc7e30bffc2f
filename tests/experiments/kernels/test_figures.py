"""What the figures of the chapter on kernels show."""

import pandas as pd
import pytest

from hyperion.experiments.kernels.figures import attention_memory, attention_speed, matmul_kernel, row_kernels
from hyperion.figures.material import Material
from hyperion.figures.style import styled
from hyperion.results import Row, Run
from tests.book.made_up import GPU

CHAPTER = "09_kernels"


def row(experiment, variant, metric, value, params, **columns):
    timed = {"n": 30, "ci_low": 0.99 * value, "ci_high": 1.01 * value} if value else {"value_reason": "unavailable: made up"}
    checks = {"check": "float64", "check_error": 1e-3, "check_tolerance": 1e-2} if value else {}
    common = {"notebook": CHAPTER, "experiment": experiment, "dtype": "bf16", "limit_source": "no limit: made up"}
    return Row(variant=variant, metric=metric, value=value, params=params, **common | timed | checks | columns)


@pytest.fixture
def material(tmp_path):
    shape = {"heads": 16, "key_heads": 4, "length": 8192, "features": 128, "causal": True}
    rows = {
        "row_kernels": [
            row("row_kernels", name, "bandwidth_gb_s", value, {"operation": operation})
            for name, value in (("triton", 3800.0), ("torch", 3500.0))
            for operation in ("softmax", "layer_norm")
        ],
        "matmul_kernel": [
            row("matmul_kernel", "torch.mm", "gemm_tflops", 700.0, {"m": 1, "n": 2, "k": 3}),
            row("matmul_kernel", "triton", "gemm_tflops", None, {"m": 1, "n": 2, "k": 3}),
        ],
        "attention_speed": [
            row("attention_speed", name, "attention_tflops", value, shape | {"pass": which})
            for name, value in (("triton", 400.0), ("cudnn", 600.0), ("flash", None))
            for which in ("forward", "backward")
        ],
        "attention_memory": [
            row("attention_memory", name, "peak_memory_gib", value * length, {"length": length})
            for name, value in (("triton", 1e-6), ("math", 1e-3))
            for length in (1024, 2048)
        ],
    }
    run = Run.create(tmp_path / "run", {"environment": GPU})
    for experiment, some in rows.items():
        run.record(CHAPTER, experiment, some, pd.DataFrame({"x": [1]}), input_hash="h")
    return Material(run)


def drawn(function, material):
    with styled():
        return function(material)


def texts(axes):
    return [text.get_text() for text in axes.texts]


def test_bars_have_their_values_and_what_is_missing_its_reason(material):
    axes = drawn(row_kernels, material).axes[0]
    assert sorted(bar.get_width() for bar in axes.patches) == [3500.0, 3500.0, 3800.0, 3800.0]
    assert [label.get_text() for label in axes.get_yticklabels()] == ["softmax", "layer norm"]
    figure = drawn(matmul_kernel, material)
    assert texts(figure.axes[0]) == ["700"] and "triton: not measured (unavailable: made up)" in figure.get_supxlabel()


def test_attention_has_a_panel_for_each_pass(material):
    figure = drawn(attention_speed, material)
    assert [axes.get_title(loc="left") for axes in figure.axes] == ["forward", "backward"]
    assert figure.axes[0].get_yticklabels()[0].get_text() == "8192 positions, 16/4 heads of 128"
    assert texts(figure.axes[0]) == ["400", "600"]


def test_memory_has_a_line_for_each_implementation(material):
    axes = drawn(attention_memory, material).axes[0]
    assert [line.get_label() for line in axes.lines] == ["triton", "math"]


def test_without_rows_there_is_no_figure(tmp_path):
    empty = Material(Run.create(tmp_path / "run", {}))
    assert [function(empty) for function in (row_kernels, matmul_kernel, attention_speed, attention_memory)] == [None] * 4
