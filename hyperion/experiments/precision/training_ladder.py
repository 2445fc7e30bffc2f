"""What each means of speeding up a training step adds to those before it: time, memory and loss, from plain fp32 upwards.

Memory and losses of each rung come from a process of its own; all steps are then timed in turn, since speeds that were
measured one after the other differ by clocks and temperature too.
"""

from dataclasses import replace
from functools import partial
from itertools import cycle, islice
from pathlib import Path

import numpy as np
import pandas as pd
import torch

from hyperion.chapter.context import Context, Experiment, Forecast, Result
from hyperion.chapter.rows import out_of_memory_reason, sample_frame, timed_columns
from hyperion.chapter.side_by_side import run_counted
from hyperion.chapter.variants import merged
from hyperion.experiments.precision.ladder_rungs import BASELINE, Rung, ladder
from hyperion.experiments.precision.precision_variants import rate_forecast, tensor_bytes_of_a_step
from hyperion.measure import PeakMemoryRegion, Timing, time_interleaved
from hyperion.results import Row, ratio_estimate
from hyperion.workloads import datasets, workloads
from hyperion.workloads.step_comparison import emptied_afterwards
from hyperion.workloads.training_rows import speed_rows
from hyperion.workloads.twins import BIAS, agreements, difference_rows, train_twins, twin_format
from hyperion.workloads.workloads import Batch, Ready, Workload

GIB = 2**30
_FORETOLD = ("tf32", "bf16")  # of the others shapes and ceilings say nothing
_STEPS_FOR_MEMORY = 3
_NO_LIMIT = "no limit: how far the slower of the two stays below its own limit is not bounded"


def forecast(context: Context) -> list[Forecast]:
    """The speed of the 16-bit rung over the first (to be guessed), and throughputs where a rung changes the format."""
    lines: list[Forecast] = []
    for kind in _kinds(context):
        work = workloads.foretold(context, kind)
        if work is None:
            basis = "no estimate: this run has not counted the vocabulary (01_dataset_preparation)"
            lines.append(Forecast(variant=context.sizes[kind]["model"], metric="speedup", estimate=None, basis=basis))
            continue
        rungs = [rung for rung in ladder(context, kind) if not rung.absent and rung.name in (BASELINE, *_FORETOLD)]
        rates = [_of(rung, rate_forecast(context, work, rung.dtype)) for rung in rungs]
        ratios = [_ratio_forecast(rate, rates[0]) for rate in rates[1:]]
        lines += [*sorted(ratios, key=lambda line: line.dtype != "bf16"), *rates]
    return lines


def run(context: Context, report) -> Result:
    """Each rung alone for memory and losses, then the steps of a model's rungs in turn."""
    ready = {kind: workloads.prepare(context, kind) for kind in _kinds(context)}
    try:
        cells, twins = [], []
        for kind, found in ready.items():
            present = [(number, rung) for number, rung in enumerate(ladder(context, kind)) if not rung.absent]
            cells += [found.for_worker() | {"number": number} for number, _ in present]
            formats = dict.fromkeys(twin_format(rung.dtype) for _, rung in present if rung.name != BASELINE)
            twins += [found.for_worker() | {"dtype": dtype} for dtype in formats]
        results = run_counted(context, report, measure_alone, cells)
        results += run_counted(context, report, measure_twins, twins)
        for done, found in enumerate(ready.values()):
            report(done, len(ready), f"steps of the {found.kind} model in turn")
            results.append(_timed(context, found))
    finally:
        for found in ready.values():
            found.file.unlink()
    told = merged(results)
    return replace(told, rows=told.rows + _differences(told), source=workloads.source_of(ready.values()))


EXPERIMENT = Experiment(
    forecast, run, forecast_reads=("text_pipeline", "gemm", "bandwidth"), data=datasets.TEXT + datasets.IMAGES
)


