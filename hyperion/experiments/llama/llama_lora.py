"""Fine-tune a Llama with LoRA on instruction rows on one device, and compare its memory with that of full fine-tuning."""

import gc
import math
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import chain
from typing import Any, cast

import pandas as pd
import torch
from torch import nn

from hyperion.chapter.context import Context, Experiment, Forecast, Report, Result
from hyperion.chapter.rows import checked, out_of_memory_reason, sample_frame, timed_row
from hyperion.chapter.variants import merged, run_variant
from hyperion.data import Completions
from hyperion.data.batches import InstructionBatches
from hyperion.measure import PeakMemoryRegion, TensorMemory, Timing, state_of, time_function
from hyperion.models import LlamaLM, LlamaShape, llama_lora_parameter_count, llama_parameter_count, random_llama_shape
from hyperion.results import Row
from hyperion.training import LanguageEngine, TrainingPlan, choose_precision, frozen_sha256, save_adapter, train
from hyperion.training.lora import ATTENTION
from hyperion.units import GIB
from hyperion.workloads.fine_tuning import (
    DATA,
    FULL,
    LOADED_TOLERANCE,
    LORA,
    RANK,
    FineTuningData,
    FineTuningOptions,
    TokenCounts,
    base_model,
    count_tokens,
    equality_row,
    fine_tuning_engine,
    frozen_dtype,
    largest_difference,
    least_flops,
    load_base_and_adapter,
    probe_logits,
    shape_of,
    state_bytes,
    step_flops,
    trained_parameters,
    with_lora,
)
from hyperion.workloads.training_rows import epoch_rows, loss_curve, speed_rows, step_ceiling

METHODS = (LORA, FULL)
# Tolerance for the logits after merging. Merging rounds W + B A, and the terms of a product are added in another order.
MERGED_TOLERANCE = 1e-4
_STANDARD_ERRORS = 4.0


class LlamaLoraOptions(FineTuningOptions):
    """Options for the `llama_lora` experiment.

    Args:
        evaluation_batch_size: number of held-out rows in a batch.
    """

    evaluation_batch_size: int


def forecast(context: Context) -> list[Forecast]:
    """Predict the memory of a step, the share of trained parameters, and the loss before training.

    For the throughput, return only an upper bound.
    """
    options = LlamaLoraOptions.of(context)
    data = options.data(context)
    if data.weights != options.model:
        basis = "no estimate: the shapes of real weights are read when they are loaded"
        return [Forecast(LORA, "tokens_per_s", None, basis)]
    shape = random_llama_shape(data.model, data.tokenizer.vocab_size)
    dtype = choose_precision(context.device, options.precision).dtype
    counts = count_tokens(_batches(context, options, data).next_batch())
    flops, traffic = step_flops(shape, LORA, counts.length), _traffic(shape, dtype, counts)
    ceiling, basis = step_ceiling(context, dtype, counts.tokens, flops, traffic)
    if ceiling is not None:
        basis = f"no reference run shows which share of it LoRA reaches; ceiling: {basis}"
    step = {"batch": counts.tokens, "step": "steady"}
    memory = ["tensor_memory_gib", *(["peak_memory_gib"] if context.device.kind != "cpu" else [])]
    return [
        *(_memory_forecast(data, shape, method, dtype, counts, metric) for metric in memory for method in METHODS),
        _share_forecast(shape),
        Forecast(LORA, "tokens_per_s", None, basis, dtype=dtype, params=step, ceiling=ceiling),
        Forecast(
            LORA,
            "validation_loss",
            math.log(shape.vocab_size) + 0.5,
            "random weights give logits of variance 1: ln V + 1/2 nats, for any text",
            dtype=dtype,
            params={"step": 0},
        ),
    ]


def run(context: Context, report: Report) -> Result:
    """Run LoRA and full fine-tuning in separate processes, so that their memory is measured separately."""
    return merged([run_variant(context, report, function) for function in (fine_tune, full_memory)])


EXPERIMENT = Experiment(forecast, run, forecast_reads=("gemm", "bandwidth"), data=DATA, options=LlamaLoraOptions)


