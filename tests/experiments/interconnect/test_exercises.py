"""The exercises of the interconnect chapter: what is given fails for the reasons it should, a solution passes."""

import numpy as np
import pytest
import torch

from hyperion.experiments.interconnect.exercises import judge_busbw, judge_inputs
from tests.exercise_scores import solved


def as_given(seconds, size):
    return size / seconds.min() / 1e9


def solution(seconds, size):
    ranks = seconds.shape[1]
    return size * 2 * (ranks - 1) / ranks / np.median(seconds.max(axis=1)) / 1e9


def test_the_given_bandwidth_is_wrong_everywhere_and_the_solution_nowhere():
    assert not judge_busbw(as_given)["right"].any()
    assert solved(judge_busbw(solution))


@pytest.mark.parametrize(
    ("half_right", "still_wrong"),
    [
        (lambda s, size: size * 1.5 / np.median(s.max(axis=1)) / 1e9, "8 ranks: another factor"),
        (lambda s, size: size * 2 * (1 - 1 / s.shape[1]) / np.median(s[:, 0]) / 1e9, "a rank that did not wait"),
        (lambda s, size: size * 2 * (1 - 1 / s.shape[1]) / s.mean() / 1e9, "a rank that did not wait"),
        (lambda s, size: size * 2 * (1 - 1 / s.shape[1]) / s.max(axis=1).mean() / 1e9, "a first call that sets up connections"),
    ],
)
def test_each_case_stands_for_one_fault(half_right, still_wrong):
    score = judge_busbw(half_right)
    assert still_wrong in set(score.loc[~score["right"], "measured"])


@pytest.mark.parametrize(
    ("inputs", "wrong"),
    [
        (lambda rank, count: torch.zeros(count), 6),
        (lambda rank, count: torch.full((count,), float(rank + 1)), 2),
        (lambda rank, count: torch.arange(count) % 61, 1),
        (lambda rank, count: torch.randn(count, generator=torch.Generator().manual_seed(rank)), 1),
        (lambda rank, count: (torch.arange(count) * (2 * rank + 7) + rank) % 61, 0),
    ],
)
def test_inputs_that_show_nothing_fail_and_inputs_that_differ_by_rank_and_element_pass(inputs, wrong):
    score = judge_inputs(inputs)
    assert (~score["right"]).sum() == wrong, score
