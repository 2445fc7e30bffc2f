"""Score models on held-out text, and build the rows with their perplexities."""

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from hyperion.chapter.context import Context
from hyperion.data import PreparedText, TextCorpus, count_words_with_eos
from hyperion.results import Row

# For each metric: the unit by which a split's nats are divided, and the function that converts nats per unit to the metric.
MEASURES: dict[str, tuple[str, Callable[[float], float]]] = {
    "perplexity_token": ("tokens", math.exp),
    "perplexity_word": ("words", math.exp),
    "bits_per_byte": ("utf8_bytes", lambda nats: nats / math.log(2)),
}


@dataclass(frozen=True)
class TextFloor:
    """Floor of a text: the least possible expected negative log-likelihood.

    Args:
        total_nll_nats: negative log-likelihood in nats of the whole text under the process that generated it. None for natural
            text.
        source: source of the floor, or the reason why there is none.
    """

    total_nll_nats: float | None
    source: str

    def per(self, count: int) -> float | None:
        """Return the floor in nats per unit, or None if there is no floor. `count` is the number of units in the text."""
        return None if self.total_nll_nats is None else self.total_nll_nats / count


@dataclass(frozen=True)
class HeldOut:
    """The text of a split on which models are scored.

    Attributes:
        tokens: token ids [tokens].
        words: number of words. The <eos> at the end of each line counts as a word.
        utf8_bytes: size of the text in UTF-8 bytes.
        floor: exact for synthetic text, unknown for natural text.
    """

    tokens: np.ndarray
    words: int
    utf8_bytes: int
    floor: TextFloor

    @classmethod
    def of(cls, corpus: TextCorpus, prepared: PreparedText, split: str, samples: int | None) -> "HeldOut":
        """Return the first lines of a split, including `samples` non-blank lines, or the whole split if `samples` is None."""
        tokens, lines, extents = prepared.tokens[split], list(corpus.splits[split]), prepared.samples[split]
        if samples is not None and samples < len(extents):
            start, size = extents[samples - 1].tolist()
            non_blank = [number for number, line in enumerate(lines, 1) if line.strip()]
            tokens, lines = tokens[: start + size], lines[: non_blank[samples - 1]]
        floor = TextFloor(None, "no limit: the entropy of natural text is not known")
        if corpus.language is not None:
            total = corpus.language.true_negative_log_likelihood(lines)
            floor = TextFloor(total, "negative log-likelihood of the text under the process that wrote it")
        return cls(tokens, count_words_with_eos(lines), sum(len(line.encode()) for line in lines), floor)


@dataclass(frozen=True)
class Scored:
    """Score of a model on held-out text: the negative log-likelihood of the text.

    Attributes:
        total_nll_nats: negative log-likelihood summed over all tokens, in nats.
        tokens: number of tokens.
        standard_error_nats: standard error of the mean negative log-likelihood per token, in nats.
        words, utf8_bytes, floor: as in `HeldOut`.
    """

    total_nll_nats: float
    tokens: int
    standard_error_nats: float
    words: int
    utf8_bytes: int
    floor: TextFloor

    @classmethod
    def of(cls, held_out: HeldOut, total_nll_nats: float, tokens: int, standard_error_nats: float) -> "Scored":
        """Return the score of a model on held-out text."""
        return cls(total_nll_nats, tokens, standard_error_nats, held_out.words, held_out.utf8_bytes, held_out.floor)

    def measure(self, metric: str) -> float:
        """Return the value of a metric in MEASURES."""
        unit, convert = MEASURES[metric]
        return convert(self.total_nll_nats / getattr(self, unit))


def perplexity_rows(context: Context, variant: str, dtype: str, params: dict, scored: Scored, data_source: str) -> list[Row]:
    """Return the rows with perplexity per token, perplexity per word and bits per byte of held-out text.

    The <eos> at the end of each line counts as a word.
    """
    rows = []
    for metric, (unit, convert) in MEASURES.items():
        count = getattr(scored, unit)
        mean = scored.total_nll_nats / count
        half = 1.96 * scored.standard_error_nats * scored.tokens / count
        least = scored.floor.per(count)
        rows.append(
            context.row(
                variant,
                metric,
                convert(mean),
                dtype=dtype,
                params=params | {"units": count},
                n=scored.tokens,
                ci_low=convert(mean - half),
                ci_high=convert(mean + half),
                limit=None if least is None else convert(least),
                limit_source=scored.floor.source,
                data_source=data_source,
            )
        )
    return rows
