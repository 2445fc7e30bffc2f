"""The language baseline: a small causal Transformer.

Its options were chosen by the validation loss. The test split is used once, after training.
"""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, fields
from typing import Any, Literal

import pandas as pd
from pydantic import BaseModel

from hyperion.chapter.context import Context, Experiment, Forecast, Options, Report, Result
from hyperion.data import PreparedText, TextCorpus, Tokenizer
from hyperion.data.batches import LanguageBatches, evaluation_windows
from hyperion.errors import not_none
from hyperion.experiments.baselines.perplexity import MEASURES, HeldOut, Scored, perplexity_rows
from hyperion.measure.clock.timing import MINIMUM_SAMPLES
from hyperion.models import TransformerConfig, TransformerLM, flops_per_token, named_config
from hyperion.results import Row
from hyperion.training import (
    History,
    LanguageEngine,
    LanguageEvaluation,
    TrainingPlan,
    WarmupCosine,
    adamw,
    choose_precision,
    evaluate_language,
    seed_everything,
    train,
)
from hyperion.workloads import datasets
from hyperion.workloads.training_rows import epoch_rows, loss_curve, part_report, seed_statistics, steady_rows, step_forecasts
from hyperion.workloads.twins import captured_parity
from hyperion.workloads.workloads import ADAMW_BYTES_A_PARAMETER, LOGIT_BYTES, NO_VOCABULARY

Split = Literal["valid", "test"]


class Beats(BaseModel, extra="forbid", frozen=True, strict=True):
    """Requirements for the trained model.

    Args:
        baseline: n-gram model for the comparison on natural text, a variant of `ngram_baselines`.
        factor: on natural text, the perplexity of the trained model must be below `factor` times that of the baseline.
        floor_share: on synthetic text, the trained model's loss may exceed the least possible loss by at most this share of the
            least possible loss.
    """

    baseline: str
    factor: float
    floor_share: float


class SyntheticChanges(BaseModel, extra="forbid", frozen=True, strict=True):
    """Options whose values differ for synthetic text. None keeps the value of `LanguageModelOptions`.

    Synthetic text has a small vocabulary, and a model learns its structure late in training.

    Args:
        sequence_length, batch_size, steps, warmup_steps, stride, scores: as in `LanguageModelOptions`.
    """

    sequence_length: int | None = None
    batch_size: int | None = None
    steps: int | None = None
    warmup_steps: int | None = None
    stride: int | None = None
    scores: tuple[Split, ...] | None = None


class LanguageModelOptions(Options):
    """Options for the `language_model` experiment.

    Args:
        model: name of the Transformer configuration.
        sequence_length: number of tokens in a sequence.
        batch_size: number of sequences in a batch.
        steps, epochs: length of the training run. Exactly one of the two is given.
        learning_rate: peak learning rate, reached at the end of the warm-up.
        warmup_steps: number of warm-up steps.
        weight_decay: weight decay of AdamW.
        dropout: dropout probability of the model.
        precision: number format, or "auto".
        evaluate_every: number of epochs between evaluations on the validation split.
        checkpoint_every: number of steps between checkpoints.
        evaluation_batch_size: number of windows in an evaluation batch.
        stride: number of tokens between the starts of successive windows when the final scores are computed. Windows may overlap.
            Each token is scored once, in the window that gives it the longest context.
        scores: splits to score after training.
        scored_samples: number of non-blank lines to score in a split, during and after training. None scores the whole split.
        seeds: number of training runs, each with its own seed.
        steady_time_limit_s: timing budget in seconds for single training steps after the training run.
        steady_samples: minimum number of these steps. Use a small number on a CPU, where a step takes long.
        beats: requirements for the trained model.
        reaches: maximum validation perplexity per word, averaged over the seeds. Used only if there are several seeds.
        when_synthetic: options whose values differ for synthetic text.
    """

    model: str
    sequence_length: int
    batch_size: int
    steps: int | None = None
    epochs: int | None = None
    learning_rate: float
    warmup_steps: int
    weight_decay: float
    dropout: float = 0.0
    precision: str
    evaluate_every: int
    checkpoint_every: int
    evaluation_batch_size: int
    stride: int
    scores: tuple[Split, ...] = ("valid", "test")
    scored_samples: int | None = None
    seeds: int = 1
    steady_time_limit_s: float
    steady_samples: int = MINIMUM_SAMPLES
    beats: Beats
    reaches: float = math.inf
    when_synthetic: SyntheticChanges = SyntheticChanges()

    def for_source(self, source: str) -> "LanguageModelOptions":
        """Return the options for text from this data source."""
        return self.model_copy(update=self.when_synthetic.model_dump(exclude_none=True)) if source == "synthetic" else self

    @property
    def plan(self) -> TrainingPlan:
        """Length of the training run, epochs between evaluations, and steps between checkpoints."""
        return TrainingPlan(
            epochs=self.epochs, steps=self.steps, evaluate_every=self.evaluate_every, checkpoint_every=self.checkpoint_every
        )

    def config(self, vocabulary: int) -> TransformerConfig:
        """Return the model configuration for a vocabulary of this size."""
        return named_config(self.model, vocab_size=vocabulary, context=self.sequence_length, dropout=self.dropout)


