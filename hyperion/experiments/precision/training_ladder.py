"""The training ladder: start with a plain fp32 training step, and add one optimization after the other.

A rung is one version of the training step. It contains all optimizations of the previous rungs and one more. The memory and
losses of each rung are measured in a separate process. The steps of all rungs are timed in alternation in one process. If they
were timed one after the other, changes of clock and temperature would distort the comparison.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from itertools import cycle, islice
from pathlib import Path
from typing import Any, cast

import numpy as np
import pandas as pd
import torch
import torch.nn.functional as F
from pydantic import BaseModel
from torch import Tensor, nn

from hyperion.chapter.context import Context, Experiment, Forecast, Options, Report, Result
from hyperion.chapter.efficiency import EAGER_STEP
from hyperion.chapter.rows import out_of_memory_reason, sample_frame, timed_columns
from hyperion.chapter.variants import merged, run_counted
from hyperion.data.packing import IGNORE_INDEX
from hyperion.errors import HyperionError
from hyperion.experiments.precision.precision_variants import (
    speedup_forecast,
    tensor_bytes_of_a_step,
    train_losses,
    why_not_timed,
)
from hyperion.hardware import Device
from hyperion.measure import PeakMemoryRegion, Timing, time_interleaved
from hyperion.measure.steps.compilation import missing_compiler
from hyperion.measure.steps.profiled import device_seconds
from hyperion.models import TransformerLM
from hyperion.parallel import ParallelPlan
from hyperion.parallel.parallelize import EVERY_BLOCK, NONE
from hyperion.results import BUSY_GPU, Row, ratio_estimate
from hyperion.training import TorchEngine
from hyperion.training.float8 import float8_formats, to_float8
from hyperion.units import GIB
from hyperion.workloads import datasets
from hyperion.workloads.training_rows import NO_SPEEDUP_LIMIT, memory_released, rate_forecast, speed_rows
from hyperion.workloads.twins import BIAS, agreements, difference_rows, train_twins, twin_format
from hyperion.workloads.workloads import (
    NO_VOCABULARY,
    Batch,
    ImageSizes,
    LanguageSizes,
    StoredBatches,
    Workload,
    applied,
    common_source,
    expected_workload,
    load_batches,
    stored_batches,
    workload,
)

BASELINE = "baseline"
# Fields of StepRung that each rung changes compared with the previous one.
_ADDITIONS: dict[str, dict] = {
    BASELINE: {},
    "tf32": {"dtype": "tf32"},
    "bf16": {"dtype": "bf16"},
    "channels_last": {"channels_last": True},
    "fused optimizer": {"fused": True},
    "compile": {"compiled": True},
    "chunked loss": {"chunked": True},
    "activation checkpointing": {"checkpointing": EVERY_BLOCK},
    "fp8": {"dtype": "fp8"},
}
_PREDICTABLE = (BASELINE, "tf32", "bf16")  # rungs with a prediction; shapes and ceilings do not predict the effect of the others
_CHUNKS = 4  # number of chunks into which the chunked loss divides a batch
_MEMORY_STEPS = 3


class Parity(BaseModel, extra="forbid", frozen=True, strict=True):
    """Smaller dimensions for the loss comparison, so that many steps take only seconds.

    Args:
        batch_size: number of samples in a batch. None uses the batch size of the timed step. Each stored batch is split into
            batches of this size. This gives so many distinct batches that the model cannot memorise them. If it memorised them,
            the loss would go to zero.
        layers: number of layers of the language model. None uses the number of the timed model.
    """

    batch_size: int | None = None
    layers: int | None = None


class LanguageLadder(LanguageSizes, frozen=True):
    """Language model of the training ladder: its dimensions, and the optimizations added one after the other.

    Args:
        rungs: names of the rungs, from the first to the last. They are keys of `_ADDITIONS`.
        parity: smaller dimensions for the loss comparison.
    """

    rungs: tuple[str, ...]
    parity: Parity = Parity()


class ImageLadder(ImageSizes, frozen=True):
    """ResNet-18 of the training ladder: its dimensions, and the optimizations added one after the other.

    The arguments are the same as for `LanguageLadder`.
    """

    rungs: tuple[str, ...]
    parity: Parity = Parity()


class TrainingLadderOptions(Options):
    """Options for the `training_ladder` experiment.

    Args:
        batches: number of distinct batches. Training cycles through them in order.
        parity_steps: number of optimizer steps in the loss comparison.
        time_limit_s: timing budget in seconds for all rungs (versions of the training step) of one model.
        language: dimensions of the language model and names of the added optimizations. None omits this model.
        image: dimensions of the ResNet-18 and names of the added optimizations. None omits this model.
    """

    batches: int
    parity_steps: int
    time_limit_s: float
    language: LanguageLadder | None = None
    image: ImageLadder | None = None

    @property
    def ladders(self) -> dict[str, LanguageLadder | ImageLadder]:
        """A dict that maps each kind of model, "language" or "image", to its options."""
        return {kind: sizes for kind, sizes in (("language", self.language), ("image", self.image)) if sizes is not None}


def forecast(context: Context) -> list[Forecast]:
    """Predict the speed-up of the 16-bit step over the plain fp32 step.

    The reader of the chapter guesses this speed-up before the measurement. Also predict the throughput of each version of the
    step that changes the number format.
    """
    lines: list[Forecast] = []
    for sizes in TrainingLadderOptions.of(context).ladders.values():
        work = expected_workload(context, sizes)
        if work is None:
            variant = sizes.model if isinstance(sizes, LanguageLadder) else ""
            lines.append(Forecast(variant, "speedup", None, NO_VOCABULARY))
            continue
        rungs = [rung for rung in build_ladder(context.device, sizes.rungs) if not rung.absent and rung.name in _PREDICTABLE]
        rates = [rate_forecast(context, work, rung.dtype, EAGER_STEP) for rung in rungs]
        rates = [replace(rate, params=rate.params | {"rung": rung.name}) for rung, rate in zip(rungs, rates, strict=True)]
        speedups = [speedup_forecast(rate, rates[0], BASELINE) for rate in rates[1:]]
        lines += [*sorted(speedups, key=lambda line: line.dtype != "bf16"), *rates]
    return lines


def run(context: Context, report: Report) -> Result:
    """Measure memory and losses of each rung in a separate process. Then time the steps of each model's rungs in alternation."""
    options = TrainingLadderOptions.of(context)
    with stored_batches(context, options.ladders, options.batches) as stored:
        cells, twins = [], []
        for batches in stored:
            rungs = build_ladder(context.device, options.ladders[batches.kind].rungs)
            present = [(number, rung) for number, rung in enumerate(rungs) if not rung.absent]
            cells += [batches.params | {"number": number} for number, _ in present]
            formats = dict.fromkeys(twin_format(rung.dtype) for _, rung in present if rung.name != BASELINE)
            twins += [batches.params | {"dtype": dtype} for dtype in formats]
        # The twins (see `measure_twins`) train longer than a rung, so they start first.
        results = run_counted(context, report, measure_rung_or_twins, twins + cells)
        for number, batches in enumerate(stored):
            report(number, len(stored), f"steps of the {batches.kind} model, alternately")
            results.append(_timed(context, options, batches))
    result = merged(results)
    return replace(result, rows=result.rows + _difference_rows(result), source=common_source(stored))


