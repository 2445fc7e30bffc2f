"""The exercises of the compilation chapter: what is given fails, a right answer passes, half an answer does not."""

import torch

from hyperion.experiments.compilation.exercises import judge_memory_probe, judge_without_breaks
from tests.exercise_scores import solved


def as_given(memory, model):
    memory.load(model)
    memory.call(model)
    return memory.allocated


def without_reset(memory, model):
    for other in list(memory.loaded):
        memory.unload(other)
    memory.load(model)
    memory.call(model)
    return memory.peak


def not_alone(memory, model):
    memory.load(model)
    memory.reset_peak()
    memory.call(model)
    return memory.peak


def alone_and_reset(memory, model):
    for other in list(memory.loaded):
        memory.unload(other)
    memory.load(model)
    memory.reset_peak()
    memory.call(model)
    return memory.peak


def test_a_probe_must_be_alone_and_reset_the_peak():
    assert list(judge_memory_probe(as_given)["right"]) == [False, False, False]
    assert list(judge_memory_probe(without_reset)["right"]) == [True, False, False]
    assert list(judge_memory_probe(not_alone)["right"]) == [True, False, True]
    assert solved(judge_memory_probe(alone_and_reset))


def branching(x):
    if x.sum() > 0:
        return 2 * x
    return x - 1


def test_a_branch_on_data_breaks_the_graph_and_a_selection_does_not():
    given = judge_without_breaks(branching)
    assert list(given["right"]) == [True, True, False]
    assert "1 graph breaks" in given["seen"].iloc[-1] and "branch" in given["seen"].iloc[-1].lower()
    assert solved(judge_without_breaks(lambda x: torch.where(x.sum() > 0, 2 * x, x - 1)))
    assert list(judge_without_breaks(lambda x: 2 * x)["right"]) == [True, False, True]