def fine_tune(context: Context, report: Report) -> Result:
    """Train the adapters and evaluate them on held-out completions before and after training.

    Then time a step, and check that the adapters can be saved, loaded and merged.
    """
    options = LlamaLoraOptions.of(context)
    data, precision = options.data(context), choose_precision(context.device, options.precision)
    base = base_model(context, data, frozen_dtype(precision))
    base_sha256, shape = frozen_sha256(base), shape_of(base)
    model = with_lora(base, context.seed)
    engine = fine_tuning_engine(context, options, model, precision)
    print(f"{data.model}, vocabulary {shape.vocab_size}: {options.steps} steps of {options.batch_size} rows in {precision}")

    def validation() -> InstructionBatches:
        return _held_out_batches(context, options, data.held_out)

    before = engine.evaluate(validation())
    plan = TrainingPlan(steps=options.steps)
    history = train(engine, _batches(context, options, data), plan, validation=validation, report=report)
    rows = epoch_rows(context, LORA, precision.dtype, engine, history, data.rows.source)
    rows += _loss_rows(context, options, data, precision.dtype, before, history.epochs[-1].evaluation or {})
    rows += _count_rows(context, data, model, shape)
    with restored_adapters(model):
        step_rows, samples = _step_rows(context, options, data, engine, shape)
    rows += step_rows + adapter_rows(context, options, data, engine, base_sha256)
    curves = pd.concat([loss_curve(history), samples, _one_row(data)], ignore_index=True)
    return Result(rows, curves, data.rows.source)


def full_memory(context: Context, report: Report) -> Result:
    """Measure the peak memory of a step that trains every parameter, on the same batch as the LoRA step."""
    options = LlamaLoraOptions.of(context)
    data, precision = options.data(context), choose_precision(context.device, options.precision)
    report(0, 1, FULL)
    shared = {"dtype": precision.dtype, "params": {"model": data.model}, "data_source": data.rows.source}
    try:
        base = base_model(context, data, torch.float32)
        shared |= {"params": _params(data, shape_of(base))}
        engine = fine_tuning_engine(context, options, LlamaLM(base), precision)
        rows = _memory_rows(context, engine, _batches(context, options, data).next_batch(), shape_of(base), FULL, shared)
    except torch.OutOfMemoryError as error:
        rows = [context.absent_row(FULL, "peak_memory_gib", out_of_memory_reason(error), **shared)]
    return Result(rows, pd.DataFrame(), data.rows.source)


def adapter_rows(
    context: Context, options: LlamaLoraOptions, data: FineTuningData, engine: LanguageEngine, base_sha256: str
) -> list[Row]:
    """Check that the trained adapters can be saved, loaded into a new base model, and merged with it.

    The logits after loading and after merging must equal those of the trained model, within a tolerance. They are compared in
    float32, because 16-bit formats would hide small differences. The trained model is removed from the engine, because two models
    may not fit into memory.

    Args:
        context: context of the experiment.
        options: options of the experiment.
        data: instruction rows.
        engine: engine with the trained adapters. It has no model after the call.
        base_sha256: `frozen_sha256` of the base model before training. The base weights must not have changed.
    """
    device, dtype = engine.device.torch_device, frozen_dtype(engine.precision)
    # Compute the hash before `probe_logits`, which converts the model to float32 and thus changes the bytes of its weights.
    changed = frozen_sha256(engine.model) != base_sha256
    # Save the adapters before this conversion, too, so that they keep the number format of the training.
    path = save_adapter(context.workspace / "adapters", options.steps, engine.model, base_sha256)
    trained = probe_logits(engine.model, data, device)
    del engine.model, engine.optimizer
    gc.collect()
    fresh = load_base_and_adapter(context, data, path, dtype)
    loaded = largest_difference(probe_logits(fresh, data, device), trained)
    merged_model = LlamaLM(cast(Any, fresh.lm).merge_and_unload())
    in_one = largest_difference(probe_logits(merged_model, data, device), trained)
    size = sum(file.stat().st_size for file in path.iterdir())
    same, unchanged = "logits of the trained model", "sha256 unchanged"
    return [
        equality_row(context, data, LORA, "base weights after training", float(changed), unchanged, 0),
        equality_row(context, data, LORA, "logits, adapter loaded", loaded, same, LOADED_TOLERANCE),
        equality_row(context, data, LORA, "logits, adapter merged", in_one, same, MERGED_TOLERANCE),
        context.row(LORA, "stored_gb", size / 1e9, params={"model": data.model, "what": "adapter checkpoint"}),
    ]


def _step_rows(
    context: Context, options: LlamaLoraOptions, data: FineTuningData, engine: LanguageEngine, shape: LlamaShape
) -> tuple[list[Row], pd.DataFrame]:
    """Measure the memory and speed of a LoRA step, and return the rows and samples.

    The batch is the same as in the full fine-tuning step.
    """
    batch = _batches(context, options, data).next_batch()
    shared = {"dtype": engine.precision.dtype, "params": _params(data, shape), "data_source": data.rows.source}
    rows = _memory_rows(context, engine, batch, shape, LORA, shared)
    timing = time_function(lambda: engine.train_step(batch), engine.device, cold=False, time_limit_s=options.steady_time_limit_s)
    steady = shared | {"params": shared["params"] | {"step": "steady"}}
    speed, samples = _speed_rows(context, timing, count_tokens(batch), shape, steady)
    return rows + speed, samples


