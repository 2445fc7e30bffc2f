"""The planner rejects what cannot be divided or does not fit, and finds the smallest replica."""

import pytest

from hyperion.models.llama import LlamaShape
from hyperion.parallel.megatron.layouts import MegatronLayout, rank_parameters
from hyperion.parallel.megatron.planner import mixed_precision_bytes, smallest_layout, why_rejected

SHAPE = LlamaShape(64, 6, 12, 4, 96, 120)
PLENTY = 2.0**40


@pytest.mark.parametrize(
    ("layout", "ranks", "reason"),
    [
        (MegatronLayout(2, 2), 6, "6 ranks cannot be divided by 4 ranks of a replica"),
        (MegatronLayout(8), 8, "12 heads cannot be divided by 8 tensor-parallel ranks"),
        (MegatronLayout(3), 3, "4 key-value heads cannot be divided by 3 tensor-parallel ranks"),
        (MegatronLayout(1, 4), 4, "6 layers cannot be divided by 4 stages"),
        (MegatronLayout(4, 3), 12, ""),
    ],
)
def test_what_cannot_be_divided_is_rejected(layout, ranks, reason):
    assert why_rejected(SHAPE, layout, ranks, PLENTY) == reason


def test_the_columns_and_the_vocabulary_are_divided_too():
    assert "97 columns of the MLP" in why_rejected(LlamaShape(64, 6, 12, 4, 97, 120), MegatronLayout(2), 2, PLENTY)
    assert "121 tokens of the vocabulary" in why_rejected(LlamaShape(64, 6, 12, 4, 96, 121), MegatronLayout(2), 2, PLENTY)


def test_a_state_that_does_not_fit_is_rejected():
    layout = MegatronLayout(2, 1, distributed_optimizer=True)
    state = mixed_precision_bytes(SHAPE, layout, 4)
    assert state == rank_parameters(SHAPE, layout, 0) * (6 + 12 / 2)
    assert why_rejected(SHAPE, layout, 4, state) == "" and "exceeds" in why_rejected(SHAPE, layout, 4, state - 1)
    assert mixed_precision_bytes(SHAPE, MegatronLayout(2), 4) == 1.5 * state


def test_the_fullest_stage_counts():
    layout = MegatronLayout(pipeline=3)
    stages = [18 * rank_parameters(SHAPE, layout, stage) for stage in range(3)]
    assert mixed_precision_bytes(SHAPE, layout, 3) == max(stages) == stages[2] > stages[1]


def test_the_smallest_replica_that_fits_is_chosen():
    def smallest(memory_bytes: float, node_ranks: int = 8) -> tuple[int, int] | None:
        layout = smallest_layout(SHAPE, 8, memory_bytes, node_ranks)
        return layout and (layout.tensor, layout.pipeline)

    whole = mixed_precision_bytes(SHAPE, MegatronLayout(distributed_optimizer=True), 8)
    assert smallest(whole) == (1, 1) and smallest(whole - 1) == (2, 1)
    assert smallest(whole - 1, node_ranks=1) == (1, 2)
    assert smallest(1.0) is None


def test_fewer_ranks_come_before_fewer_stages():
    three_stages = MegatronLayout(pipeline=3, distributed_optimizer=True)
    layout = smallest_layout(SHAPE, 12, mixed_precision_bytes(SHAPE, three_stages, 12))
    assert layout == three_stages  # four tensor-parallel ranks would fit too
