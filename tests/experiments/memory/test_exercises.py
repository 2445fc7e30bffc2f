"""The exercises on precision and memory: what the notebook gives fails, what solves them passes."""

import pytest
import torch

from hyperion.chapter.exercises import solved
from hyperion.experiments.memory.exercises import CLIP_NORM, judge_saving, judge_scaled_step
from hyperion.hardware import detect_cpu
from hyperion.measure import TensorMemory


def scaled_step(unscale=True, update=True, clear=True, skip=True):
    def step(model, optimizer, scaler, loss):
        scaler.scale(loss).backward()
        if unscale:
            scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP_NORM)
        scaler.step(optimizer) if skip else optimizer.step()
        if update:
            scaler.update()
        if clear:
            optimizer.zero_grad()

    return step


def test_a_right_step_is_free_of_every_fault():
    assert solved(judge_scaled_step(scaled_step()))


@pytest.mark.parametrize(
    "broken, fault",
    [
        ({"unscale": False}, "a gradient of norm 5 is not clipped to 1"),
        ({"unscale": False}, "a gradient of norm 0.5 is changed"),
        ({"update": False}, "the scale stays after an overflow"),
        ({"skip": False}, "an overflow changes the weights"),
        ({"clear": False}, "gradients are left behind"),
    ],
)
def test_each_fault_of_a_step_is_named(broken, fault):
    verdict = judge_scaled_step(scaled_step(**broken)).set_index("fault")["right"]
    assert not verdict[fault]


def saving(backward=True, of="peak_bytes"):
    def measure(plain, checkpointed, batch):
        held = []
        for model in (plain, checkpointed):
            with TensorMemory(detect_cpu()) as memory:
                if backward:
                    model(batch).sum().backward()
                else:
                    with torch.no_grad():
                        model(batch).sum()
            held.append(getattr(memory, of))
        return held[0] - held[1]

    return measure


def test_a_saving_is_the_difference_of_peaks_with_a_backward_pass():
    assert solved(judge_saving(saving()))


@pytest.mark.parametrize("broken", [{"backward": False}, {"of": "now_bytes"}])
def test_a_saving_without_gradients_or_without_peaks_is_none(broken):
    verdict = judge_saving(saving(**broken)).set_index("second model")
    assert not verdict["right"]["every block checkpointed"] and verdict["right"]["none checkpointed"]
    assert verdict["true"]["every block checkpointed"] > verdict["true"]["every second block checkpointed"] > 0
