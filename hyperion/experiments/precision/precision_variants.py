"""fp32, TF32, bf16 and fp16 with a loss scale on both baselines: memory and loss each in a process of its own, speed in turn."""

from dataclasses import replace
from functools import partial
from itertools import cycle, islice
from pathlib import Path

import pandas as pd
import torch

from hyperion.chapter.context import Context, Experiment, Forecast, Result
from hyperion.chapter.rows import out_of_memory_reason
from hyperion.chapter.side_by_side import run_side_by_side
from hyperion.chapter.variants import merged
from hyperion.hardware import Device
from hyperion.measure import FORMATS, Gemm, PeakMemoryRegion, TensorMemory, state_of
from hyperion.results import Row
from hyperion.training import TorchEngine
from hyperion.workloads import datasets, workloads
from hyperion.workloads.memory_forecasts import foretold, policy
from hyperion.workloads.step_comparison import Contender, compare_steps
from hyperion.workloads.training_rows import step_forecasts
from hyperion.workloads.twins import BIAS, agreements, difference_rows, train_twins
from hyperion.workloads.workloads import KINDS, SIXTEEN_BIT, Batch, Ready, Workload

REFERENCE = "fp32"
GIB = 2**30


def forecast(context: Context) -> list[Forecast]:
    """Speed-ups over fp32 (the first line is the one to guess), throughputs, and the tensor bytes of a step."""
    lines: list[Forecast] = []
    for kind in KINDS:
        work = workloads.foretold(context, kind)
        if work is None:
            basis = "no estimate: this run has not counted the vocabulary (01_dataset_preparation)"
            lines.append(Forecast(variant=context.sizes[kind]["model"], metric="speedup", estimate=None, basis=basis))
            continue
        dtypes = [dtype for dtype in context.sizes["dtypes"] if context.device.supports(dtype)[0]]
        timed = [dtype for dtype in dtypes if not _emulated(context.device, dtype)]
        rates = {dtype: rate_forecast(context, work, dtype) for dtype in timed}
        others = sorted((dtype for dtype in timed if dtype != REFERENCE), key=lambda dtype: dtype != "bf16")
        lines += [_speedup_forecast(rates, dtype) for dtype in others]
        lines += [*rates.values(), *(_memory_forecast(context, work, dtype) for dtype in dtypes)]
    return lines


def run(context: Context, report) -> Result:
    """Train each variant in a process of its own over the same batches, then time all of a model's steps in turn."""
    with workloads.prepared(context) as ready:
        return _compared(context, report, list(ready.values()))


def _compared(context: Context, report, ready: list[Ready]) -> Result:
    reasons = {dtype: _unsupported(context.device, dtype) for dtype in context.sizes["dtypes"]}
    dtypes = [dtype for dtype, reason in reasons.items() if not reason]
    cells = [found.for_worker() | {"dtype": dtype} for found in ready for dtype in dtypes]
    results = run_side_by_side(context, report, train_variant, cells)
    if any(dtype != REFERENCE for dtype in dtypes):
        twins = [found.for_worker() for found in ready]
        results += run_side_by_side(context, report, twins_of_variant, twins)
    reasons = {dtype: why or _emulated(context.device, dtype) for dtype, why in reasons.items()}
    for number, found in enumerate(ready):
        report(number, len(ready), f"steps of the {found.kind} model in turn")
        results.append(_timed(context, found, [dtype for dtype, reason in reasons.items() if not reason]))
    told = merged(results)
    absent = [_absent(context, found, dtype, why) for found in ready for dtype, why in reasons.items() if why]
    rows = told.rows + _agreements(told) + absent
    return replace(told, rows=rows, source=workloads.source_of(ready))


def train_variant(context: Context, report, kind: str, file: str, source: str, dtype: str) -> Result:
    """One variant in this process: K steps, their losses and the peak of memory, then the tensor bytes of one more step."""
    device, steps = context.device, context.sizes["steps"]
    work, batches = workloads.load(kind, context.sizes[kind], Path(file), device)
    row = partial(_row, context, work, dtype, source)
    try:
        with PeakMemoryRegion(device) as region:
            engine = work.engine(dtype, device, context.seed)
            told = [engine.train_step(batch) for batch in islice(cycle(batches), steps)]
        counted = tensor_bytes_of_a_step(engine, batches[0])
    except torch.OutOfMemoryError as error:
        absent = row("peak_memory_gib", None, value_reason=out_of_memory_reason(error), steps=steps)
        return Result([absent], pd.DataFrame(), source)
    losses = torch.stack([metrics.loss for metrics in told]).tolist()
    last = losses[-len(batches) :]
    rows = [
        row("training_loss", sum(last) / len(last), steps=steps, limit_source="no limit: it can be learnt by heart"),
        row("tensor_memory_gib", counted / GIB, phase="whole step"),
        row(
            region.peak.metric,
            region.peak.gib,
            value_reason=region.peak.reason,
            steps=steps,
            limit=work.standing_bytes / GIB,
            limit_source=f"weights and {work.moments} moments of each in float32",
        ),
    ]
    if dtype == "fp16":
        rows.append(row("count", engine.scaler.skipped_steps, what="skipped steps", steps=steps))
        rows.append(row("loss_scale", engine.scaler.scale, steps=steps))
    curve = pd.DataFrame({"kind": "step", "step": range(1, steps + 1), "loss": losses})
    return Result(rows, curve.assign(variant=work.name, dtype=dtype), source)


