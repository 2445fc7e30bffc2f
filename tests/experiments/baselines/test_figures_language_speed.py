"""A step's parts add up to its roof in the figure, and both paths stand beside it."""

from dataclasses import replace

import pytest

from hyperion.experiments.baselines.figures_speed import _notes, language_speed
from hyperion.figures.style import styled
from tests.book.made_up_images import language_speed_rows


def test_the_roofs_are_stacked_beside_both_steps(material):
    with styled():
        left, right = language_speed(material).axes
    tops = [bar.get_y() + bar.get_height() for bar in left.patches]
    assert (tops[4], tops[9], *tops[10:]) == pytest.approx((91.2, 105.2, 110, 126))
    shown = " ".join(text.get_text() for text in left.texts)
    assert "1.145 ×" in shown and "83 %, 96 %" in shown and "91.2 ms" in shown and "105 ms" in shown
    labels = [text.get_text() for text in left.get_legend().get_texts()]
    assert sorted(labels) == ["activations", "logits", "optimizer", "products"]
    assert "65,536 tokens" in right.get_title(loc="left")


def test_rows_of_before_say_that_each_product_was_timed_alone():
    rows = [row for row in language_speed_rows(limited=True) if row.metric == "share"]
    before = [replace(row, params=row.params | {"attention_s": 0.012}) if "own" in row.params["what"] else row for row in rows]
    (now, *_), (then, *_) = _notes(rows, compiled=True), _notes(before, compiled=True)
    assert "alternating with the steps" in now and "each timed alone" in then


def test_without_ceilings_there_are_two_bars_and_a_reason(cpu_material):
    with styled():
        figure = language_speed(cpu_material)
    assert len(figure.axes[0].patches) == 2
    assert "no ceilings" in figure.get_supxlabel() and "Neither loop is compiled" in figure.get_supxlabel()