def forecast(context: Context) -> list[Forecast]:
    """Predict the throughput of a training step after warm-up."""
    options, counted = LanguageModelOptions.of(context), datasets.vocabulary_row(context)
    if counted is None:
        return [Forecast(options.model, "tokens_per_s", None, NO_VOCABULARY)]
    options, vocabulary = options.for_source(counted.data_source), int(not_none(counted.value))
    config, tokens = options.config(vocabulary), options.batch_size * options.sequence_length
    return step_forecasts(
        context,
        options.model,
        choose_precision(context.device, options.precision).dtype,
        "token",
        tokens,
        flops_per_token(config),
        {"optimizer": ADAMW_BYTES_A_PARAMETER * config.parameter_count, "logits": tokens * vocabulary * LOGIT_BYTES},
    )


def run(context: Context, report: Report) -> Result:
    """Train with each seed, and score the held-out text of the chosen splits after each training run.

    After the run with the first seed, time its training step.
    """
    corpus, tokenizer, prepared = datasets.text(context)
    text = _Text(context, LanguageModelOptions.of(context).for_source(corpus.source), corpus, tokenizer, prepared)
    seeds = [context.seed + number for number in range(text.options.seeds)]
    rows, samples, runs = [], [], []
    for number, seed in enumerate(seeds):
        report_seed = part_report(report, number, len(seeds))
        engine, batches, trained = _train(text, seed, report_seed)
        for split in text.options.scores:
            report_seed(engine.steps, engine.steps, f"scoring {split}")
            trained.scored[split] = _score(text, engine, trained.history, split)
        samples.append(loss_curve(trained.history).assign(seed=seed))
        if number == 0:
            rows, steady_samples = _rows(text, trained, engine, batches)
            samples.append(steady_samples)
        runs.append(trained)
        del engine, batches  # free the device memory for the next training run
    if len(seeds) > 1:
        rows += seed_rows(context, runs, corpus.source)
    parity, parity_samples = captured_parity(context, runs[0].name, _beginning(text), corpus.source)
    return Result(rows + parity, pd.concat(samples + parity_samples, ignore_index=True), corpus.source)


EXPERIMENT = Experiment(
    forecast,
    run,
    options=LanguageModelOptions,
    isolated=True,
    forecast_reads=("text_pipeline", "gemm", "bandwidth"),
    data=datasets.TEXT,
)


