"""The language baseline: a small causal Transformer, trained and scored against what counting achieves."""

from collections.abc import Iterable
from dataclasses import fields, replace

import numpy as np
import pandas as pd

from hyperion.data import PreparedText, TextCorpus
from hyperion.data.loaders import LanguageBatches, evaluation_windows
from hyperion.experiments import datasets
from hyperion.experiments.context import Context, Experiment, Forecast, Result
from hyperion.experiments.language_rows import perplexity_rows, text_floor
from hyperion.experiments.training_rows import (
    ADAMW_BYTES_A_PARAMETER,
    epoch_rows,
    loss_curve,
    steady_rows,
    step_forecasts,
)
from hyperion.models import TransformerConfig, TransformerLM, flops_per_token, named_config
from hyperion.results import Row
from hyperion.training import (
    History,
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

# A logit is written in 16 or 32 bits, read for the softmax, and its gradient is written and read twice.
_LOGIT_BYTES = 20


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
        context, sizes["model"], dtype, "token", tokens, flops_per_token(config),
        {"optimizer": ADAMW_BYTES_A_PARAMETER * config.parameter_count, "logits": tokens * vocabulary * _LOGIT_BYTES},
    )  # fmt: skip


def run(context: Context, report) -> Result:
    """Train, score every token of valid and test once, then time the steady step."""
    seed_everything(context.seed)
    corpus, tokenizer, prepared = datasets.text(context)
    context = _for_source(context, corpus.source)
    sizes, device = context.sizes, context.device
    length = sizes["sequence_length"]
    batches = LanguageBatches(prepared.tokens["train"], length, sizes["batch_size"], context.seed, device.torch_device)
    engine = _engine(context, tokenizer.vocab_size, _total_steps(sizes, len(batches)))

    def validation() -> Iterable:
        return _windows(prepared.tokens["valid"], context, tokenizer.eos_id, stride=length)

    history = train(engine, batches, _plan(sizes), validation=validation, folder=context.workspace, report=report)
    rows = epoch_rows(context, sizes["model"], engine.precision.dtype, engine, history, corpus.source)
    rows += _validation_rows(context, corpus, prepared, engine, history)
    for split in ("valid", "test"):
        report(len(history.losses), len(history.losses), f"scoring {split}")
        scored = _scored(context, prepared, engine, tokenizer, split, history)
        rows += _scored_rows(context, corpus, prepared, engine, tokenizer, split, scored)
    steady, samples = steady_rows(
        context, sizes["model"], engine, batches.next_batch(), batches.tokens_per_batch,
        flops_per_token(engine.model.config, length), _least_flops(engine.model.config, length), corpus.source,
    )  # fmt: skip
    curves = pd.concat([loss_curve(history), samples], ignore_index=True)
    return Result(rows + steady, curves, corpus.source)


EXPERIMENT = Experiment(
    forecast, run, isolated=True, forecast_reads=("text_pipeline", "gemm", "bandwidth"), data=datasets.TEXT
)


def _least_flops(config: TransformerConfig, length: int) -> float:
    """Forward and backward of a token with the causal half of attention only, which is all that must be computed."""
    return flops_per_token(config, length // 2).forward_backward


def _for_source(context: Context, source: str) -> Context:
    """The synthetic text needs other sizes: its vocabulary is small, and copying is learned late."""
    if source != "synthetic":
        return context
    return replace(context, sizes=context.sizes | context.sizes.get("when_synthetic", {}))


def _config(context: Context, vocabulary: int) -> TransformerConfig:
    return named_config(context.sizes["model"], vocab_size=vocabulary, context=context.sizes["sequence_length"])


def _plan(sizes: dict) -> Plan:
    return Plan(
        epochs=sizes.get("epochs"),
        steps=sizes.get("steps"),
        evaluate_every=sizes["evaluate_every"],
        checkpoint_every=sizes["checkpoint_every"],
    )


def _total_steps(sizes: dict, steps_per_epoch: int) -> int:
    return _plan(sizes).total_steps(steps_per_epoch)


def _engine(context: Context, vocabulary: int, total_steps: int) -> LanguageEngine:
    sizes, device = context.sizes, context.device
    model = TransformerLM(_config(context, vocabulary)).to(device.torch_device)
    schedule = WarmupCosine(sizes["learning_rate"], sizes["warmup_steps"], total_steps)
    precision = choose_precision(device, sizes["precision"])
    print(f"{sizes['model']}, vocabulary {vocabulary}: {total_steps} steps in {precision}")
    return LanguageEngine(
        model, adamw(model, sizes["learning_rate"], sizes["weight_decay"]), schedule, precision, device
    )


def _windows(tokens: np.ndarray, context: Context, eos_id: int, stride: int) -> Iterable:
    sizes = context.sizes
    return evaluation_windows(
        tokens, sizes["sequence_length"], stride, eos_id, sizes["evaluation_batch_size"], context.device.torch_device
    )


def _validation_rows(
    context: Context, corpus: TextCorpus, prepared: PreparedText, engine: LanguageEngine, history: History
) -> list[Row]:
    floor = text_floor(corpus, "valid")
    return [
        context.row(
            context.sizes["model"],
            "validation_loss",
            record.evaluation["loss"],
            dtype=engine.precision.dtype,
            params={"epoch": record.epoch, "step": record.step, "stride": context.sizes["sequence_length"]},
            limit=floor.per(len(prepared.tokens["valid"])),
            limit_source=floor.source,
            data_source=corpus.source,
        )
        for record in history.epochs
        if record.evaluation is not None
    ]


def _scored(
    context: Context, prepared: PreparedText, engine: LanguageEngine, tokenizer, split: str, history: History
) -> LanguageEvaluation:
    """Every token of the split under the final weights."""
    stride = context.sizes["stride"]
    if split == "valid" and stride == context.sizes["sequence_length"]:
        # The evaluation after the last epoch saw these weights and these windows: a minute on a CPU.
        last = history.epochs[-1].evaluation
        return LanguageEvaluation(**{field.name: last[field.name] for field in fields(LanguageEvaluation)})
    windows = _windows(prepared.tokens[split], context, tokenizer.eos_id, stride)
    return evaluate_language(engine.model, windows, engine.precision, engine.device)


def _scored_rows(
    context: Context, corpus: TextCorpus, prepared: PreparedText, engine: LanguageEngine, tokenizer, split: str,
    scored: LanguageEvaluation,
) -> list[Row]:  # fmt: skip
    sizes = context.sizes
    params = {
        "split": split, "context": sizes["sequence_length"], "stride": sizes["stride"], "step": engine.steps,
        "tokenizer": tokenizer.name, "tokenizer_sha256": tokenizer.sha256[:16],
    }  # fmt: skip
    words, floor = prepared.steps[split]["read"]["words_with_eos"], text_floor(corpus, split)
    rows = perplexity_rows(
        context, sizes["model"], engine.precision.dtype, params, scored.total_nll_nats, scored.tokens, words, floor,
        corpus.source, scored.standard_error_nats,
    )  # fmt: skip
    if floor.total_nll_nats is not None:
        excess = (scored.total_nll_nats - floor.total_nll_nats) / scored.tokens
        columns = {"limit": 0.0, "limit_source": floor.source, "data_source": corpus.source}
        rows.append(
            context.row(
                sizes["model"], "excess_loss_nats", excess, dtype=engine.precision.dtype, params=params, **columns
            )
        )
    return rows