@contextmanager
def restored_adapters(model: nn.Module) -> Iterator[None]:
    """Context manager that restores the trainable parameters on exit, so that timed steps do not change the trained model."""
    trained = {name: p.detach().clone() for name, p in model.named_parameters() if p.requires_grad}
    yield
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name in trained:
                parameter.copy_(trained[name])


def _memory_rows(
    context: Context, engine: LanguageEngine, batch: tuple, shape: LlamaShape, method: str, shared: dict
) -> list[Row]:
    """Return the rows with the peak memory of one step: the tensor bytes, and on an accelerator also the allocator's peak.

    On a CPU, the resident memory of the process is not recorded, because it depends mostly on earlier work of the process.

    Args:
        shared: dtype, params and data source of all rows.
    """
    engine.train_step(batch)  # allocates the optimizer's moments
    with PeakMemoryRegion(engine.device) as region:
        engine.train_step(batch)
    alive = chain(*state_of(engine.model, engine.optimizer).values(), batch)
    with TensorMemory(engine.device, alive) as counted:
        engine.train_step(batch)
    bound = {
        "limit": state_bytes(shape, method, engine.precision.dtype) / GIB,
        "limit_source": "bytes of weights, gradients and moments, which all exist when the backward pass ends",
    }
    rows = [context.row(method, "tensor_memory_gib", counted.peak_bytes / GIB, **bound, **shared)]
    if engine.device.kind != "cpu":
        rows.append(context.row(method, region.peak.metric, region.peak.gib, **bound, **shared))
    return rows


def _speed_rows(
    context: Context, timing: Timing, counts: TokenCounts, shape: LlamaShape, shared: dict
) -> tuple[list[Row], pd.DataFrame]:
    """Time a LoRA step. Return rows with its time, its MFU (model FLOPs utilization) and two throughputs, and the samples.

    One throughput counts all tokens. The other counts only tokens with a loss.
    """
    read = shared | {"params": shared["params"] | {"batch": counts.tokens, "tokens": "prompt and completion"}}
    learned = shared | {"params": shared["params"] | {"batch": counts.completion_tokens, "tokens": "completion"}}
    flops = step_flops(shape, LORA, counts.length)
    rows = speed_rows(context, LORA, "token", counts.tokens, timing, flops, least_flops(shape, LORA, counts), read)
    limit = next(row for row in rows if row.metric == "tokens_per_s")
    share = counts.completion_tokens / counts.tokens
    rate = timing.estimate.map(lambda seconds: counts.completion_tokens / seconds)
    rows.append(
        timed_row(
            context,
            LORA,
            "tokens_per_s",
            rate,
            timing,
            limit=(None if limit.limit is None else limit.limit * share, limit.limit_source),
            **learned,
        )
    )
    return rows, sample_frame(timing, LORA, shared["dtype"], read["params"]).assign(kind="steady step")


def _loss_rows(
    context: Context, options: LlamaLoraOptions, data: FineTuningData, dtype: str, before: dict, after: dict
) -> list[Row]:
    """Return the rows with the mean loss per held-out completion token, before and after training.

    The check fails if the loss has not decreased significantly.
    """
    floor = data.rows.least_loss_nats
    source = "each completion follows from its prompt" if floor is not None else "no limit: what rows say is not certain"
    # Both losses are those of the same tokens, so the error of their difference is smaller than this.
    error = math.hypot(before["standard_error_nats"], after["standard_error_nats"])
    decrease = checked(
        "below the loss before training by 4 standard errors (passes by chance 3 times in 100,000)",
        after["loss"] - before["loss"],
        -_STANDARD_ERRORS * error,
    )
    return [
        context.row(
            LORA,
            "validation_loss",
            scored["loss"],
            dtype=dtype,
            n=scored["tokens"],
            ci_low=scored["loss_ci_low"],
            ci_high=scored["loss_ci_high"],
            params={"model": data.model, "split": "held out", "tokens": "completion", "step": step},
            limit=floor,
            limit_source=source,
            data_source=data.rows.source,
            **check,
        )
        for step, scored, check in ((0, before, {}), (options.steps, after, decrease))
    ]