@dataclass(frozen=True)
class _Text:
    """Data and options shared by all training runs of this experiment."""

    context: Context
    options: LanguageModelOptions
    corpus: TextCorpus
    tokenizer: Tokenizer
    prepared: PreparedText
    _held_out: dict[str, HeldOut] = field(default_factory=dict)  # cached by split, because every evaluation reads it

    def batches(self, seed: int) -> LanguageBatches:
        options, where = self.options, self.context.device.torch_device
        return LanguageBatches(self.prepared.tokens["train"], options.sequence_length, options.batch_size, seed, where)

    def held_out(self, split: str) -> HeldOut:
        if split not in self._held_out:
            self._held_out[split] = HeldOut.of(self.corpus, self.prepared, split, self.options.scored_samples)
        return self._held_out[split]

    def windows(self, split: str, stride: int) -> Iterable:
        options = self.options
        return evaluation_windows(
            self.held_out(split).tokens,
            options.sequence_length,
            stride,
            self.tokenizer.eos_id,
            options.evaluation_batch_size,
            self.context.device.torch_device,
        )

    def engine(self, steps_per_epoch: int, capture: bool) -> LanguageEngine:
        options, device = self.options, self.context.device
        model = TransformerLM(options.config(self.tokenizer.vocab_size)).to(device.torch_device)
        schedule = WarmupCosine(options.learning_rate, options.warmup_steps, options.plan.total_steps(steps_per_epoch))
        optimizer = adamw(model, options.learning_rate, options.weight_decay)
        precision = choose_precision(device, options.precision)
        return LanguageEngine(model, optimizer, schedule, precision, device, capture=capture)


@dataclass(frozen=True)
class TrainedLanguage:
    """Results of one training run.

    Attributes:
        name: name of the model.
        dtype: number format of the training run.
        history: losses, times and evaluations of the epochs.
        score_params: params of all score rows: how the scores were computed and with which weights.
        scored: a dict that maps each split to its score.
    """

    seed: int
    name: str
    dtype: str
    history: History
    score_params: dict
    scored: dict[str, Scored] = field(default_factory=dict)


def seed_rows(context: Context, runs: list[TrainedLanguage], source: str) -> list[Row]:
    """Return rows with the metrics of every seed and split, then their means and standard deviations over the seeds.

    The metrics are perplexity per token, perplexity per word and bits per byte.
    """
    rows, first = [], runs[0]
    for split in first.scored:
        floor = first.scored[split].floor
        for run in runs:
            params = run.score_params | {"split": f"{split}, every seed", "seed": run.seed}
            rows += perplexity_rows(context, run.name, run.dtype, params, run.scored[split], source)
        params = first.score_params | {"split": f"{split}, mean of seeds", "seeds": len(runs)}
        shared = {"dtype": first.dtype, "params": params, "data_source": source}
        for metric, (unit, convert) in MEASURES.items():
            least = floor.per(getattr(first.scored[split], unit))
            limit = None if least is None else convert(least), floor.source
            values = [run.scored[split].measure(metric) for run in runs]
            rows += seed_statistics(context, first.name, metric, values, limit, shared)
    return rows


def _train(text: _Text, seed: int, report: Report) -> tuple[LanguageEngine, LanguageBatches, TrainedLanguage]:
    """Train a new model with one seed. The test split is not read."""
    seed_everything(seed)
    options, batches = text.options, text.batches(seed)
    engine = text.engine(len(batches), capture=True)
    how = "each replayed as one graph" if not engine.uncaptured else f"one by one ({engine.uncaptured})"
    print(f"{options.model}, vocabulary {text.tokenizer.vocab_size}, seed {seed}: {engine.precision}, steps {how}")
    history = train(
        engine,
        batches,
        options.plan,
        validation=lambda: text.windows("valid", stride=options.sequence_length),
        folder=text.context.workspace / f"seed-{seed}",
        report=report,
    )
    score_params = {
        "context": options.sequence_length,
        "stride": options.stride,
        "step": engine.steps,
        # Score the weights after the last step, not those with the best validation loss. All seeds train for the same number of
        # steps, which was chosen on the validation split.
        "weights": "after the last step",
        "dropout": options.dropout,
        "tokenizer": text.tokenizer.name,
        "tokenizer_sha256": text.tokenizer.sha256[:16],
    }
    return engine, batches, TrainedLanguage(seed, options.model, engine.precision.dtype, history, score_params)


