"""The language baseline: a small causal Transformer, chosen on valid, tested once at the end, beside what counting achieves."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields, replace

import pandas as pd

from hyperion.chapter.context import Context, Experiment, Forecast, Result
from hyperion.data import PreparedText, TextCorpus, Tokenizer
from hyperion.data.batches.loaders import LanguageBatches, evaluation_windows
from hyperion.experiments.baselines.captured_parity import captured_parity
from hyperion.experiments.baselines.language_rows import Scored, TrainedLanguage, perplexity_rows, seed_rows, text_floor
from hyperion.models import TransformerConfig, TransformerLM, flops_per_token, named_config
from hyperion.results import Row
from hyperion.training import (
    LanguageEngine,
    LanguageEvaluation,
    Plan,
    WarmupCosine,
    adamw,
    choose_precision,
    evaluate_language,
    seed_everything,
    train,
)
from hyperion.workloads import datasets
from hyperion.workloads.training_rows import ADAMW_BYTES_A_PARAMETER, epoch_rows, loss_curve, steady_rows, step_forecasts

# A logit is written in 16 or 32 bits, read for the softmax, and its gradient is written and read twice.
_LOGIT_BYTES = 20
# No checkpoint is chosen afterwards: how long to train, and how, was chosen on valid for all seeds alike.
_LAST = "after the last step"


@dataclass(frozen=True)
class Text:
    """A corpus, what made tokens of it, and the tokens."""

    corpus: TextCorpus
    tokenizer: Tokenizer
    prepared: PreparedText


def forecast(context: Context) -> list[Forecast]:
    """Tokens per second of a steady step."""
    counted = datasets.vocabulary_row(context)
    if counted is None:
        basis = "no estimate: this run has not counted the vocabulary (01_dataset_preparation)"
        return [Forecast(variant=context.sizes["model"], metric="tokens_per_s", estimate=None, basis=basis)]
    context, vocabulary = _for_source(context, counted.data_source), int(counted.value)
    sizes, config = context.sizes, _config(context, vocabulary)
    tokens = sizes["batch_size"] * sizes["sequence_length"]
    dtype = choose_precision(context.device, sizes["precision"]).dtype
    return step_forecasts(
        context,
        sizes["model"],
        dtype,
        "token",
        tokens,
        flops_per_token(config),
        {"optimizer": ADAMW_BYTES_A_PARAMETER * config.parameter_count, "logits": tokens * vocabulary * _LOGIT_BYTES},
    )


def run(context: Context, report) -> Result:
    """Train, score every token of valid and test once, then time the steady step; then again with other seeds.

    A profile whose training is too short to be a result names in `scores` the splits that it looks at.
    """
    text = Text(*datasets.text(context))
    context = _for_source(context, text.corpus.source)
    seeds = [context.seed + number for number in range(context.sizes.get("seeds", 1))]
    rows, curves, runs = [], [], []
    for number, seed in enumerate(seeds):

        def told(done: int, total: int, note: str, number: int = number) -> None:
            report(number * total + done, len(seeds) * total, note)

        run = trained(context, text, seed, told)
        steps = run.engine.steps
        for split in context.sizes.get("scores", ("valid", "test")):
            told(steps, steps, f"scoring {split}")
            run.scored[split] = scored(context, text, run, split)
        curves.append(loss_curve(run.history).assign(seed=seed))
        if number == 0:
            rows, samples = _rows(context, text, run)
            curves += samples
        runs.append(replace(run, engine=None, batches=None))
        del run  # leaves the device's memory for the next
    if len(seeds) > 1:
        rows += seed_rows(context, runs, text.corpus)
    parity, samples = captured_parity(context, runs[0].name, _beginning(context, text), text.corpus.source)
    return Result(rows + parity, pd.concat(curves + samples, ignore_index=True), text.corpus.source)


EXPERIMENT = Experiment(forecast, run, isolated=True, forecast_reads=("text_pipeline", "gemm", "bandwidth"), data=datasets.TEXT)


def trained(context: Context, text: Text, seed: int, report) -> TrainedLanguage:
    """One training from a seed; the test split is not looked at."""
    seed_everything(seed)
    sizes = context.sizes
    batches = _batches(context, text, seed)
    engine = _engine(context, text.tokenizer.vocab_size, _total_steps(sizes, len(batches)), capture=True)
    how = "each replayed as one graph" if not engine.uncaptured else f"one by one ({engine.uncaptured})"
    print(f"{sizes['model']}, vocabulary {text.tokenizer.vocab_size}, seed {seed}: {engine.precision}, steps {how}")

    def validation() -> Iterable:
        return _windows(context, text, "valid", stride=sizes["sequence_length"])

    folder = context.workspace / f"seed-{seed}"
    history = train(engine, batches, _plan(sizes), validation=validation, folder=folder, report=report)
    told = {
        "context": sizes["sequence_length"],
        "stride": sizes["stride"],
        "step": engine.steps,
        "weights": _LAST,
        "dropout": engine.model.config.dropout,
        "tokenizer": text.tokenizer.name,
        "tokenizer_sha256": text.tokenizer.sha256[:16],
    }
    return TrainedLanguage(seed, sizes["model"], engine.precision.dtype, history, told, engine, batches)


def scored(context: Context, text: Text, run: TrainedLanguage, split: str) -> Scored:
    """Every token of the split under the final weights."""
    stride = context.sizes["stride"]
    if split == "valid" and stride == context.sizes["sequence_length"]:
        # The evaluation after the last epoch saw these weights and these windows: a minute on a CPU.
        last = run.history.epochs[-1].evaluation
        found = LanguageEvaluation(**{field.name: last[field.name] for field in fields(LanguageEvaluation)})
    else:
        windows = _windows(context, text, split, stride)
        found = evaluate_language(run.engine.model, windows, run.engine.precision, run.engine.device)
    numbers = found.total_nll_nats, found.tokens, found.standard_error_nats
    return Scored.of(text.corpus, text.prepared, split, *numbers)


def _least_flops(config: TransformerConfig, length: int) -> float:
    """Forward and backward of a token with the causal half of attention only, which is all that must be computed."""
    return flops_per_token(config, length // 2).forward_backward


def _for_source(context: Context, source: str) -> Context:
    """The synthetic text needs other sizes: its vocabulary is small, and copying is learned late."""
    if source != "synthetic":
        return context
    return replace(context, sizes=context.sizes | context.sizes.get("when_synthetic", {}))


def _config(context: Context, vocabulary: int) -> TransformerConfig:
    sizes = context.sizes
    changes = {"vocab_size": vocabulary, "context": sizes["sequence_length"], "dropout": sizes.get("dropout", 0.0)}
    return named_config(sizes["model"], **changes)


def _plan(sizes: dict) -> Plan:
    return Plan(
        epochs=sizes.get("epochs"),
        steps=sizes.get("steps"),
        evaluate_every=sizes["evaluate_every"],
        checkpoint_every=sizes["checkpoint_every"],
    )


def _total_steps(sizes: dict, steps_per_epoch: int) -> int:
    return _plan(sizes).total_steps(steps_per_epoch)


def _batches(context: Context, text: Text, seed: int) -> LanguageBatches:
    sizes, where = context.sizes, context.device.torch_device
    return LanguageBatches(text.prepared.tokens["train"], sizes["sequence_length"], sizes["batch_size"], seed, where)


def _engine(context: Context, vocabulary: int, total_steps: int, capture: bool) -> LanguageEngine:
    sizes, device = context.sizes, context.device
    model = TransformerLM(_config(context, vocabulary)).to(device.torch_device)
    schedule = WarmupCosine(sizes["learning_rate"], sizes["warmup_steps"], total_steps)
    precision = choose_precision(device, sizes["precision"])
    optimizer = adamw(model, sizes["learning_rate"], sizes["weight_decay"])
    return LanguageEngine(model, optimizer, schedule, precision, device, capture=capture)


def _beginning(context: Context, text: Text) -> Callable[[bool], tuple[LanguageEngine, Callable]]:
    """What begins the training of the first seed anew, to compare recorded steps with others."""

    def begin(capture: bool) -> tuple[LanguageEngine, Callable]:
        batches = _batches(context, text, context.seed)
        total = _total_steps(context.sizes, len(batches))
        return _engine(context, text.tokenizer.vocab_size, total, capture), batches.next_batch

    return begin


def _windows(context: Context, text: Text, split: str, stride: int) -> Iterable:
    sizes = context.sizes
    return evaluation_windows(
        text.prepared.tokens[split],
        sizes["sequence_length"],
        stride,
        text.tokenizer.eos_id,
        sizes["evaluation_batch_size"],
        context.device.torch_device,
    )


def _rows(context: Context, text: Text, run: TrainedLanguage) -> tuple[list[Row], list[pd.DataFrame]]:
    """Rows of a training, of its scores, and of a steady step, timed after it; and the samples of that step."""
    source, engine = text.corpus.source, run.engine
    config, length = engine.model.config, context.sizes["sequence_length"]
    rows = epoch_rows(context, run.name, run.dtype, engine, run.history, source)
    rows += _validation_rows(context, text, run)
    for split in run.scored:
        rows += _scored_rows(context, text, run, split)
    steady, samples = steady_rows(
        context,
        run.name,
        engine,
        run.batches.next_batch(),
        run.batches.tokens_per_batch,
        flops_per_token(config, length),
        _least_flops(config, length),
        source,
    )
    if engine.capture_time_s is not None:
        what = {"what": "the step, warmed up and recorded as a graph"}
        columns = {"dtype": run.dtype, "params": what, "data_source": source}
        rows.append(context.row(run.name, "compile_time_s", engine.capture_time_s, **columns))
    return rows + steady, [samples]


def _validation_rows(context: Context, text: Text, run: TrainedLanguage) -> list[Row]:
    floor = text_floor(text.corpus, "valid")
    return [
        context.row(
            run.name,
            "validation_loss",
            record.evaluation["loss"],
            dtype=run.dtype,
            params={"epoch": record.epoch, "step": record.step, "stride": context.sizes["sequence_length"]},
            limit=floor.per(len(text.prepared.tokens["valid"])),
            limit_source=floor.source,
            data_source=text.corpus.source,
        )
        for record in run.history.epochs
        if record.evaluation is not None
    ]


def _scored_rows(context: Context, text: Text, run: TrainedLanguage, split: str) -> list[Row]:
    found, floor, source = run.scored[split], text_floor(text.corpus, split), text.corpus.source
    params = run.told | {"split": split}
    rows = perplexity_rows(context, run.name, run.dtype, params, found, floor, source)
    if floor.total_nll_nats is not None:
        excess = (found.total_nll_nats - floor.total_nll_nats) / found.tokens
        columns = {"limit": 0.0, "limit_source": floor.source, "data_source": source}
        rows.append(context.row(run.name, "excess_loss_nats", excess, dtype=run.dtype, params=params, **columns))
    return rows
