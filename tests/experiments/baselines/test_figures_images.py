"""Both paths of image training side by side, the ratio above their intervals, and the dashed line over its own batch."""

import dataclasses

import pytest

from hyperion.experiments.baselines.figures_speed import image_training_speed
from hyperion.figures.style import styled


def drawn(material):
    with styled():
        return image_training_speed(material).axes[0]


def dashed(axes) -> list[tuple]:
    return [(*line.get_xdata(), line.get_ydata()[0]) for line in axes.lines if line.get_linestyle() == "--"]


def test_products_alone_bound_the_bars_of_their_batch(material):
    axes = drawn(material)
    assert [tick.get_text() for tick in axes.get_xticklabels()] == ["batch 128", "batch 512"]
    lines = {line[:2]: line[2] for line in dashed(axes)}
    rate = {batch: batch / (batch / 1.4e5 + 1e-5) for batch in (128, 512)}
    assert lines == {(-0.4, 0.4): pytest.approx(rate[128]), (0.6, 1.4): pytest.approx(rate[512])}


def test_a_batch_whose_products_were_not_timed_has_no_line_and_the_others_stay_where_they_were(material, monkeypatch):
    def without(row):
        return row.metric != "share" or row.params["batch"] != 128

    rows = material.of("image_training_speed")
    monkeypatch.setattr(type(material), "of", lambda self, name: [row for row in rows if without(row)])
    assert [line[:2] for line in dashed(drawn(material))] == [(0.6, 1.4)]


def test_the_ratio_stands_above_wide_intervals(material, monkeypatch):
    def wide(row):
        return dataclasses.replace(row, ci_high=2 * row.value) if row.metric == "images_per_s" else row

    rows = [wide(row) for row in material.of("image_training_speed")]
    monkeypatch.setattr(type(material), "of", lambda self, name: rows)
    tops = {text.xy[0]: text.xy[1] for text in drawn(material).texts if "×" in text.get_text()}
    assert tops == {0.18: pytest.approx(1e5), 1.18: pytest.approx(1.76e5)}
