"""What the figures of the chapter on megatron-core show."""

import pytest

from hyperion.experiments.megatron.figures import layout_speed, megatron_parity, megatron_pretraining, pipeline_bubble
from hyperion.figures.material import Material
from hyperion.figures.style import styled
from hyperion.results import Run
from tests.book.made_up.megatron import LOSS, NORM, megatron_chapters
from tests.book.made_up.run import GPU


@pytest.fixture
def material(tmp_path):
    run = Run.create(tmp_path / "run", {"environment": GPU})
    for chapter, experiment, rows, samples in megatron_chapters():
        run.record(chapter, experiment, rows, samples, input_hash="h")
    return Material(run)


def drawn(function, material):
    with styled():
        figure = function(material)
        figure.draw_without_rendering()
    return figure, figure.axes[0]


def legend(axes):
    return [text.get_text() for text in axes.get_legend().get_texts()]


def test_differences_of_losses_and_norms_stand_on_the_line_of_their_layout(material):
    figure, axes = drawn(megatron_parity, material)
    assert legend(axes) == [LOSS, NORM, "predicted", "tolerance"]
    losses, norms = axes.lines[:2]
    assert list(losses.get_xdata()) == pytest.approx([1e-8, 3e-7, 5e-6]) and list(losses.get_ydata()) == [0, 1, 2]
    assert list(norms.get_xdata()) == pytest.approx([1e-8, 6e-7, 1e-5])
    assert [text.get_text() for text in axes.get_yticklabels()] == ["DP 2", "TP 2", "PP 2"]
    assert "TP 4: not measured (unavailable: made up)" in figure.get_supxlabel()


def test_bubbles_have_the_formula_as_a_line(material):
    _, axes = drawn(pipeline_bubble, material)
    formula = next(line for line in axes.lines if line.get_label() == "(p - 1) / (m + p - 1)")
    assert list(formula.get_xdata()) == [1, 2, 4] and list(formula.get_ydata()) == pytest.approx([1 / 2, 1 / 3, 1 / 5])
    measured = axes.containers[0].lines[0]
    assert list(measured.get_ydata()) == pytest.approx([1.1 / 2, 1.1 / 3, 1.1 / 5])


def test_speedups_stand_beside_the_bar_of_their_layout(material):
    figure, left = drawn(layout_speed, material)
    right = figure.axes[1]
    assert [bar.get_width() for bar in left.patches] == pytest.approx([200, 250, 500])
    assert [text.get_text() for text in left.get_yticklabels()][2] == "megatron-core, PP 2"
    measured, predicted = right.containers[0].lines[0], right.lines[-1]
    assert list(measured.get_xdata()) == [1.25, 0.5] and list(measured.get_ydata()) == [0, 2]
    assert list(predicted.get_xdata()) == [0.8] and list(predicted.get_ydata()) == [2]
    assert left.get_ylim() == right.get_ylim()


def test_the_entropy_is_a_line_above_the_loss(material):
    _, axes = drawn(megatron_pretraining, material)
    assert legend(axes) == ["training loss", "loss on the test split", "entropy of single tokens"]
    assert [line.get_ydata()[0] for line in axes.lines[1:]] == [2.2, 3.2]


def test_without_rows_there_is_no_figure(tmp_path):
    empty = Material(Run.create(tmp_path / "run", {}))
    assert megatron_parity(empty) is pipeline_bubble(empty) is layout_speed(empty) is megatron_pretraining(empty) is None
