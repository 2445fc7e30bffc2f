"""The history of a step's memory against lives counted by hand."""

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from hyperion.hardware import detect_cpu
from hyperion.measure.memory_use.tensor_memory import ACTIVATIONS, GRADIENTS, TEMPORARY, MemoryTimeline, allocated_peak

WEIGHT, IN, OUT = 4 * 64 * 128, 4 * 32 * 64, 4 * 32 * 128


def watched(model, x, step, **options):
    standing = {"parameters": model.parameters(), "batch": [x]}
    with MemoryTimeline(model, standing, **options) as timeline:
        step()
    return timeline.history()


def test_lives_of_a_step_by_what_they_are():
    model, x = nn.Linear(64, 128, bias=False), torch.randn(32, 64)

    def step():
        model(x).square().sum().backward()
        model.zero_grad()

    history = watched(model, x, step)
    parts = history.parts
    assert parts.pop(TEMPORARY) >= OUT
    assert parts == {"parameters": WEIGHT, "batch": IN, ACTIVATIONS: pytest.approx(OUT, abs=64), GRADIENTS: WEIGHT}
    assert history.levels()[-1] == pytest.approx(WEIGHT + IN, abs=64), "all that came has gone"
    fullest = history.fullest()
    assert sum(history.at(fullest).values()) == history.peak_bytes == max(history.levels())
    assert history.phase_of(fullest) == "backward"
    assert history.levels(ACTIVATIONS)[history.phase_ends[1] - 1] <= 64, "but for the loss"


def test_blocks_are_rounded_up_and_a_kernel_may_need_more_than_it_gives_out():
    model, x = nn.Linear(64, 128, bias=False), torch.randn(32, 64)

    def step():
        with torch.no_grad():
            model(x).sum()

    plain, asking = watched(model, x, step), watched(model, x, step, inside=lambda operator, arguments: 10**6)
    assert asking.peak_bytes == plain.peak_bytes + 10**6
    assert all(life.size % 512 == 0 for life in watched(model, x, step, block_bytes=512).lives)


class Twice(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(512, 512))

    def forward(self, x):
        return (x @ self.weight).sum() + (2 * x @ self.weight).sum()


def test_two_gradients_of_one_weight_are_added_in_place_as_unwatched():
    """The profiler sees what the allocator did when no mode watched: never three gradients at once."""

    def step(model, x):
        model(x).backward()
        model.zero_grad()

    model, x = Twice(), torch.randn(4, 512)
    real = allocated_peak(detect_cpu(), lambda: step(model, x), 4 * (512 * 512 + 4 * 512))
    assert watched(model, x, lambda: step(model, x)).peak_bytes > 1.2 * real, "watched, autograd makes a third"
    with FakeTensorMode():
        model, x = Twice(), torch.randn(4, 512)
        assert watched(model, x, lambda: step(model, x), in_place=True).peak_bytes == pytest.approx(real, rel=0.01)
