"""Synthetic text with exactly known entropy, so that the lowest possible loss of a model is known.

A line is " w1 w2 ... w15 \\n": LINE_WORDS words and the newline, LINE_UNITS units. Words are drawn from a Zipf
distribution q over 256 pronounceable words. In every line but the first of a split, a word ECHOES the word directly above it,
LINE_UNITS units back, with probability p, and is drawn from q otherwise. Each column is then a Markov chain with stationary
distribution q, and the columns are independent, so:

    entropy rate per word      sum_x q(x) H(p d_x + (1 - p) q); the newline adds nothing, because all lines have equal length
    n-grams up to 16 units     H(q) per word, plus a little because the position in the line is unknown

A model that does not look back LINE_UNITS units learns only word frequencies. All entropies are in nats.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from hyperion.data.errors import DataError

LINE_WORDS = 15
LINE_UNITS = LINE_WORDS + 1
SYLLABLES = ("ba", "de", "fi", "go", "ku", "la", "me", "ni", "po", "ru", "sa", "te", "vi", "zo", "ja", "he")
VOCABULARY = len(SYLLABLES) ** 2
# Each split has as many units as WikiText-2 has words with <eos>: 2,088,628, 217,646 and 245,569.
LINES_LIKE_WIKITEXT2 = {"train": 130_539, "valid": 13_602, "test": 15_348}


@dataclass(frozen=True)
class EchoLanguage:
    """The source of the text, and its true model.

    Attributes:
        echo_probability: p, the probability that a word repeats the one above it.
        zipf_exponent: q(rank r) is proportional to r ** -zipf_exponent.
    """

    echo_probability: float = 0.7
    zipf_exponent: float = 1.0
    words: tuple[str, ...] = field(init=False, repr=False)

    def __post_init__(self):
        # 89 is odd, so the map visits all 256 pairs of syllables; neighbours in rank share no spelling.
        codes = [(rank * 89 + 7) % VOCABULARY for rank in range(VOCABULARY)]
        object.__setattr__(self, "words", tuple(SYLLABLES[code // 16] + SYLLABLES[code % 16] for code in codes))

    @cached_property
    def probabilities(self) -> np.ndarray:
        """q by rank, float64 [256]."""
        weights = np.arange(1, VOCABULARY + 1, dtype=np.float64) ** -self.zipf_exponent
        return weights / weights.sum()

    def sample(self, lines: int, seed: int | Sequence[int]) -> list[str]:
        """Return `lines` lines of text, the same for the same seed."""
        generator = np.random.default_rng(seed)
        shape = (lines, LINE_WORDS)
        edges = np.cumsum(self.probabilities)[:-1]
        fresh = np.searchsorted(edges, generator.random(shape), side="right")
        echo = generator.random(shape) < self.echo_probability
        echo[:1] = False
        origin = np.maximum.accumulate(np.where(echo, 0, np.arange(lines)[:, None]), axis=0)
        ranks = np.take_along_axis(fresh, origin, axis=0)
        table = np.array([f" {word}" for word in self.words], dtype=object)
        return ["".join(row) + " \n" for row in table[ranks]]

    def ranks(self, lines: Sequence[str]) -> np.ndarray:
        """Return the word ranks int64 [lines, 15] of text in this language.

        Raises:
            DataError: a line is not in the language; its number is given.
        """
        rank_of = {word: rank for rank, word in enumerate(self.words)}
        table = np.empty((len(lines), LINE_WORDS), dtype=np.int64)
        for number, line in enumerate(lines):
            row = [rank_of.get(word, -1) for word in line.split()]
            if len(row) != LINE_WORDS or -1 in row or not line.endswith(" \n"):
                raise DataError(
                    "the line is not in the synthetic language",
                    where=f"line {number + 1}: {line[:60]!r}",
                    next_step="pass lines from EchoLanguage.sample",
                )
            table[number] = row
        return table

    def true_negative_log_likelihood(self, lines: Sequence[str]) -> float:
        """Return -ln P(lines) in nats under the true model, the lowest expected value of any model."""
        ranks, q, p = self.ranks(lines), self.probabilities, self.echo_probability
        fresh = q[ranks]
        total = -np.log(fresh[:1]).sum()
        echoed = ranks[1:] == ranks[:-1]
        return float(total - np.log(p * echoed + (1 - p) * fresh[1:]).sum())

    def entropy_rate_nats_per_word(self) -> float:
        """Return the entropy of a word given all previous text (after the first line), the lower bound of the loss."""
        q, p = self.probabilities, self.echo_probability
        repeated = p + (1 - p) * q  # probability of the word above
        others = (1 - p) * q  # probability of any other word
        surprise = others * np.log(others)
        given = -(repeated * np.log(repeated) + surprise.sum() - surprise)
        return float(q @ given)

    def entropy_rate_nats_per_unit(self) -> float:
        """Return the entropy rate per unit: a line has 15 words and a newline of entropy 0."""
        return self.entropy_rate_nats_per_word() * LINE_WORDS / LINE_UNITS

    def unigram_entropy_nats_per_word(self) -> float:
        """Return H(q)."""
        q = self.probabilities
        return float(-(q * np.log(q)).sum())

    def ngram_entropy_nats_per_unit(self, order: int) -> float:
        """Return the entropy of a unit given the previous order - 1 units, for orders 1 (unigram) to 16.

        If the k = order - 1 previous units contain a newline (k of 16 positions), the position is known. In the other 16 - k
        positions, the next unit is the newline with probability 1 / (16 - k).
        """
        if not 1 <= order <= LINE_UNITS:
            raise ValueError(f"order {order} is not in 1 .. {LINE_UNITS}")
        history = order - 1
        unknown = LINE_UNITS - history
        newline = 1 / unknown
        position = -newline * np.log(newline) - (0.0 if unknown == 1 else (1 - newline) * np.log1p(-newline))
        words = self.unigram_entropy_nats_per_word() * LINE_WORDS / LINE_UNITS
        return float(words + unknown / LINE_UNITS * position)

    def unigram_entropy_nats_per_unit(self) -> float:
        """Return the entropy of a unit without history."""
        return self.ngram_entropy_nats_per_unit(1)

    def bigram_entropy_nats_per_unit(self) -> float:
        """Return the entropy of a unit given the previous one."""
        return self.ngram_entropy_nats_per_unit(2)
