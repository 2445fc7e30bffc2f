"""Prepare the text, and count lines, words and tokens after each step."""

import math
from itertools import islice

import numpy as np
import pandas as pd

from hyperion.chapter.context import Context, Experiment, Forecast, Options, Report, Result
from hyperion.chapter.rows import checked
from hyperion.data import PreparedText, TextCorpus, Tokenizer
from hyperion.results import Row
from hyperion.workloads import datasets

# Mean number of words per line in the published train split of WikiText-2: words, with one <eos> per line, divided by the number
# of non-empty lines.
_WORDS_A_LINE = 2_088_628 / 23_767
_WINDOW = 128
_SHOWN_LINES = 4


def forecast(context: Context) -> list[Forecast]:
    """Predict the share of padding tokens if every line is padded to the window length."""
    params = {"split": "train", "what": "padding"}
    filled = _WORDS_A_LINE / _WINDOW * (1 - math.exp(-_WINDOW / _WORDS_A_LINE))
    basis = (
        f"WikiText-2's published {_WORDS_A_LINE:.0f} words a line, a token a word, lengths spread exponentially and cut "
        f"at {_WINDOW}"
    )
    return [Forecast("padded lines", "share", 1 - filled, basis, params=params)]


def run(context: Context, report: Report) -> Result:
    """Load, filter, tokenize, pack and pad the text. Return one row for each count."""
    report(0, 2, "load and tokenize")
    corpus, tokenizer, prepared = datasets.text(context)
    report(1, 2, "count")
    rows = [row for split in prepared.steps for row in _split_rows(context, prepared, split)]
    columns = {"params": {"what": "vocabulary"} | _tokenizer_params(tokenizer), "data_source": corpus.source}
    rows.append(context.row(prepared.manifest.name, "count", float(tokenizer.vocab_size), **columns))
    rows += datasets.proof_rows(context, corpus, prepared)
    samples = pd.concat([_histogram(prepared, tokenizer), _lines(corpus)], ignore_index=True)
    return Result(rows, samples, corpus.source)


EXPERIMENT = Experiment(forecast, run, data=datasets.TEXT, options=Options)


def _tokenizer_params(tokenizer: Tokenizer) -> dict:
    return {"tokenizer": tokenizer.name, "tokenizer_source": tokenizer.source, "tokenizer_sha256": tokenizer.sha256[:16]}


def _split_rows(context: Context, prepared: PreparedText, split: str) -> list[Row]:
    steps, name = prepared.steps[split], prepared.manifest.name
    counts = {
        "lines": steps["read"]["lines"],
        "words with <eos>": steps["read"]["words_with_eos"],
        "non-empty lines": steps["filter"]["non_empty"],
        "tokens": steps["tokenize"]["tokens"],
        "packed windows": steps["pack"]["windows"],
        "padded samples": steps["pad"]["samples"],
        "tokens cut off by padding's window": steps["pad"]["truncated"],
    }
    source = prepared.manifest.source
    # The round trip was checked when the stream was written. The SHA-256 of the stored stream shows that it has not changed
    # since.
    failed = 0.0 if steps["tokenize"]["round_trip"] else 1.0
    round_trip = checked("decode(encode(text)) == text", failed, 0.0)
    rows = [
        context.row(
            name,
            "count",
            float(count),
            params={"split": split, "what": what},
            data_source=source,
            **(round_trip if what == "tokens" else {}),
        )
        for what, count in counts.items()
    ]
    share = steps["pad"]["padding_share"]
    params = {"split": split, "what": "padding"}
    return [*rows, context.row("padded lines", "share", share, params=params, data_source=source)]


def _histogram(prepared: PreparedText, tokenizer: Tokenizer) -> pd.DataFrame:
    """Return a table with the count of each token in the train split, most frequent first."""
    ids, counts = np.unique(prepared.tokens["train"], return_counts=True)
    order = np.argsort(-counts, kind="stable")
    texts = [tokenizer.decode([token]) for token in ids[order]]
    return pd.DataFrame(
        {"kind": "token", "split": "train", "token_id": ids[order].astype(np.int64), "text": texts, "count": counts[order]}
    )


def _lines(corpus: TextCorpus) -> pd.DataFrame:
    shown = list(islice((line for line in corpus.splits["train"] if line.strip()), _SHOWN_LINES))
    return pd.DataFrame({"kind": "line", "split": "train", "text": shown})