def measure_alone(context: Context, report, kind: str, file: str, source: str, number: int) -> Result:
    """One rung: the most memory of its steps, then the losses of a shorter model over many steps."""
    rung, device = ladder(context, kind)[number], context.device
    work, batches = workloads.load(kind, context.sizes[kind], Path(file), device)
    row = partial(_row, context, work, rung, source)
    try:
        with emptied_afterwards(), PeakMemoryRegion(device) as region:
            engine = rung.engine(work, device, context.seed)
            for batch in islice(cycle(batches), _STEPS_FOR_MEMORY):
                engine.train_step(batch)
            rows = _memory_rows(row, work, rung, engine, batches[0])
            del engine
    except torch.OutOfMemoryError as error:
        return Result([row("peak_memory_gib", None, value_reason=out_of_memory_reason(error))], pd.DataFrame(), source)
    if device.kind != "cpu":  # on a CPU the region is the whole process
        limit = f"weights and {work.moments} moments of each in float32"
        rows.append(row(region.peak.metric, region.peak.gib, limit=work.standing_bytes / GIB, limit_source=limit))
    losses = _losses(context, kind, rung, work, batches)
    told = _parity(context, kind) | {"steps": len(losses)}
    last = float(np.mean(losses[-max(2, len(losses) // 4) :]))
    rows.append(row("training_loss", last, limit_source="no limit: it can be learnt by heart", **told))
    curve = pd.DataFrame({"kind": "step", "step": range(1, len(losses) + 1), "loss": losses})
    return Result(rows, curve.assign(variant=work.name, dtype=rung.dtype, rung=rung.name), source)


def measure_twins(context: Context, report, kind: str, file: str, source: str, dtype: str) -> Result:
    """Twins of the first rung, whose products round at random as coarsely as the format does."""
    work, batches = workloads.load(kind, context.sizes[kind], Path(file), context.device)
    first = ladder(context, kind)[0]
    twins = train_twins(dtype, context.seed, lambda: _losses(context, kind, first, work, batches))
    return Result([], twins.assign(variant=work.name), source)


def _memory_rows(row, work: Workload, rung: Rung, engine, batch: Batch) -> list[Row]:
    """Bytes of tensors, where each is made by an operator that can be watched: inside compiled code none is."""
    return [] if rung.compiled else [row("tensor_memory_gib", tensor_bytes_of_a_step(engine, batch) / GIB)]


def _losses(context: Context, kind: str, rung: Rung, work: Workload, batches: list[Batch]) -> list[float]:
    """Losses of a model with fewer layers or a smaller batch, so that as many steps as a claim needs take seconds.

    Smaller batches are as many more, for a model that meets the same few again and again learns them by heart: its loss
    goes to zero, and the rounding of one step to a large share of it.
    """
    parity, steps = _parity(context, kind), context.sizes["parity_steps"]
    sizes = context.sizes[kind] | parity
    vocabulary = work.config.vocab_size if work.config else 0
    short = workloads.workload(kind, sizes, vocabulary, parity.get("layers", 0))
    cut = [zip(*(part.split(sizes["batch_size"]) for part in batch), strict=True) for batch in batches]
    batches = [batch for several in cut for batch in several]
    with emptied_afterwards():
        engine = rung.engine(short, context.device, context.seed)
        told = [engine.train_step(batch).loss for batch in islice(cycle(batches), steps)]
        return torch.stack(told).tolist()


def _timed(context: Context, found: Ready) -> Result:
    work, batches = workloads.load(found.kind, context.sizes[found.kind], found.file, context.device)
    rungs = ladder(context, found.kind)
    present = [rung for rung in rungs if not rung.absent]
    row = partial(_row, context, work, source=found.source)
    untimed = partial(row, metric="step_time_s", value=None, step="steady")
    absent = [untimed(rung, value_reason=rung.absent) for rung in rungs if rung.absent]
    try:
        with emptied_afterwards():
            engines = [rung.engine(work, context.device, context.seed) for rung in present]
            steps = [partial(engine.train_step, batches[0]) for engine in engines]
            for step in steps:  # compiles what is compiled, which no warm-up has time for
                step()
            timings = time_interleaved(steps, context.device, cold=False, time_limit_s=context.sizes["time_limit_s"])
            del engines, steps
    except torch.OutOfMemoryError as error:
        reason = out_of_memory_reason(error)
        rows = [untimed(rung, value_reason=reason) for rung in present]
        return Result([*absent, *rows], pd.DataFrame(), found.source)
    rows, frames = [], []
    for rung, timing in zip(present, timings, strict=True):
        params = _params(work, rung) | {"step": "steady"}
        shared = {"dtype": rung.dtype, "params": params, "data_source": found.source}
        rows += speed_rows(context, work.name, work.item, work.items, timing, work.flops, work.least_flops, shared)
        frames.append(sample_frame(timing, work.name, rung.dtype, params).assign(kind="steady step", rung=rung.name))
    rows += _speedups(row, present, timings)
    return Result(rows + absent, pd.concat(frames, ignore_index=True), found.source)


def _speedups(row, rungs: list[Rung], timings: list[Timing]) -> list[Row]:
    """Of each rung over the one before it, and over the first."""
    found = []
    for number, (rung, timing) in enumerate(zip(rungs, timings, strict=True)):
        for other in sorted({max(number - 1, 0), 0} - {number}):
            ratio = ratio_estimate(timing.samples_s, timings[other].samples_s)
            columns = {"limit_source": _NO_LIMIT, "columns": timed_columns(ratio, timing)}
            found.append(row(rung, metric="speedup", value=ratio.value, step="steady", over=rungs[other].name, **columns))
    return found


def _differences(told: Result) -> list[Row]:
    """How far each rung's losses lie from those of the first over the same steps, early and late, and how far they may: as
    far as trainings of the first rung lie apart that round differently."""
    found = []
    for row in (row for row in told.rows if row.metric == "training_loss"):
        own = told.samples[told.samples["variant"] == row.variant]
        curves = {name: part["loss"].to_numpy() for name, part in own[own["kind"] == "step"].groupby("rung")}
        if row.params["rung"] == BASELINE or BASELINE not in curves:
            continue
        twins = own[(own["kind"] == "twin") & (own["dtype"] == twin_format(row.dtype))]
        compared = agreements(curves[row.params["rung"]], curves[BASELINE], twins, BIAS[row.dtype])
        found += difference_rows(row, BASELINE, compared)
    return found


def _kinds(context: Context) -> list[str]:
    return [kind for kind in workloads.KINDS if kind in context.sizes]


def _parity(context: Context, kind: str) -> dict:
    """What is smaller in the model whose losses are compared: layers or batch_size."""
    return context.sizes[kind].get("parity", {})


def _params(work: Workload, rung: Rung) -> dict:
    return {"batch": work.items, "rung": rung.name}


def _row(
    context: Context,
    work: Workload,
    rung: Rung,
    source: str,
    metric: str,
    value: float | None,
    *,
    value_reason: str = "",
    limit: float | None = None,
    limit_source: str = "",
    columns: dict | None = None,
    **params,
) -> Row:
    return context.row(
        work.name,
        metric,
        value,
        dtype=rung.dtype,
        params=_params(work, rung) | params,
        value_reason=value_reason,
        limit=limit,
        limit_source=limit_source,
        data_source=source,
        **(columns or {}),
    )


def _of(rung: Rung, line: Forecast) -> Forecast:
    return replace(line, params=line.params | {"rung": rung.name})


def _ratio_forecast(rate: Forecast, first: Forecast) -> Forecast:
    known = None not in (rate.estimate, first.estimate)
    basis = f"the estimated throughputs of {rate.dtype} and {first.dtype}, one over the other" if known else rate.basis
    estimate = rate.estimate / first.estimate if known else None
    return replace(rate, metric="speedup", estimate=estimate, basis=basis, params=rate.params | {"over": BASELINE})
