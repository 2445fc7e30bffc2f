"""Rows that every language model has, counted or trained: its perplexities on a split, the floor under them, and what they
are from seed to seed."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field

from hyperion.chapter.context import Context
from hyperion.data import PreparedText, TextCorpus
from hyperion.data.batches.loaders import LanguageBatches
from hyperion.results import Row
from hyperion.training import History, LanguageEngine
from hyperion.workloads.training_rows import seed_statistics


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


@dataclass(frozen=True)
class Scored:
    """How well a model foretells a split.

    Attributes:
        total_nll_nats: summed over all tokens, none left out.
        tokens: of the split.
        standard_error_nats: of the mean negative log-likelihood per token, from the spread of the tokens.
        words: of the split, with one <eos> a line.
        utf8_bytes: of the split as its file has it.
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
        """With the words and bytes of a split of a corpus."""
        words = prepared.steps[split]["read"]["words_with_eos"]
        utf8_bytes = sum(len(line.encode()) for line in corpus.splits[split])
        return cls(total_nll_nats, tokens, standard_error_nats, words, utf8_bytes)

    def measure(self, metric: str) -> float:
        """One of MEASURES."""
        count, told = MEASURES[metric]
        return told(self.total_nll_nats / getattr(self, count))


def _bits(nats: float) -> float:
    return nats / math.log(2)


# What the nats of a split are divided by, and as what that is told.
MEASURES: dict[str, tuple[str, Callable[[float], float]]] = {
    "perplexity_token": ("tokens", math.exp),
    "perplexity_word": ("words", math.exp),
    "bits_per_byte": ("utf8_bytes", _bits),
}


def perplexity_rows(
    context: Context, variant: str, dtype: str, params: dict, scored: Scored, floor: TextFloor, data_source: str
) -> list[Row]:
    """Perplexity per token, and per word with one <eos> a line, and bits per byte, of a whole split."""
    rows = []
    for metric, (units, told) in MEASURES.items():
        count = getattr(scored, units)
        mean = scored.total_nll_nats / count
        half = 1.96 * scored.standard_error_nats * scored.tokens / count
        least = floor.per(count)
        rows.append(
            context.row(
                variant,
                metric,
                told(mean),
                dtype=dtype,
                params=params | {"units": count},
                n=scored.tokens,
                ci_low=told(mean - half),
                ci_high=told(mean + half),
                limit=None if least is None else told(least),
                limit_source=floor.source,
                data_source=data_source,
            )
        )
    return rows


@dataclass(frozen=True)
class TrainedLanguage:
    """A training that has ended.

    Attributes:
        name, dtype: of the model, and what it was trained in.
        history: of the training.
        told: parameters of every row of a score: how it was taken, and of which weights.
        engine, batches: to go on with; None when they were given up.
        scored: by split, once it was.
    """

    seed: int
    name: str
    dtype: str
    history: History
    told: dict
    engine: LanguageEngine | None
    batches: LanguageBatches | None
    scored: dict[str, Scored] = field(default_factory=dict)


def seed_rows(context: Context, runs: list[TrainedLanguage], corpus: TextCorpus) -> list[Row]:
    """Every measure of every seed and split, then of each the mean and the deviation."""
    rows, source = [], corpus.source
    for split in runs[0].scored:
        floor = text_floor(corpus, split)
        for run in runs:
            params = run.told | {"split": f"{split}, every seed", "seed": run.seed}
            rows += perplexity_rows(context, run.name, run.dtype, params, run.scored[split], floor, source)
        first = runs[0]
        params = first.told | {"split": f"{split}, mean of seeds", "seeds": len(runs)}
        shared = {"dtype": first.dtype, "params": params, "data_source": source}
        for metric, (units, told) in MEASURES.items():
            least = floor.per(getattr(first.scored[split], units))
            limit = None if least is None else told(least), floor.source
            values = [run.scored[split].measure(metric) for run in runs]
            rows += seed_statistics(context, first.name, metric, values, limit, shared)
    return rows
