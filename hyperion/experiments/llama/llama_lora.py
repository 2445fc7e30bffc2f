"""A Llama fine-tuned by LoRA on instruction rows, on one device; beside it one that is fine-tuned whole, for its memory."""

import math

import pandas as pd
import torch

from hyperion.chapter.context import Context, Experiment, Forecast, Result
from hyperion.chapter.rows import out_of_memory_reason
from hyperion.chapter.variants import Report, merged, run_variant
from hyperion.checkpoints import frozen_sha256
from hyperion.data import Completions
from hyperion.data.batches.instruction_batches import InstructionBatches
from hyperion.data.batches.packing import IGNORE_INDEX
from hyperion.experiments.llama.llama_adapters import adapter_rows, keeping_adapters
from hyperion.experiments.llama.llama_rows import (
    FULL,
    LORA,
    METHODS,
    Work,
    logits_bytes,
    memory_rows,
    step_bytes,
    step_flops,
    throughput_rows,
)
from hyperion.measure import time_function
from hyperion.measure.memory_use.peak import GIB
from hyperion.models import LlamaLM, LlamaShape, llama_lora_parameter_count, llama_parameter_count, random_llama_shape
from hyperion.parallel.lora import ATTENTION
from hyperion.results import Row
from hyperion.training import LanguageEngine, Plan, Precision, WarmupCosine, adamw, choose_precision, train
from hyperion.workloads.llama_setup import DATA, RANK, Material, base_model, frozen_dtype, material, with_lora
from hyperion.workloads.training_rows import epoch_rows, loss_curve, step_forecasts

_STANDARD_ERRORS = 4.0
_WARMUP_SHARE = 0.1


def forecast(context: Context) -> list[Forecast]:
    """Memory of a step, share of parameters trained, throughput, and the loss of a model that knows nothing yet."""
    found = material(context, quiet=True)
    if found.weights != context.sizes["model"]:
        return [_none(found, "no estimate: the shapes of real weights are read when they are loaded")]
    shape = random_llama_shape(found.model, found.tokenizer.vocab_size)
    dtype = choose_precision(context.device, context.sizes["precision"]).dtype
    batch = _batches(context, found).next_batch()
    work = work_of(batch)
    memory = ["tensor_memory_gib", *(["peak_memory_gib"] if context.device.kind != "cpu" else [])]
    estimates = [_memory_forecast(found, shape, method, dtype, work, metric) for metric in memory for method in METHODS]
    estimates.append(_share_forecast(shape, dtype))
    estimates += step_forecasts(
        context, LORA, dtype, "token", work.tokens, step_flops(shape, LORA, work.length), _traffic(shape, dtype, work)
    )
    basis = "random weights give logits of variance 1: ln V + 1/2 nats, whatever the text"
    estimates.append(
        Forecast(
            variant=LORA,
            metric="validation_loss",
            estimate=math.log(shape.vocab_size) + 0.5,
            basis=basis,
            dtype=dtype,
            params={"step": 0},
        )
    )
    return estimates


def run(context: Context, report: Report) -> Result:
    """LoRA in one process, full fine-tuning in another: neither's memory is the other's."""
    return merged([run_variant(context, report, function) for function in (fine_tune, full_memory)])


EXPERIMENT = Experiment(forecast, run, forecast_reads=("gemm", "bandwidth"), data=DATA)


def fine_tune(context: Context, report: Report) -> Result:
    """Train the adapters, score held-out completions before and after, time and weigh a step, save, load and merge."""
    found, sizes = material(context), context.sizes
    precision = choose_precision(context.device, sizes["precision"])
    base = base_model(context, found, frozen_dtype(precision))
    base_sha256, shape = frozen_sha256(base), base.config
    model = with_lora(base, context.seed)
    engine = fine_tuning_engine(context, model, precision)
    print(f"{found.model}, vocabulary {shape.vocab_size}: {sizes['steps']} steps of {sizes['batch_size']} rows in {precision}")

    def validation() -> InstructionBatches:
        return held_out_batches(context, found.held_out)

    before = engine.evaluate(validation())
    history = train(engine, _batches(context, found), Plan(steps=sizes["steps"]), validation=validation, report=report)
    rows = epoch_rows(context, LORA, precision.dtype, engine, history, found.rows.source)
    rows += _loss_rows(context, found, precision.dtype, before, history.epochs[-1].evaluation)
    rows += _count_rows(context, found, model, shape)
    with keeping_adapters(model):
        speed, samples = _step_rows(context, found, engine, shape)
    rows += speed + adapter_rows(context, found, engine, base_sha256)
    curves = pd.concat([loss_curve(history), samples, _one_row(found)], ignore_index=True)
    return Result(rows, curves, found.rows.source)


