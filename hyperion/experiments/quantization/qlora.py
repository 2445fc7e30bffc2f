"""Can a model be trained with 4-bit weights, or with 8-bit optimizer states?

- QLoRA: the base model is frozen in NF4, and adapters in float32 are trained. Its twin trains the same adapters on the original
  weights.
- AdamW with 8-bit moments trains all parameters. Its twin is AdamW with float32 moments.

A variant and its twin start from the same trained model and use the same batches of instruction rows.
"""

import hashlib
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd
import torch
from pydantic import Field
from torch import nn

from hyperion.chapter.context import Context, Experiment, Forecast, Options, Report, Result
from hyperion.chapter.rows import checked
from hyperion.data.batches import InstructionBatches
from hyperion.experiments.quantization.layer_checks import stored_error, stored_tensors, weight_bytes_of
from hyperion.experiments.quantization.quantized_linears import Nf4, bitsandbytes_library, replace_linears, why_no_bitsandbytes
from hyperion.measure import bytes_of, state_of
from hyperion.measure.clock.verify import largest_error
from hyperion.models import LlamaLM, LlamaShape
from hyperion.models.llama import layer_shapes
from hyperion.results import Estimate, Row
from hyperion.training import (
    LanguageEngine,
    TrainingPlan,
    WarmupCosine,
    adamw,
    choose_precision,
    decay_groups,
    frozen_sha256,
    seed_everything,
    train,
)
from hyperion.workloads.datasets import TEXT
from hyperion.workloads.fine_tuning import FineTuningData, base_model, fine_tuning_data, frozen_dtype, with_lora
from hyperion.workloads.quality import clustered_mean
from hyperion.workloads.trained_models import LANGUAGE_MODELS, trained_language_model

LORA, QLORA, ADAMW, ADAMW_8BIT = "LoRA", "QLoRA", "AdamW", "8-bit AdamW"
TWINS = {QLORA: LORA, ADAMW_8BIT: ADAMW}
# Largest loss of 8-bit AdamW above that of AdamW, in nats, as a mean over all steps. The mean losses differ by 0.0001 over 200
# steps on an H100, and by at most 0.0005 over 20 steps on a CPU, for five seeds.
_ADAMW_BOUND_NATS = 0.02
BASE = Nf4(double=True)
# Constants of bitsandbytes. Tensors with fewer elements than _SMALLEST_8BIT have float32 moments.
_SMALLEST_8BIT, _BLOCK, _TABLE_BYTES = 4096, 256, 256 * 4
_CLUSTER = 5  # number of consecutive steps whose losses are treated as one sample, because they are correlated


class QloraOptions(Options):
    """Options for the `qlora` experiment.

    Args:
        trained_model: name of a trained language model, see `hyperion.workloads.trained_models`.
        sequence_length: largest number of tokens in an instruction row.
        batch_size: number of rows in an optimizer step.
        held_out_rows: number of held-out rows on which losses are compared. None uses all.
        steps: number of optimizer steps of each variant, at least ten.
        adapter_rate: peak learning rate of the training runs with adapters. The warm-up takes a tenth of the steps.
        full_rate: peak learning rate of the training runs that train all parameters. The warm-up takes a tenth of the steps.
        qlora_bound_nats: largest mean training loss of QLoRA above that of LoRA. NF4 changes the base by about 0.002 nats, and
            the adapters amplify this: to 0.008 nats in the profile `full` on an H100, with an interval up to 0.013.
    """

    trained_model: str
    sequence_length: int
    batch_size: int
    held_out_rows: int | None = None
    steps: int = Field(ge=2 * _CLUSTER)
    adapter_rate: float
    full_rate: float
    qlora_bound_nats: float = 0.05


def forecast(context: Context) -> list[Forecast]:
    """Predict the size of the optimizer state from the shapes of the parameters and the format of the moments."""
    options = QloraOptions.of(context)
    sizes = _parameter_sizes(LANGUAGE_MODELS[options.trained_model].shape)
    params = {"model": options.trained_model}
    return [
        Forecast(variant, "optimizer_state_bytes", state_bytes(variant, sizes), basis, params=params)
        for variant, basis in (
            (ADAMW_8BIT, "two moments of a byte, a float32 scale for each block of 256, two tables of 256 values"),
            (ADAMW, "two float32 moments of each parameter, and a step count of each tensor"),
        )
    ]