def twins_of_variant(context: Context, report, kind: str, file: str, source: str) -> Result:
    """Twins of the fp32 training, whose products round at random as coarsely as bf16 does."""
    work, batches = workloads.load(kind, context.sizes[kind], Path(file), context.device)

    def train() -> list[float]:
        engine = work.engine(REFERENCE, context.device, context.seed)
        losses = [engine.train_step(batch).loss for batch in islice(cycle(batches), context.sizes["steps"])]
        return torch.stack(losses).tolist()

    return Result([], train_twins("bf16", context.seed, train).assign(variant=work.name), source)


EXPERIMENT = Experiment(
    forecast, run, forecast_reads=("text_pipeline", "gemm", "bandwidth"), data=datasets.TEXT + datasets.IMAGES
)


def tensor_bytes_of_a_step(engine: TorchEngine, batch: Batch) -> int:
    """The most bytes of tensors alive at once in one step, weights, optimizer and batch included: exact on any device."""
    alive = [tensor for tensors in state_of(engine.model, engine.optimizer).values() for tensor in tensors]
    with TensorMemory(engine.device, [*alive, *batch]) as memory:
        engine.train_step(batch)
    return memory.peak_bytes


def _row(
    context: Context,
    work: Workload,
    dtype: str,
    source: str,
    metric: str,
    value: float | None,
    *,
    value_reason: str = "",
    limit: float | None = None,
    limit_source: str = "",
    **params,
) -> Row:
    return context.row(
        work.name,
        metric,
        value,
        dtype=dtype,
        params={"batch": work.items} | params,
        value_reason=value_reason,
        limit=limit,
        limit_source=limit_source,
        data_source=source,
    )


def _unsupported(device: Device, dtype: str) -> str:
    """Why a variant cannot be had here, "" when it can."""
    possible, how = device.supports(dtype)
    if not possible:
        return f"unsupported: {how}"
    if dtype == "tf32" and Gemm(256, 256, 256, "tf32", device).verify().error < FORMATS["fp32"].gemm_tolerance:
        return "unsupported: TF32 was allowed, but a product has the accuracy of fp32"
    return ""


def why_not_timed(device: Device, dtype: str) -> str:
    """Why steps in a format cannot be had here, or say nothing of it; "" when they can and do."""
    return _unsupported(device, dtype) or _emulated(device, dtype)


def _emulated(device: Device, dtype: str) -> str:
    """Why a format is not timed here, "" where the device has instructions for it."""
    how = device.supports(dtype)[1]
    return f"not timed, because it says nothing of the format: {how}" if how.startswith("emulated") else ""


def _absent(context: Context, found: Ready, dtype: str, reason: str) -> Row:
    work = workloads.workload(found.kind, context.sizes[found.kind], found.vocabulary)
    return _row(context, work, dtype, found.source, "step_time_s", None, value_reason=reason, step="steady")


def _timed(context: Context, found: Ready, dtypes: list[str]) -> Result:
    work, batches = workloads.load(found.kind, context.sizes[found.kind], found.file, context.device)
    contenders = [Contender(dtype, dtype, {}, partial(work.engine, dtype, context.device, context.seed)) for dtype in dtypes]
    return compare_steps(context, work, batches[0], contenders, found.source)


def _agreements(told: Result) -> list[Row]:
    """How far each variant's losses lie from those of fp32 over the same batches, early and late, and how far they may."""
    found = []
    for row in (row for row in told.rows if row.metric == "training_loss" and row.dtype != REFERENCE):
        own = told.samples[told.samples["variant"] == row.variant]
        curves = {name: part["loss"].to_numpy() for name, part in own[own["kind"] == "step"].groupby("dtype")}
        if REFERENCE not in curves:
            continue
        compared = agreements(curves[row.dtype], curves[REFERENCE], own[own["kind"] == "twin"], BIAS[row.dtype])
        found += difference_rows(row, REFERENCE, compared)
    return found


def rate_forecast(context: Context, work: Workload, dtype: str) -> Forecast:
    """Throughput of a steady step from this run's ceilings and the model's shapes."""
    half = 0.5 if dtype in SIXTEEN_BIT else 1.0
    traffic = {name: moved * (half if name == "activations" else 1) for name, moved in work.step_bytes.items()}
    return step_forecasts(context, work.name, dtype, work.item, work.items, work.flops, traffic)[0]


def _speedup_forecast(rates: dict[str, Forecast], dtype: str) -> Forecast:
    rate, reference = rates[dtype], rates[REFERENCE]
    estimate, basis = None, rate.basis
    if None not in (rate.estimate, reference.estimate):
        estimate = rate.estimate / reference.estimate
        basis = f"the estimated throughputs of {dtype} and {REFERENCE}, one over the other"
    params = rate.params | {"over": REFERENCE}
    return Forecast(variant=rate.variant, metric="speedup", estimate=estimate, basis=basis, dtype=dtype, params=params)


def _memory_forecast(context: Context, work: Workload, dtype: str) -> Forecast:
    peak, standing = foretold(work, dtype, policy(), context.device).history.tensor_peak_bytes, work.standing_bytes
    basis = (
        f"the step itself on tensors without memory: {standing / GIB:.3g} GiB of weights and moments in float32, and "
        f"{(peak - standing) / GIB:.3g} GiB of activations and gradients at the fullest moment"
    )
    params = {"batch": work.items, "phase": "whole step"}
    return Forecast(variant=work.name, metric="tensor_memory_gib", estimate=peak / GIB, basis=basis, dtype=dtype, params=params)
