"""Steps in turn: the ratio is that of the medians, and engines that do not fit leave a row with the reason."""

import time

import pytest
import torch

from hyperion.hardware import detect_cpu
from hyperion.workloads.training_rows import Contender, compare_steps
from hyperion.workloads.workloads import ImageSizes, random_batch, workload
from tests.chapter.toy import toy_context

CPU = detect_cpu()
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
