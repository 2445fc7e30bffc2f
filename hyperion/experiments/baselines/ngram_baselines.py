"""What counting alone achieves on the held-out text: the perplexities that a neural model must beat."""

import math

import pandas as pd

from hyperion.chapter.context import Context, Experiment, Forecast, Result
from hyperion.data import Baseline, bigram_baseline, unigram_baseline
from hyperion.experiments.baselines.language_rows import Scored, perplexity_rows, text_floor
from hyperion.results import Row
from hyperion.workloads import datasets

_VARIANTS = {"unigram": "unigram", "interpolated bigram": "bigram_interpolated"}


def forecast(context: Context) -> list[Forecast]:
    """The unigram perplexity of tokens spread by Zipf's law over the vocabulary: an upper estimate, by entropy."""
    counted = datasets.vocabulary_row(context)
    if counted is None:
        basis = "no estimate: this run has not counted the vocabulary (01_dataset_preparation)"
        estimate = None
    else:
        vocabulary = int(counted.value)
        weights = [1 / rank for rank in range(1, vocabulary + 1)]
        total = math.fsum(weights)
        estimate = math.exp(-math.fsum(w / total * math.log(w / total) for w in weights))
        basis = f"entropy of Zipf's law with exponent 1 over {vocabulary} tokens"
    return [Forecast(variant="unigram", metric="perplexity_token", estimate=estimate, basis=basis, params={"split": "valid"})]


def run(context: Context, report) -> Result:
    """Fit on the train split, score every token of valid and test."""
    corpus, tokenizer, prepared = datasets.text(context)
    train = prepared.tokens["train"]
    rows: list[Row] = []
    for done, split in enumerate(("valid", "test")):
        report(done, 2, split)
        scored = prepared.tokens[split]
        baselines: list[Baseline] = [
            unigram_baseline(train, scored, tokenizer.vocab_size),
            bigram_baseline(train, scored, tokenizer.vocab_size, tokenizer.eos_id),
        ]
        floor = text_floor(corpus, split)
        for baseline in baselines:
            counted = Scored.of(corpus, prepared, split, baseline.total_nll_nats, baseline.tokens, baseline.standard_error_nats)
            rows += perplexity_rows(context, _VARIANTS[baseline.name], "", {"split": split}, counted, floor, corpus.source)
    columns = [{"variant": r.variant, "split": r.params["split"], "metric": r.metric, "value": r.value} for r in rows]
    return Result(rows, pd.DataFrame(columns), corpus.source)


EXPERIMENT = Experiment(forecast, run, forecast_reads=("text_pipeline",), data=datasets.TEXT)
