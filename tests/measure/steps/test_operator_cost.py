"""What the host pays for operators and compiled blocks: counted by hand, timed here, taken apart on made-up times."""

from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch

from hyperion.hardware import detect_cpu
from hyperion.measure.steps import operator_cost
from hyperion.measure.steps.operator_cost import measure_block_cost, measure_operator_cost


@pytest.fixture(scope="module")
def cost():
    drawn = torch.get_rng_state()
    measured = measure_operator_cost(detect_cpu(), time_limit_s=0.05)
    assert torch.equal(torch.get_rng_state(), drawn), "the caller's random numbers go on as they would have"
    return measured


def made_up(timing, *seconds):
    return [replace(timing, samples_s=np.full(40, each), warm=True) for each in seconds]


@pytest.mark.slow
def test_each_operator_costs_the_host_something_here(cost):
    assert cost.operators == 2 * 44, "of two layers more: four linear, two norms, attention, relu, and their gradients"
    assert (cost.convolutions, cost.other_operators) == (4 * 4, 4 * 3), (
        "and a counter, relu and its gradient in each of four parts"
    )
    for few, many in (cost.layers, cost.convolving):  # at their fastest: on shared cores medians of so few steps may swap
        assert few.timing.samples_s.min() < many.timing.samples_s.min()
    for found in (cost.time_s, cost.convolution_time_s, cost.once_s):
        assert found.ci_low <= found.value <= found.ci_high < 1
    assert cost.verification.error < 1, "a step that lowers no loss is none"


def test_what_a_step_costs_once_is_charged_to_no_operator(cost):
    each, convolution, once = 2e-5, 7e-5, 4e-4
    steps = (*cost.layers, *cost.convolving)
    seconds = [once + step.plain * each + step.convolutions * convolution for step in steps]
    timings = made_up(cost.layers[0].timing, *seconds)
    few, many, *convolving = (replace(step, timing=timing) for step, timing in zip(steps, timings, strict=True))
    found = replace(cost, layers=(few, many), convolving=tuple(convolving))
    for estimate, planted in ((found.time_s, each), (found.convolution_time_s, convolution), (found.once_s, once)):
        assert (estimate.value, estimate.ci_low, estimate.ci_high) == pytest.approx((planted,) * 3)


@pytest.mark.slow
def test_a_block_is_what_one_more_of_them_adds_to_a_step(monkeypatch):
    # Captured and cut into forward and backward as ever; what is captured runs as it is, so that no compiler is needed.
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))
    monkeypatch.setattr(operator_cost, "_PARITY_STEPS", 3)
    monkeypatch.setattr(operator_cost, "_IN_A_ROW", 1)
    found = measure_block_cost(detect_cpu(), time_limit_s=0.01)
    assert found.kernels == 2 * 14, "of four linear layers and attention: the products forward, and twice as many backward"
    assert found.few.samples_s.min() < found.many.samples_s.min() and found.verification.error < 1e-3
    few, many = made_up(found.few, 3e-3, 11e-3)
    assert replace(found, few=few, many=many).time_s.value == pytest.approx(8e-3 / 4)
