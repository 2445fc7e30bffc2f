"""Train the language model and the ResNet-18 in fp32, TF32, bf16, and fp16 with a loss scale, and compare the formats.

The memory and losses of each format are measured in a separate process. The steps of all formats are timed in alternation in one
process: eager steps, and on a GPU also the same steps replayed as graphs. An eager step in a 16-bit format often waits for the
host, so its time depends on the speed of the host. The time of a graph does not.
"""

from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import pandas as pd
import torch

from hyperion.chapter.context import Context, Experiment, Forecast, Options, Report, Result
from hyperion.chapter.efficiency import EAGER_STEP
from hyperion.chapter.rows import out_of_memory_reason, unused_tf32
from hyperion.chapter.variants import merged, run_side_by_side
from hyperion.hardware import Device
from hyperion.measure import Gemm, PeakMemoryRegion, TensorMemory, state_of
from hyperion.measure.clock.timing import MINIMUM_SAMPLES
from hyperion.parallel import ParallelPlan
from hyperion.results import Row
from hyperion.training import TorchEngine
from hyperion.training.captured import why_not_captured
from hyperion.units import GIB
from hyperion.workloads import datasets
from hyperion.workloads.training_rows import Contender, compare_steps, rate_forecast
from hyperion.workloads.twins import BIAS, agreements, difference_rows, train_twins
from hyperion.workloads.workloads import (
    KINDS,
    NO_VOCABULARY,
    Batch,
    ImageSizes,
    LanguageSizes,
    StoredBatches,
    Workload,
    common_source,
    estimate_step,
    expected_workload,
    load_batches,
    stored_batches,
)

REFERENCE = "fp32"
# Params of the rows of steps that are replayed as graphs. The rows of eager steps do not have them.
GRAPH = {"mode": "graph"}


class PrecisionVariantsOptions(Options):
    """Options for the `precision_variants` experiment.

    Args:
        dtypes: number formats to compare.
        batches: number of distinct batches. Training cycles through them in order.
        steps: number of optimizer steps of each training run.
        time_limit_s: timing budget in seconds for the steps of one model in all formats.
        samples: minimum number of timed steps of each format. Use a small number on a CPU that emulates 16-bit formats. A step
            takes seconds there.
        language: dimensions of the language model and its batches.
        image: dimensions of the ResNet-18 and its batches.
    """

    dtypes: tuple[str, ...]
    batches: int
    steps: int
    time_limit_s: float
    language: LanguageSizes
    image: ImageSizes
    samples: int = MINIMUM_SAMPLES

    def sizes(self, kind: str) -> LanguageSizes | ImageSizes:
        """Return the dimensions for a kind of model, "language" or "image"."""
        return self.language if kind == "language" else self.image


def forecast(context: Context) -> list[Forecast]:
    """Predict the speed-up of each format over fp32, its throughput, and the peak tensor bytes of a step.

    The first prediction in the list is a speed-up. The reader of the chapter guesses its value before the measurement.
    """
    options, device = PrecisionVariantsOptions.of(context), context.device
    lines: list[Forecast] = []
    for kind in KINDS:
        work = expected_workload(context, options.sizes(kind))
        if work is None:
            lines.append(Forecast(options.language.model, "speedup", None, NO_VOCABULARY))
            continue
        dtypes = [dtype for dtype in options.dtypes if device.supports(dtype)[0]]
        rates = {dtype: rate_forecast(context, work, dtype, EAGER_STEP) for dtype in dtypes if not _why_emulated(device, dtype)}
        others = sorted((dtype for dtype in rates if dtype != REFERENCE), key=lambda dtype: dtype != "bf16")
        lines += [speedup_forecast(rates[dtype], rates[REFERENCE], REFERENCE) for dtype in others]
        graphs = [rate_forecast(context, work, dtype) for dtype in rates if not why_not_captured(device, 1, dtype)]
        lines += [*rates.values(), *(replace(graph, params=graph.params | GRAPH) for graph in graphs)]
        lines += [_memory_forecast(device, work, dtype) for dtype in dtypes]
    return lines


def run(context: Context, report: Report) -> Result:
    """Train in each format in a separate process on the same batches. Then time the steps of all formats in alternation."""
    options = PrecisionVariantsOptions.of(context)
    with stored_batches(context, {kind: options.sizes(kind) for kind in KINDS}, options.batches) as stored:
        return _compared(context, options, report, stored)


