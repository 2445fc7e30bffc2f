"""Steps of the reference models: what their rows carry, and the faults that their checks refuse."""

import contextlib

import numpy as np
import pandas as pd
import pytest
import torch

from hyperion.chapter import Context
from hyperion.errors import HyperionError
from hyperion.experiments.steps import model_steps as experiment
from hyperion.experiments.steps.batch_scaling import forecast_on_device
from hyperion.experiments.steps.model_steps import ModelStepsOptions, cells_of, parity_rows
from hyperion.hardware import detect, detect_cpu
from hyperion.models import reference_model
from hyperion.results import Row, RowError
from hyperion.workloads.reference_steps import StepVariant, TrainingStep, least_memory_gib, step_rows, timed, update_of
from tests.experiments.hardware.test_model_products import upstream
from tests.hardware.machines import facts

NAME = "encoder_d128_h2_l2"


pytestmark = pytest.mark.usefixtures("one_thread")


SIZES = {
    "models": [NAME],
    "variants": [{"dtype": "fp32"}, {"dtype": "tf32"}],
    "batch_size": 2,
    "time_limit_s": 0.05,
    "parity_steps": 5,
}


@pytest.fixture
def context(tmp_path):
    return Context(notebook="toy", experiment="model_steps", sizes=SIZES, workspace=tmp_path)


def silent(done, total, note=""):
    pass


@pytest.mark.slow
def test_every_phase_throughput_memory_and_the_count_are_rows(context):
    context.upstream.append(upstream("gemm", "torch.mm", 2.0))
    result = experiment.measure(context, silent, [0])
    for row in result.rows:
        row.validate()
        assert row.params.items() >= {"batch": 2, "layout": "contiguous", "mode": "eager"}.items()
    rows = {row.metric: row for row in result.rows}
    assert set(rows) == {
        "count",
        "step_time_s",
        "samples_per_s",
        "mfu",
        "mfu_maf",
        "forward_time_s",
        "backward_time_s",
        "optimizer_time_s",
        "peak_rss_gib",
    }
    assert (rows["count"].value, rows["count"].check, rows["count"].check_error) == (396_544, "expected count", 0)
    step, rate = rows["step_time_s"], rows["samples_per_s"]
    assert step.check == "forward + backward + optimizer = step" and step.n >= 30
    assert rate.value == pytest.approx(2 / step.value)
    assert rate.check == "last loss / first loss" and rate.check_error < 0.99
    reached = 2 * reference_model(NAME).flops.forward_backward / step.value / 1e12
    assert rows["mfu_maf"].value == pytest.approx(reached / 2.0) and rows["mfu_maf"].params["maf"] == "gemm"
    assert rows["mfu_maf"].ci_low <= reached / 2.2 and rows["mfu_maf"].ci_high >= reached / 1.8
    assert rows["peak_rss_gib"].value is None or rows["peak_rss_gib"].value > rows["peak_rss_gib"].limit
    assert set(result.samples["phase"]) == {"step", "forward", "backward", "optimizer"}
    for foretold in experiment.forecast(context):
        met = [row for row in result.rows if row.metric == foretold.metric and foretold.params.items() <= row.params.items()]
        assert len(met) == 1


@pytest.mark.slow
def test_without_a_product_of_the_format_there_is_no_share_of_the_fastest(context):
    context.upstream.append(upstream("gemm", "torch.mm", 2.0, dtype="bf16"))
    row = next(row for row in experiment.measure(context, silent, [0]).rows if row.metric == "mfu_maf")
    assert row.value is None and "no product in fp32" in row.value_reason


def options(models, variants):
    return ModelStepsOptions.parse(SIZES | {"models": models, "variants": variants}, "model_steps")


def reasons_of(models, variants, device):
    return [(str(cell.variant), cell.absent.partition(":")[0]) for cell in cells_of(options(models, variants), device)]


def test_a_variant_that_a_device_or_a_model_has_not_says_why(context):
    everything = [{"dtype": "tf32"}, {"dtype": "fp32", "channels_last": True}, {"dtype": "bf16", "compiled": True, "models": []}]
    assert reasons_of([NAME], everything, detect_cpu()) == [
        ("tf32", "unsupported"),
        ("fp32 channels_last", "no variant"),
        ("bf16 compiled", "left out by this profile, for time"),
    ]
    asked = ModelStepsOptions.of(context)
    rows = [experiment._absent(context, asked, cell) for cell in cells_of(asked, detect_cpu()) if cell.absent]
    assert [(row.dtype, row.value) for row in rows] == [("tf32", None)] and "TF32" in rows[0].value_reason