def _count_rows(context: Context, data: FineTuningData, model: LlamaLM, shape: LlamaShape) -> list[Row]:
    """Return rows with counts: trained parameters, prompt and completion tokens, and instruction rows that were cut.

    The number of trained parameters is checked.
    """
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    expected = llama_lora_parameter_count(shape, RANK, ATTENTION)
    everything = sum(p.numel() for p in model.parameters())
    params = {"model": data.model, "rank": RANK, "targets": list(ATTENTION), "what": "trainable parameters"}
    rows = [
        context.row(LORA, "count", trained, params=params, **checked("sum of r (d_in + d_out)", abs(trained - expected), 0)),
        context.row(LORA, "share", trained / everything, params=params),
    ]
    counts = {
        "completion tokens": data.train.completion_tokens,
        "prompt tokens": data.train.tokens - data.train.completion_tokens,
        "rows whose prompt was cut": data.train.prompts_cut,
        "rows whose completion was cut": data.train.completions_cut,
    }
    return rows + [
        context.row("train rows", "count", value, params={"what": what}, data_source=data.rows.source)
        for what, value in counts.items()
    ]


def _one_row(data: FineTuningData) -> pd.DataFrame:
    """Return a table with the tokens of the first held-out instruction row.

    The table states whether each token belongs to the prompt, which is given, or to the completion, which is learned.
    """
    size, targets = int(data.held_out.sizes[0]), data.held_out.targets[0]
    # Inputs and targets are shifted by one token, so the last target completes the row.
    ids = [*data.held_out.inputs[0, :size], targets[size - 1]]
    learned = [False, *data.held_out.scored[0, :size]]
    kinds = ["learned token" if is_learned else "given token" for is_learned in learned]
    return pd.DataFrame({"kind": kinds, "text": [data.tokenizer.decode([token]) for token in ids]})


def _memory_forecast(
    data: FineTuningData, shape: LlamaShape, method: str, dtype: str, counts: TokenCounts, metric: str
) -> Forecast:
    parts = step_bytes(shape, method, dtype, counts.positions)
    basis = f"{method}: " + " + ".join(f"{amount / GIB:.3g} GiB of {name}" for name, amount in parts.items())
    # The param "model" selects the rows of a single step. Rows with the peak of an epoch, which includes the evaluation, lack
    # this param.
    params = {"model": data.model}
    return Forecast(method, metric, sum(parts.values()) / GIB, basis, dtype=dtype, params=params)


def step_bytes(shape: LlamaShape, method: str, dtype: str, positions: int) -> dict[str, int]:
    """Return a dict that maps each part of a step's peak memory to its bytes.

    The peak occurs at the start or at the end of the backward pass. At the start, the logits exist and the gradients do not. At
    the end, the gradients exist and the logits do not. Activations of the decoder layers are ignored, because they are small for
    short rows.
    """
    whole, trained = state_bytes(shape, method, dtype), trained_parameters(shape, method)
    # The gradient takes 4 bytes per trained parameter. It does not exist yet at the start of the backward pass.
    start = {"weights and moments": whole - 4 * trained, "logits": logits_bytes(shape, dtype, positions)}
    if dtype == "bf16" and method == FULL:
        start["16-bit copies of the weights"] = 2 * trained
    end = {"weights, gradients and moments": whole}
    return max(start, end, key=lambda parts: sum(parts.values()))


def logits_bytes(shape: LlamaShape, dtype: str, positions: int) -> int:
    """Return the bytes of the logits, the log-probabilities and one gradient of the logits, all in float32.

    For bf16, two 16-bit copies are added.
    """
    # Three float32 tensors take 12 bytes per logit, and two 16-bit copies 4 more.
    return positions * shape.vocab_size * (16 if dtype == "bf16" else 12)


def _share_forecast(shape: LlamaShape) -> Forecast:
    adapters, base = llama_lora_parameter_count(shape, RANK, ATTENTION), llama_parameter_count(shape)
    basis = f"rank {RANK} on {', '.join(ATTENTION)}: {adapters:,} trained, {base:,} frozen"
    return Forecast(LORA, "share", adapters / (adapters + base), basis)


def _traffic(shape: LlamaShape, dtype: str, counts: TokenCounts) -> dict[str, float]:
    """Return a dict that maps each cause of memory traffic in a LoRA step to its bytes.

    The causes are the logits and the frozen weights. The forward pass and the backward pass each read the frozen weights.
    """
    stored = (2 if dtype == "bf16" else 4) * llama_parameter_count(shape)
    return {"frozen weights": 2 * stored, "logits": 2 * logits_bytes(shape, dtype, counts.positions)}


def _batches(context: Context, options: LlamaLoraOptions, data: FineTuningData) -> InstructionBatches:
    return InstructionBatches(data.train, options.batch_size, context.seed, device=context.device.torch_device)


def _held_out_batches(context: Context, options: LlamaLoraOptions, held_out: Completions) -> InstructionBatches:
    size, device = options.evaluation_batch_size, context.device.torch_device
    return InstructionBatches(held_out, size, shuffle=False, drop_last=False, device=device)


def _params(data: FineTuningData, shape: LlamaShape) -> dict:
    return {"model": data.model, "parameters": llama_parameter_count(shape)}
