"""Predictions are scored by how much better was foretold than came, with the reader's guess beside them."""

import pytest

from hyperion.book.plots_predictions import predictions, scored
from hyperion.figures.style import styled
from hyperion.results import Row, metric_named


def drawn(material):
    with styled():
        return predictions(material)


def rank_row(rank, value, predicted, **columns):
    return Row(
        notebook="n",
        experiment="e",
        variant="ddp",
        metric="tokens_per_s",
        value=value,
        rank=rank,
        predicted=predicted,
        params={"epoch": 1},
        **columns,
    )


def test_ratios_and_the_readers_guess(material):
    lines = {line.get_label(): line for line in drawn(material).axes[0].lines}
    row = next(r for r in material.of("gemm") if (r.dtype, r.params["m"], r.variant) == ("bf16", 16384, "torch.mm"))
    assert lines["reader's guess"].get_ydata()[0] == pytest.approx(500 / row.value)
    foretold = [r for r in material.of("gemm") if r.predicted and r.value]
    assert sorted(lines["gemm_tflops [TFLOPS] ↑"].get_ydata()) == pytest.approx(sorted(r.predicted / r.value for r in foretold))


def test_where_less_is_better_the_ratio_is_turned_round(material):
    figure = drawn(material)
    lines = {line.get_label(): line for line in figure.axes[0].lines}
    rows = scored(material.rows)
    lower = {row.metric for row in rows if metric_named(row.metric).direction == "lower"}
    assert lower and "above 1 says that better was foretold than came" in figure.get_supxlabel().replace("\n", " ")
    for metric in lower:
        line = next(line for name, line in lines.items() if name.startswith(metric) and name.endswith("↓"))
        expected = [row.value / row.predicted for row in rows if row.metric == metric]
        assert list(line.get_ydata()) == pytest.approx(expected)


def test_a_forecast_of_each_rank_is_scored_for_each():
    parts = [rank_row(rank, 100.0, 120.0) for rank in range(4)]
    assert scored([rank_row(None, 400.0, None), *parts]) == parts