def test_compiled_convolutions_lie_channels_last_and_sequences_as_ever():
    compiled = [{"dtype": "bf16", "channels_last": True, "compiled": True}, {"dtype": "fp32", "compiled": True}]
    gpu = detect(facts("H200"))
    assert reasons_of(["resnet50"], compiled, gpu) == [("bf16 channels_last compiled", ""), ("fp32 compiled", "left out")]
    assert reasons_of(["vit_b_16"], compiled[:1], gpu) == [("bf16 compiled", "")]


def test_a_model_that_there_is_not_fails():
    with pytest.raises(HyperionError, match="no reference model is named 'resnet51'"):
        reasons_of(["resnet51"], [{"dtype": "fp32"}], detect_cpu())


@pytest.mark.slow
def test_what_does_not_fit_is_a_row_with_the_reason(context, monkeypatch):
    def full(*args):
        raise torch.OutOfMemoryError("tried to allocate 9 GiB")

    monkeypatch.setattr(experiment, "TrainingStep", full)
    [row] = experiment.measure(context, silent, [0]).rows
    assert row.value is None and row.value_reason.startswith("out of memory: ") and row.params["mode"] == "eager"


def test_a_compiled_step_with_other_losses_is_refused(context):
    asked = options([NAME], [{"dtype": "fp32", "compiled": True}])
    [cell] = cells_of(asked, detect_cpu())
    eager = np.linspace(7.0, 1.0, 200)
    steps = range(1, 201)
    twins = pd.concat(pd.DataFrame({"twin": twin, "step": steps, "loss": eager * (1 + 1e-3 * (-1) ** twin)}) for twin in range(8))
    early, late = parity_rows(context, asked, cell, 1.005 * eager, eager, twins)
    early.validate()
    late.validate()
    early, late = parity_rows(context, asked, cell, np.full(200, 7.0), eager, twins)  # one that trains nothing
    with pytest.raises(RowError, match="mean loss of steps 151 to 200"):
        late.validate()


def test_another_layout_is_the_same_step():
    losses, strides = [], []
    for last in (False, True):
        step = TrainingStep("resnet50_w16_64px", 1, StepVariant("fp32", channels_last=last), detect_cpu())
        step.once()
        losses.append(float(step.losses[0]))
        strides.append(step.module.layer1[0].conv2.weight.is_contiguous(memory_format=torch.channels_last))
    assert strides == [False, True] and losses[0] == pytest.approx(losses[1], rel=1e-4)


@pytest.mark.slow
def test_a_step_that_trains_nothing_is_refused(context, monkeypatch):
    monkeypatch.setattr(torch.optim.AdamW, "step", lambda self: None)
    with pytest.raises(RowError, match="last loss / first loss"):
        for row in experiment.measure(context, silent, [0]).rows:
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
    assert forecast_on_device(context, NAME, 2, "fp32").ceiling is None
    shared = {
        "notebook": "hw",
        "dtype": "fp32",
        "n": 30,
        "limit_source": "no limit: toy",
        "check": "toy",
        "check_error": 0.0,
        "check_tolerance": 1.0,
    }
    gemm = Row(experiment="gemm", variant="torch.mm", metric="gemm_tflops", value=0.1, ci_low=0.1, ci_high=0.1, **shared)
    stream = Row(
        experiment="bandwidth",
        variant="copy",
        metric="bandwidth_gb_s",
        value=10.0,
        ci_low=10.0,
        ci_high=10.0,
        params={"elements": 1000},
        **shared,
    )
    context.upstream.extend([gemm, stream])
    forecast = forecast_on_device(context, NAME, 2, "fp32")
    model = reference_model(NAME)
    products = 2 * model.flops.forward_backward / 0.1e12
    traffic = (28 * model.parameter_count + 2 * 12 * 4 * model.activations) / 10e9
    assert forecast.ceiling == pytest.approx(2 / (products + traffic))
    assert forecast.metric == "samples_per_s" and forecast.params == {"batch": 2, "step": "steady"}
