"""Steps in turn: the ratio is that of the medians, and engines that do not fit leave a row with the reason."""

import time
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from hyperion.chapter import Context
from hyperion.hardware import Telemetry, detect, detect_cpu, gemm_path, peak
from hyperion.measure import Timing
from hyperion.models import ModelFlops
from hyperion.training import EpochRecord, History, Precision
from hyperion.workloads.training_rows import Contender, compare_steps, epoch_rows, flops_floor, speed_rows
from hyperion.workloads.workloads import ImageSizes, random_batch, workload
from tests.chapter.toy import toy_context
from tests.hardware.machines import facts

CPU = detect_cpu()
H100 = detect(facts("H100 SXM"))
WORK = workload(ImageSizes(width=4, batch_size=2, learning_rate=1e-3, warmup_steps=1))


class Pausing:
    """An engine whose step takes a known time."""

    def __init__(self, seconds: float):
        self.seconds = seconds

    def train_step(self, batch) -> None:
        time.sleep(self.seconds)


def compared(tmp_path, builds: dict):
    contenders = [Contender(name, "fp32", {"pause": name}, build) for name, build in builds.items()]
    context = toy_context("toy", {}, tmp_path)
    return compare_steps(context, WORK, random_batch(WORK, CPU, 0), contenders, "", time_limit_s=0.01).rows


@pytest.mark.slow
def test_each_but_the_first_is_compared_with_the_first(tmp_path):
    rows = compared(tmp_path, {"long": lambda: Pausing(4e-3), "short": lambda: Pausing(1e-3)})
    times = {row.params["pause"]: row for row in rows if row.metric == "step_time_s"}
    assert times["long"].value >= 4e-3 and times["short"].value >= 1e-3 and times["long"].n == times["short"].n >= 30
    (ratio,) = (row for row in rows if row.metric == "speedup")
    assert (ratio.params["pause"], ratio.params["over"]) == ("short", "long")
    assert ratio.value == pytest.approx(times["long"].value / times["short"].value)
    assert {row.metric for row in rows} == {"step_time_s", "images_per_s", "mfu", "speedup"}


@pytest.mark.slow
def test_what_does_not_fit_is_a_row(tmp_path):
    def too_large():
        raise torch.OutOfMemoryError("out of memory: made up")

    rows = compared(tmp_path, {"small": lambda: Pausing(1e-3), "large": too_large})
    assert len(rows) == 2 and all(row.value is None and "made up" in row.value_reason for row in rows)
    for row in rows:
        row.validate()


@pytest.mark.parametrize("reserved_gib", [None, 3.5])
def test_an_epoch_has_its_wall_time_and_on_a_gpu_the_memory_that_the_allocator_held(tmp_path, reserved_gib):
    memory = "peak_rss_gib" if reserved_gib is None else "peak_memory_gib"
    record = EpochRecord(1, 10, 10, 2.5, 1e-3, 640, 0.5, 7, 900.0, memory, 2.0, None, None, 0.1, reserved_gib, 0.75)
    engine = SimpleNamespace(item="token", uncaptured="made up")
    rows = epoch_rows(toy_context("toy", {}, tmp_path), "lm", "bf16", engine, History("token", epochs=[record]), "synthetic")
    for row in rows:
        row.validate()
    values = {row.metric: row.value for row in rows}
    assert values["epoch_time_s"] == 0.75 and values[memory] == 2.0
    assert values.get("reserved_memory_gib") == reserved_gib
    assert all(row.params["epoch"] == 1 for row in rows)


def test_the_limit_counts_what_must_be_computed_and_the_mfu_what_is_counted_by_convention(tmp_path, monkeypatch):
    monkeypatch.setattr(Context, "device", property(lambda of_context: H100))
    items, seconds, least_flops, flops = 8, 0.02, 2e11, ModelFlops(10**11, 3 * 10**11)
    timing = Timing(np.full(30, seconds), (seconds,), True, False, "interval", Telemetry())
    shared = {"dtype": "bf16", "params": {"batch": items}, "data_source": "synthetic"}
    context = toy_context("toy", {}, tmp_path)
    rows = {row.metric: row for row in speed_rows(context, "lm", "token", items, timing, flops, least_flops, shared)}
    of_h100 = peak(H100, gemm_path("bf16", H100))
    floor_s = least_flops * items / (of_h100.limit_tflops * 1e12)
    assert rows["step_time_s"].limit == pytest.approx(floor_s)
    assert rows["tokens_per_s"].limit == pytest.approx(items / floor_s)
    assert rows["tokens_per_s"].value == pytest.approx(items / seconds)
    assert rows["mfu"].value == pytest.approx(flops.forward_backward * items / seconds / (of_h100.published_tflops * 1e12))
    assert rows["mfu"].limit == pytest.approx(of_h100.limit_tflops / of_h100.published_tflops) and rows["mfu"].limit > 1


@pytest.mark.parametrize("products", ["tf32", "fp32"])
def test_steps_in_fp32_have_the_limit_of_tf32_where_products_may_use_it(products):
    with Precision(products, "test").products():
        floor_s, _ = flops_floor(H100, "fp32", 1e15)
    limit_tflops = peak(H100, gemm_path(products, H100)).limit_tflops
    assert floor_s == pytest.approx(1e15 / (limit_tflops * 1e12))
