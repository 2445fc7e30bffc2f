"""Twin trainings: random rounding where products are, a tolerance with its false-alarm rate, and what it does notice."""

import math
from functools import partial
from itertools import cycle, islice

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from hyperion.data.packing import IGNORE_INDEX
from hyperion.workloads import twins
from hyperion.workloads.twins import (
    BIAS,
    FALSE_ALARM,
    TWINS,
    OtherRounding,
    agreements,
    tolerance,
    train_twins,
    windows,
    with_unequal_rows,
)

UNITS = {"fp32": 2.0**-24, "bf16": 2.0**-8, "fp8": 2.0**-4}


@pytest.mark.parametrize("name", UNITS)
def test_numbers_are_rounded_to_a_scaled_grid_of_the_format(name):
    unit, numbers = UNITS[name], torch.randn(1000, dtype=torch.float64)
    rounding = OtherRounding(name, 7)
    rounded = rounding.rounded(numbers)
    # fp8 is scaled by a power of two; its smallest numbers have an absolute error.
    error, smallest = (rounded - numbers).abs(), 2.0**-9 * float(numbers.abs().max()) if name == "fp8" else 0.0
    assert (error <= 1.01 * (unit * numbers.abs() + smallest)).all() and error.mean() > unit * numbers.abs().mean() / 8
    assert 1 <= rounding.factor < 2 and rounding.factor != OtherRounding(name, 8).factor
    torch.testing.assert_close(rounding.rounded(rounded), rounded, rtol=1e-6, atol=0)  # already on the grid
    equal = torch.full((10,), 0.3, dtype=torch.float64)
    assert len(rounding.rounded(equal).unique()) == 1


def test_the_format_itself_is_the_grid_with_factor_one():
    rounding, numbers = OtherRounding("bf16", 0), torch.randn(1000)
    rounding.factor = 1.0
    assert torch.equal(rounding.rounded(numbers), numbers.bfloat16().float())


def test_products_alone_are_rounded_operands_results_and_gradients():
    weight, inputs = torch.nn.Parameter(torch.randn(16, 8)), torch.randn(4, 8, requires_grad=True)
    exact = inputs @ weight.T
    rounding = OtherRounding("bf16", 0)
    expected = rounding.rounded(rounding.rounded(inputs) @ rounding.rounded(weight).T)
    for product in (F.linear, lambda x, w: x @ w.T, lambda x, w: torch.matmul(x, w.T)):
        with rounding:
            result = product(inputs, weight)
            torch.testing.assert_close(inputs + 1, inputs.detach() + 1, rtol=0, atol=0)
        torch.testing.assert_close(result, expected, rtol=1e-6, atol=1e-6)
        (gradient,) = torch.autograd.grad(result.sum(), inputs)
        plain = torch.ones(4, 16) @ weight
        assert 0 < (gradient - plain).abs().max() < 2.0**-6 * plain.abs().max()
    torch.testing.assert_close(F.linear(inputs, weight), exact)


def test_products_inside_of_attention_are_rounded_too():
    layer = torch.nn.MultiheadAttention(8, 2, batch_first=True)
    inputs = torch.randn(2, 5, 8, requires_grad=True)
    plain = layer(inputs, inputs, inputs)[0]
    with OtherRounding("bf16", 0):
        rounded, weights = layer(inputs, inputs, inputs)
    assert 0 < (rounded - plain).abs().max() < 0.05 and weights.shape == (2, 5, 5)


def test_the_same_seed_gives_the_same_twin():
    frames = [train_twins("bf16", 5, partial(train, steps=6)) for _ in range(2)]
    assert frames[0].equals(frames[1]) and len(frames[0]) == 6 * TWINS
    assert not frames[0].equals(train_twins("bf16", 6, partial(train, steps=6)))


@pytest.mark.parametrize("steps", [1, 2, 4, 8, 50, 200])
def test_windows_lie_at_the_two_ends(steps):
    early, late = (range(steps)[window] for window in windows(steps).values())
    assert early[0] == 0 and late[-1] == steps - 1 and len(early) >= min(4, steps) and len(late) >= min(2, steps)