def _compared(context: Context, options: PrecisionVariantsOptions, report: Report, stored: list[StoredBatches]) -> Result:
    reasons = {dtype: _why_unsupported(context.device, dtype) for dtype in options.dtypes}
    dtypes = [dtype for dtype, reason in reasons.items() if not reason]
    cells = [batches.params | {"dtype": dtype} for batches in stored for dtype in dtypes]
    twins = [batches.params for batches in stored] if any(dtype != REFERENCE for dtype in dtypes) else []
    # Memory and losses do not depend on other processes, so the formats train concurrently. Times are measured later, without
    # other processes. The twins (see `twins_of_variant`) train longer than one format, so they start first.
    results = run_side_by_side(context, report, train_variant_or_twins, twins + cells)
    reasons = {dtype: reason or _why_emulated(context.device, dtype) for dtype, reason in reasons.items()}
    for number, batches in enumerate(stored):
        report(number, len(stored), f"steps of the {batches.kind} model, alternately")
        results += _timed(context, options, batches, reasons)
    result = merged(results)
    return replace(result, rows=result.rows + _difference_rows(result), source=common_source(stored))


def train_variant_or_twins(context: Context, report: Report, **params: Any) -> Result:
    """Call `train_variant` if `params` contains a number format. Otherwise, call `twins_of_variant`."""
    return train_variant(context, report, **params) if "dtype" in params else twins_of_variant(context, report, **params)


