"""What the figures of memory show: the parts of each phase stacked, what checkpointing trades, and activations by depth."""

import pandas as pd
import pytest

from hyperion.book.material import Material
from hyperion.book.plots import draw
from hyperion.book.plots_memory import checkpointing, memory_phases
from hyperion.book.style import styled
from hyperion.book.tables import phase_table, tables_of
from hyperion.results import Run
from tests.book.made_up import GPU
from tests.book.made_up_precision import MEMORY, PHASES, PRECISION, checkpointing_rows, phase_rows


@pytest.fixture(scope="module")
def material(tmp_path_factory):
    run = Run.create(tmp_path_factory.mktemp("memory") / "run", {"environment": GPU})
    run.record(PRECISION, "memory_phases", phase_rows(), pd.DataFrame({"x": [1]}), input_hash="h")
    run.record(MEMORY, "activation_checkpointing", checkpointing_rows(), pd.DataFrame({"x": [1]}), input_hash="h")
    return Material(run)


def drawn(function, material):
    with styled():
        return function(material)


def texts(figure):
    return " | ".join([*(t.get_text() for axes in figure.axes for t in axes.texts), figure.get_supxlabel()])


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
    assert "add up to all tensors that are alive" in texts(figure)


def test_checkpointing_is_drawn_relative_to_none(material):
    figure = drawn(checkpointing, material)
    assert [bar.get_width() for bar in figure.axes[0].patches] == pytest.approx([0.4, 1 / 0.75, 0.4, 1 / 0.75])
    assert "40 %: 10 to 4 GiB" in texts(figure) and "133 %: 30 to 40 ms" in texts(figure)
    depths = {line.get_label(): list(line.get_ydata()) for line in figure.axes[1].lines}
    assert depths["everything kept"] == pytest.approx([3.9, 11.1])
    assert depths["inputs of blocks kept"] == pytest.approx([1.65, 2.1])


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