def _score(text: _Text, engine: LanguageEngine, history: History, split: str) -> Scored:
    """Compute the negative log-likelihood of the split's tokens with the final weights."""
    stride, last = text.options.stride, history.epochs[-1].evaluation
    if split == "valid" and stride == text.options.sequence_length and last is not None:
        # The last evaluation during training used the same weights and windows. Repeating it would take a minute on a CPU.
        columns: dict[str, Any] = {column.name: last[column.name] for column in fields(LanguageEvaluation)}
        evaluation = LanguageEvaluation(**columns)
    else:
        evaluation = evaluate_language(engine.model, text.windows(split, stride), engine.precision, engine.device)
    numbers = evaluation.total_nll_nats, evaluation.tokens, evaluation.standard_error_nats
    return Scored.of(text.held_out(split), *numbers)


def _least_flops(config: TransformerConfig, length: int) -> float:
    """Return the least FLOPs per token of one forward and backward pass.

    Only half of the attention FLOPs are counted, because a causal mask makes the other half unnecessary.
    """
    return flops_per_token(config, length // 2).forward_backward


def _beginning(text: _Text) -> Callable[[bool], tuple[LanguageEngine, Callable]]:
    """Return a function that builds a new engine and a new loader for the first seed.

    Its argument states whether the step runs as a CUDA graph.
    """

    def begin(capture: bool) -> tuple[LanguageEngine, Callable]:
        batches = text.batches(text.context.seed)
        return text.engine(len(batches), capture), batches.next_batch

    return begin


def _rows(text: _Text, run: TrainedLanguage, engine: LanguageEngine, batches: LanguageBatches) -> tuple[list[Row], pd.DataFrame]:
    """Return the rows of one training run and its scores, and the rows and samples of training steps timed after it."""
    context, source = text.context, text.corpus.source
    config, length = text.options.config(text.tokenizer.vocab_size), text.options.sequence_length
    rows = epoch_rows(context, run.name, run.dtype, engine, run.history, source)
    rows += _validation_rows(text, run)
    for split in run.scored:
        rows += _score_rows(text, run, split)
    steady, samples = steady_rows(
        context,
        run.name,
        engine,
        batches.next_batch(),
        batches.tokens_per_batch,
        flops_per_token(config, length),
        _least_flops(config, length),
        source,
        text.options.steady_time_limit_s,
        text.options.steady_samples,
    )
    if engine.capture_time_s is not None:
        params = {"what": "the step, warmed up and recorded as a graph"}
        columns = {"dtype": run.dtype, "params": params, "data_source": source}
        rows.append(context.row(run.name, "compile_time_s", engine.capture_time_s, **columns))
    return rows + steady, samples


def _validation_rows(text: _Text, run: TrainedLanguage) -> list[Row]:
    held_out = text.held_out("valid")
    return [
        text.context.row(
            run.name,
            "validation_loss",
            record.evaluation["loss"],
            dtype=run.dtype,
            params={"epoch": record.epoch, "step": record.step, "stride": text.options.sequence_length},
            limit=held_out.floor.per(len(held_out.tokens)),
            limit_source=held_out.floor.source,
            data_source=text.corpus.source,
        )
        for record in run.history.epochs
        if record.evaluation is not None
    ]


def _score_rows(text: _Text, run: TrainedLanguage, split: str) -> list[Row]:
    scored, source = run.scored[split], text.corpus.source
    floor = scored.floor
    params = run.score_params | {"split": split}
    rows = perplexity_rows(text.context, run.name, run.dtype, params, scored, source)
    if floor.total_nll_nats is not None:
        excess = (scored.total_nll_nats - floor.total_nll_nats) / scored.tokens
        columns = {"limit": 0.0, "limit_source": floor.source, "data_source": source}
        rows.append(text.context.row(run.name, "excess_loss_nats", excess, dtype=run.dtype, params=params, **columns))
    return rows
