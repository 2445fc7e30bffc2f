"""Batches of instruction rows: resumable, the same on any number of ranks, no wider than they must be."""

import pytest
import torch

from hyperion.data import IGNORE_INDEX, DataError, load_instructions, tokenize_completions
from hyperion.data.batches import InstructionBatches
from hyperion.data.text.tokenizer import train_tokenizer

ROWS = load_instructions("synthetic")
COMPLETIONS = tokenize_completions(ROWS.train[:50], train_tokenizer(ROWS.as_corpus()), 64)


def test_an_epoch_holds_every_row_once_and_the_next_in_another_order():
    batches = InstructionBatches(COMPLETIONS, 10, seed=3)
    epochs = [list(batches), list(batches)]
    assert [len(epoch) for epoch in epochs] == [5, 5]
    rows = [sorted(tuple(row[row != 0].tolist()) for inputs, _ in epoch for row in inputs) for epoch in epochs]
    assert rows[0] == rows[1] and not torch.equal(epochs[0][0][0], epochs[1][0][0])


def test_a_batch_is_as_wide_as_its_longest_row_in_steps_of_eight():
    for inputs, targets in InstructionBatches(COMPLETIONS, 4, drop_last=False):
        filled = (inputs != 0).sum(dim=1).max()
        assert inputs.shape == targets.shape and inputs.shape[1] % 8 == 0 and 0 <= inputs.shape[1] - filled < 8
        assert inputs.dtype == targets.dtype == torch.int64 and (targets != IGNORE_INDEX).any(dim=1).all()


def test_ranks_get_the_parts_of_one_devices_batch_and_resume_on_another_number_of_ranks():
    alone = InstructionBatches(COMPLETIONS, 8, seed=1)
    parts = [InstructionBatches(COMPLETIONS, 8, seed=1, rank=rank, ranks=2) for rank in range(2)]
    for _ in range(3):
        whole = alone.next_batch()
        halves = [part.next_batch() for part in parts]
        assert all(torch.equal(torch.cat(pair), side) for pair, side in zip(zip(*halves, strict=True), whole, strict=True))
    resumed = InstructionBatches(COMPLETIONS, 8, seed=1, rank=3, ranks=4)
    resumed.load_state_dict(parts[0].state_dict())
    assert torch.equal(resumed.next_batch()[0], alone.next_batch()[0][6:])


def test_what_does_not_fit_is_refused():
    with pytest.raises(DataError, match="do not divide a batch of 7"):
        InstructionBatches(COMPLETIONS, 7, ranks=2)
    state = InstructionBatches(COMPLETIONS, 8).state_dict()
    other = tokenize_completions(ROWS.held_out[:50], train_tokenizer(ROWS.as_corpus()), 64)
    with pytest.raises(DataError, match="loader state has tokens"):
        InstructionBatches(other, 8).load_state_dict(state)
