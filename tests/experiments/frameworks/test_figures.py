"""What the figures of the chapter on frameworks show."""

import pytest

from hyperion.experiments.frameworks.figures import (
    flat_tables,
    framework_parity,
    framework_parts,
    framework_speed,
    planted_unfairness,
    trainer_defaults,
)
from hyperion.figures.material import Material
from hyperion.figures.style import MUTED, styled
from hyperion.results import Run
from tests.book.made_up.frameworks import framework_chapters
from tests.book.made_up.run import GPU


@pytest.fixture
def material(tmp_path):
    run = Run.create(tmp_path / "run", {"environment": GPU})
    for chapter, experiment, rows, samples in framework_chapters():
        run.record(chapter, experiment, rows, samples, input_hash="h")
    return Material(run)


def drawn(function, material):
    with styled():
        return function(material)


def names(axes):
    return [label.get_text() for label in axes.get_yticklabels()]


def test_a_difference_of_zero_is_hollow_and_named(material):
    figure = drawn(planted_unfairness, material)
    axes = figure.axes[0]
    assert figure.get_supxlabel().startswith("The judge named 1 of 2 unfairnesses correctly.")
    assert names(axes) == ["tokens counted per rank", "learning rate x 1.1"]
    zero, other = axes.lines
    assert zero.get_fillstyle() == "none" and zero.get_xdata()[0] == pytest.approx(0.3 * 0.09)
    assert other.get_fillstyle() == "full" and list(other.get_xdata()) == [0.09]
    assert [text.get_text() for text in axes.texts] == ["0"]


def test_parity_shows_twins_in_grey_the_bound_and_what_is_missing(material):
    figure = drawn(framework_parity, material)
    axes = figure.axes[0]
    assert names(axes) == ["HF Trainer", "accelerate", "fused AdamW"]
    assert [line.get_color() == MUTED for line in axes.lines[:3]] == [False, False, True]
    assert list(axes.lines[3].get_xdata()) == [4e-6, 4e-6]
    assert "NeMo: unavailable: not installed." in figure.get_supxlabel()


def test_speed_is_sorted_and_ties_are_named(material):
    figure = drawn(framework_speed, material)
    assert names(figure.axes[0]) == ["plain loop", "accelerate", "HF Trainer"]
    assert "Tied for the first place: plain loop, accelerate." in figure.get_supxlabel()
    assert "deepspeed zero-1: unavailable" in figure.get_supxlabel()


def test_the_parts_of_a_step_make_a_bar_for_each_framework_with_a_mark_at_its_timed_step(material):
    figure = drawn(framework_parts, material)
    axes = figure.axes[0]
    assert names(axes) == ["plain loop", "accelerate"]  # the fastest without the profiler is first
    (marks,) = axes.lines
    assert list(marks.get_xdata()) == [134, 135] and list(marks.get_ydata()) == [0, 1]
    legend = [text.get_text() for text in axes.get_legend().get_texts()]
    assert legend == ["matrix products", "norms, activations and other elementwise work", "idle"]  # no part without time
    norms = axes.containers[1]
    assert [patch.get_x() for patch in norms] == [100, 100] and [patch.get_width() for patch in norms] == [30, 20]
    notes = figure.get_supxlabel()
    assert notes.startswith("Black: time of a step without the profiler.")
    assert "Traced step time over timed step time: plain loop 1.04, accelerate 1.04." in notes
    assert "HF Trainer: unavailable: not installed" in notes


def test_the_flat_table_has_a_line_for_each_kernel(material):
    table = flat_tables([material.rows])["frameworks/kernels.csv"]
    assert table.to_csv(index=False).splitlines() == [
        "framework,kernel,operator,part,calls_per_step,time_per_step_s",
        "accelerate,nvjet,aten::mm,matrix products,154.0,0.1",
    ]


def test_defaults_have_one_mark_each(material):
    assert names(drawn(trainer_defaults, material).axes[0]) == ["equal work", "all defaults"]


def test_no_rows_no_figure(tmp_path):
    empty = Material(Run.create(tmp_path / "run", {"environment": GPU}))
    functions = (planted_unfairness, framework_parity, framework_speed, framework_parts, trainer_defaults)
    assert all(function(empty) is None for function in functions)
