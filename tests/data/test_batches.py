"""Batches of tokens: resumable, the same on any number of ranks, padded or made ahead, and read from a file."""

import json

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hyperion.data import load_instructions, tokenize_completions
from hyperion.data.batches import InstructionBatches, LanguageBatches, PaddedBatches, Prefetched, evaluation_windows
from hyperion.data.images.device_images import ImageBatches
from hyperion.data.packing import IGNORE_INDEX
from hyperion.data.store.folders import DataError
from hyperion.data.text.tokenizer import train_tokenizer
from hyperion.hardware import detect_cpu
from hyperion.models import TransformerConfig, TransformerLM
from hyperion.training import LanguageEngine, adamw, choose_precision

TOKENS = np.arange(1000, dtype=np.uint16)
GENERATOR = np.random.default_rng(0)
IMAGES = GENERATOR.integers(1, 256, (50, 3, 32, 32), dtype=np.uint8)
LABELS = np.arange(50) % 10
IDENTITY = ((0.0,) * 3, (1 / 255,) * 3)  # leaves the levels 0 .. 255 as they are


def _language(seed: int = 0, **changes) -> LanguageBatches:
    return LanguageBatches(**{"tokens": TOKENS, "sequence_length": 16, "batch_size": 4, "seed": seed} | changes)


def _images(**changes) -> ImageBatches:
    options = {"images": IMAGES, "labels": LABELS, "batch_size": 8, "normalisation": IDENTITY, "augment": ("crop", "flip")}
    return ImageBatches(**options | changes)


def test_windows_are_shuffled_disjoint_and_one_ahead():
    batches = _language()
    inputs, targets = zip(*batches, strict=True)
    inputs, targets = torch.cat(inputs), torch.cat(targets)
    assert inputs.dtype == torch.int64 and inputs.shape == (4 * len(batches), 16)
    assert torch.equal(targets, inputs + 1) and torch.equal(inputs[:, 1:], inputs[:, :-1] + 1)
    assert len(inputs.unique()) == inputs.numel() >= (1000 - 2 * 17 - 4 * 17) * 16 / 17
    assert set((inputs[:, 0] % 16).tolist()) == set(range(16)), "windows start at every place of a line of 16"
    assert not torch.equal(inputs[:, 0], inputs[:, 0].sort().values)
    assert batches.tokens_per_batch == 64


def test_epochs_differ_and_seeds_decide():
    one, other = _language(), _language()
    epochs = [torch.cat([inputs for inputs, _ in one]) for _ in range(2)]
    assert not torch.equal(*epochs) and not torch.equal(epochs[0][:, 0] % 17, epochs[1][:, 0] % 17)
    assert torch.equal(epochs[0], torch.cat([inputs for inputs, _ in other]))
    assert not torch.equal(epochs[0], torch.cat([inputs for inputs, _ in _language(seed=1)]))


@pytest.mark.parametrize("make", [_language, _images])
@pytest.mark.parametrize("taken", [0, 1, 5, 6, 14, 15, 20])
def test_resuming_gives_the_same_batches_bit_for_bit(make, taken):
    whole, first, second = make(), make(), make()
    expected = [whole.next_batch() for _ in range(taken + 20)][taken:]
    for _ in range(taken):
        first.next_batch()
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    for (x, y), (a, b) in zip(expected, (second.next_batch() for _ in range(20)), strict=True):
        assert torch.equal(x, a) and torch.equal(y, b)


def test_a_loop_over_epochs_goes_on_in_the_middle_and_at_the_end():
    batches = _language()
    size = len(batches)
    for number, _ in enumerate(batches):
        if number == 4:
            state = batches.state_dict()
    assert batches.state_dict() == {**state, "epoch": 1, "position": 0}
    again = _language()
    again.load_state_dict(state)
    assert (again.epoch, again.position) == (0, 5)
    assert len(list(again)) == size - 5 and len(list(again)) == size and again.epoch == 1


@pytest.mark.parametrize("change", [{"seed": 1}, {"batch_size": 2}, {"tokens": TOKENS[:500]}, {"sequence_length": 8}])
def test_a_state_of_other_data_is_refused(change):
    with pytest.raises(DataError, match="loader state has"):
        _language(**change).load_state_dict(_language().state_dict())


def test_too_little_data_is_an_error():
    with pytest.raises(DataError, match="do not fill a batch of 4"):
        _language(tokens=TOKENS[:70])


