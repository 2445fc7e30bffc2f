"""The ladder: each rung is the one below with one thing more, trains the same, and is timed beside the others."""

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch

from hyperion.chapter import Context, Result
from hyperion.errors import HyperionError
from hyperion.experiments.precision import training_ladder
from hyperion.experiments.precision.precision_variants import why_not_timed
from hyperion.experiments.precision.training_ladder import (
    BASELINE,
    EXPERIMENT,
    AllLogits,
    StepRung,
    TrainingLadderOptions,
    _difference_rows,
    _speedup_rows,
    _timed,
    build_ladder,
)
from hyperion.hardware import Telemetry, detect_cpu
from hyperion.measure import Timing
from hyperion.parallel.parallelize import EVERY_BLOCK
from hyperion.results import Run
from hyperion.workloads.workloads import random_batch, stored_batches, workload
from tests.chapter.toy import by_params, perform, toy_context

RATE = {"learning_rate": 1e-3, "warmup_steps": 2}
SIZES = {
    "batches": 2,
    "parity_steps": 8,
    "time_limit_s": 0.05,
    "language": {
        "model": "lm_d64_h4_l2",
        "sequence_length": 32,
        "batch_size": 16,
        "parity": {"layers": 1, "batch_size": 4},
        "rungs": [BASELINE, "tf32", "bf16", "fused optimizer", "chunked loss", "activation checkpointing", "fp8"],
    }
    | RATE,
    "image": {"width": 8, "batch_size": 4, "parity": {"batch_size": 2}, "rungs": [BASELINE, "channels_last"]} | RATE,
}


OPTIONS = TrainingLadderOptions.parse(SIZES, "training_ladder")


def ladder(kind: str) -> list[StepRung]:
    return build_ladder(detect_cpu(), OPTIONS.ladders[kind].rungs)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("ladder")


@pytest.fixture(scope="module", autouse=True)
def own_data(folder, one_thread):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HYPERION_DATA", str(folder / "data"))
        yield


@pytest.fixture(scope="module")
def context(folder):
    return toy_context("training_ladder", SIZES, folder)


@pytest.fixture(scope="module")
def result(context, folder):
    return perform(context, folder)


def test_each_rung_adds_one_thing_and_what_is_missing_is_passed_by():
    rungs = {rung.name: rung for rung in ladder("language")}
    assert "TF32" in rungs["tf32"].absent and "no fp8" in rungs["fp8"].absent
    kept = [rung for rung in rungs.values() if not rung.absent]
    for below, rung in pairwise(kept):
        changed = [name for name in vars(rung) if getattr(rung, name) != getattr(below, name)]
        assert len(changed) == 2 and "name" in changed
    assert kept[0] == StepRung(BASELINE) and kept[-1].checkpointing == EVERY_BLOCK and kept[-1].fused and kept[-1].chunked


def test_engines_are_what_their_rungs_say():
    device = detect_cpu()
    language = workload(OPTIONS.language.model_copy(update={"vocabulary": 64}))
    plain, chunked = (replace(StepRung(BASELINE), chunked=value).engine(language, device, 0) for value in (False, True))
    assert isinstance(plain.model, AllLogits) and chunked.model.loss_chunk_tokens == language.items // 4
    batch = random_batch(language, device, 0)
    with torch.no_grad():
        torch.testing.assert_close(plain.summed_loss(batch), chunked.summed_loss(batch), rtol=1e-6, atol=0)
    assert not plain.optimizer.param_groups[0]["fused"]
    assert StepRung("x", fused=True).engine(language, device, 0).optimizer.param_groups[0]["fused"]
    image = workload(OPTIONS.image)
    for last in (False, True):
        kernel = StepRung("x", channels_last=last).engine(image, device, 0).model.conv1.weight
        assert kernel.is_contiguous(memory_format=torch.channels_last) is last


def test_a_speed_up_is_over_the_rung_below_and_over_the_first():
    rungs = [StepRung(name) for name in (BASELINE, "tf32", "bf16")]
    timings = [Timing(np.full(30, seconds), (), True, False, "interval", Telemetry()) for seconds in (4.0, 2.0, 1.0)]
    rows = _speedup_rows(lambda rung, metric, value, **columns: (rung.name, columns["over"], value), rungs, timings)
    assert rows == [("tf32", BASELINE, 2), ("bf16", BASELINE, 4), ("bf16", "tf32", 2)]


