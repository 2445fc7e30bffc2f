"""Loaders that leave the text in its file, pad it, or make batches ahead: the same batches, resumed bit for bit."""

import json

import numpy as np
import pytest
import torch

from hyperion.data import IGNORE_INDEX
from hyperion.data.batches import LanguageBatches, PaddedBatches, Prefetched
from hyperion.data.store.folders import DataError
from hyperion.hardware import detect_cpu
from hyperion.models import TransformerConfig, TransformerLM
from hyperion.training import LanguageEngine, adamw, choose_precision

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
