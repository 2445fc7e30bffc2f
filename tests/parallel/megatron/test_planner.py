"""The planner counts state and activations, rejects what cannot be divided or does not fit, and finds the smallest replica."""

from functools import partial

import pytest
import torch

from hyperion.models.llama import LlamaShape
from hyperion.parallel.megatron import release
from hyperion.parallel.megatron.layouts import MegatronLayout, rank_parameters
from hyperion.parallel.megatron.planner import (
    Batch,
    activation_bytes,
    mixed_precision_bytes,
    smallest_layout,
    training_bytes,
    why_rejected,
)
from hyperion.processes import process_group
from hyperion.processes.isolated import IsolatedProcess

SHAPE = LlamaShape(64, 6, 12, 4, 96, 120)
PLENTY = 2.0**40
BATCH = Batch(sequence_length=10, micro_batch_size=3)
# Computed by hand, for 30 tokens in a micro-batch: width 64, 6 layers, 8 heads, 2 key-value heads (k = 16), MLP 96, 120 tokens.
# 8h = 512; 4h + 4k = 256 + 64 = 320; 6f = 576; 2as = 2 x 8 x 10 = 160. So a layer has 512 + 1056 = 1568 bytes for each token.
# The head has 4h + 4 x 120 = 256 + 480 = 736 bytes for each token.
HAND = LlamaShape(64, 6, 8, 2, 96, 120)


@pytest.mark.parametrize(
    ("layout", "stage", "recompute", "bytes_of_a_token"),
    [
        (MegatronLayout(), 0, False, 6 * 1568 + 736),
        (MegatronLayout(), 0, True, 6 * 128 + 1568 + 736),
        (MegatronLayout(2), 0, False, 6 * (512 + 528) + 256 + 240),
        (MegatronLayout(2), 0, True, 6 * 128 + 512 + 528 + 256 + 240),
        (MegatronLayout(2, sequence=True), 0, False, 6 * 784 + 368),
        (MegatronLayout(2, sequence=True), 0, True, 6 * 64 + 784 + 368),
        (MegatronLayout(pipeline=3), 0, False, 3 * 2 * 1568),
        (MegatronLayout(pipeline=3), 1, False, 2 * 2 * 1568),
        (MegatronLayout(pipeline=3), 2, False, 2 * 1568 + 736),
        (MegatronLayout(pipeline=3), 0, True, 3 * 2 * 128 + 1568),
    ],
)
def test_activations_are_those_of_the_example(layout, stage, recompute, bytes_of_a_token):
    assert activation_bytes(HAND, layout, stage, Batch(10, 3, recompute)) == 30 * bytes_of_a_token


def test_the_fullest_rank_has_the_largest_sum_of_state_and_activations():
    layout = MegatronLayout(pipeline=3)
    state = [18 * rank_parameters(HAND, layout, stage) for stage in range(3)]
    # The first stage holds the most micro-batches. With full recomputation, the logits of the last stage exceed them.
    assert training_bytes(HAND, layout, 3, Batch(10, 1)) == state[0] + 10 * 6 * 1568
    assert training_bytes(HAND, layout, 3, Batch(10, 1, recompute=True)) == state[2] + 10 * (2 * 128 + 1568 + 736)


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
    assert why_rejected(SHAPE, layout, ranks, PLENTY, BATCH) == reason


def test_the_columns_and_the_vocabulary_are_divided_too():
    assert "97 columns of the MLP" in why_rejected(LlamaShape(64, 6, 12, 4, 97, 120), MegatronLayout(2), 2, PLENTY, BATCH)
    assert "121 tokens of the vocabulary" in why_rejected(LlamaShape(64, 6, 12, 4, 96, 121), MegatronLayout(2), 2, PLENTY, BATCH)


def test_a_state_that_does_not_fit_is_rejected():
    layout = MegatronLayout(2, 1, distributed_optimizer=True)
    state = mixed_precision_bytes(SHAPE, layout, 4)
    assert state == rank_parameters(SHAPE, layout, 0) * (6 + 12 / 2)
    assert "exceeds" in why_rejected(SHAPE, layout, 4, state, BATCH)  # there is no space for activations
    needed = training_bytes(SHAPE, layout, 4, BATCH)
    assert needed == state + activation_bytes(SHAPE, layout, 0, BATCH)
    assert why_rejected(SHAPE, layout, 4, needed, BATCH) == "" and "exceeds" in why_rejected(SHAPE, layout, 4, needed - 1, BATCH)
    assert mixed_precision_bytes(SHAPE, MegatronLayout(2), 4) == 1.5 * state


