"""A step's parts add up to its roof in the figure, and both paths stand beside it."""

from dataclasses import replace

import pytest

from hyperion.experiments.baselines.figures_speed import _notes, language_speed, speed_ladder_table
from hyperion.figures.style import styled
from tests.book.made_up.images import LADDER, language_speed_rows


def test_the_roofs_are_stacked_beside_both_steps(material):
    with styled():
        left, right = language_speed(material).axes
    tops = [bar.get_y() + bar.get_height() for bar in left.patches]
    assert (tops[4], tops[9], *tops[10:]) == pytest.approx((91.2, 105.2, 110, 124, 126))
    assert [tick.get_text() for tick in left.get_xticklabels()][2:] == [
        "this library",
        "plain loop\nin a graph",
        "plain public\nloop",
    ]
    shown = " ".join(text.get_text() for text in left.texts)
    assert "83 %, 96 %" in shown and "91.2 ms" in shown and "105 ms" in shown
    factors = {text.xy[0]: text.get_text() for text in left.texts if "×" in text.get_text()}
    assert factors == {3: "1.127 ×\n[1.116, 1.139]\n124 ms", 4: "1.145 ×\n[1.134, 1.157]\n126 ms\n72 %, 83 %"}
    labels = [text.get_text() for text in left.get_legend().get_texts()]
    assert sorted(labels) == ["activations", "logits", "optimizer", "products"]
    assert "65,536 tokens" in right.get_title(loc="left")


def test_rows_of_before_say_that_each_product_was_timed_alone():
    rows = [row for row in language_speed_rows(limited=True) if row.metric == "share"]
    before = [replace(row, params=row.params | {"attention_s": 0.012}) if "own" in row.params["what"] else row for row in rows]
    (now, *_), (then, *_) = _notes(rows, compiled=True), _notes(before, compiled=True)
    assert "alternating with the steps" in now and "each timed alone" in then


def test_the_table_of_the_ladder_has_a_line_a_rung_and_compares_it_with_the_last_one_that_was_timed():
    table = speed_ladder_table(language_speed_rows(limited=True))
    assert list(table["rung"]) == list(LADDER) and list(table["batch"]) == ["65,536"] * 5
    assert list(table["ms a step"]) == ["126", "124", "", "116", "110"]
    gains = [cell.partition(" ")[0] for cell in table["× the rung before [95 %, one launch]"]]
    assert gains == ["", "1.016", "not", "1.069", "1.055"]
    assert table["× the rung before [95 %, one launch]"][2] == "not timed: in fp32 the residual stream is not bfloat16"
    assert table["× the rung before [95 %, one launch]"][4] == "1.055 [1.044, 1.065]"
    assert list(table["× plain"]) == ["1.000", "1.016", "", "1.086", "1.145"]
    assert list(table["adds"]) == [f"what {rung} adds" for rung in LADDER]


def test_batches_of_one_table_have_their_own_first_rung():
    rows = language_speed_rows(limited=True)
    half = [replace(row, params=row.params | {"batch": 32768}, value=row.value and row.value / 2) for row in rows]
    table = speed_ladder_table([*rows, *half])
    assert list(table.query("rung == 'plain'")["× plain"]) == ["1.000", "1.000"]
    assert len(table) == 10 and speed_ladder_table([]).empty


def test_without_ceilings_there_are_two_bars_and_a_reason(cpu_material):
    with styled():
        figure = language_speed(cpu_material)
    assert len(figure.axes[0].patches) == 2
    assert "no ceilings" in figure.get_supxlabel() and "Neither loop is compiled" in figure.get_supxlabel()
