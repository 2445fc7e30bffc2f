"""Rows that every language model has, counted or trained: its perplexities on a split, and the floor under them."""

import math
from dataclasses import dataclass

from hyperion.data import TextCorpus
from hyperion.experiments.context import Context
from hyperion.results import Row


@dataclass(frozen=True)
class TextFloor:
    """The least total negative log-likelihood of a split, where the true source of the text is known.

    Args:
        total_nll_nats: what the true model pays for the whole split, None for natural text.
        source: where the floor comes from, or why there is none.
    """

    total_nll_nats: float | None
    source: str

    def per(self, count: int) -> float | None:
        """Nats for each of `count` units."""
        return None if self.total_nll_nats is None else self.total_nll_nats / count


def text_floor(corpus: TextCorpus, split: str) -> TextFloor:
    """The floor under a split: exact for synthetic text, unknown for natural text."""
    if corpus.language is None:
        return TextFloor(None, "no limit: the entropy of natural text is not known")
    total = corpus.language.true_negative_log_likelihood(corpus.splits[split])
    return TextFloor(total, "negative log-likelihood of the split under the process that wrote it")


def perplexity_rows(
    context: Context,
    variant: str,
    dtype: str,
    params: dict,
    total_nll_nats: float,
    tokens: int,
    words_with_eos: int,
    floor: TextFloor,
    data_source: str,
    standard_error_nats: float,
) -> list[Row]:
    """Perplexity per token, and per word with one <eos> a line, of a whole split.

    Args:
        total_nll_nats: summed over all tokens, none left out.
        standard_error_nats: of the mean negative log-likelihood per token, from the spread of the tokens.
    """
    rows = []
    for metric, count in (("perplexity_token", tokens), ("perplexity_word", words_with_eos)):
        mean = total_nll_nats / count
        half = 1.96 * standard_error_nats * tokens / count
        least = floor.per(count)
        rows.append(
            context.row(
                variant,
                metric,
                math.exp(mean),
                dtype=dtype,
                params=params | {"units": count},
                n=tokens,
                ci_low=math.exp(mean - half),
                ci_high=math.exp(mean + half),
                limit=None if least is None else math.exp(least),
                limit_source=floor.source,
                data_source=data_source,
            )
        )
    return rows
