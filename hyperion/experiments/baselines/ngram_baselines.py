"""Perplexities of n-gram models on the held-out splits. A neural model must reach a lower perplexity than these baselines.

The functions that compute perplexity rows are also used for neural models.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import pandas as pd

from hyperion.chapter.context import Context, Experiment, Forecast, Options, Report, Result
from hyperion.data import Baseline, PreparedText, TextCorpus, bigram_baseline, unigram_baseline
from hyperion.errors import not_none
from hyperion.results import Row
from hyperion.workloads import datasets
from hyperion.workloads.workloads import NO_VOCABULARY

# For each metric: the unit by which a split's nats are divided, and the function that converts nats per unit to the metric.
MEASURES: dict[str, tuple[str, Callable[[float], float]]] = {
    "perplexity_token": ("tokens", math.exp),
    "perplexity_word": ("words", math.exp),
    "bits_per_byte": ("utf8_bytes", lambda nats: nats / math.log(2)),
}
_VARIANTS = {"unigram": "unigram", "interpolated bigram": "bigram_interpolated"}


class NgramBaselinesOptions(Options):
    """Options for the `ngram_baselines` experiment: only those that every experiment has."""


def forecast(context: Context) -> list[Forecast]:
    """Predict the unigram model's perplexity as exp(entropy of Zipf's law), on the assumption that tokens follow Zipf's law."""
    counted = datasets.vocabulary_row(context)
    estimate, basis = None, NO_VOCABULARY
    if counted is not None:
        vocabulary = int(not_none(counted.value))
        weights = [1 / rank for rank in range(1, vocabulary + 1)]
        total = math.fsum(weights)
        estimate = math.exp(-math.fsum(w / total * math.log(w / total) for w in weights))
        basis = f"exp of the entropy of Zipf's law with exponent 1 over {vocabulary} tokens"
    return [Forecast("unigram", "perplexity_token", estimate, basis, params={"split": "valid"})]


def run(context: Context, report: Report) -> Result:
    """Fit the n-gram models on the training split, then score every token of the validation and test splits."""
    corpus, tokenizer, prepared = datasets.text(context)
    train = prepared.tokens["train"]
    rows: list[Row] = []
    for number, split in enumerate(("valid", "test")):
        report(number, 2, split)
        tokens = prepared.tokens[split]
        baselines: list[Baseline] = [
            unigram_baseline(train, tokens, tokenizer.vocab_size),
            bigram_baseline(train, tokens, tokenizer.vocab_size, tokenizer.eos_id),
        ]
        floor = text_floor(corpus, split)
        for baseline in baselines:
            scored = Scored.of(corpus, prepared, split, baseline.total_nll_nats, baseline.tokens, baseline.standard_error_nats)
            rows += perplexity_rows(context, _VARIANTS[baseline.name], "", {"split": split}, scored, floor, corpus.source)
    columns = [{"variant": r.variant, "split": r.params["split"], "metric": r.metric, "value": r.value} for r in rows]
    return Result(rows, pd.DataFrame(columns), corpus.source)


EXPERIMENT = Experiment(forecast, run, options=NgramBaselinesOptions, forecast_reads=("text_pipeline",), data=datasets.TEXT)


@dataclass(frozen=True)
class TextFloor:
    """Floor of a split: the least possible expected negative log-likelihood.

    Args:
        total_nll_nats: negative log-likelihood in nats of the whole split under the process that generated the text. None for
            natural text.
        source: source of the floor, or the reason why there is none.
    """

    total_nll_nats: float | None
    source: str

    def per(self, count: int) -> float | None:
        """Return the floor in nats per unit, or None if there is no floor. `count` is the number of units in the split."""
        return None if self.total_nll_nats is None else self.total_nll_nats / count


def text_floor(corpus: TextCorpus, split: str) -> TextFloor:
    """Return the floor of a split: exact for synthetic text, unknown for natural text."""
    if corpus.language is None:
        return TextFloor(None, "no limit: the entropy of natural text is not known")
    total = corpus.language.true_negative_log_likelihood(list(corpus.splits[split]))
    return TextFloor(total, "negative log-likelihood of the split under the process that wrote it")


@dataclass(frozen=True)
class Scored:
    """Score of a model on a split: the negative log-likelihood of its text.

    Attributes:
        total_nll_nats: negative log-likelihood summed over all tokens, in nats.
        tokens: number of tokens.
        standard_error_nats: standard error of the mean negative log-likelihood per token, in nats.
        words: number of words. The <eos> at the end of each line counts as a word.
        utf8_bytes: size of the split's text in UTF-8 bytes.
    """

    total_nll_nats: float
    tokens: int
    standard_error_nats: float
    words: int
    utf8_bytes: int

    @classmethod
    def of(
        cls,
        corpus: TextCorpus,
        prepared: PreparedText,
        split: str,
        total_nll_nats: float,
        tokens: int,
        standard_error_nats: float,
    ) -> "Scored":
        """Return the score of a split, including its numbers of words and bytes."""
        words = prepared.steps[split]["read"]["words_with_eos"]
        utf8_bytes = sum(len(line.encode()) for line in corpus.splits[split])
        return cls(total_nll_nats, tokens, standard_error_nats, words, utf8_bytes)

    def measure(self, metric: str) -> float:
        """Return the value of a metric in MEASURES."""
        unit, convert = MEASURES[metric]
        return convert(self.total_nll_nats / getattr(self, unit))


def perplexity_rows(
    context: Context, variant: str, dtype: str, params: dict, scored: Scored, floor: TextFloor, data_source: str
) -> list[Row]:
    """Return the rows with perplexity per token, perplexity per word and bits per byte of a whole split.

    The <eos> at the end of each line counts as a word.
    """
    rows = []
    for metric, (unit, convert) in MEASURES.items():
        count = getattr(scored, unit)
        mean = scored.total_nll_nats / count
        half = 1.96 * scored.standard_error_nats * scored.tokens / count
        least = floor.per(count)
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
                limit_source=floor.source,
                data_source=data_source,
            )
        )
    return rows
