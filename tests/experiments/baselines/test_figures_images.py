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


def test_the_ratio_stands_above_wide_intervals_and_the_bar_of_this_library(material, monkeypatch):
    def wide(row):
        return dataclasses.replace(row, ci_high=2 * row.value) if row.metric == "images_per_s" else row

    rows = [wide(row) for row in material.of("image_training_speed")]
    monkeypatch.setattr(type(material), "of", lambda self, name: rows)
    axes = drawn(material)
    tops = {round(text.xy[0], 3): text.xy[1] for text in axes.texts if "×" in text.get_text()}
    ours = next(container for container in axes.containers if container.get_label() == "this library")
    assert set(tops) == {round(bar.get_x() + bar.get_width() / 2, 3) for bar in ours.patches}
    assert sorted(tops.values()) == [pytest.approx(1e5), pytest.approx(1.76e5)]


def test_each_loop_has_a_bar_and_each_ratio_names_the_loop_that_it_is_over(material):
    axes = drawn(material)
    assert [container.get_label() for container in axes.containers if container.get_label()[:1] != "_"] == [
        "plain public loop",
        "plain loop in a graph",
        "this library",
    ]
    lines = next(text.get_text() for text in axes.texts if 0.5 < text.xy[0] < 1.5).split("\n")
    assert [line.split(" [")[0] for line in lines] == ["2.15 × plain", "1.02 × graph"]
    centres = [bar.get_x() + bar.get_width() / 2 for container in axes.containers for bar in getattr(container, "patches", ())]
    assert len({round(centre, 3) for centre in centres}) == 6, "no bar hides another one"


def test_without_a_graph_two_bars_fill_the_place(material, monkeypatch):
    rows = [row for row in material.of("image_training_speed") if "plain, captured" not in row.params.values()]
    monkeypatch.setattr(type(material), "of", lambda self, name: rows)
    assert len([bar for container in drawn(material).containers for bar in getattr(container, "patches", ())]) == 4
