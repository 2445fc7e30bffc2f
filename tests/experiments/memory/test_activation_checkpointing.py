"""Activation checkpointing at toy sizes: the same gradients, less memory, as much as shapes say."""

import pytest
import torch

from hyperion.experiments.memory import activation_checkpointing
from hyperion.experiments.memory.activation_checkpointing import EXPERIMENT, largest_difference
from hyperion.parallel import ParallelPlan
from hyperion.parallel.parallelize import BUDGET, CHECKPOINTING, EVERY_BLOCK, NONE, SELECTIVE
from tests.chapter.toy import by_params, perform, toy_context

POLICIES = [EVERY_BLOCK, SELECTIVE, BUDGET]
RATE = {"learning_rate": 1e-3, "warmup_steps": 1}
SIZES = {
    "precision": "auto",
    "budget_share": 0.5,
    "policies": {"language": POLICIES, "image": POLICIES},
    "depths": [1, 3],
    "time_limit_s": 0.05,
    "language": {"model": "lm_d64_h4_l2", "vocabulary": 64, "sequence_length": 16, "batch_size": 4} | RATE,
    "image": {"width": 4, "batch_size": 8} | RATE,
}
MODELS = {"lm_d64_h4_l2_v64", "resnet18_w4"}


@pytest.fixture(scope="module")
def context(tmp_path_factory):
    return toy_context("activation_checkpointing", SIZES, tmp_path_factory.mktemp("checkpointing"))


@pytest.fixture(scope="module")
def result(context):
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield perform(context, context.workspace)
    torch.set_num_threads(threads)


@pytest.mark.slow
def test_gradients_and_running_statistics_are_equal_under_every_policy(result):
    found = {(row.variant, row.params["checkpointing"], row.params["of"]) for row in result.rows if row.check}
    policies = [how for how in CHECKPOINTING if how != NONE]
    expected = {(model, how, "gradients") for model in MODELS for how in policies}
    assert found == expected | {("resnet18_w4", how, "running statistics") for how in policies}
    assert all(row.check_error <= row.check_tolerance == 1e-5 for row in result.rows if row.check)


@pytest.mark.slow
def test_memory_falls_as_foretold_and_time_is_compared_in_turn(result, context):
    foretold = {
        (line.variant, line.params["checkpointing"]): line.estimate
        for line in EXPERIMENT.forecast(context)
        if line.metric == "tensor_memory_gib"
    }
    held = {how: by_params(result.rows, "tensor_memory_gib", checkpointing=how) for how in CHECKPOINTING}
    for model in MODELS:
        none, every, selective, budget = (held[how][model].value for how in (NONE, EVERY_BLOCK, SELECTIVE, BUDGET))
        assert every <= budget < none and every < selective < none
        assert budget <= (none + every) / 2 * 1.01, "the policy keeps its budget"
        for how in CHECKPOINTING:
            assert held[how][model].value == pytest.approx(foretold[model, how], rel=0.02)
    for how in (EVERY_BLOCK, SELECTIVE, BUDGET):
        ratios = by_params(result.rows, "speedup", over="no checkpointing", checkpointing=how)
        assert set(ratios) == MODELS and all(row.n >= 30 for row in ratios.values())


@pytest.mark.slow
def test_depth_costs_a_whole_layer_or_one_input(result, context):
    forecasts = [forecast for forecast in EXPERIMENT.forecast(context) if "layers" in forecast.params]
    foretold = {(f.variant, f.params["checkpointing"]): f.estimate for f in forecasts}
    kept = {(row.variant, row.params["checkpointing"]): row.value for row in result.rows if "layers" in row.params}
    assert len(kept) == 4
    for cell, value in kept.items():
        assert foretold[cell] == pytest.approx(value, rel=0.05)
    shallow, deep = "lm_d64_h4_l2_v64_cut_to_l1", "lm_d64_h4_l2_v64_cut_to_l3"
    slopes = {how: kept[deep, how] - kept[shallow, how] for how in (NONE, EVERY_BLOCK)}
    assert slopes[NONE] > 10 * slopes[EVERY_BLOCK] > 0


def test_the_largest_difference_is_of_any_parameter_and_rounding_is_no_gradient():
    reference = {"weight": torch.ones(100), "ignored bias": torch.full((4,), 1e-9)}
    assert largest_difference(reference, reference) == 0
    wrong = reference | {"weight": torch.ones(100) * 1.01}
    assert largest_difference(wrong, reference) == pytest.approx(0.01, rel=1e-3)
    noise = reference | {"ignored bias": -reference["ignored bias"]}
    assert largest_difference(noise, reference) < 1e-5


def test_a_block_that_is_run_again_with_other_random_numbers_would_be_found():
    reference = {"layer": torch.randn(64)}
    other = {"layer": reference["layer"] * torch.bernoulli(torch.full((64,), 0.9))}
    assert largest_difference(other, reference) > 1e-5


@pytest.mark.parametrize("kind", ["language", "image"])
def test_what_is_computed_again_is_part_of_the_least_work_of_a_policy(kind, context, monkeypatch):
    least_flops = {}

    def compare(context, work, batch, contenders, *rest):
        least_flops.update({contender.params["checkpointing"]: contender.least_flops for contender in contenders})

    monkeypatch.setattr(activation_checkpointing, "compare_steps", compare)
    setup = activation_checkpointing._Setup.of(context)
    work = setup.work(kind)
    plans = [ParallelPlan(), *(ParallelPlan(checkpointing=policy) for policy in (EVERY_BLOCK, SELECTIVE))]
    plans.append(ParallelPlan(checkpointing=BUDGET, checkpointed_blocks=1))
    activation_checkpointing._timed(setup, work, plans)
    # Selective checkpointing keeps the outputs of matrix products.
    assert least_flops[NONE] == least_flops[SELECTIVE] == work.least_flops
    assert least_flops[EVERY_BLOCK] == pytest.approx(work.least_flops + work.block_flops) and work.block_flops > 0
    assert least_flops[BUDGET] == pytest.approx(work.least_flops + work.block_flops / work.blocks)
