"""The ladder's figure and table say what its rows say: values, changes from the rung before, and what is absent."""

import pytest

from hyperion.experiments.precision.figures import ladder_table, training_ladder
from hyperion.figures.material import Material
from hyperion.figures.style import styled
from hyperion.results import Run
from tests.book.made_up.precision import LADDER, LADDER_BUSY, PRECISION, ladder_rows, variant_samples
from tests.book.made_up.run import GPU


@pytest.fixture(scope="module")
def material(tmp_path_factory):
    run = Run.create(tmp_path_factory.mktemp("ladder") / "run", {"environment": GPU})
    run.record(PRECISION, "training_ladder", ladder_rows(), variant_samples(), input_hash="h")
    return Material(run)


def test_bars_reach_from_the_rung_before_to_their_own_value(material):
    with styled():
        figure = training_ladder(material)
    time, memory, loss = figure.axes
    for axes, place in ((time, 0), (memory, 1)):
        ends = [(bar.get_x(), bar.get_x() + bar.get_width()) for bar in axes.patches]
        values = [step[place] for step in LADDER.values()]
        assert ends == [pytest.approx(pair) for pair in zip([0, *values], values, strict=False)]
    assert [label.get_text() for label in time.get_yticklabels()] == list(LADDER)
    shown = " | ".join([text.get_text() for axes in figure.axes for text in axes.texts])
    assert "60  -57 %" in shown and "55  +10 %" in shown and "4  -33 %" in shown
    assert "fp8: unsupported: made up" in figure.get_supxlabel()
    assert len(loss.collections) + len(loss.lines) >= 3


def test_the_note_explains_only_the_marks_that_are_drawn(tmp_path, material):
    with styled():
        assert "Circles: early steps. Squares: late steps." in training_ladder(material).get_supxlabel()
    run = Run.create(tmp_path / "run", {"environment": GPU})
    old = [row for row in ladder_rows() if row.params.get("window") != "early"]
    run.record(PRECISION, "training_ladder", old, variant_samples(), input_hash="h")
    with styled():
        note = training_ladder(Material(run)).get_supxlabel()
    assert "Circles" not in note and "Squares: late steps. Bars: tolerance." in note


def test_the_busy_time_of_the_gpu_is_drawn_and_explained_only_if_it_was_measured(tmp_path, material):
    with styled():
        figure = training_ladder(material)
    marks = [(line.get_xdata()[0], line.get_ydata()[0]) for line in figure.axes[0].lines if line.get_marker() == "D"]
    expected = [(LADDER[name][0] * LADDER_BUSY[name], place) for place, name in enumerate(LADDER)]
    assert [place for _, place in marks] == [place for _, place in expected]
    assert [busy for busy, _ in marks] == pytest.approx([busy for busy, _ in expected])
    assert "Diamonds: time in which the GPU is busy" in figure.get_supxlabel()
    assert list(ladder_table(material.rows)["GPU busy"]) == ["100.0 %", "90.0 %", "80.0 %", "40.0 %"]
    run = Run.create(tmp_path / "run", {"environment": GPU})
    rows = [row for row in ladder_rows() if row.metric != "share"]
    run.record(PRECISION, "training_ladder", rows, variant_samples(), input_hash="h")
    with styled():
        figure = training_ladder(Material(run))
    assert "Diamonds" not in figure.get_supxlabel() and "D" not in [line.get_marker() for line in figure.axes[0].lines]
    assert "GPU busy" not in ladder_table(rows).columns


def test_the_table_has_a_line_a_rung_with_intervals_of_the_changes(material):
    table = ladder_table(material.rows)
    assert list(table["rung"]) == list(LADDER) and list(table["format"]) == ["fp32", "bf16", "bf16", "bf16"]
    assert (
        table["Δ time [95 %, one launch]"][0] == table["Δ memory"][0] == table["Δ loss early"][0] == table["Δ loss late"][0] == ""
    )
    assert table["Δ time [95 %, one launch]"][3] == "+10.0 % [+7.8, +12.2]"  # one over the ends of the speed's interval
    assert table["Δ memory"][3] == "-33.3 %"
    assert (table["Δ loss early"][1], table["Δ loss late"][1]) == ("0.020 % (allowed 0.10 %)", "0.40 % (allowed 3 %)")
    assert "fp8" not in set(table["rung"])
