"""The exercise on precision: a correct step has no fault, and each broken step has the fault it was given."""

import pytest
import torch

from hyperion.experiments.precision.exercises import CLIP_NORM, judge_scaled_step
from tests.exercise_scores import solved


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
        ({"update": False}, "the scale is not halved after an overflow"),
        ({"skip": False}, "an overflow changes the weights"),
        ({"clear": False}, "gradients are not cleared"),
    ],
)
def test_each_fault_of_a_step_is_named(broken, fault):
    verdict = judge_scaled_step(scaled_step(**broken)).set_index("fault")["right"]
    assert not verdict[fault]
