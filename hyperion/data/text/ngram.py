"""Unigram and interpolated bigram models as baselines: a neural language model must have a lower loss than both.

The bigram model gives the token w after the token v the probability

    P(w | v) = a(v) c(v, w) / c(v) + b(v) c(w) / N + (1 - a(v) - b(v)) / V

where c are counts in the train tokens, N is the number of train tokens, and V is the size of the vocabulary. The weights a and
b depend on the count c(v): tokens with similar counts form a bucket, and all tokens in a bucket have the same weights. The
weights are fitted by expectation-maximisation on the last part (the fraction HELD_OUT) of the train tokens, with counts from the
other train tokens. The final model uses the counts of all train tokens.

Source: Jelinek and Mercer, 1980.
"""

from dataclasses import dataclass

import numpy as np

HELD_OUT = 0.05
ITERATIONS = 50
_BLOCK_TOKENS = 256
# Bucket limits of c(v). Rare tokens need more smoothing, so the buckets are narrow where the counts are small.
BUCKET_EDGES = np.array([1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 4096, 16384, 65536])


@dataclass(frozen=True)
class Baseline:
    """Negative log-likelihood of a text under an n-gram model.

    Attributes:
        name: 'unigram' or 'interpolated bigram'.
        total_nll_nats: -ln P in nats, summed over all evaluated tokens.
        tokens: number of evaluated tokens.
        standard_error_nats: standard error of the mean per token in nats. It allows for correlation between the tokens of a block
            of 256 tokens.
    """

    name: str
    total_nll_nats: float
    tokens: int
    standard_error_nats: float


def unigram_baseline(train: np.ndarray, evaluation: np.ndarray, vocab_size: int) -> Baseline:
    """Evaluate a unigram model. Train frequencies are mixed with the uniform distribution, so that no probability is zero.

    Args:
        train, evaluation: token ids [tokens] of the train text and of the evaluated text.
        vocab_size: V, the size of the vocabulary.
    """
    counted, held_out = _split(train)
    # A unigram model has no history v, so all tokens are in one bucket.
    weights = _fit(_unigram_terms(counted, held_out, vocab_size), np.zeros(len(held_out), dtype=np.int64), 1)
    probabilities = _unigram_terms(train, evaluation, vocab_size) @ weights[0]
    return _scored("unigram", probabilities)


def bigram_baseline(train: np.ndarray, evaluation: np.ndarray, vocab_size: int, prefix_id: int) -> Baseline:
    """Evaluate the interpolated bigram model (see the module's docstring).

    Args:
        train, evaluation: token ids [tokens] of the train text and of the text to evaluate.
        vocab_size: V, the size of the vocabulary.
        prefix_id: token id that precedes the first evaluated token, usually the end of text, so that this token is evaluated too.
    """
    counted, held_out = _split(train)
    # The first held-out token follows the last counted token.
    terms, buckets = _bigram_terms(counted, held_out, vocab_size, int(counted[-1]))
    weights = _fit(terms, buckets, len(BUCKET_EDGES) + 1)
    terms, buckets = _bigram_terms(train, evaluation, vocab_size, prefix_id)
    probabilities = (terms * weights[buckets]).sum(axis=1)
    return _scored("interpolated bigram", probabilities)


def _scored(name: str, probabilities: np.ndarray) -> Baseline:
    nll = -np.log(probabilities)
    n, blocks = len(nll), np.add.reduceat(nll - nll.mean(), np.arange(0, len(nll), _BLOCK_TOKENS))
    between = len(blocks) / (len(blocks) - 1) * float(np.sum(blocks**2)) if len(blocks) > 1 else n * float(nll.var())
    return Baseline(name, float(nll.sum()), n, float(np.sqrt(between)) / n)


def _split(train: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    at = len(train) - max(1, int(len(train) * HELD_OUT))
    return train[:at], train[at:]


def _unigram_terms(train: np.ndarray, tokens: np.ndarray, vocab_size: int) -> np.ndarray:
    """Return the unigram probability and the uniform probability 1 / V of each token, [tokens, 2]."""
    frequency = np.bincount(train, minlength=vocab_size) / len(train)
    return np.stack([frequency[tokens], np.full(len(tokens), 1 / vocab_size)], axis=1)


def _bigram_terms(train: np.ndarray, tokens: np.ndarray, vocab_size: int, prefix_id: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the bigram, unigram and uniform probabilities of each token, [tokens, 3], and its bucket of c(v), [tokens]."""
    train, tokens = np.asarray(train, dtype=np.int64), np.asarray(tokens, dtype=np.int64)
    # Encode a pair (v, w) as one integer, v * V + w, which does not overflow int64.
    pairs, pair_counts = np.unique(train[:-1] * vocab_size + train[1:], return_counts=True)
    before_counts = np.bincount(train[:-1], minlength=vocab_size)
    before = np.concatenate([[prefix_id], tokens[:-1]])
    keys = before * vocab_size + tokens
    # Binary search in the sorted pairs. For a pair after the last one, the search returns an index outside the array, so the
    # index is clipped.
    place = np.minimum(np.searchsorted(pairs, keys), len(pairs) - 1)
    count = np.where(pairs[place] == keys, pair_counts[place], 0)
    # c(v) counts tokens with a successor, so that the bigram probabilities of each v sum to 1.
    seen = before_counts[before]
    lower = _unigram_terms(train, tokens, vocab_size)
    bigram = np.where(
        seen > 0, count / np.maximum(seen, 1), lower[:, 0]
    )  # after a token that does not occur in train, use the unigram probability instead
    terms = np.column_stack([bigram, lower])
    return terms, np.searchsorted(BUCKET_EDGES, seen, side="right")


def _fit(terms: np.ndarray, buckets: np.ndarray, bucket_count: int) -> np.ndarray:
    """Fit the mixture weights [buckets, terms] of each bucket by expectation-maximisation."""
    width = terms.shape[1]
    weights = np.full((bucket_count, width), 1 / width)
    sizes = np.bincount(buckets, minlength=bucket_count)
    for _ in range(ITERATIONS):
        # E step: probability that each term generated the token, [tokens, terms].
        shares = terms * weights[buckets]
        shares /= shares.sum(axis=1, keepdims=True)
        for term in range(width):
            # M step: the new weight of a term is its mean probability in the bucket. A bucket without tokens keeps equal weights.
            total = np.bincount(buckets, weights=shares[:, term], minlength=bucket_count)
            weights[:, term] = np.where(sizes > 0, total / np.maximum(sizes, 1), weights[:, term])
    # Half an observation is spread over all terms, because held-out data cannot prove that a term is never needed.
    return (weights * sizes[:, None] + 0.5 / width) / (sizes[:, None] + 0.5)
