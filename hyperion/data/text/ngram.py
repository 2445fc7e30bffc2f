"""What counting alone achieves: unigram and interpolated bigram models, the baselines that a language model must beat.

Bigram: P(w | v) = a(v) c(v, w) / c(v) + b(v) c(w) / N + (1 - a(v) - b(v)) / V. The weights depend on how often v was
seen (one set a bucket of counts) and are fitted by expectation-maximisation on the last HELD_OUT of the train tokens,
with counts from the rest; then everything is counted again on all train tokens. Jelinek and Mercer, 1980.
"""

from dataclasses import dataclass

import numpy as np

HELD_OUT = 0.05
ITERATIONS = 50
BUCKET_EDGES = np.array([1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 4096, 16384, 65536])


@dataclass(frozen=True)
class Baseline:
    """Score of a counting model.

    Attributes:
        name: 'unigram' or 'interpolated bigram'.
        total_nll_nats: -ln P of all evaluated tokens.
        tokens: how many were scored: every one.
        standard_error_nats: of the mean per token, from the spread of the tokens taken as independent.
    """

    name: str
    total_nll_nats: float
    tokens: int
    standard_error_nats: float

    @property
    def token_perplexity(self) -> float:
        """exp of the mean negative log likelihood a token."""
        return float(np.exp(self.total_nll_nats / self.tokens))

    def word_perplexity(self, words_with_eos: int) -> float:
        """exp of the total negative log likelihood over words (see corpus.count_words_with_eos)."""
        return float(np.exp(self.total_nll_nats / words_with_eos))


def unigram_baseline(train: np.ndarray, evaluation: np.ndarray, vocab_size: int) -> Baseline:
    """Train frequencies, mixed with the uniform distribution (weight fitted on the held-out slice) so that none is
    zero.

    Args:
        train, evaluation: token ids [tokens].
    """
    kept, held_out = _split(train)
    weights = _fit(_unigram_terms(kept, held_out, vocab_size), np.zeros(len(held_out), dtype=np.int64), 1)
    probabilities = _unigram_terms(train, evaluation, vocab_size) @ weights[0]
    return _scored("unigram", probabilities)


def bigram_baseline(train: np.ndarray, evaluation: np.ndarray, vocab_size: int, prefix_id: int) -> Baseline:
    """The interpolated bigram model of the module's docstring.

    Args:
        train, evaluation: token ids [tokens].
        prefix_id: what stands before the first evaluated token (the end of text), so that this one is scored too.
    """
    kept, held_out = _split(train)
    terms, buckets = _bigram_terms(kept, held_out, vocab_size, int(kept[-1]))
    weights = _fit(terms, buckets, len(BUCKET_EDGES) + 1)
    terms, buckets = _bigram_terms(train, evaluation, vocab_size, prefix_id)
    probabilities = (terms * weights[buckets]).sum(axis=1)
    return _scored("interpolated bigram", probabilities)


def _scored(name: str, probabilities: np.ndarray) -> Baseline:
    nll = -np.log(probabilities)
    return Baseline(name, float(nll.sum()), len(nll), float(nll.std() / np.sqrt(len(nll))))


def _split(train: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    at = len(train) - max(1, int(len(train) * HELD_OUT))
    return train[:at], train[at:]


def _unigram_terms(train: np.ndarray, tokens: np.ndarray, vocab_size: int) -> np.ndarray:
    """[tokens, 2]: relative frequency and 1 / V."""
    frequency = np.bincount(train, minlength=vocab_size) / len(train)
    return np.stack([frequency[tokens], np.full(len(tokens), 1 / vocab_size)], axis=1)


def _bigram_terms(train: np.ndarray, tokens: np.ndarray, vocab_size: int, prefix_id: int) -> tuple[np.ndarray, np.ndarray]:
    """[tokens, 3]: bigram, unigram and uniform probability of each token; and the bucket of its predecessor's count."""
    train, tokens = np.asarray(train, dtype=np.int64), np.asarray(tokens, dtype=np.int64)
    pairs, pair_counts = np.unique(train[:-1] * vocab_size + train[1:], return_counts=True)
    before_counts = np.bincount(train[:-1], minlength=vocab_size)
    before = np.concatenate([[prefix_id], tokens[:-1]])
    keys = before * vocab_size + tokens
    place = np.minimum(np.searchsorted(pairs, keys), len(pairs) - 1)
    count = np.where(pairs[place] == keys, pair_counts[place], 0)
    seen = before_counts[before]
    lower = _unigram_terms(train, tokens, vocab_size)
    bigram = np.where(seen > 0, count / np.maximum(seen, 1), lower[:, 0])  # after a token never seen: the unigram
    terms = np.column_stack([bigram, lower])
    return terms, np.searchsorted(BUCKET_EDGES, seen, side="right")


def _fit(terms: np.ndarray, buckets: np.ndarray, bucket_count: int) -> np.ndarray:
    """Mixture weights [buckets, terms] by expectation-maximisation, for every bucket of counts."""
    width = terms.shape[1]
    weights = np.full((bucket_count, width), 1 / width)
    sizes = np.bincount(buckets, minlength=bucket_count)
    for _ in range(ITERATIONS):
        shares = terms * weights[buckets]
        shares /= shares.sum(axis=1, keepdims=True)
        for term in range(width):
            total = np.bincount(buckets, weights=shares[:, term], minlength=bucket_count)
            weights[:, term] = np.where(sizes > 0, total / np.maximum(sizes, 1), weights[:, term])
    # Half an observation spread over all terms: held-out data cannot prove that a term is never needed.
    return (weights * sizes[:, None] + 0.5 / width) / (sizes[:, None] + 0.5)