@settings(max_examples=60, deadline=None)
@given(st.sampled_from([_language, _images]), st.integers(1, 5), st.integers(1, 4), st.integers(0, 30), st.booleans())
def test_the_parts_of_all_ranks_are_the_batch_of_one_device(make, ranks, share, taken, shuffle):
    options = {"batch_size": ranks * share, "seed": 7} | ({} if make is _language else {"shuffle": shuffle})
    whole, parts = make(**options), [make(**options, rank=rank, ranks=ranks) for rank in range(ranks)]
    assert {len(part) for part in parts} == {len(whole)}
    state = whole.state_dict() | {"epoch": taken // len(whole), "position": taken % len(whole)}
    for loader in (whole, *parts):
        loader.load_state_dict(json.loads(json.dumps(state)))
    expected = whole.next_batch()
    found = [part.next_batch() for part in parts]
    assert all(len(inputs) == len(targets) == share for inputs, targets in found)
    for of_all, of_one in zip(zip(*found, strict=True), expected, strict=True):
        assert torch.equal(torch.cat(of_all), of_one)
    assert all(part.state_dict() == whole.state_dict() for part in parts)


@settings(max_examples=25, deadline=None)
@given(st.integers(1, 4), st.integers(1, 3))
def test_no_two_ranks_see_the_same_example_in_an_epoch(ranks, share):
    parts = [_language(batch_size=ranks * share, rank=rank, ranks=ranks) for rank in range(ranks)]
    seen = torch.cat([targets.flatten() for part in parts for _, targets in part])
    assert len(seen.unique()) == len(seen)


def test_a_run_goes_on_with_another_number_of_ranks():
    two = [_images(rank=rank, ranks=2) for rank in range(2)]
    for part in two:
        for _ in range(4):
            part.next_batch()
    four = [_images(rank=rank, ranks=4) for rank in range(4)]
    for part in four:
        part.load_state_dict(two[1].state_dict())
    after_two, after_four = (torch.cat([part.next_batch()[0] for part in parts]) for parts in (two, four))
    assert torch.equal(after_two, after_four)


@pytest.mark.parametrize("make", [_language, _images])
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"batch_size": 4, "ranks": 3}, "3 ranks do not divide a batch of 4"),
        ({"batch_size": 4, "ranks": 8}, "8 ranks do not divide a batch of 4"),
        ({"batch_size": 4, "rank": 2, "ranks": 2}, "rank 2 of 2 does not exist"),
    ],
)
def test_ranks_that_do_not_divide_the_batch_are_refused(make, options, message):
    with pytest.raises(DataError, match=message):
        make(**options)


def test_a_last_batch_that_the_ranks_do_not_divide_is_refused():
    assert [len(_images(batch_size=12, drop_last=False, ranks=2).next_batch()[1])] == [6]
    with pytest.raises(DataError, match="4 ranks do not divide the last batch of 2"):
        _images(batch_size=16, drop_last=False, ranks=4)


@settings(max_examples=200, deadline=None)
@given(st.integers(1, 60), st.integers(1, 20), st.data())
def test_every_token_is_scored_exactly_once_after_the_right_past(count, context, data):
    stride = data.draw(st.integers(1, context))
    tokens = np.arange(1, count + 1)
    stream = [0, *range(1, count + 1)]
    scored = []
    for inputs, targets in evaluation_windows(tokens, context, stride, 0, batch_size=data.draw(st.integers(1, 4))):
        assert inputs.shape == targets.shape and inputs.shape[1] == min(context, count)
        for row, answers in zip(inputs.tolist(), targets.tolist(), strict=True):
            assert row == stream[row[0] : row[0] + len(row)]
            for position, (token, answer) in enumerate(zip(row, answers, strict=True)):
                if answer != IGNORE_INDEX:
                    assert answer == token + 1
                    assert position >= min(token, context - stride), "too little of the past is visible"
                    scored.append(answer)
    assert sorted(scored) == tokens.tolist()


@pytest.mark.parametrize(("tokens", "stride"), [(TOKENS, 0), (TOKENS, 9), (TOKENS[:0], 4)])
def test_windows_that_would_leave_tokens_out_are_refused(tokens, stride):
    with pytest.raises(DataError, match="cannot score every token once"):
        next(evaluation_windows(tokens, 8, stride, 0))


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_the_examples_of_all_ranks_are_those_of_one_device(ranks):
    tokens = np.arange(1000)
    one = LanguageBatches(tokens, 7, 8, seed=3).examples(epoch=2)
    parts = [LanguageBatches(tokens, 7, 8, seed=3, rank=rank, ranks=ranks).examples(epoch=2) for rank in range(ranks)]
    assert sorted(np.concatenate(parts)) == sorted(one) and len(set(one)) == len(one)
    first, _ = LanguageBatches(tokens, 7, 8, seed=3).next_batch()
    assert first[:, 0].tolist() == LanguageBatches(tokens, 7, 8, seed=3).examples(0)[:8].tolist()


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


def test_a_state_of_rows_of_another_length_is_refused():
    lines = np.array([[4 * n, 4] for n in range(10)])
    short, long = (PaddedBatches(TOKENS, lines, length, 2, 0) for length in (8, 16))
    with pytest.raises(DataError, match="has sequence_length 8, but this loader has sequence_length 16"):
        long.load_state_dict(short.state_dict())


