"""Perplexities of unigram and bigram counts on the held-out text, which a neural model must beat."""

import math

import pandas as pd

from hyperion.chapter.context import Context, Experiment, Forecast, Options, Report, Result
from hyperion.data import Baseline, bigram_baseline, unigram_baseline
from hyperion.errors import not_none
from hyperion.experiments.baselines.perplexity import Scored, perplexity_rows, text_floor
from hyperion.results import Row
from hyperion.workloads import datasets
from hyperion.workloads.workloads import NO_VOCABULARY

_VARIANTS = {"unigram": "unigram", "interpolated bigram": "bigram_interpolated"}


class NgramBaselinesOptions(Options):
    """Options of `ngram_baselines`, which has none of its own."""


def forecast(context: Context) -> list[Forecast]:
    """Return the unigram perplexity of tokens distributed by Zipf's law, exp(entropy)."""
    counted = datasets.vocabulary_row(context)
    estimate, basis = None, NO_VOCABULARY
    if counted is not None:
        vocabulary = int(not_none(counted.value))
        weights = [1 / rank for rank in range(1, vocabulary + 1)]
        total = math.fsum(weights)
        estimate = math.exp(-math.fsum(w / total * math.log(w / total) for w in weights))
        basis = f"entropy of Zipf's law with exponent 1 over {vocabulary} tokens"
    return [Forecast(variant="unigram", metric="perplexity_token", estimate=estimate, basis=basis, params={"split": "valid"})]


def run(context: Context, report: Report) -> Result:
    """Fit on the train split, score every token of valid and test."""
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
