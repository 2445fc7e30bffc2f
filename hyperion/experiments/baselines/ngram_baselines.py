"""Perplexities of n-gram models on the held-out splits. A neural model must reach a lower perplexity than these baselines."""

import math

import pandas as pd

from hyperion.chapter.context import Context, Experiment, Forecast, Options, Report, Result
from hyperion.data import Baseline, bigram_baseline, unigram_baseline
from hyperion.errors import not_none
from hyperion.experiments.baselines.perplexity import HeldOut, Scored, perplexity_rows
from hyperion.results import Row
from hyperion.workloads import datasets
from hyperion.workloads.workloads import NO_VOCABULARY

_VARIANTS = {"unigram": "unigram", "interpolated bigram": "bigram_interpolated"}


class NgramBaselinesOptions(Options):
    """Options for the `ngram_baselines` experiment.

    Args:
        scored_samples: number of non-blank lines to score in each split. None scores the whole split.
    """

    scored_samples: int | None = None


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
    """Fit the n-gram models on the training split, then score the held-out text of the validation and test splits."""
    options = NgramBaselinesOptions.of(context)
    corpus, tokenizer, prepared = datasets.text(context)
    train = prepared.tokens["train"]
    rows: list[Row] = []
    for number, split in enumerate(("valid", "test")):
        report(number, 2, split)
        held_out = HeldOut.of(corpus, prepared, split, options.scored_samples)
        baselines: list[Baseline] = [
            unigram_baseline(train, held_out.tokens, tokenizer.vocab_size),
            bigram_baseline(train, held_out.tokens, tokenizer.vocab_size, tokenizer.eos_id),
        ]
        for baseline in baselines:
            scored = Scored.of(held_out, baseline.total_nll_nats, baseline.tokens, baseline.standard_error_nats)
            rows += perplexity_rows(context, _VARIANTS[baseline.name], "", {"split": split}, scored, corpus.source)
    columns = [{"variant": r.variant, "split": r.params["split"], "metric": r.metric, "value": r.value} for r in rows]
    return Result(rows, pd.DataFrame(columns), corpus.source)


EXPERIMENT = Experiment(forecast, run, options=NgramBaselinesOptions, forecast_reads=("text_pipeline",), data=datasets.TEXT)
