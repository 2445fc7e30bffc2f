"""Estimates beside measurements, and a step from inside, at toy sizes."""

import gzip
import json

import pandas as pd
import pytest

from hyperion.experiments.memory import memory_estimate, memory_trace
from hyperion.measure.memory_use.tensor_memory import Birth, MemoryHistory
from tests.chapter.toy import perform, toy_context

CELL = {"kind": "language", "model": "lm_d64_h4_l2", "vocabulary": 64, "sequence_length": 32, "batch_size": 4, "dtype": "fp32"}
QUESTION = {key: value for key, value in CELL.items() if key != "batch_size"} | {"memory_gib": 0.008, "margin": 0.05}


pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.slow
def test_every_peak_and_part_is_foretold_and_the_batch_fits(tmp_path):
    cells = [CELL, CELL | {"checkpointing": "every block"}]
    context = toy_context("memory_estimate", {"cells": cells, "question": QUESTION}, tmp_path)
    rows = perform(context, tmp_path).rows
    foretold = {
        (line.metric, *sorted(line.params.items())): line.estimate for line in memory_estimate.EXPERIMENT.forecast(context)
    }
    assert len(rows) == len(foretold) == 2 * 5 + 2
    for row in rows:
        assert row.value == pytest.approx(foretold[(row.metric, *sorted(row.params.items()))], rel=0.05)
    answer = next(row for row in rows if row.metric == "count")
    fits = next(row for row in rows if row.metric == "peak_memory_gib" and "memory_gib" in row.params)
    assert 0.9 * QUESTION["memory_gib"] < fits.value <= QUESTION["memory_gib"]
    assert fits.params["batch"] == answer.value * CELL["sequence_length"]


@pytest.mark.slow
def test_a_step_from_inside_leaves_its_files_and_its_curve(tmp_path):
    language = {key: value for key, value in CELL.items() if key not in ("kind", "dtype")}
    sizes = {"precision": "fp32", "policies": ["none", "every block"], "language": language}
    context = toy_context("memory_trace", sizes, tmp_path)
    result = perform(context, tmp_path)
    peaks = {row.params["checkpointing"]: row.value for row in result.rows if row.metric == "tensor_memory_gib"}
    for how, peak in peaks.items():
        curve = result.samples[result.samples["checkpointing"] == how]
        assert curve.groupby("event")["gib"].sum().max() == pytest.approx(peak)
        assert list(dict.fromkeys(curve["phase"])) == ["forward", "backward", "update"]
    shares = [row.value for row in result.rows if row.metric == "share"]
    assert len(shares) == 10 and shares == sorted(shares, reverse=True) and sum(shares) <= 1
    trace = next(tmp_path.rglob(memory_trace.TRACE))
    names = {event.get("name") for event in json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]}
    assert {"aten::addmm", "aten::_fused_adamw_"} <= names
    kernels = pd.read_csv(trace.with_name(memory_trace.KERNELS))
    assert list(kernels.columns) == ["kernel", "kind", "intervals", "time_ns", "share"] and len(kernels) > 10
    assert kernels["share"].sum() == pytest.approx(1) and kernels["share"].iloc[:10].tolist() == pytest.approx(shares)
    # The schedule leaves the warm-up step out of the trace.
    assert sorted(name for name in names if name and name.startswith("ProfilerStep")) == [f"ProfilerStep#{n}" for n in (1, 2, 3)]
    lives = json.loads(next(tmp_path.rglob(memory_trace.TIMELINE)).read_text())["lives"]
    assert {life["kind"] for life in lives} >= {"parameters", "activations", "gradients"}


def test_a_curve_of_few_points_keeps_the_fullest_moment():
    lives = tuple(Birth(size=size, kind="temporary", born=event, died=event + 1) for event, size in enumerate([1, 2, 9, 1, 1, 1]))
    curve = memory_trace.curve(MemoryHistory(lives, 7, (3, 6, 7)), points=2)
    assert list(curve["event"]) == [2, 4] and curve["gib"].max() == 9 / 2**30