@pytest.mark.long
@pytest.mark.slow
def test_the_false_alarm_rate_is_what_it_says(monkeypatch):
    """Of 40,000 baselines with twins and one variant each, all of one normal distribution, at 1 in 1,000: at most 40 would be
    expected; more than 70 has a chance below 1e-5."""
    monkeypatch.setattr(twins, "FALSE_ALARM", 1e-3)
    random, alarms, trials = np.random.default_rng(0), 0, 40_000
    losses = np.exp(random.normal(0, 0.02, (trials, TWINS + 2)))
    for baseline, variant, *others in losses:
        alarms += abs(variant / baseline - 1) > tolerance(others, baseline)
    assert alarms <= 70
    assert FALSE_ALARM <= 1e-4


def test_a_wider_scatter_allows_more_and_identical_twins_the_spacing_of_float32():
    narrow, wide = (tolerance(list(1 + scale * np.linspace(-1, 1, 8)), 1.0) for scale in (1e-4, 1e-2))
    assert 90 < wide / narrow < 110
    assert tolerance([2.0] * 8, 2.0) == pytest.approx(2.0**-23)
    # t of 7 degrees of freedom, 5e-6 on each side: 11.2 (tables), times s sqrt(1 + 1/8)
    s = np.log(1 + 1e-4 * np.linspace(-1, 1, 8)).std(ddof=1)
    assert narrow == pytest.approx(11.2 * s * math.sqrt(9 / 8), rel=0.02)


def train(steps: int = 80, rate: float = 0.05, dtype: torch.dtype = torch.float32, momentum: float = 0.9, drop: float = 0.0):
    """A small regression net that meets the same four batches again and again."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Linear(16, 64), torch.nn.Tanh(), torch.nn.Linear(64, 64), torch.nn.Tanh(), torch.nn.Linear(64, 4)
    )
    batches = [(torch.randn(32, 16), torch.randn(32, 4)) for _ in range(4)]
    optimizer = torch.optim.SGD(model.parameters(), rate, momentum=momentum)
    losses = []
    for inputs, targets in islice(cycle(batches), steps):
        with torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.bfloat16):
            loss = F.mse_loss(F.dropout(model(inputs).float(), drop), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


@pytest.fixture(scope="module")
def scattered():
    return np.array(train()), train_twins("bf16", 0, train)


@pytest.mark.slow
def test_bf16_lies_within_its_twins(scattered):
    losses = np.array(train(dtype=torch.bfloat16))
    for agreement, allowed in zip(agreements(losses, *scattered), agreements(losses, *scattered, BIAS["bf16"]), strict=True):
        assert 0 < agreement.difference <= agreement.tolerance < 0.1, agreement
        assert allowed.tolerance == agreement.tolerance + 2.0**-8 and "0.0039 for a bias" in allowed.check


@pytest.mark.parametrize("fault", [{"rate": 0.052}, {"momentum": 0.88}, {"drop": 0.05}], ids=str)
def test_another_training_is_noticed(scattered, fault):
    found = agreements(np.array(train(**fault)), *scattered)
    assert any(agreement.difference > agreement.tolerance for agreement in found), found


def test_rows_have_different_numbers_of_targets_whoever_has_them():
    inputs_BT = torch.arange(8 * 10).view(8, 10)
    whole = with_unequal_rows((inputs_BT, inputs_BT + 1), 0, 8)
    counts = (whole[1] != IGNORE_INDEX).sum(dim=1)
    assert counts.tolist() == [10, 10, 9, 9, 8, 7, 7, 6] and torch.equal(whole[0], inputs_BT)
    for parts in (2, 4):
        # The mean of the means of the parts is not the mean of all.
        sums = [part.sum() for part in counts.chunk(parts)]
        assert len(set(map(int, sums))) == parts
        mine = [with_unequal_rows((part, part + 1), 8 // parts * rank, 8)[1] for rank, part in enumerate(inputs_BT.chunk(parts))]
        assert torch.equal(torch.cat(mine), whole[1])
