"""Mixed precision at toy sizes: who is compared with whom, what is absent and why, and that memory is what shapes say."""

from types import SimpleNamespace

import pandas as pd
import pytest
import torch

from hyperion.chapter import Context, variants
from hyperion.chapter.context import Forecast, Result
from hyperion.experiments.precision import precision_variants
from hyperion.experiments.precision.precision_variants import (
    EXPERIMENT,
    PrecisionVariantsOptions,
    train_variant,
    twins_of_variant,
)
from hyperion.hardware import detect
from hyperion.workloads.twins import TWINS
from hyperion.workloads.workloads import store_batches
from tests.chapter.toy import by_params, perform, toy_context
from tests.hardware.machines import facts

pytestmark = pytest.mark.slow

RATE = {"learning_rate": 1e-3, "warmup_steps": 2}
SIZES = {
    "dtypes": ["fp32", "tf32", "bf16"],
    "batches": 2,
    "steps": 4,
    "time_limit_s": 0.05,
    "language": {"model": "lm_d64_h4_l2", "sequence_length": 32, "batch_size": 2} | RATE,
    "image": {"width": 8, "batch_size": 8} | RATE,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("precision")


@pytest.fixture(scope="module", autouse=True)
def own_data_and_one_thread(folder):
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HYPERION_DATA", str(folder / "data"))
        yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def context(folder):
    return toy_context("precision_variants", SIZES, folder)


@pytest.fixture(scope="module")
def result(context, folder):
    # The variants of toys in one process after another: test_variants has the processes, the smoke profile has both.
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(precision_variants, "run_side_by_side", variants.run_counted)
        return perform(context, folder)


def test_each_variant_has_a_loss_held_against_fp32_and_two_kinds_of_memory(result):
    models = {row.variant for row in result.rows}
    assert len(models) == 2 and "resnet18_w8" in models
    for dtype in ("fp32", "bf16"):
        for metric in ("training_loss", "tensor_memory_gib", "peak_rss_gib"):
            assert set(by_params(result.rows, metric, dtype=dtype)) == models
    compared = [row for row in result.rows if row.metric == "relative_difference"]
    assert {(row.dtype, row.params["from"]) for row in compared} == {("bf16", "fp32")}
    assert sorted((row.variant, row.params["window"]) for row in compared) == sorted(
        (model, window) for model in models for window in ("early", "late")
    )
    assert all(0 < row.value == row.check_error <= row.check_tolerance < 0.1 for row in compared)
    assert {row.data_source for row in result.rows} == {"synthetic"} == {result.source}


@pytest.mark.parametrize(("reason", "dtype"), [("", "tf32"), ("unsupported: no matrix units", "fp32")])
def test_twins_compute_in_tf32_if_the_device_has_it(context, monkeypatch, reason, dtype):
    seen = []
    work = SimpleNamespace(name="a model", engine=lambda dtype, device, seed: seen.append(dtype))
    stand_ins = {"_why_unsupported": reason, "load_batches": (work, []), "train_losses": [3.0]}
    for name, answer in stand_ins.items():
        monkeypatch.setattr(precision_variants, name, lambda *_, answer=answer: answer)
    twins = twins_of_variant(context, print, "language", "no file", "synthetic").samples
    assert seen == [dtype] * TWINS and list(twins["dtype"]) == ["bf16"] * TWINS  # rounded to bf16, computed in `dtype`


def test_speed_is_compared_in_turn_and_what_cannot_be_had_says_why(result):
    timed = [row for row in result.rows if row.metric == "step_time_s"]
    assert all("TF32 is a format of GPU matrix units" in row.value_reason for row in timed if row.dtype == "tf32")
    measured = {row.dtype for row in timed if row.value is not None}
    for ratio in (row for row in result.rows if row.metric == "speedup"):
        times = {row.dtype: row.value for row in timed if row.variant == ratio.variant and row.value}
        assert ratio.params["over"] == "fp32" and ratio.n >= 30
        assert ratio.value == pytest.approx(times["fp32"] / times[ratio.dtype])
    assert "fp32" in measured


def test_the_same_weights_and_batches_in_every_variant(result):
    first = result.samples.query("kind == 'step' and step == 1").set_index(["variant", "dtype"])["loss"]
    for variant in {row.variant for row in result.rows}:
        assert first[variant, "bf16"] == pytest.approx(first[variant, "fp32"], rel=0.01)
    steps = result.samples.query("kind == 'step'").groupby(["variant", "dtype"]).size()
    assert (steps == 4).all() and len(steps) == 4


def test_shapes_foretell_the_bytes_of_a_step(result, context):
    foretold = {(f.variant, f.dtype): f.estimate for f in EXPERIMENT.forecast(context) if f.metric == "tensor_memory_gib"}
    for dtype in ("fp32", "bf16"):
        row = by_params(result.rows, "tensor_memory_gib", dtype=dtype)["resnet18_w8"]
        assert foretold["resnet18_w8", dtype] == pytest.approx(row.value, rel=0.05)


def test_fp16_counts_its_skipped_steps_and_tells_its_scale(context):
    options = PrecisionVariantsOptions.of(context)
    stored = store_batches(context, options.image, options.batches)
    rows = train_variant(context, lambda *progress: None, **stored.params, dtype="fp16").rows
    skipped, scale = (next(row.value for row in rows if row.metric == name) for name in ("count", "loss_scale"))
    assert scale == 65536 / 2**skipped
    assert next(row for row in rows if row.metric == "training_loss").value > 0


def test_the_first_line_is_a_speed_up_to_guess(context):
    forecasts = EXPERIMENT.forecast(context)
    assert forecasts[0].metric == "speedup" and "vocabulary" in forecasts[0].basis
    assert all(forecast.basis for forecast in forecasts)


def test_on_a_gpu_the_same_steps_are_also_timed_as_graphs_and_fp16_says_why_not(context, monkeypatch):
    options = PrecisionVariantsOptions.of(context)
    stored = store_batches(context, options.image, options.batches)
    asked = []

    def compare(context, work, batch, contenders, *rest):
        asked.append({contender.name: contender.params for contender in contenders})
        return Result([], pd.DataFrame(), stored.source)

    gpu = detect(facts("H100 SXM"))
    loaded = precision_variants.load_batches(options.image, stored.file, context.device)
    monkeypatch.setattr(precision_variants, "load_batches", lambda *which: loaded)
    monkeypatch.setattr(precision_variants, "compare_steps", compare)
    monkeypatch.setattr(Context, "device", property(lambda of_context: gpu))
    reasons = {"fp32": "", "bf16": "", "fp16": "", "fp8": "unsupported: no"}
    _, graphs = precision_variants._timed(context, options, stored, reasons)
    eager, graph = asked
    assert eager == {"fp32": {}, "bf16": {}, "fp16": {}}
    assert graph == {"fp32": {"mode": "graph"}, "bf16": {"mode": "graph"}}
    why = {row.dtype: row.value_reason for row in graphs.rows}
    assert set(why) == {"fp16", "fp8"} and "loss scale" in why["fp16"] and why["fp8"] == "unsupported: no"
    unsized = Forecast("any", "tensor_memory_gib", None, "the estimate asks CUDA for the size of its workspace")
    monkeypatch.setattr(precision_variants, "_memory_forecast", lambda *which: unsized)
    foretold = {f.dtype for f in EXPERIMENT.forecast(context) if f.metric == "images_per_s" and "mode" in f.params}
    assert foretold == {"fp32", "tf32", "bf16"}
