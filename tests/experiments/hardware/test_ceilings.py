"""The ceilings of forecasts, roofline table, roofline picture and headlines are the same: those of cold caches."""

from dataclasses import replace

import pandas as pd
import pytest

from hyperion.book.outline import headlines
from hyperion.chapter import Context, experiment_named
from hyperion.chapter.rows import stream_ceiling
from hyperion.experiments.hardware.figures import roofline as picture
from hyperion.experiments.hardware.figures import summary_notes
from hyperion.figures.material import Material
from hyperion.models import ModelFlops
from hyperion.results import Row, Run
from hyperion.workloads.training_rows import step_forecasts

HARDWARE = "01_hardware_exploration"
COLD, HOT = {"gemm": 741.4, "bandwidth": 4271.0}, {"gemm": 749.6, "bandwidth": 4333.0}


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Both ceilings with cold and with warm caches, and of fp16 a warm value alone."""
    run = Run.create(tmp_path_factory.mktemp("ceilings") / "run", {"environment": {"gpus": [{"name": "GPU"}]}})
    product, stream = {"m": 4096, "n": 4096, "k": 4096}, {"elements": 5 * 10**8}
    for experiment, variant, metric, dtype, params in (
        ("gemm", "torch.mm", "gemm_tflops", "bf16", product),
        ("bandwidth", "copy", "bandwidth_gb_s", "fp32", stream),
    ):
        rows = [
            timed(experiment, variant, metric, dtype, value[experiment], params | {"cache": cache})
            for cache, value in (("cold", COLD), ("hot", HOT))
        ]
        if experiment == "gemm":
            rows.append(timed(experiment, variant, metric, "fp16", 600.0, params | {"cache": "hot"}))
        else:
            rows.append(timed(experiment, "triad", metric, dtype, 4200.0, params | {"cache": "cold"}))
        run.record(HARDWARE, experiment, rows, pd.DataFrame({"x": [1]}), input_hash="h")
    return run


def timed(experiment, variant, metric, dtype, value, params):
    return Row(
        notebook=HARDWARE,
        experiment=experiment,
        variant=variant,
        metric=metric,
        dtype=dtype,
        value=value,
        n=30,
        ci_low=value,
        ci_high=value,
        limit_source="no limit: made up",
        params=params,
        check="c",
        check_error=0.0,
        check_tolerance=1.0,
    )


@pytest.fixture
def context(run, tmp_path):
    return Context(notebook=HARDWARE, experiment="roofline", sizes={}, workspace=tmp_path, upstream=run.rows())


def test_table(context):
    rows = experiment_named("roofline").run(context, lambda *report: None).rows
    ridges = {row.dtype: row.value for row in rows}
    assert ridges == {"bf16": pytest.approx(COLD["gemm"] * 1e3 / COLD["bandwidth"])}


def test_forecast(context):
    (forecast,) = step_forecasts(context, "lm", "bf16", "token", 1, ModelFlops(2 * 10**11, 7414 * 10**8), {"weights": 42710})
    assert "741.4 TFLOPS" in forecast.basis and "4271 GB/s" in forecast.basis
    assert forecast.ceiling == pytest.approx(1 / (1e-3 + 1e-8))
    assert forecast.estimate is None  # no curve of this architecture
    assert context.best_gemm("fp16") is None


def test_values_of_a_busy_machine_are_no_ceilings_unless_there_are_no_others(context):
    def rates(busy, idle):
        rows = [timed("gemm", "torch.mm", "gemm_tflops", "bf16", value, {"cache": "cold"}) for value in (busy, idle)]
        return [replace(rows[0], throttle="busy", params={"m": 1}), rows[1]]

    fast, slow = rates(900.0, 700.0)
    assert replace(context, upstream=[fast, slow]).best_gemm("bf16") == slow
    assert replace(context, upstream=[fast]).best_gemm("bf16") == fast
    streams = [
        replace(timed("bandwidth", "copy", "bandwidth_gb_s", "fp32", value, {"elements": 8, "cache": "cold"}), throttle=state)
        for value, state in ((90.0, "busy"), (70.0, "none"))
    ]
    assert stream_ceiling(streams).value == 70.0 and stream_ceiling(streams[:1]).value == 90.0
    small = replace(streams[1], value=500.0, params={"elements": 4, "cache": "cold"})  # its data may come from a cache
    assert stream_ceiling([*streams, small]).value == 70.0


def test_picture_and_headlines(run):
    texts = [text.get_text() for text in picture(Material(run)).axes[0].texts]
    assert "bf16 741.4" in texts and "4,271 GB/s measured" in texts
    assert [headline.value for headline in headlines(Material(run))] == ["741.4 TFLOPS", "4,271 GB/s"]


def test_the_summary_names_labelled_rates_that_were_not_steady(tmp_path, monkeypatch):
    run = Run.create(tmp_path, {})
    rows = [
        timed("gemm", "torch.mm", "gemm_tflops", dtype, value, dict.fromkeys("mnk", size) | {"cache": "cold"})
        for dtype, size, value in (("bf16", 1024, 250.0), ("bf16", 2048, 600.0), ("tf32", 1024, 100.0), ("tf32", 2048, 350.0))
    ]
    streams = [timed("bandwidth", "copy", "bandwidth_gb_s", "fp32", 4271.0, {"elements": 8, "cache": "cold"})]
    for experiment, own in (("gemm", rows), ("bandwidth", streams)):
        run.record(HARDWARE, experiment, own, pd.DataFrame({"x": [1]}), input_hash="h")
    unsteady: list[float] = []
    monkeypatch.setattr(Material, "steadiness", lambda _, row: "no (drift 8 %)" if row.value in unsteady else "yes")
    assert summary_notes(Material(run)) == []
    unsteady += [250.0, 350.0, 4271.0]  # the label of bf16 is that of 2048
    assert summary_notes(Material(run)) == ["The labelled rates of these were not steady: tf32, copy."]