def test_full_recomputation_makes_a_layout_possible():
    layout, recomputed = MegatronLayout(pipeline=2), Batch(10, 300, recompute=True)
    between = training_bytes(HAND, layout, 2, recomputed)
    assert why_rejected(HAND, layout, 2, between, recomputed) == ""
    reason = why_rejected(HAND, layout, 2, between, Batch(10, 300))
    assert "without recomputation, which exceeds" in reason and "the state alone needs 0.0 GiB" in reason
    assert "with full recomputation" in why_rejected(HAND, layout, 2, between - 1, recomputed)


def test_the_fullest_stage_counts():
    layout = MegatronLayout(pipeline=3)
    stages = [18 * rank_parameters(SHAPE, layout, stage) for stage in range(3)]
    assert mixed_precision_bytes(SHAPE, layout, 3) == max(stages) == stages[2] > stages[1]


def test_the_smallest_replica_that_fits_is_chosen():
    def smallest(memory_bytes: float, node_ranks: int = 8) -> tuple[int, int] | None:
        layout = smallest_layout(SHAPE, 8, memory_bytes, BATCH, node_ranks)
        return layout and (layout.tensor, layout.pipeline)

    whole = training_bytes(SHAPE, MegatronLayout(distributed_optimizer=True), 8, BATCH)
    assert smallest(whole) == (1, 1) and smallest(whole - 1) == (2, 1)
    assert smallest(whole - 1, node_ranks=1) == (1, 2)
    assert smallest(1.0) is None


def test_fewer_ranks_come_before_fewer_stages():
    three_stages = MegatronLayout(pipeline=3, distributed_optimizer=True)
    layout = smallest_layout(SHAPE, 12, training_bytes(SHAPE, three_stages, 12, BATCH), BATCH)
    assert layout == three_stages  # four tensor-parallel ranks would fit too


def stored_bytes(shape: LlamaShape, batch: Batch) -> int:
    """The bytes that megatron-core stores for the backward pass of one micro-batch, besides the parameters, in float32."""
    release.use_adapted()
    from hyperion.parallel.megatron import gpt

    layout, stored = MegatronLayout(), {}
    with process_group(), gpt.model_parallel(layout):
        model = gpt.build_gpt(shape, layout, batch.sequence_length)
        parameters = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}

        def keep(tensor: torch.Tensor) -> torch.Tensor:
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in parameters:
                stored[storage.data_ptr()] = storage.nbytes(), tensor  # a tensor that is kept alive keeps its address
            return tensor

        tokens_BT = torch.zeros(batch.micro_batch_size, batch.sequence_length, dtype=torch.int64)
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            model(tokens_BT, torch.arange(batch.sequence_length).expand_as(tokens_BT), None, labels=tokens_BT).mean()
    return sum(count for count, _ in stored.values())


@pytest.mark.slow
@pytest.mark.process
@pytest.mark.skipif(bool(release.why_unavailable()), reason="megatron-core is not installed")
@pytest.mark.parametrize(
    ("shape", "batch"),
    [
        (LlamaShape(64, 2, 4, 2, 176, 64), Batch(32, 2)),
        pytest.param(LlamaShape(128, 6, 8, 8, 352, 64), Batch(128, 1), marks=pytest.mark.long),
    ],
)
def test_megatron_core_stores_at_least_the_activations_of_the_formula_and_at_most_1_6_times_as_much(shape, batch):
    with IsolatedProcess(timeout_s=120) as process:
        measured = process.run(partial(stored_bytes, shape, batch))
    logits = 4 * shape.vocab_size * batch.sequence_length * batch.micro_batch_size  # in float32 in both
    expected = 2 * (activation_bytes(shape, MegatronLayout(), 0, batch) - logits) + logits
    assert 1.0 <= measured / expected <= 1.6