def _step_rows(context: Context, found: Material, engine: LanguageEngine, shape: LlamaShape) -> tuple[list[Row], pd.DataFrame]:
    """Memory and speed of LoRA's step on the batch that full fine-tuning is weighed with."""
    batch = _batches(context, found).next_batch()
    shared = {"dtype": engine.precision.dtype, "params": _params(found, shape), "data_source": found.rows.source}
    rows = memory_rows(context, engine, batch, shape, LORA, shared)
    timing = time_function(
        lambda: engine.train_step(batch), engine.device, cold=False, time_limit_s=context.sizes["steady_time_limit_s"]
    )
    steady = shared | {"params": shared["params"] | {"step": "steady"}}
    speed, samples = throughput_rows(context, timing, work_of(batch), shape, LORA, steady)
    return rows + speed, samples


def full_memory(context: Context, report: Report) -> Result:
    """A few steps of the same batch with every parameter trained: what they need at most."""
    found = material(context, quiet=True)
    precision = choose_precision(context.device, context.sizes["precision"])
    report(0, 1, FULL)
    shared = {"dtype": precision.dtype, "data_source": found.rows.source}
    try:
        base = base_model(context, found, torch.float32)
        shared |= {"params": _params(found, base.config)}
        engine = fine_tuning_engine(context, LlamaLM(base), precision)
        rows = memory_rows(context, engine, _batches(context, found).next_batch(), base.config, FULL, shared)
    except torch.OutOfMemoryError as error:
        metric, reason = "peak_memory_gib", out_of_memory_reason(error)
        rows = [context.row(FULL, metric, None, value_reason=reason, **{"params": {"model": found.model}} | shared)]
    return Result(rows, pd.DataFrame(), found.rows.source)


def fine_tuning_engine(context: Context, model: LlamaLM, precision: Precision, **options) -> LanguageEngine:
    """AdamW without weight decay, warm-up and cosine over the profile's steps."""
    rate, steps = context.sizes["learning_rate"], context.sizes["steps"]
    schedule = WarmupCosine(rate, math.ceil(_WARMUP_SHARE * steps), steps + 1)
    return LanguageEngine(model, adamw(model, rate, weight_decay=0.0), schedule, precision, context.device, **options)


def held_out_batches(context: Context, held_out: Completions) -> InstructionBatches:
    """The held-out rows in order, the same on every rank."""
    return InstructionBatches(
        held_out, context.sizes["evaluation_batch_size"], shuffle=False, drop_last=False, device=context.device.torch_device
    )


def work_of(batch: tuple[torch.Tensor, torch.Tensor]) -> Work:
    """What a batch holds, counted: a row's last token that is read stands before its last target."""
    inputs, targets = (side.cpu() for side in batch)
    last = torch.where(targets != IGNORE_INDEX, torch.arange(targets.shape[1]), 0).max(dim=1).values
    tokens, completion = int((last + 1).sum()), int((targets != IGNORE_INDEX).sum())
    return Work(inputs.numel(), tokens, completion, round(tokens / len(inputs)))


def _one_row(found: Material) -> pd.DataFrame:
    """The first held-out row token by token, to be read by eye: what is given, and what is to be answered."""
    size, targets = int(found.held_out.sizes[0]), found.held_out.targets[0]
    ids = [*found.held_out.inputs[0, :size], targets[size - 1]]
    scored = [False, *(targets[:size] != IGNORE_INDEX)]
    kinds = ["learned token" if learned else "given token" for learned in scored]
    return pd.DataFrame({"kind": kinds, "text": [found.tokenizer.decode([token]) for token in ids]})