def run(context: Context, report: Report) -> Result:
    """Train all four variants for the same number of steps.

    Two of them need bitsandbytes. If it cannot be used, the rows of these variants contain the reason.
    """
    options = QloraOptions.of(context)
    trained = trained_language_model(context, options.trained_model)
    data = fine_tuning_data(context, str(trained.folder), options.sequence_length, held_out_rows=options.held_out_rows)
    rows: list[Row] = []
    losses: dict[str, list[float]] = {}
    for done, variant in enumerate((LORA, QLORA, ADAMW, ADAMW_8BIT)):
        report(done, 4, variant)
        if variant in TWINS and (reason := why_no_bitsandbytes(context.device)):
            rows.append(context.absent_row(variant, "loss_difference_nats", reason, **_columns(options, data)))
            continue
        losses[variant], new_rows = _train(context, options, data, variant)
        rows += new_rows
    for variant, twin in TWINS.items():
        if variant in losses:
            bound_nats = options.qlora_bound_nats if variant == QLORA else _ADAMW_BOUND_NATS
            difference = np.array(losses[variant]) - np.array(losses[twin])
            mean = clustered_mean(difference, np.arange(options.steps) // _CLUSTER)
            # The check is on the mean instead of the interval, because the few steps of a small profile have an interval that is
            # wider than the bound.
            check = checked("nats above the loss of the twin", max(mean.value, 0.0), bound_nats)
            columns = _columns(options, data, twin=twin, steps=options.steps)
            rows.append(context.row(variant, "loss_difference_nats", mean, **columns, **check))
    report(4, 4, "done")
    curves = [
        pd.DataFrame({"kind": "loss curve", "variant": variant, "step": range(1, len(curve) + 1), "loss": curve})
        for variant, curve in losses.items()
    ]
    return Result(rows, pd.concat(curves, ignore_index=True), data.rows.source)


EXPERIMENT = Experiment(forecast, run, options=QloraOptions, data=(*TEXT, "instructions"))


def state_bytes(variant: str, sizes: Sequence[int]) -> int:
    """Return the bytes of an optimizer state.

    Args:
        variant: `ADAMW` or `ADAMW_8BIT`.
        sizes: number of elements of each trained parameter.
    """
    if variant == ADAMW:
        return sum(8 * size + 4 for size in sizes)
    large = [size for size in sizes if size >= _SMALLEST_8BIT]
    moments = sum(2 * size + 2 * 4 * math.ceil(size / _BLOCK) for size in large)
    # Each moment has one lookup table, which all parameters share. Small parameters have float32 moments.
    return moments + sum(8 * size for size in sizes if size < _SMALLEST_8BIT) + (2 * _TABLE_BYTES if large else 0)


def _columns(options: QloraOptions, data: FineTuningData, **params: Any) -> dict:
    """Return the columns that all rows share. `params` are additional params of the row."""
    return {"params": {"model": options.trained_model} | params, "data_source": data.rows.source}


def _train(context: Context, options: QloraOptions, data: FineTuningData, variant: str) -> tuple[list[float], list[Row]]:
    """Train a variant. Return the loss of each step, and its rows."""
    device, precision = context.device, choose_precision(context.device, "auto")
    adapters = variant in (LORA, QLORA)
    model: Any = base_model(context, data, frozen_dtype(precision) if adapters else torch.float32)
    layers: list[Any] = []
    errors: list[tuple[float, float]] = []
    if variant == QLORA:
        originals = replace_linears(model, BASE, device)
        layers = [model.get_submodule(name) for name in originals]
        errors = [stored_error(BASE, weight, layer) for weight, layer in zip(originals.values(), layers, strict=True)]
        for layer in layers:
            # On CPUs with AVX512-BF16, bitsandbytes reorders the weights during evaluation for a kernel that has no backward
            # pass. Later training steps would also use this kernel, and earlier layers would get no gradient.
            layer.support_avx512bf16_for_cpu = False
        del originals
        # With this attribute, peft uses its adapter class for the layers of bitsandbytes.
        model.is_loaded_in_4bit = True
    before = _sha256(model, layers) if adapters else ""
    lm = with_lora(model, context.seed) if adapters else LlamaLM(model)
    rate = options.adapter_rate if adapters else options.full_rate
    optimizer = _optimizer(variant, lm, rate)
    schedule = WarmupCosine(rate, max(1, options.steps // 10), options.steps + 1)
    seed_everything(context.seed)
    engine = LanguageEngine(lm, optimizer, schedule, precision, device)

    def held_out() -> InstructionBatches:
        where = device.torch_device
        return InstructionBatches(data.held_out, options.batch_size, shuffle=False, drop_last=False, device=where)

    start = engine.evaluate(held_out())
    batches = InstructionBatches(data.train, options.batch_size, context.seed, device=device.torch_device)
    history = train(engine, batches, TrainingPlan(steps=options.steps))
    end = engine.evaluate(held_out())
    rows = []
    for step, scored in ((0, start), (options.steps, end)):
        columns = _columns(options, data, step=step, split="held out", tokens="completion")
        columns |= {"limit": None, "limit_source": "no limit: what rows say is not certain"}
        mean = Estimate(scored["loss"], scored["loss_ci_low"], scored["loss_ci_high"], int(scored["tokens"]))
        rows.append(context.row(variant, "validation_loss", mean, dtype=precision.dtype, **columns))
    if adapters:
        changed = float(_sha256(model, layers) != before)
        columns = _columns(options, data, what="base weights after training") | {"dtype": precision.dtype}
        name = "sha256 of the frozen weights, scales and tables"
        rows.append(context.error_row(variant, "relative_difference", changed, name, 0, **columns))
    if errors:
        # A small model trains about as well with wrong scales, because its adapters correct them. So the losses cannot verify
        # the weights.
        check = checked("float64, largest error over its bound", largest_error(ratio for _, ratio in errors), 1.0)
        columns = _columns(options, data, what="base weights before training") | {"dtype": BASE.dtype}
        worst = largest_error(error for error, _ in errors)
        rows.append(context.row(variant, "relative_difference", worst, **columns, **check))
    return history.losses, rows + _byte_rows(context, variant, lm, optimizer, layers, _columns(options, data))


def _sha256(model: nn.Module, layers: list[Any]) -> str:
    """Return the SHA-256 of all frozen weights of a model, including the scales and tables of its quantised layers."""
    digest = hashlib.sha256(frozen_sha256(model).encode())
    for layer in layers:
        for tensor in stored_tensors(layer):
            digest.update(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def _optimizer(variant: str, model: nn.Module, rate: float) -> torch.optim.Optimizer:
    """Return the optimizer of a variant. Both kinds have the same betas, epsilon and weight decay."""
    if variant != ADAMW_8BIT:
        return adamw(model, rate, weight_decay=0.0)
    return bitsandbytes_library().optim.AdamW8bit(decay_groups(model, 0.0), lr=rate, betas=(0.9, 0.95), eps=1e-8)


def _byte_rows(
    context: Context, variant: str, model: nn.Module, optimizer: torch.optim.Optimizer, layers: list[Any], columns: dict
) -> list[Row]:
    """Return the rows with the bytes of the optimizer state and, for adapters on a quantised base, of the base weights."""
    sizes = [parameter.numel() for parameter in model.parameters() if parameter.requires_grad]
    # The step count is a tensor in PyTorch's AdamW, but a Python number in that of bitsandbytes.
    measured = bytes_of(state_of(model, optimizer)["optimizer state"])
    computed = state_bytes(ADAMW_8BIT if variant == ADAMW_8BIT else ADAMW, sizes)
    check = checked("bytes computed from shapes and format", abs(measured - computed), 0)
    rows = [context.row(variant, "optimizer_state_bytes", measured, **columns, **check)]
    if layers:
        stored = weight_bytes_of(layers)
        expected = sum(BASE.weight_bytes(layer.out_features, layer.in_features) for layer in layers)
        check = checked("bytes computed from the format", abs(stored - expected), 0)
        rows.append(context.row(variant, "weight_bytes", stored, dtype=BASE.dtype, **columns, **check))
    return rows


def _parameter_sizes(shape: LlamaShape) -> list[int]:
    """Return the number of elements of each parameter of a Llama whose head shares its weights with the embedding."""
    D = shape.hidden_size
    layer = [*(n * k for k, n in layer_shapes(shape).values()), D, D]
    return [shape.vocab_size * D, *shape.num_hidden_layers * layer, D]
