"""Launches: eager and graph as rows with intervals, the copies beside them, and the size at which both take as long."""

from dataclasses import replace

import numpy as np
import pytest

from hyperion.chapter import experiment_named
from hyperion.experiments.hardware import launch_cost
from hyperion.measure import measure_cache_sweep, measure_launch
from tests.chapter.toy import by_params, perform, toy_context

SIZES = {"time_limit_s": 0.02, "copy_kib": [4, 4096]}


@pytest.fixture(scope="module")
def context(tmp_path_factory):
    return toy_context("launch_cost", SIZES, tmp_path_factory.mktemp("launch"))


@pytest.fixture(scope="module")
def result(context, tmp_path_factory):
    return perform(context, tmp_path_factory.mktemp("run"))


@pytest.fixture
def scripted(context, monkeypatch):
    """Launches of 2 µs eagerly and 1 µs in a graph, copies of 1 and 100 µs: as on a GPU, without one."""

    def taking(timing, seconds):
        return replace(timing, samples_s=np.full(40, seconds))

    cost = measure_launch(context.device, time_limit_s=0.01)
    points = measure_cache_sweep("copy", context.device, sizes=[4096, 409600], time_limit_s=0.01)
    cost = replace(cost, eager=taking(cost.eager, 2e-6), graph=taking(cost.eager, 1e-6), graph_kernels=1000, asynchronous=True)
    points = [
        replace(point, captured=True, timing=taking(point.timing, t)) for point, t in zip(points, (1e-6, 1e-4), strict=True)
    ]
    monkeypatch.setattr(launch_cost, "measure_launch", lambda *args, **options: cost)
    monkeypatch.setattr(launch_cost, "measure_cache_sweep", lambda *args, **options: points)


def test_launches_are_rows_with_interval_and_check(result):
    eager = by_params(result.rows, "launch_time_s")["eager"]
    assert 1e-8 < eager.value < 1e-2 and eager.n >= 30 and eager.check == "calls counted"
    graph = next(row for row in result.rows if row.variant == "graph")
    assert graph.value is not None or "no graphs" in graph.value_reason


def test_copies_stand_beside_them_in_order(result):
    copies = [row for row in result.rows if row.metric == "bandwidth_gb_s"]
    assert [row.params["working_set_bytes"] for row in copies] == [4096, 4096 * 1024] and all(row.hot for row in copies)


def test_the_crossing_lies_between_the_sizes_or_says_why_not(result):
    (row,) = [row for row in result.rows if row.metric == "worthwhile_bytes"]
    if row.value is None:
        assert "copy" in row.value_reason
    else:
        assert 4096 < row.value < 4096 * 1024 and row.ci_low <= row.value <= row.ci_high
    assert row.params["launches"] == 2 and "twice" in row.params["set_equal"]


def test_a_gpus_graph_has_its_row_and_the_crossing_is_that_of_one_launch(scripted, context, tmp_path):
    result = perform(context, tmp_path)
    launches = by_params(result.rows, "launch_time_s")
    assert launches["eager"].value == pytest.approx(2e-6) and launches["graph"].value == pytest.approx(1e-6)
    assert launches["graph"].params["kernels"] == 1000 and set(result.samples["variant"]) == {"eager", "graph", "copy"}
    (row,) = [row for row in result.rows if row.metric == "worthwhile_bytes"]
    # On logarithmic scales 2 µs lie log(2)/log(100) of the way from 1 to 100 µs, and so does the size.
    assert row.value == pytest.approx(4096 * 100 ** (np.log(2) / np.log(100))) and row.params["launches"] == 1


def test_copies_that_are_all_larger_leave_a_reason(scripted, context, monkeypatch, tmp_path):
    points = launch_cost.measure_cache_sweep()
    slow = [replace(point, timing=points[1].timing) for point in points]
    monkeypatch.setattr(launch_cost, "measure_cache_sweep", lambda *args, **options: slow)
    (row,) = [row for row in perform(context, tmp_path).rows if row.metric == "worthwhile_bytes"]
    assert row.value is None and "longer than its launch" in row.value_reason


def test_nothing_is_foretold_and_the_basis_says_why(context, result):
    forecasts = experiment_named("launch_cost").forecast(context)
    assert [forecast.estimate for forecast in forecasts] == [None] * 3
    assert all(forecast.basis.startswith("no datasheet value") for forecast in forecasts)
    measured = {(row.variant, row.metric) for row in result.rows}
    assert {(forecast.variant, forecast.metric) for forecast in forecasts} <= measured
