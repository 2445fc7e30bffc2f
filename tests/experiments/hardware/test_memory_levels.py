"""Bandwidth by working set: what its rows say of a CPU, and what is foretold of GPUs that are not here."""

from dataclasses import replace

import pytest
import torch

from hyperion.chapter import Context, experiment_named
from hyperion.experiments.hardware import memory_levels
from hyperion.hardware import detect
from hyperion.measure import SWEEPS, CachePoint, cache_capacities
from tests.chapter.toy import by_params, perform, toy_context
from tests.hardware.machines import facts

SIZES = {"dtype": "fp32", "largest_mib": 1, "step": 4, "time_limit_s": 0.01}
GPU_SIZES = SIZES | {"largest_mib": 8192, "step": 1}


@pytest.fixture(scope="module")
def context(tmp_path_factory):
    return toy_context("memory_levels", SIZES, tmp_path_factory.mktemp("levels"))


@pytest.fixture(scope="module")
def result(context, tmp_path_factory):
    return perform(context, tmp_path_factory.mktemp("run"))


def on(machine: str, context: Context, monkeypatch, sizes=GPU_SIZES) -> Context:
    device = detect(facts(machine))
    monkeypatch.setattr(Context, "device", property(lambda self: device))
    return Context(notebook="toy", experiment="memory_levels", sizes=sizes, workspace=context.workspace)


@pytest.mark.slow
def test_every_working_set_is_read_and_copied_warm_and_checked(result):
    for operation in SWEEPS:
        rows = [row for row in result.rows if (row.variant, row.metric) == (operation, "bandwidth_gb_s")]
        sizes = [row.params["working_set_bytes"] for row in rows]
        assert len(sizes) >= 2 and sizes == sorted(set(sizes)) and sizes[-1] == 2**20
        assert all(row.hot and row.n >= 30 and row.check and "host's clock" in row.params["timed"] for row in rows)


def test_no_row_below_memory_has_a_limit_and_each_says_why(result):
    rows = [row for row in result.rows if row.metric == "bandwidth_gb_s"]
    assert all(row.limit is None and row.limit_source.startswith("no limit: ") for row in rows)


def test_capacities_are_rows(result, context):
    found = {name: row.value for name, row in by_params(result.rows, "cache_bytes").items()}
    assert found == {capacity.name: capacity.bytes for capacity in cache_capacities(context.device)}


def test_samples_say_how_they_were_taken(result):
    assert {"variant", "time_s", "how", "warm"} <= set(result.samples.columns)
    assert set(result.samples["variant"]) == set(SWEEPS)


def test_a_forecast_finds_its_row(result, context):
    rows = [row for row in result.rows if row.metric == "bandwidth_gb_s"]
    for forecast in experiment_named("memory_levels").forecast(context):
        sources = (forecast.variant, forecast.dtype, forecast.params)
        assert sum((r.variant, r.dtype, {name: r.params[name] for name in forecast.params}) == sources for r in rows) == 1


def test_a_gpu_is_foretold_its_data_sheet_where_no_cache_has_a_part(context, monkeypatch):
    there = on("H200", context, monkeypatch)
    cache = there.device.last_level_cache_bytes
    forecasts = experiment_named("memory_levels").forecast(there)
    assert forecasts[0].estimate is not None, "the one that the reader guesses first"
    for forecast in forecasts:
        far = forecast.params["working_set_bytes"] >= 20 * cache
        assert (forecast.estimate is not None) == far
        assert forecast.ceiling in (None, forecasts[0].ceiling) and forecast.basis
    assert forecasts[0].ceiling == pytest.approx(4800, rel=0.05) and forecasts[0].estimate < forecasts[0].ceiling


def test_a_cache_of_unknown_size_leaves_no_limit(context, monkeypatch):
    device = replace(detect(facts("H200")), last_level_cache_bytes=None)
    monkeypatch.setattr(Context, "device", property(lambda self: device))
    forecasts = experiment_named("memory_levels").forecast(replace(context, sizes=GPU_SIZES))
    assert {(forecast.estimate, forecast.basis) for forecast in forecasts} == {(None, memory_levels._limit(device, 2**30)[1])}
    assert "unknown size" in forecasts[0].basis


def test_sizes_keep_to_the_cap_and_reach_it_from_the_innermost(context, monkeypatch):
    there = on("H200", context, monkeypatch, GPU_SIZES | {"largest_mib": 256})
    sizes = [forecast.params["working_set_bytes"] for forecast in experiment_named("memory_levels").forecast(there)]
    assert max(sizes) == 256 * 2**20 and min(sizes) == 4096
    assert all(forecast.estimate is None for forecast in experiment_named("memory_levels").forecast(there))


def test_a_point_that_is_mostly_launching_says_so(context, result, monkeypatch):
    monkeypatch.setattr(CachePoint, "launch_bound", True)
    rows = experiment_named("memory_levels").run(context, lambda *report: None).rows
    sources = {row.limit_source.partition(" (")[0] for row in rows if row.metric == "bandwidth_gb_s"}
    assert sources == {"no limit: mostly launching"}


def test_no_memory_left_is_a_row(context, monkeypatch, tmp_path):
    def refuse(*args, **options):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 8 GiB")

    monkeypatch.setattr(memory_levels, "measure_cache_sweep", refuse)
    rows = [row for row in perform(context, tmp_path).rows if row.metric == "bandwidth_gb_s"]
    assert [row.variant for row in rows] == list(SWEEPS)
    assert all(row.value is None and "out of memory" in row.value_reason for row in rows)
