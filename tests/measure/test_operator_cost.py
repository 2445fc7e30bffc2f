"""What the host pays for operators and compiled blocks: counted by hand, timed here, taken apart on made-up times."""

from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch

from hyperion.hardware import detect_cpu
from hyperion.measure import operator_cost
from hyperion.measure.operator_cost import measure_block_cost, measure_operator_cost


@pytest.fixture(scope="module")
def cost():
    drawn = torch.get_rng_state()
    measured = measure_operator_cost(detect_cpu(), time_limit_s=0.05)
    assert torch.equal(torch.get_rng_state(), drawn), "the caller's random numbers go on as they would have"
    return measured


def made_up(timing, *seconds):
    return [replace(timing, samples_s=np.full(40, each), warm=True) for each in seconds]


def test_each_operator_costs_the_host_something_here(cost):
    assert cost.operators > 50 and 1e-7 < cost.time_s.ci_low <= cost.time_s.value < 1e-2
    assert cost.convolutions == 4 * 4, "convolution and batch norm of four parts, forward and backward"
    assert cost.verification.error < 1, "a step that lowers no loss is none"


def test_convolutions_cost_what_their_step_takes_beyond_its_other_operators(cost):
    layers, convolving = made_up(cost.timing, cost.operators * 2e-5, cost.plain * 2e-5 + cost.convolutions * 7e-5)
    found = replace(cost, timing=layers, convolving=convolving)
    assert found.time_s.value == pytest.approx(2e-5) and found.convolution_time_s.value == pytest.approx(7e-5)


def test_a_block_is_what_one_more_of_them_adds_to_a_step(monkeypatch):
    # Captured and cut into forward and backward as ever; what is captured runs as it is, so that no compiler is needed.
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))
    monkeypatch.setattr(operator_cost, "_PARITY_STEPS", 3)
    monkeypatch.setattr(operator_cost, "_IN_A_ROW", 1)
    found = measure_block_cost(detect_cpu(), time_limit_s=0.01)
    assert found.kernels == 2 * 14, "of four linear layers and attention: the products forward, and twice as many backward"
    assert 0 < found.time_s.value < found.few.estimate.value and found.verification.error < 1e-3
    few, many = made_up(found.few, 3e-3, 11e-3)
    assert replace(found, few=few, many=many).time_s.value == pytest.approx(8e-3 / 4)
