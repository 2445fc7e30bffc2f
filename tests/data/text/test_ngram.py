import itertools

import numpy as np
import pytest

from hyperion.data.text import ngram
from hyperion.data.text.ngram import bigram_baseline, unigram_baseline

GENERATOR = np.random.default_rng(0)


def _chain(length: int, noise: float, states: int = 5) -> np.ndarray:
    """A cycle through the states that jumps anywhere with probability `noise`."""
    tokens, jumps = np.zeros(length, dtype=np.int64), GENERATOR.random(length) < noise
    for at in range(1, length):
        tokens[at] = GENERATOR.integers(states) if jumps[at] else (tokens[at - 1] + 1) % states
    return tokens


def test_perplexities_are_those_of_the_source():
    train, evaluation = _chain(20_000, 0.2), _chain(5_000, 0.2)
    score = unigram_baseline(train, evaluation, 5)
    assert np.exp(score.total_nll_nats / score.tokens) == pytest.approx(5, rel=0.01)
    entropy = -(0.84 * np.log(0.84) + 4 * 0.04 * np.log(0.04))
    score = bigram_baseline(train, evaluation, 5, prefix_id=4)
    assert score.tokens == 5_000
    assert score.total_nll_nats / score.tokens == pytest.approx(entropy, abs=0.04)


@pytest.mark.parametrize("token", range(6))
def test_probabilities_sum_to_one(token):
    """Over every possible next token, also after one that training never saw (5) and for one it never held (5)."""
    train = _chain(3_000, 0.3)
    unigram = [np.exp(-unigram_baseline(train, np.array([w]), 6).total_nll_nats) for w in range(6)]
    assert sum(unigram) == pytest.approx(1)
    bigram = [np.exp(-bigram_baseline(train, np.array([w]), 6, prefix_id=token).total_nll_nats) for w in range(6)]
    assert sum(bigram) == pytest.approx(1) and min(bigram) > 0


def test_tokens_are_scored_one_after_the_other():
    train, evaluation = _chain(3_000, 0.3), _chain(50, 0.3)
    steps = [bigram_baseline(train, np.array([w]), 5, prefix_id=v) for v, w in itertools.pairwise([4, *evaluation])]
    together = bigram_baseline(train, evaluation, 5, prefix_id=4).total_nll_nats
    assert together == pytest.approx(sum(step.total_nll_nats for step in steps))


def test_fitted_weights_beat_equal_ones(monkeypatch):
    train, evaluation = _chain(5_000, 0.1), _chain(2_000, 0.1)
    fitted = bigram_baseline(train, evaluation, 5, 0).total_nll_nats
    monkeypatch.setattr(ngram, "ITERATIONS", 0)
    assert fitted < bigram_baseline(train, evaluation, 5, 0).total_nll_nats


def test_a_large_vocabulary_of_small_tokens_does_not_overflow():
    train = GENERATOR.integers(50_000, 50_257, 5_000).astype(np.uint16)
    assert np.isfinite(bigram_baseline(train, train[:100], 50_257, 50_256).total_nll_nats)


def test_the_error_of_the_mean_allows_for_correlation_between_neighbours():
    """Each of two tokens follows in runs of 256, so the blocks and not the tokens are independent."""
    generator = np.random.default_rng(0)
    text = np.repeat(generator.integers(0, 2, 400), 256)
    train = np.repeat([0, 0, 0, 1], 2048)
    repeated = unigram_baseline(train, text, 2)
    shuffled = unigram_baseline(train, generator.permutation(text), 2)
    assert repeated.total_nll_nats == pytest.approx(shuffled.total_nll_nats)
    assert repeated.standard_error_nats == pytest.approx(16 * shuffled.standard_error_nats, rel=0.15)
