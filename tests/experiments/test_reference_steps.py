"""Steps of the reference models: what their rows carry, and the faults that their checks refuse."""

import contextlib

import pytest
import torch

from hyperion.experiments import Context
from hyperion.experiments import model_steps as experiment
from hyperion.experiments.reference_steps import (
    TrainingStep,
    forecast_step,
    least_memory_gib,
    step_rows,
    timed,
    update_of,
)
from hyperion.hardware import detect_cpu
from hyperion.models import reference_model
from hyperion.results import Row, RowError

NAME = "encoder_d128_h2_l2"


pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def context(tmp_path):
    sizes = {"models": [NAME], "dtypes": ["fp32", "tf32"], "batch_size": 2, "time_limit_s": 0.05}
    return Context(notebook="toy", experiment="model_steps", sizes=sizes, workspace=tmp_path)


def silent(done, total, note=""):
    pass


def test_every_phase_throughput_memory_and_the_count_are_rows(context):
    result = experiment.measure(context, silent, [NAME])
    for row in result.rows:
        row.validate()
    rows = {row.metric: row for row in result.rows if row.dtype == "fp32"}
    assert set(rows) == {"count", "step_time_s", "samples_per_s", "mfu", "forward_time_s", "backward_time_s",
                         "optimizer_time_s", "peak_rss_gib"}  # fmt: skip
    assert (rows["count"].value, rows["count"].check, rows["count"].check_error) == (396_544, "expected count", 0)
    assert rows["step_time_s"].check == "forward + backward + optimizer = step" and rows["step_time_s"].n >= 30
    assert rows["samples_per_s"].value == pytest.approx(2 / rows["step_time_s"].value)
    assert rows["samples_per_s"].check == "last loss / first loss" and rows["samples_per_s"].check_error < 0.99
    assert rows["peak_rss_gib"].value is None or rows["peak_rss_gib"].value > rows["peak_rss_gib"].limit
    assert set(result.samples["phase"]) == {"step", "forward", "backward", "optimizer"}


def test_a_dtype_that_the_device_lacks_is_a_row_with_the_reason(context):
    rows = [row for row in experiment.measure(context, silent, [NAME]).rows if row.dtype == "tf32"]
    assert len(rows) == 1 and rows[0].value is None and rows[0].value_reason.startswith("unsupported: TF32")


def test_a_step_that_trains_nothing_is_refused(context, monkeypatch):
    monkeypatch.setattr(torch.optim.AdamW, "step", lambda self: None)
    with pytest.raises(RowError, match="last loss / first loss"):
        for row in experiment.measure(context, silent, [NAME]).rows:
            row.validate()


class _Distracted(TrainingStep):
    """A step that does part of its work outside of every phase."""

    def __call__(self, phase):
        super().__call__(phase)
        super().__call__(lambda name: contextlib.nullcontext())


def test_work_outside_of_every_phase_is_refused(context):
    cpu = detect_cpu()
    timing, learned = timed(_Distracted(NAME, 2, "fp32", cpu), cpu, 0.05)
    rows, _ = step_rows(context, reference_model(NAME), 2, "fp32", timing, learned)
    with pytest.raises(RowError, match="forward \\+ backward \\+ optimizer = step"):
        for row in rows:
            row.validate()


def test_the_same_seed_is_the_same_step_and_another_is_not():
    losses = []
    for seed in (0, 0, 1):
        step = TrainingStep(NAME, 2, "fp32", detect_cpu(), seed)
        step.once()
        step.once()
        losses.append([float(loss) for loss in step.losses])
    assert losses[0] == losses[1] != losses[2] and losses[0][1] < losses[0][0]


def test_bf16_autocast_keeps_weights_and_loss_in_float32():
    step = TrainingStep(NAME, 2, "bf16", detect_cpu())
    step.once()
    assert {parameter.dtype for parameter in step.module.parameters()} == {torch.float32}
    assert step.losses[0].dtype == torch.float32
    exact = TrainingStep(NAME, 2, "fp32", detect_cpu())
    exact.once()
    assert float(step.losses[0]) != float(exact.losses[0]) == pytest.approx(float(step.losses[0]), rel=0.02)


def test_the_least_memory_is_weights_gradients_moments_and_batch():
    encoder, resnet = reference_model("encoder_d512_h8_l6"), reference_model("resnet50")
    assert least_memory_gib(encoder, 32) * 2**30 == 16 * 18_914_304 + 4 * 32 * 16 * 512
    assert least_memory_gib(resnet, 1) * 2**30 == 12 * 25_557_032 + 4 * 3 * 224 * 224
    assert update_of(encoder).traffic_bytes == 28 and update_of(resnet).traffic_bytes == 20


def test_forecasts_come_from_the_measured_ceilings_and_fit_the_rows(context):
    assert forecast_step(context, NAME, 2, "fp32")[0].estimate is None
    shared = {"notebook": "hw", "dtype": "fp32", "n": 30, "limit_source": "no limit: toy", "check": "toy",
              "check_error": 0.0, "check_tolerance": 1.0}  # fmt: skip
    gemm = Row(experiment="gemm", variant="torch.mm", metric="gemm_tflops", value=0.1, ci_low=0.1, ci_high=0.1, **shared)
    stream = Row(experiment="bandwidth", variant="copy", metric="bandwidth_gb_s", value=10.0, ci_low=10.0, ci_high=10.0,
                 params={"elements": 1000}, **shared)  # fmt: skip
    context.upstream.extend([gemm, stream])
    forecast = forecast_step(context, NAME, 2, "fp32")[0]
    model = reference_model(NAME)
    products = 2 * model.flops.forward_backward / 0.1e12
    traffic = (28 * model.parameter_count + 2 * 12 * 4 * model.activations) / 10e9
    assert forecast.estimate == pytest.approx(2 / (products + traffic))
    assert forecast.metric == "samples_per_s" and forecast.params == {"batch": 2, "step": "steady"}
