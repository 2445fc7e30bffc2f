"""Step times foretold from a run's ceilings: by hand, and scored against the steps of the reference H200s."""

from statistics import median

import pytest

from hyperion.chapter import experiment_named
from hyperion.chapter.context import Context
from hyperion.hardware import detect
from hyperion.paths import reference_folder
from hyperion.results import Row, Run
from hyperion.workloads.reference_steps import StepVariant, forecast_reference_step, operator_time, step_ceilings
from tests.chapter.toy import toy_context
from tests.experiments.hardware.test_model_products import streams, upstream
from tests.hardware.machines import facts

NAME = "encoder_d128_h2_l2"
SIZES = {"models": [NAME], "variants": [{"dtype": "fp32"}], "batch_size": 2, "time_limit_s": 0.1, "parity_steps": 5}
EAGER = {"layout": "contiguous", "mode": "eager"}


def launch(seconds):
    return Row(
        notebook="hw",
        experiment="launch_cost",
        variant="eager",
        metric="launch_time_s",
        value=seconds,
        n=30,
        ci_low=seconds,
        ci_high=seconds,
        limit_source="no limit: toy",
        check="toy",
        check_error=0.0,
        check_tolerance=1.0,
    )


def on(machine, monkeypatch):
    device = detect(facts(machine))
    monkeypatch.setattr(Context, "device", property(lambda self: device))


def variant_of(row):
    return StepVariant(row.dtype, row.params.get("layout") == "channels_last", row.params.get("mode") == "compiled")


def test_without_ceilings_nothing_is_foretold(tmp_path):
    foretold = experiment_named("model_steps").forecast(toy_context("model_steps", SIZES, tmp_path))
    assert [(f.metric, f.estimate) for f in foretold] == [("samples_per_s", None), ("step_time_s", None)]
    assert all("01_hardware_exploration" in f.basis for f in foretold)


def test_rate_and_time_are_one_prediction_and_its_basis_is_told(tmp_path):
    context = toy_context("model_steps", SIZES, tmp_path, [upstream("gemm", "torch.mm", 0.1), *streams()])
    rate, time = experiment_named("model_steps").forecast(context)
    assert rate.estimate == pytest.approx(2 / time.estimate)
    assert rate.params == time.params == {"batch": 2, "step": "steady"} | EAGER
    assert "no launch was measured" in time.basis and "10 GB/s" in time.basis and "us each = " in time.basis
    doubled = toy_context("model_steps", SIZES, tmp_path, [upstream("gemm", "torch.mm", 0.01), *streams()])
    assert experiment_named("model_steps").forecast(doubled)[1].estimate > time.estimate


def test_a_measured_launch_takes_the_place_of_the_assumed_one(tmp_path, monkeypatch):
    on("H200", monkeypatch)
    context = toy_context("model_steps", SIZES, tmp_path, [upstream("gemm", "torch.mm", 50.0), *streams()])
    assert operator_time(context)[0] == pytest.approx(19e-6)
    context.upstream.append(launch(1e-3))
    seconds, how = operator_time(context)
    assert seconds == pytest.approx(4e-3) and "measured launches" in how
    assert "the host's time decides" in forecast_reference_step(context, NAME, 2, StepVariant("fp32"))[1].basis


def test_tf32_has_rates_of_its_own_and_compiled_code_fewer_bytes_and_launches(tmp_path, monkeypatch):
    on("H200", monkeypatch)
    rates = [upstream("gemm", "torch.mm", 0.001), upstream("gemm", "torch.mm", 0.01, dtype="tf32"), launch(1e-8)]
    context = toy_context("model_steps", SIZES, tmp_path, [*rates, *streams()])
    fp32, tf32, compiled = (
        forecast_reference_step(context, NAME, 2, variant)[1]
        for variant in (StepVariant("fp32"), StepVariant("tf32"), StepVariant("fp32", compiled=True))
    )
    assert tf32.estimate < fp32.estimate and compiled.estimate <= fp32.estimate and compiled.params["mode"] == "compiled"
    assert "fused operators between them" in compiled.basis and "two kernels per product of 0.02 us" in compiled.basis
    assert step_ceilings(context, "tf32")[0].products["fp32"] == step_ceilings(context, "tf32")[0].products["tf32"]
    without = toy_context("model_steps", SIZES, tmp_path, [upstream("gemm", "torch.mm", 50.0), *streams()])
    assert forecast_reference_step(without, NAME, 2, StepVariant("tf32"))[1].estimate is None


def test_warm_products_and_other_experiments_are_no_ceilings(tmp_path):
    others = [upstream("gemm", "torch.mm", 9.0, cache="hot"), upstream("model_products", "resnet50", 9.0), *streams()]
    assert step_ceilings(toy_context("model_steps", SIZES, tmp_path, others), "fp32")[0] is None
    found, _ = step_ceilings(toy_context("model_steps", SIZES, tmp_path, [*others, upstream("gemm", "torch.mm", 1.0)]), "fp32")
    assert max(found.products["fp32"].filled_tflops) == pytest.approx(1.0, rel=0.5)


@pytest.mark.slow
@pytest.mark.long
def test_steps_of_the_reference_h200s_are_foretold_within_a_fifth_in_the_median(tmp_path, monkeypatch):
    on("H200", monkeypatch)
    rows = Run.open(reference_folder() / "h200x2").rows()
    ceilings = [row for row in rows if row.experiment in ("gemm", "bandwidth", "operator_cost")]
    steps = [r for r in rows if (r.experiment, r.metric) == ("model_steps", "step_time_s") and r.value is not None]
    context = toy_context("model_steps", SIZES, tmp_path, ceilings)
    errors = [
        abs(forecast_reference_step(context, row.variant, row.params["batch"], variant_of(row))[1].estimate / row.value - 1)
        for row in steps
    ]
    assert len(errors) >= 6 and median(errors) <= 0.20