def _batches(context: Context, found: Material) -> InstructionBatches:
    return InstructionBatches(found.train, context.sizes["batch_size"], context.seed, device=context.device.torch_device)


def _params(found: Material, shape: LlamaShape) -> dict:
    return {"model": found.model, "parameters": llama_parameter_count(shape)}


def _loss_rows(context: Context, found: Material, dtype: str, before: dict, after: dict) -> list[Row]:
    """Loss per held-out completion token before and after; the second must lie below the first, beyond chance."""
    floor = found.rows.least_loss_nats
    source = "each completion follows from its prompt" if floor is not None else "no limit: what rows say is not certain"
    error = math.hypot(before["standard_error_nats"], after["standard_error_nats"])
    fall = {
        "check": "below the loss before training by 4 standard errors (passes by chance 3 times in 100,000)",
        "check_error": after["loss"] - before["loss"],
        "check_tolerance": -_STANDARD_ERRORS * error,
    }
    return [
        context.row(
            LORA,
            "validation_loss",
            scored["loss"],
            dtype=dtype,
            n=scored["tokens"],
            ci_low=scored["loss"] - 1.96 * scored["standard_error_nats"],
            ci_high=scored["loss"] + 1.96 * scored["standard_error_nats"],
            params={"model": found.model, "split": "held out", "tokens": "completion", "step": step},
            limit=floor,
            limit_source=source,
            data_source=found.rows.source,
            **check,
        )
        for step, scored, check in ((0, before, {}), (context.sizes["steps"], after, fall))
    ]


def _count_rows(context: Context, found: Material, model: LlamaLM, shape: LlamaShape) -> list[Row]:
    """Parameters trained, against the formula; tokens that carry a loss; rows that had to be cut."""
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    expected = llama_lora_parameter_count(shape, RANK, ATTENTION)
    everything = sum(p.numel() for p in model.parameters())
    about = {"model": found.model, "rank": RANK, "targets": list(ATTENTION)}
    rows = [
        context.row(
            LORA,
            "count",
            trained,
            params=about | {"what": "trainable parameters"},
            check="sum of r (d_in + d_out)",
            check_error=abs(trained - expected),
            check_tolerance=0,
        ),
        context.row(LORA, "share", trained / everything, params=about | {"what": "trainable parameters"}),
    ]
    counted = {
        "completion tokens": found.train.completion_tokens,
        "prompt tokens": found.train.tokens - found.train.completion_tokens,
        "rows whose prompt was cut": found.train.prompts_cut,
        "rows whose completion was cut": found.train.completions_cut,
    }
    return rows + [
        context.row("train rows", "count", value, params={"what": what}, data_source=found.rows.source)
        for what, value in counted.items()
    ]


def _memory_forecast(found: Material, shape: LlamaShape, method: str, dtype: str, work: Work, metric: str) -> Forecast:
    parts = step_bytes(shape, method, dtype, work.positions)
    told = f"{method}: " + " + ".join(f"{amount / GIB:.3g} GiB of {name}" for name, amount in parts.items())
    # With the model named it is the forecast of one step; an epoch's peak has the evaluation in it.
    return Forecast(
        variant=method, metric=metric, estimate=sum(parts.values()) / GIB, basis=told, dtype=dtype, params={"model": found.model}
    )


def _share_forecast(shape: LlamaShape, dtype: str) -> Forecast:
    adapters, base = llama_lora_parameter_count(shape, RANK, ATTENTION), llama_parameter_count(shape)
    basis = f"rank {RANK} on {', '.join(ATTENTION)}: {adapters:,} beside {base:,} frozen"
    return Forecast(variant=LORA, metric="share", estimate=adapters / (adapters + base), basis=basis)


def _traffic(shape: LlamaShape, dtype: str, work: Work) -> dict[str, float]:
    """Bytes that a LoRA step moves: the frozen weights for the forward and for the backward pass, and the logits."""
    stored = (2 if dtype == "bf16" else 4) * llama_parameter_count(shape)
    return {"frozen weights": 2 * stored, "logits": 2 * logits_bytes(shape, dtype, work.positions)}


def _none(found: Material, basis: str) -> Forecast:
    return Forecast(variant=LORA, metric="tokens_per_s", estimate=None, basis=basis)
