"""The exercise on loops: the check as it is given catches nothing, a thorough one catches all, and each part its own fault."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from hyperion.experiments.baselines.exercises import judge_loop_check
from tests.exercise_scores import solved


def shifts(loop):
    inputs, targets = loop.pairs(torch.arange(12).view(2, 6))
    return torch.equal(targets, inputs + 1)


def weighs_examples_alike(loop):
    torch.manual_seed(0)
    model, inputs, targets = nn.Linear(3, 4), torch.randn(5, 3), torch.tensor([0, 1, 2, 3, 0])
    loop.accumulate(model, [(inputs[:4], targets[:4]), (inputs[4:], targets[4:])])
    found, model.weight.grad = model.weight.grad, None
    F.cross_entropy(model(inputs), targets).backward()
    return torch.allclose(found, model.weight.grad, atol=1e-6)


def evaluates_as_used(loop):
    model = nn.Sequential(nn.Dropout(0.5), nn.Linear(3, 4))
    batch = [(torch.ones(8, 3), torch.zeros(8, dtype=torch.int64))]
    return loop.evaluate(model, batch) == loop.evaluate(model, batch) and model.training


def chooses_by_valid(loop):
    return loop.choose([{"valid": 1.0, "test": 3.0}, {"valid": 2.0, "test": 1.0}]) == 0


PARTS = (shifts, weighs_examples_alike, evaluates_as_used, chooses_by_valid)


def test_a_thorough_check_catches_all():
    assert solved(judge_loop_check(lambda loop: all(part(loop) for part in PARTS)))


@pytest.mark.parametrize("number", range(4))
def test_each_part_catches_one_fault_alone(number):
    score = judge_loop_check(PARTS[number])
    assert [place for place, right in enumerate(score["right"]) if right] == [0, number + 1]
