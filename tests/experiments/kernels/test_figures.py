"""What the figures of the chapter on kernels show."""

from dataclasses import replace

import pytest

from hyperion.experiments.kernels.figures import attention_memory, attention_speed, matmul_kernel, row_kernels
from hyperion.figures.material import Material
from hyperion.figures.style import styled
from hyperion.results import Run
from tests.book.made_up.run import GPU
from tests.book.made_up.triton import triton_chapters


@pytest.fixture
def material(tmp_path):
    run = Run.create(tmp_path / "run", {"environment": GPU})
    for chapter, experiment, rows, samples in triton_chapters():
        run.record(chapter, experiment, rows, samples, input_hash="h")
    return Material(run)


def drawn(function, material):
    with styled():
        return function(material)


def texts(axes):
    return [text.get_text() for text in axes.texts]


def test_bars_have_their_values_and_what_is_missing_its_reason(material):
    axes = drawn(row_kernels, material).axes[0]
    assert sorted(bar.get_width() for bar in axes.patches) == [350.0, 350.0, 380.0, 380.0]
    assert [label.get_text() for label in axes.get_yticklabels()] == ["softmax", "layer norm"]
    figure = drawn(matmul_kernel, material)
    assert texts(figure.axes[0]) == ["0.700"] and "triton: not measured (unavailable: made up)" in figure.get_supxlabel()


def test_attention_has_a_panel_for_each_pass(material):
    figure = drawn(attention_speed, material)
    assert [axes.get_title(loc="left") for axes in figure.axes] == ["forward", "backward"]
    assert figure.axes[0].get_yticklabels()[0].get_text() == "8192 positions, 16/4 heads of 128"
    assert texts(figure.axes[0]) == ["0.400", "0.600"]


def test_what_was_measured_for_one_shape_alone_is_in_the_legend(tmp_path):
    (rows, samples), *_ = [(rows, samples) for _, name, rows, samples in triton_chapters() if name == "attention_speed"]
    short = [replace(row, variant="math", params=row.params | {"length": 2047}) for row in rows if row.variant == "triton"]
    run = Run.create(tmp_path / "run", {"environment": GPU})
    run.record("09_kernels", "attention_speed", [*rows, *short], samples, input_hash="h")
    axes = drawn(attention_speed, Material(run)).axes[0]
    assert [text.get_text() for text in axes.get_legend().get_texts()] == ["triton", "cudnn", "math"]
    assert texts(axes) == ["0.400", "0.600", "0.400"]


def test_memory_has_a_line_for_each_implementation(material):
    axes = drawn(attention_memory, material).axes[0]
    assert [line.get_label() for line in axes.lines] == ["triton", "math"]


def test_without_rows_there_is_no_figure(tmp_path):
    empty = Material(Run.create(tmp_path / "run", {}))
    assert [function(empty) for function in (row_kernels, matmul_kernel, attention_speed, attention_memory)] == [None] * 4