def train_variant(context: Context, report: Report, kind: str, file: str, source: str, dtype: str) -> Result:
    """Train in one number format and record losses and peak memory. Then count the peak tensor bytes in one more step."""
    options, device = PrecisionVariantsOptions.of(context), context.device
    steps = options.steps
    work, batches = load_batches(options.sizes(kind), Path(file), device)
    row = partial(_row, context, work, dtype, source)
    try:
        with PeakMemoryRegion(device) as region:
            engine = work.engine(dtype, device, context.seed)
            losses = train_losses(engine, batches, steps)
        # Count after training, so that the counting does not affect the peak that the allocator reports.
        tensor_bytes = tensor_bytes_of_a_step(engine, batches[0])
    except torch.OutOfMemoryError as error:
        absent = row("peak_memory_gib", None, value_reason=out_of_memory_reason(error), steps=steps)
        return Result([absent], pd.DataFrame(), source)
    # Average over one pass through all batches, because the losses of different batches differ.
    last = losses[-len(batches) :]
    rows = [
        row("training_loss", sum(last) / len(last), steps=steps, limit_source="no limit: it can be learnt by heart"),
        row("tensor_memory_gib", tensor_bytes / GIB, phase="whole step"),
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


def twins_of_variant(context: Context, report: Report, kind: str, file: str, source: str) -> Result:
    """Train the twins: repetitions of the fp32 training run with perturbed rounding.

    In a twin, the operands and results of matrix products are rounded to the precision of bf16. The spread of the twins' losses
    sets the tolerance for the difference between two formats' losses (see `hyperion.workloads.twins`). If the device has TF32,
    the products of the twins use it. This takes a third of the time, and TF32 rounds eight times as finely as bf16.
    """
    options = PrecisionVariantsOptions.of(context)
    work, batches = load_batches(options.sizes(kind), Path(file), context.device)
    dtype = REFERENCE if _why_unsupported(context.device, "tf32") else "tf32"

    def train() -> list[float]:
        return train_losses(work.engine(dtype, context.device, context.seed), batches, options.steps)

    return Result([], train_twins("bf16", context.seed, train).assign(variant=work.name), source)


EXPERIMENT = Experiment(
    forecast,
    run,
    options=PrecisionVariantsOptions,
    forecast_reads=("text_pipeline", "gemm", "bandwidth"),
    data=datasets.TEXT + datasets.IMAGES,
)


def train_losses(engine: TorchEngine, batches: Iterable[Batch], steps: int) -> list[float]:
    """Train for a number of steps and return the loss of every step. The batches are repeated in the same order."""
    losses = [engine.train_step(batch).loss for batch in islice(cycle(batches), steps)]
    # One transfer at the end, because reading each loss would make every step wait for the device.
    return torch.stack(losses).tolist()


def tensor_bytes_of_a_step(engine: TorchEngine, batch: Batch) -> int:
    """Return the peak bytes of all tensors in one step, including weights, optimizer state and batch.

    The number is the sum of the sizes of all existing tensors. It needs no allocator statistics, so it is exact on every device.
    """
    present = [tensor for tensors in state_of(engine.model, engine.optimizer).values() for tensor in tensors]
    with TensorMemory(engine.device, [*present, *batch]) as memory:
        engine.train_step(batch)
    return memory.peak_bytes


def why_not_timed(device: Device, dtype: str) -> str:
    """Return the reason why steps in this format are not timed on this device, or an empty string if they are."""
    return _why_unsupported(device, dtype) or _why_emulated(device, dtype)


def speedup_forecast(rate: Forecast, baseline: Forecast, over: str) -> Forecast:
    """Return the forecast of a speed-up from two throughput forecasts.

    Args:
        rate: forecast of the throughput in one number format.
        baseline: forecast of the throughput in the baseline format.
        over: name of the baseline in the speed-up rows.
    """
    estimate, basis = None, rate.basis
    if rate.ceiling is not None and baseline.ceiling is not None:
        # A training step reaches an unknown share of its ceiling. If the share is the same in both formats, it cancels.
        estimate = rate.ceiling / baseline.ceiling
        basis = f"the ceiling of the throughput of {rate.dtype}, divided by that of {baseline.dtype}"
    params = rate.params | {"over": over}
    return replace(rate, metric="speedup", estimate=estimate, basis=basis, params=params, ceiling=None, low=None, high=None)


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


def _why_unsupported(device: Device, dtype: str) -> str:
    """Return the reason why a format cannot run on this device, or an empty string if it can."""
    possible, how = device.supports(dtype)
    if not possible:
        return f"unsupported: {how}"
    # PyTorch does not report which units computed a product. Only the accuracy of the product reveals it.
    unused = unused_tf32(dtype, Gemm(256, 256, 256, dtype, device).verify().error) if dtype == "tf32" else ""
    return f"unsupported: {unused}" if unused else ""


def _why_emulated(device: Device, dtype: str) -> str:
    """Return the reason why a format is not timed, or an empty string if the device has instructions for it.

    A format without instructions is emulated, so its time says nothing about the format.
    """
    how = device.supports(dtype)[1]
    return f"not timed, because it says nothing of the format: {how}" if how.startswith("emulated") else ""


def _timed(context: Context, options: PrecisionVariantsOptions, stored: StoredBatches, reasons: dict[str, str]) -> list[Result]:
    """Time the steps of all number formats in alternation: first the eager steps, then on a GPU the graphs.

    Args:
        reasons: a dict that maps each format to the reason why it is not timed, or to an empty string if it is.
    """
    work, batches = load_batches(options.sizes(stored.kind), stored.file, context.device)

    def timed(build: Callable[[str], TorchEngine], params: dict, reasons: dict[str, str]) -> Result:
        contenders = [Contender(dtype, dtype, params, partial(build, dtype)) for dtype, reason in reasons.items() if not reason]
        result = compare_steps(context, work, batches[0], contenders, stored.source, options.time_limit_s, options.samples)
        absent = [
            _row(context, work, dtype, stored.source, "step_time_s", None, value_reason=reason, step="steady", **params)
            for dtype, reason in reasons.items()
            if reason
        ]
        return replace(result, rows=result.rows + absent)

    def eager(dtype: str) -> TorchEngine:
        return work.engine(dtype, context.device, context.seed)

    def graph(dtype: str) -> TorchEngine:
        engine = eager(dtype)
        engine.capture()
        engine.train_step(batches[0])  # capture before the timing, because the warm-up is shorter than a capture
        return engine

    results = [timed(eager, {}, reasons)]
    if context.device.kind != "cpu":
        why = {dtype: why_not_captured(context.device, 1, dtype) for dtype in reasons}
        results.append(
            timed(graph, GRAPH, {d: reason or why[d] and f"not timed as a graph: {why[d]}" for d, reason in reasons.items()})
        )
    return results


def _difference_rows(result: Result) -> list[Row]:
    """Return rows that compare each format's losses with the fp32 losses on the same batches, early and late in training."""
    rows = []
    for row in result.rows:
        if row.metric != "training_loss" or row.dtype == REFERENCE:
            continue
        samples = result.samples.query("variant == @row.variant")
        curves = {dtype: part["loss"].to_numpy() for dtype, part in samples.query("kind == 'step'").groupby("dtype")}
        if REFERENCE in curves:
            twins = samples.query("kind == 'twin'")
            compared = agreements(curves[row.dtype], curves[REFERENCE], twins, BIAS[row.dtype])
            rows += difference_rows(row, REFERENCE, compared)
    return rows


def _memory_forecast(device: Device, work: Workload, dtype: str) -> Forecast:
    peak, standing = estimate_step(work, dtype, ParallelPlan(), device).history.tensor_peak_bytes, work.standing_bytes
    return Forecast(
        work.name,
        "tensor_memory_gib",
        peak / GIB,
        f"the step runs on tensors without memory (meta tensors): {standing / GIB:.3g} GiB of weights and optimizer moments in "
        f"float32, and {(peak - standing) / GIB:.3g} GiB of activations and gradients at the peak",
        dtype=dtype,
        params={"batch": work.items, "phase": "whole step"},
    )
