"""The exercises on runtimes: the planted bugs are caught, and a right answer passes."""

import torch

from hyperion.experiments.inference.exercises import P99_SAMPLES, judge_parity
from tests.exercise_scores import solved


def solved_cases(table):
    return table.set_index(table.columns[0])["right"].to_dict()


def test_a_check_without_shapes_misses_a_fixed_batch_and_nan():
    found = solved_cases(judge_parity(lambda a, b: not ((a - b).abs() > 1e-3).any()))
    assert not found["a batch fixed at 1: all examples are equal"] and not found["only NaN"]
    assert found["the last class is cut off"] and found["one logit is off by 0.1"] and found["float32 rounding"]


def test_a_check_of_shapes_and_values_passes():
    assert solved(judge_parity(lambda a, b: a.shape == b.shape and bool(((a - b).abs() <= 1e-3).all())))


def test_the_number_of_samples():
    assert P99_SAMPLES.judge(368).lower().startswith("right") and not P99_SAMPLES.judge(100).lower().startswith("right")


def test_an_exception_of_the_check_means_different():
    def my_check(expected, output):
        torch.testing.assert_close(output, expected)
        return True

    assert solved(judge_parity(my_check))
