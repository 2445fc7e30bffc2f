"""What the figures of memory show: the parts of each phase stacked, what checkpointing trades, and activations by depth."""

import pytest

from hyperion.book.plots import draw
from hyperion.experiments.memory.figures import checkpointing, memory_estimate, memory_phases, memory_trace
from hyperion.figures.material import Material
from hyperion.figures.style import png, styled
from hyperion.figures.tables import phase_table, tables_of
from hyperion.results import Run
from tests.book.made_up.precision import PHASES, checkpointing_rows, phase_rows, precision_chapters
from tests.book.made_up.run import GPU


@pytest.fixture(scope="module")
def material(tmp_path_factory):
    run = Run.create(tmp_path_factory.mktemp("memory") / "run", {"environment": GPU})
    for notebook, experiment, rows, samples in precision_chapters():
        run.record(notebook, experiment, rows, samples, input_hash="h")
    return Material(run)


def drawn(function, material):
    with styled():
        return function(material)


def texts(figure):
    return " | ".join([*(t.get_text() for axes in figure.axes for t in axes.texts), figure.get_supxlabel()])


@pytest.mark.slow
def test_the_parts_of_a_phase_are_stacked_up_to_all_tensors(material):
    figure = drawn(memory_phases, material)
    assert [axes.get_title(loc="left") for axes in figure.axes][:2] == ["gpt2_124m, fp32", "gpt2_124m, bf16"]
    totals = {
        row.params["phase"]: row.value
        for row in phase_rows()
        if row.params.get("part") == "all tensors" and (row.variant, row.dtype) == ("gpt2_124m", "fp32")
    }
    tops = [max(bar.get_y() + bar.get_height() for bar in column) for column in zip(*figure.axes[0].containers, strict=True)]
    assert tops == pytest.approx([totals[phase] for phase in PHASES])
    peaks = [line.get_ydata()[0] for line in figure.axes[0].lines]
    assert peaks == pytest.approx([totals[phase] + 2.0 for phase in PHASES[1:]])
    assert "equals all live tensors" in texts(figure)


def test_policies_are_drawn_relative_to_none(material):
    trade, depth = drawn(checkpointing, material).axes
    marks = {(round(x, 3), round(y, 3)) for line in trade.lines for x, y in zip(*line.get_data(), strict=True)}
    assert {(1.333, 0.4), (1.067, 0.7), (1.2, 0.6)} <= marks
    assert "-60 %" in [text.get_text() for text in trade.texts]
    figure = trade.get_figure()
    png(figure)
    labels = [text.get_window_extent() for text in trade.texts]
    assert not any(label.contains(*trade.transData.transform(mark)) for label in labels for mark in marks)
    corner = trade.patches[0].get_bbox()
    assert (corner.x1, corner.y1) == (1.3, 0.6), "what is asked of a policy"
    depths = {line.get_label(): list(line.get_ydata()) for line in depth.lines}
    assert depths["no checkpointing"] == pytest.approx([3.9, 11.1])
    assert depths["every block checkpointed"] == pytest.approx([1.65, 2.1])


def test_an_estimate_that_is_too_far_off_has_another_colour(material):
    peaks, errors = drawn(memory_estimate, material).axes
    assert [label.get_text() for label in peaks.get_yticklabels()][2] == "gpt2_124m, bf16, 28,672, in 24 GiB"
    assert [bar.get_width() for bar in peaks.patches] == [9.2, 1.3, 22.0], "what did not fit is not drawn"
    bars = errors.patches[1:]
    assert [bar.get_width() for bar in bars] == pytest.approx([-1.087, 15.385, 0.455], abs=1e-3)
    assert bars[0].get_facecolor() == bars[2].get_facecolor() != bars[1].get_facecolor()


def test_memory_over_a_step_is_stacked_for_each_policy_on_one_scale(material):
    none, every, kernels = drawn(memory_trace, material).axes
    assert none.get_ylim() == every.get_ylim() and [a.get_title(loc="left") for a in (none, every)] == [
        "no checkpointing",
        "every block",
    ]
    top = max(point for path in none.collections[-1].get_paths() for point in path.vertices[:, 1])
    assert top == pytest.approx(3.0)
    assert [bar.get_width() for bar in kernels.patches] == pytest.approx([40 / 3, 20, 40])
    assert max(len(text.get_text()) for text in kernels.texts) == 80


def test_phases_make_one_table_with_a_column_for_each_part():
    table = phase_table(phase_rows())
    assert len(table) == 2 * 2 * len(PHASES)
    line = table[(table["model"] == "resnet18") & (table["dtype"] == "bf16") & (table["phase"] == "after forward")].iloc[0]
    assert float(line["activations [GiB]"]) == 3.5 and float(line["all tensors [GiB]"]) == pytest.approx(5.1)
    assert next(caption for caption, _ in tables_of(phase_rows())) == "By phase and part"
    assert len(phase_table(checkpointing_rows())) == 0


def test_nothing_measured_nothing_drawn(tmp_path):
    empty = Material(Run.create(tmp_path / "run", {}))
    assert draw("memory_phases", empty) is None and draw("activation_checkpointing", empty) is None