def test_the_busy_time_of_a_gpu_is_a_share_of_each_timed_step_or_absent_with_the_reason(context, monkeypatch):
    cpu = context.device

    def timed(steps, device, **settings):
        for step in steps:
            step()
        return [Timing(np.full(30, 0.02), (), True, False, "interval", Telemetry()) for _ in steps]

    def profile(step, device):
        step()
        return next(times)

    def nothing(step, device):
        raise HyperionError("no kernel")

    def busy(**claims):
        # A CPU that claims to be a GPU: the steps are real, and their times are not.
        monkeypatch.setattr(Context, "device", replace(cpu, **claims))
        with stored_batches(context, {"image": OPTIONS.image}, OPTIONS.batches) as (stored,):
            rows = _timed(context, OPTIONS, stored).rows
        return {row.params["rung"]: row for row in rows if row.params.get("what") == "device time over step time"}

    monkeypatch.setattr(training_ladder, "time_interleaved", timed)
    times, gpu = iter([0.008, 0.05]), {"kind": "cuda", "arch": "sm_90"}
    monkeypatch.setattr(training_ladder, "device_seconds", profile)
    assert {rung: row.value for rung, row in busy(**gpu).items()} == pytest.approx({BASELINE: 0.4, "channels_last": 1.0})
    monkeypatch.setattr(training_ladder, "device_seconds", nothing)
    assert {(row.value, row.value_reason) for row in busy(**gpu).values()} == {(None, "no kernel")}
    assert not busy()


@pytest.mark.long
@pytest.mark.slow
def test_every_rung_has_time_memory_and_a_loss_beside_that_of_the_first(result):
    models = {row.variant for row in result.rows}
    assert len(models) == 2 and "resnet18_w8" in models
    for kind, model in zip(("language", "image"), sorted(models), strict=True):
        present = [rung.name for rung in ladder(kind) if not rung.absent]
        own = [row for row in result.rows if row.variant == model and row.value is not None]
        for metric in ("step_time_s", "tensor_memory_gib", "training_loss"):
            assert [row.params["rung"] for row in own if row.metric == metric] == present
        compared = [row for row in own if row.metric == "relative_difference"]
        windows = [(name, window) for name in present[1:] for window in ("early", "late")]
        assert [(row.params["rung"], row.params["window"]) for row in compared] == windows
        assert all(row.value == row.check_error <= row.check_tolerance and row.params["steps"] == 8 for row in compared)
        overs = {(row.params["rung"], row.params["over"]) for row in own if row.metric == "speedup"}
        assert overs == set(zip(present[1:], present, strict=False)) | {(name, BASELINE) for name in present[1:]}
    absent = {row.params["rung"]: row.value_reason for row in result.rows if row.value is None and row.metric == "step_time_s"}
    emulated = {"bf16"} if why_not_timed(detect_cpu(), "bf16") else set()
    assert set(absent) == {"tf32", "fp8"} | emulated
    assert all(reason.startswith(("unsupported", "not timed")) for reason in absent.values())


@pytest.mark.long
@pytest.mark.slow
def test_what_is_bought_for_memory_saves_some(result):
    (language,) = {row.variant for row in result.rows} - {"resnet18_w8"}
    held = {
        rung: by_params(result.rows, "tensor_memory_gib", rung=rung)[language].value
        for rung in (BASELINE, "fused optimizer", "chunked loss", "activation checkpointing")
    }
    assert held["chunked loss"] < held["fused optimizer"] and held["activation checkpointing"] < held["chunked loss"]


@pytest.mark.long
@pytest.mark.slow
def test_a_loss_that_strays_is_not_stored(result, context, tmp_path):
    strayed = result.samples.copy()
    strayed.loc[strayed["rung"] == "fused optimizer", "loss"] *= 1.2
    rows = _difference_rows(Result([row for row in result.rows if row.metric == "training_loss"], strayed))
    strays = {row.params["rung"]: row.value for row in rows if row.params["window"] == "late"}
    assert strays["fused optimizer"] == pytest.approx(0.2, rel=0.02) and strays["chunked loss"] < 0.01
    with pytest.raises(HyperionError, match="no further from the baseline's than 8 twins"):
        Run.create(tmp_path / "run", {}).record("toy", "training_ladder", rows, strayed, input_hash="toy")


def test_the_first_line_is_a_speed_up_to_guess(context):
    forecasts = EXPERIMENT.forecast(context)
    assert forecasts[0].metric == "speedup" and all(line.basis for line in forecasts)