SIZES = np.random.default_rng(0).integers(1, 12, 90)


@pytest.fixture(scope="module")
def tokens(tmp_path_factory):
    """Ids 1, 2, 3 … in a file."""
    path = tmp_path_factory.mktemp("tokens") / "tokens.npy"
    np.save(path, np.arange(1, SIZES.sum() + 1, dtype=np.uint16))
    return np.load(path, mmap_mode="r")


def samples() -> np.ndarray:
    return np.stack([np.cumsum(SIZES) - SIZES, SIZES], axis=1)


def language(tokens, **options) -> LanguageBatches:
    return LanguageBatches(tokens, 8, 4, seed=3, **options)


def padded(tokens, **options) -> PaddedBatches:
    return PaddedBatches(tokens, samples(), 8, 4, padding_id=0, seed=3, **options)


def equal(one, other) -> bool:
    return all(torch.equal(a, b) and a.dtype == b.dtype for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("make", [language, padded])
@pytest.mark.parametrize("workers", [1, 2, 5])
@pytest.mark.parametrize("taken", [0, 7, 40])
def test_any_number_of_workers_gives_the_same_batches_and_resumes_in_mid_epoch(tokens, make, workers, taken):
    plain = make(tokens)
    expected = [plain.next_batch() for _ in range(taken + 50)]
    with Prefetched(make(tokens, resident=False), workers=workers, ahead=6) as first:
        for batch in expected[:taken]:
            assert equal(first.next_batch(), batch)
        state = json.loads(json.dumps(first.state_dict()))
    with Prefetched(make(tokens, resident=False), workers=3) as second:
        second.next_batch()
        second.load_state_dict(state)
        assert all(equal(second.next_batch(), batch) for batch in expected[taken:])
        assert second.state_dict() == plain.state_dict() and second.waited_s > 0


def test_every_worker_has_a_batch_to_make():
    with Prefetched(_language(), workers=2, ahead=0) as batches:
        assert batches.ahead == 2
        assert torch.equal(batches.next_batch()[0], _language().next_batch()[0])


def test_a_loop_over_epochs_ends_with_each(tokens):
    with Prefetched(language(tokens, resident=False)) as batches:
        batches.next_batch()
        assert len(list(batches)) == len(batches) - 1 and len(list(batches)) == len(batches)
        assert batches.state_dict()["epoch"] == 2


def test_what_fails_in_a_thread_fails_in_the_loop(tokens):
    loader = language(tokens, resident=False)
    loader._stream._tokens = np.arange(3)
    with Prefetched(loader) as batches, pytest.raises(IndexError):
        batches.next_batch()


def test_padding_carries_no_loss_and_is_counted_apart(tokens):
    loader = padded(tokens)
    rows = [row for inputs, targets in loader for row in zip(inputs.tolist(), targets.tolist(), strict=True)]
    assert len({inputs[0] for inputs, _ in rows}) == len(rows) == 88, "every line at most once"
    by_start = {int(start) + 1: int(size) for start, size in samples()}
    for inputs, targets in rows:
        line = list(range(inputs[0], inputs[0] + by_start[inputs[0]]))
        assert inputs == (line + [0] * 8)[:8]
        assert targets == (line[1:] + [IGNORE_INDEX] * 9)[:8], "no target beyond the line"
    assert loader.padding.tokens == np.minimum(SIZES, 8).sum() and loader.padding.samples == 90
    assert loader.padding.padding == 90 * 8 - loader.padding.tokens and loader.padding.truncated == (SIZES - 8).clip(0).sum()


def test_an_engine_counts_the_tokens_that_carry_a_loss(tokens):
    """Rows of padding only change neither the loss nor the count."""
    device = detect_cpu()
    model = TransformerLM(TransformerConfig(vocab_size=1000, context=8, width=16, heads=2, layers=1))
    engine = LanguageEngine(model, adamw(model, 1e-3), lambda step: 1e-3, choose_precision(device), device)
    inputs, targets = padded(tokens).next_batch()
    filled = torch.full_like(inputs, 5), torch.full_like(targets, IGNORE_INDEX)
    twice = torch.cat([inputs, filled[0]]), torch.cat([targets, filled[1]])
    assert int(engine.count_items((inputs, targets))) == int((targets != IGNORE_INDEX).sum()) == int(engine.count_items(twice))
    torch.testing.assert_close(engine.summed_loss((inputs, targets)), engine.summed_loss(twice))


def test_a_stream_in_its_file_has_no_windows_on_a_device(tokens):
    with pytest.raises(DataError, match="on the CPU only, not on meta"):
        language(tokens, resident=False, device="meta")
