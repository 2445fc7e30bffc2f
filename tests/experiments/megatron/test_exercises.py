"""The exercises accept right answers and refuse wrong ones."""

import torch

from hyperion.experiments.megatron.exercises import MICRO_BATCHES, judge_qkv, judge_scaler
from hyperion.experiments.megatron.pipeline_bubble import ideal_bubble


def test_only_rows_ordered_by_key_value_heads_are_right():
    def by_groups(queries, keys, values, groups):
        parts = [matrix.view(groups, -1, matrix.shape[1]) for matrix in (queries, keys, values)]
        return torch.cat(parts, dim=1).flatten(0, 1)

    assert judge_qkv(by_groups)["right"].all()
    queries_first = judge_qkv(lambda queries, keys, values, groups: torch.cat([queries, keys, values]))
    assert queries_first["right"].tolist() == [False, False, True]  # one group has only one order
    assert not judge_qkv(lambda *arguments: 1 / 0)["right"].any()


def test_a_scale_needs_growth_and_hysteresis():
    def scale(overflows, hysteresis):
        value, clean, left = 4096.0, 0, hysteresis
        for overflow in overflows:
            clean, left = (0, left - 1) if overflow else (clean + 1, left)
            if overflow and left <= 0:
                value = max(1.0, value / 2)
            if clean == 1000:
                value, clean, left = 2 * value, 0, hysteresis
        return value

    assert judge_scaler(scale)["right"].all()
    eager = judge_scaler(lambda overflows, hysteresis: scale(overflows, 1))
    assert eager[eager["hysteresis"] == 1]["right"].all() and not eager["right"].all()
    assert not judge_scaler(lambda overflows, hysteresis: 0.0)["right"].any()


def test_the_number_of_micro_batches():
    assert abs(ideal_bubble(8, 133) - 0.05) < 1e-12
    assert MICRO_BATCHES.judge(133) == "right" and MICRO_BATCHES.judge(132) != "right"
