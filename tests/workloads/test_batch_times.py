"""Times of one example and of batches: the table of a chapter, and batches of more examples than there are."""

import pandas as pd
import torch

from hyperion.book import show_table
from hyperion.results import Row
from hyperion.workloads.batch_times import batch_of, times_table

COMMON = {"notebook": "n", "experiment": "runtimes"}


def row(variant, metric, value, **params):
    interval = {"ci_low": value * 0.5, "ci_high": value * 2, "n": 30} if value else {"value_reason": "too few"}
    return Row(
        variant=variant, metric=metric, value=value, params={"model": "m"} | params, limit_source="none", **COMMON, **interval
    )


def test_the_table_has_percentiles_in_ms_and_the_best_rate_of_each_variant():
    rows = [
        row("eager", "latency_p50_s", 0.002),
        row("eager", "latency_p99_s", None),
        row("eager", "samples_per_s", 100.0, batch=1, role="search"),
        row("eager", "samples_per_s", 300.0, batch=8, role="best batch"),
        row("eager", "samples_per_s", 900.0, batch=8, role="best batch", beside="graph"),
        row("eager", "samples_per_s", 310.0, batch=8, cache="hot", role="search"),  # the largest of several rates is too high
        row("eager", "samples_per_s", 200.0, batch=32, cache="hot", role="search"),
        row("graph", "samples_per_s", 70.0, batch=1, role="search"),
        row("graph", "samples_per_s", 50.0, batch=8, role="search"),
        row("graph", "latency_p95_s", 0.001),
        row("eager", "latency_p50_s", 0.004, runtime="ONNX Runtime"),
        row("eager", "weight_bytes", 7),
    ]
    table = times_table(rows)
    assert list(table) == ["model", "runtime", "variant", "p50 / ms", "p95 / ms", "best rate"], "no column without a value"
    assert table.to_numpy().tolist() == [
        ["m", "", "eager", "2 (1 to 4)", "", "300 examples/s, batch 8"],
        ["m", "", "graph", "", "1 (0.5 to 2)", "70 examples/s, batch 1"],
        ["m", "ONNX Runtime", "eager", "4 (2 to 8)", "", ""],
    ]


def test_rows_of_an_earlier_version_give_an_empty_table():
    table = times_table([row("eager", "weight_bytes", 7)])
    assert isinstance(table, pd.DataFrame) and table.empty
    show_table(table)


def test_a_batch_of_more_examples_than_there_are_repeats_them():
    inputs = torch.arange(6.0).view(3, 2)
    assert torch.equal(batch_of(inputs, 2), inputs[:2]) and torch.equal(batch_of(inputs, 7), inputs[[0, 1, 2, 0, 1, 2, 0]])