EXPERIMENT = Experiment(
    forecast,
    run,
    options=TrainingLadderOptions,
    forecast_reads=("text_pipeline", "gemm", "bandwidth"),
    data=datasets.TEXT + datasets.IMAGES,
)


@dataclass(frozen=True)
class StepRung:
    """One rung of the ladder: a version of the training step that adds one optimization to the previous rung.

    Attributes:
        name: name of the rung. It is the optimization that the rung adds to the previous one.
        dtype: number format of the matrix products.
        channels_last: whether images and convolution kernels have the channels-last memory format.
        fused: if True, the optimizer updates all parameters in one kernel. Otherwise, it uses PyTorch's default implementation.
        compiled: whether each block is compiled.
        chunked: whether the language model's loss is computed in chunks of the batch, without float32 logits. Otherwise all
            logits exist at once, in float32.
        checkpointing: activation-checkpointing policy, as in ParallelPlan.
        absent: reason why the rung cannot run on this device, or an empty string if it can. Later rungs omit the addition of a
            rung that cannot run.
    """

    name: str
    dtype: str = "fp32"
    channels_last: bool = False
    fused: bool = False
    compiled: bool = False
    chunked: bool = False
    checkpointing: str = NONE
    absent: str = ""

    def engine(self, work: Workload, device: Device, seed: int) -> TorchEngine:
        """Return a new training engine with the optimizations of this rung.

        With the same seed, all rungs have the same initial weights.
        """
        plan = ParallelPlan(checkpointing=self.checkpointing, compile_blocks=self.compiled)

        def wrap(model: nn.Module) -> nn.Module:
            if self.dtype == "fp8":
                model = to_float8(model, float8_formats(device))
            if work.kind == "language" and self.chunked:
                # Tokens per chunk, rounded up.
                cast(TransformerLM, model).loss_chunk_tokens = -(-work.items // _CHUNKS)
            # After `to_float8`, because the compiler must see the replaced layers.
            model = applied(plan, device)(model)
            return AllLogits(model) if work.kind == "language" and not self.chunked else model

        engine = work.engine(self.dtype, device, seed, wrap)
        if not self.fused:
            for group in engine.optimizer.param_groups:
                # None restores the default choice of PyTorch's optimizers.
                group.update(fused=None, foreach=None)
        if work.kind == "image" and not self.channels_last:
            engine.model.to(memory_format=torch.contiguous_format)  # pyright: ignore[reportCallIssue] torch declares no such overload
        return engine


class AllLogits(nn.Module):
    """A language model with the standard cross-entropy loss: all logits of a batch exist at once, in float32.

    Args:
        model: maps inputs_BT to logits_BTV.
    """

    def __init__(self, model: nn.Module):
        super().__init__()
        self.model = model

    def forward(self, inputs_BT: Tensor, targets_BT: Tensor) -> Tensor:
        """Return the negative log-likelihoods nll_BT in nats, in float32. They are zero where the target is IGNORE_INDEX."""
        # The chunked loss avoids this float32 copy of the logits.
        logits_MV = self.model(inputs_BT).flatten(0, 1).float()
        nll_M = F.cross_entropy(logits_MV, targets_BT.flatten(), ignore_index=IGNORE_INDEX, reduction="none")
        return nll_M.view_as(targets_BT)


def build_ladder(device: Device, names: tuple[str, ...]) -> list[StepRung]:
    """Return the rungs (versions of the training step) with these names, in the given order.

    Rungs that cannot run on the device are included.
    """
    rungs, below = [], StepRung(BASELINE)
    for name in names:
        rung = replace(below, name=name, **_ADDITIONS[name])
        rung = replace(rung, absent=_why_absent(device, name))
        rungs.append(rung)
        below = below if rung.absent else rung
    return rungs


def _why_absent(device: Device, name: str) -> str:
    if name == "compile":
        missing = missing_compiler(device)
        return f"unsupported: {missing}" if missing else ""
    dtype = _ADDITIONS[name].get("dtype")
    return why_not_timed(device, dtype) if dtype else ""


def measure_rung_or_twins(context: Context, report: Report, **params: Any) -> Result:
    """Call `measure_alone` if `params` contains the number of a rung. Otherwise, call `measure_twins`."""
    return measure_alone(context, report, **params) if "number" in params else measure_twins(context, report, **params)


def measure_alone(context: Context, report: Report, kind: str, file: str, source: str, number: int) -> Result:
    """Measure one rung of the ladder: peak memory and losses.

    The peak memory is that of the full model's training steps. The losses are those of many steps of the smaller model described
    by `Parity`.
    """
    options, device = TrainingLadderOptions.of(context), context.device
    sizes = options.ladders[kind]
    rung = build_ladder(device, sizes.rungs)[number]
    work, batches = load_batches(sizes, Path(file), device)
    row = partial(_row, context, work, source, rung)
    try:
        with memory_released(), PeakMemoryRegion(device) as region:
            engine = rung.engine(work, device, context.seed)
            for batch in islice(cycle(batches), _MEMORY_STEPS):
                engine.train_step(batch)
            # Tensor bytes are counted when operators are dispatched, and compiled code dispatches no operators.
            rows = [] if rung.compiled else [row("tensor_memory_gib", tensor_bytes_of_a_step(engine, batches[0]) / GIB)]
            del engine
    except torch.OutOfMemoryError as error:
        return Result([row("peak_memory_gib", None, value_reason=out_of_memory_reason(error))], pd.DataFrame(), source)
    if device.kind != "cpu":  # on a CPU, the measured peak would be that of the whole process
        limit = f"weights and {work.moments} moments of each in float32"
        rows.append(row(region.peak.metric, region.peak.gib, limit=work.standing_bytes / GIB, limit_source=limit))
    losses = _parity_losses(context, options, kind, rung, work, batches)
    params: dict[str, Any] = sizes.parity.model_dump(exclude_none=True) | {"steps": len(losses)}
    last = float(np.mean(losses[-max(2, len(losses) // 4) :]))
    rows.append(row("training_loss", last, limit_source="no limit: it can be learnt by heart", **params))
    curve = pd.DataFrame({"kind": "step", "step": range(1, len(losses) + 1), "loss": losses})
    return Result(rows, curve.assign(variant=work.name, dtype=rung.dtype, rung=rung.name), source)


def measure_twins(context: Context, report: Report, kind: str, file: str, source: str, dtype: str) -> Result:
    """Train the twins: repetitions of the first rung's training run with perturbed rounding.

    In a twin, the operands and results of matrix products are rounded to the precision of `dtype`. The spread of the twins'
    losses sets the tolerance for the difference between two rungs' losses (see `hyperion.workloads.twins`).
    """
    options = TrainingLadderOptions.of(context)
    sizes = options.ladders[kind]
    work, batches = load_batches(sizes, Path(file), context.device)
    first = build_ladder(context.device, sizes.rungs)[0]
    twins = train_twins(dtype, context.seed, lambda: _parity_losses(context, options, kind, first, work, batches))
    return Result([], twins.assign(variant=work.name), source)


def _parity_losses(
    context: Context, options: TrainingLadderOptions, kind: str, rung: StepRung, work: Workload, batches: list[Batch]
) -> list[float]:
    """Train the smaller model on the smaller batches described by `Parity`. Return the loss of every step."""
    changes = options.ladders[kind].parity.model_dump(exclude_none=True)
    short = workload(work.sizes.model_copy(update=changes))
    parts = [
        part
        for inputs, targets in batches
        for part in zip(inputs.split(short.sizes.batch_size), targets.split(short.sizes.batch_size), strict=True)
    ]
    with memory_released():
        return train_losses(rung.engine(short, context.device, context.seed), parts, options.parity_steps)


def _timed(context: Context, options: TrainingLadderOptions, stored: StoredBatches) -> Result:
    sizes, source = options.ladders[stored.kind], stored.source
    work, batches = load_batches(sizes, stored.file, context.device)
    rungs = build_ladder(context.device, sizes.rungs)
    present = [rung for rung in rungs if not rung.absent]
    row = partial(_row, context, work, source)
    absent = [row(rung, "step_time_s", None, step="steady", value_reason=rung.absent) for rung in rungs if rung.absent]
    try:
        with memory_released():
            steps = [partial(rung.engine(work, context.device, context.seed).train_step, batches[0]) for rung in present]
            for step in steps:  # compile before the timing, because the warm-up is shorter than a compilation
                step()
            timings = time_interleaved([*steps], context.device, cold=False, time_limit_s=options.time_limit_s)
            busy = [
                _busy_row(context, step, timing, partial(row, rung))
                for rung, step, timing in zip(present, steps, timings, strict=True)
            ]
            del step, steps  # these are the last references to the engines
    except torch.OutOfMemoryError as error:
        reason = out_of_memory_reason(error)
        rows = [row(rung, "step_time_s", None, step="steady", value_reason=reason) for rung in present]
        return Result([*absent, *rows], pd.DataFrame(), source)
    rows, frames = [], []
    for rung, timing in zip(present, timings, strict=True):
        params = _params(work, rung) | {"step": "steady"}
        shared = {"dtype": rung.dtype, "params": params, "data_source": source}
        rows += speed_rows(context, work.name, work.item, work.items, timing, work.flops, work.least_flops, shared)
        frames.append(sample_frame(timing, work.name, rung.dtype, params).assign(kind="steady step", rung=rung.name))
    rows += [*filter(None, busy), *_speedup_rows(row, present, timings)]
    return Result(rows + absent, pd.concat(frames, ignore_index=True), source)


def _busy_row(context: Context, step: Callable[[], object], timing: Timing, row: partial[Row]) -> Row | None:
    """Return the row with the busy time of the GPU as a share of the step time, or None on a CPU.

    The busy time comes from the profiler. An eager step launches its kernels one by one, so a step with many short kernels takes
    as long as the host needs to launch them. An optimization that saves time on the GPU can then make the step slower.
    """
    if context.device.kind == "cpu":
        return None
    params = BUSY_GPU | {"step": "steady"}
    try:
        share = min(device_seconds(step, context.device) / timing.estimate.value, 1.0)
    except HyperionError as error:
        return row("share", None, value_reason=error.what, **params)
    return row("share", share, limit=1.0, limit_source="the GPU is busy during the whole step", **params)


def _speedup_rows(row: partial[Row], rungs: list[StepRung], timings: list[Timing]) -> list[Row]:
    """Return two rows for each rung: its speed-up over the previous rung, and its speed-up over the first rung."""
    rows = []
    for number, (rung, timing) in enumerate(zip(rungs, timings, strict=True)):
        # Compare with the previous rung and with the first one. A set, because both are the same for the second rung.
        for other in sorted({max(number - 1, 0), 0} - {number}):
            ratio = ratio_estimate(timing.samples_s, timings[other].samples_s)
            columns = {"limit_source": NO_SPEEDUP_LIMIT, "columns": timed_columns(ratio, timing)}
            rows.append(row(rung, "speedup", ratio.value, step="steady", over=rungs[other].name, **columns))
    return rows


def _difference_rows(result: Result) -> list[Row]:
    """Return rows that compare each rung's losses with those of the first rung, early and late in training.

    The tolerance comes from twins of the first rung: the same training run with perturbed rounding (see
    `hyperion.workloads.twins`).
    """
    rows = []
    for row in result.rows:
        if row.metric != "training_loss" or row.params["rung"] == BASELINE:
            continue
        samples = result.samples.query("variant == @row.variant")
        curves = {rung: part["loss"].to_numpy() for rung, part in samples.query("kind == 'step'").groupby("rung")}
        if BASELINE in curves:
            twins = samples.query(f"kind == 'twin' and dtype == {twin_format(row.dtype)!r}")
            compared = agreements(curves[row.params["rung"]], curves[BASELINE], twins, BIAS[row.dtype])
            rows += difference_rows(row, BASELINE, compared)
    return rows


def _params(work: Workload, rung: StepRung) -> dict:
    return {"batch": work.items, "rung": rung.name}


def _row(
    context: Context,
    work: Workload,
    source: str,
    rung: StepRung,
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
