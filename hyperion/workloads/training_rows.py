"""Build the result rows and the loss curves of training runs.

There are rows for epochs, rows for a timed step after warm-up, rows that compare several implementations of a step, and forecasts
of the throughput. Engines are compared by timing their steps in alternation: A B C A B C …. If they were timed one after the
other, changes of the device's clock and temperature would distort the comparison.
"""

import math
import statistics
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import Any

import pandas as pd
import torch

from hyperion.chapter.context import Context, Forecast, Report, Result
from hyperion.chapter.efficiency import EAGER_STEP, TRAINING_STEP, Expected, expected_share
from hyperion.chapter.rows import (
    NO_CEILINGS,
    gemm_limit,
    out_of_memory_reason,
    sample_frame,
    speedup_row,
    stream_ceiling,
    timed_row,
)
from hyperion.errors import not_none
from hyperion.hardware import Device, gemm_path, peak
from hyperion.measure import Timing, Verification, time_function, time_interleaved
from hyperion.measure.clock.timing import MINIMUM_SAMPLES
from hyperion.measure.memory_use.allocation import release_memory
from hyperion.models import ModelFlops
from hyperion.results import Estimate, Row, mean_estimate
from hyperion.training import EpochRecord, History, TorchEngine
from hyperion.workloads.workloads import Batch, Workload

# `limit_source` of speed-up rows.
NO_SPEEDUP_LIMIT = "no limit: how far the slower of the two stays below its own limit is not bounded"
# `value_reason` of epoch rows without a timed step.
NOT_TIMED = "no step of this epoch was timed, or the system does not report it"
_NO_LIMIT = "no limit: "


def epoch_rows(context: Context, variant: str, dtype: str, engine: TorchEngine, history: History, source: str) -> list[Row]:
    """Return the rows with the results of all epochs.

    Each epoch has rows for the loss, the learning rate, the throughput, the peak memory, the memory that the allocator of an
    accelerator holds, the wall time, and the share of time spent waiting for data.
    """
    rows = []
    for record, peak_gib in zip(history.epochs, _peaks(engine, history), strict=True):
        values = {
            "training_loss": (record.loss, _NO_LIMIT + "a model may fit what it is trained on exactly"),
            "learning_rate": (record.learning_rate, ""),
            f"{engine.item}s_per_s": (
                record.items_per_s,
                _NO_LIMIT + "loading is part of it; the steady step of this model has one",
            ),
            record.peak_memory_metric: (peak_gib, _NO_LIMIT + "the least memory that a step needs is not derived yet"),
            "epoch_time_s": (record.wall_s, ""),
        }
        if record.reserved_memory_gib is not None:
            values["reserved_memory_gib"] = (record.reserved_memory_gib, "")
        for metric, (value, limit_source) in values.items():
            reason = "" if value is not None else NOT_TIMED
            rows.append(
                context.row(
                    variant,
                    metric,
                    value,
                    dtype=dtype,
                    params=_epoch_params(record),
                    value_reason=reason,
                    limit_source=limit_source,
                    data_source=source,
                )
            )
        if record.waiting_share is not None:
            waiting = _epoch_params(record) | {"what": "waiting for the loader"}
            rows.append(context.row(variant, "share", record.waiting_share, dtype=dtype, params=waiting, data_source=source))
    return rows


def _peaks(engine: TorchEngine, history: History) -> list[float | None]:
    """Return the peak memory of each epoch in GiB.

    A step captured as a graph has its own memory pool, which the allocator counts as tensor memory only during the capture.
    Therefore the peak of an epoch is at least that of every earlier epoch.
    """
    peaks = [record.peak_memory_gib for record in history.epochs]
    if engine.uncaptured or None in peaks:
        return peaks
    return list(accumulate(map(not_none, peaks), max))


def _epoch_params(record: EpochRecord) -> dict:
    return {"epoch": record.epoch, "step": record.step}


def seed_statistics(
    context: Context,
    variant: str,
    metric: str,
    values: Sequence[float],
    limit: tuple[float | None, str],
    shared: dict,
    most: float = math.inf,
) -> list[Row]:
    """Return two rows: the mean over seeds with Student's confidence interval, and the standard deviation (`<metric>_sd`).

    Args:
        context: context of the experiment.
        variant: variant of both rows.
        metric: name of the metric.
        values: value of the metric for each seed.
        limit: (limit of the metric, source of this limit), or (None, reason why there is no limit).
        shared: dtype, params and data source of both rows.
        most: largest possible value of the metric. The confidence interval is clipped to 0 and this value.
    """
    mean = mean_estimate(values)
    return [
        context.row(
            variant,
            metric,
            mean.value,
            n=mean.n,
            ci_low=max(0.0, mean.ci_low),
            ci_high=min(most, mean.ci_high),
            limit=limit[0],
            limit_source=limit[1],
            **shared,
        ),
        context.row(variant, f"{metric}_sd", statistics.stdev(values), **shared),
    ]


def loss_curve(history: History) -> pd.DataFrame:
    """Return a table of samples: the loss of every optimizer step (kind "step") and all evaluations (kind "evaluation")."""
    steps = pd.DataFrame({"kind": "step", "step": range(1, len(history.losses) + 1), "loss": history.losses})
    epochs = pd.DataFrame(
        [{"kind": "evaluation", "step": r.step, **r.evaluation} for r in history.epochs if r.evaluation is not None]
    )
    return pd.concat([steps, epochs], ignore_index=True)


def steady_rows(
    context: Context,
    variant: str,
    engine: TorchEngine,
    batch: Any,
    items: int,
    flops: ModelFlops,
    least_flops: float,
    source: str,
    time_limit_s: float,
    minimum_samples: int = MINIMUM_SAMPLES,
) -> tuple[list[Row], pd.DataFrame]:
    """Time one optimizer step on a batch that is already on the device, and return its rows and samples.

    The timed steps change the engine's weights.

    Args:
        context: context of the experiment.
        variant: variant of the rows.
        engine: training engine.
        batch: batch on the device.
        items: number of tokens or images in `batch`.
        flops: FLOPs per token or image as conventionally counted for MFU: matrix products and convolutions in the forward and
            backward pass, with attention over the whole sequence and without recomputation.
        least_flops: FLOPs per token or image of the forward and backward pass that every implementation must compute. The limit
            of the rows follows from them.
        source: data source of the rows.
        time_limit_s: timing budget in seconds.
        minimum_samples: minimum number of timed steps, even if they take longer.
    """
    device, dtype = engine.device, engine.precision.dtype
    # Caches are not flushed between steps, because in training a step also starts with the cache contents that the previous step
    # left.
    sampling = {"minimum_samples": minimum_samples, "time_limit_s": time_limit_s}
    timing = time_function(lambda: engine.train_step(batch), device, cold=False, **sampling)
    params = {"batch": items, "step": "steady"}
    shared = {"dtype": dtype, "params": params, "data_source": source}
    rows = speed_rows(context, variant, engine.item, items, timing, flops, least_flops, shared)
    return rows, sample_frame(timing, variant, dtype, params).assign(kind="steady step")


def speed_rows(
    context: Context,
    variant: str,
    item: str,
    items: int,
    timing: Timing,
    flops: ModelFlops,
    least_flops: float,
    shared: dict,
    step_check: Verification | None = None,
    rate_check: Verification | None = None,
) -> list[Row]:
    """Return the rows with the time, the throughput and the MFU of an optimizer step.

    The limits follow from the time that the device needs for `least_flops` at its peak rate.

    Args:
        context: context of the experiment.
        variant: variant of the rows.
        item: unit of the throughput, "token" or "image". For example, "image" gives the metric `images_per_s`.
        items, flops, least_flops: as for `steady_rows`.
        timing: timing of the step.
        shared: dtype, params and data source of all three rows.
        step_check: verification of the step, for the time row.
        rate_check: verification of the step, for the throughput row.
    """
    device, dtype, step = context.device, shared["dtype"], timing.estimate
    # The limit uses the FLOPs that must be computed; the MFU below uses the FLOPs that are conventionally counted.
    floor, limit_source = flops_floor(device, dtype, least_flops * items)
    work = flops.forward_backward * items
    rate = step.map(lambda seconds: items / seconds)
    return [
        timed_row(context, variant, "step_time_s", step, timing, step_check, limit=(floor, limit_source), **shared),
        timed_row(
            context,
            variant,
            f"{item}s_per_s",
            rate,
            timing,
            rate_check,
            # The rate is items / time, so the minimum time gives the maximum rate.
            limit=(None if floor is None else items / floor, limit_source),
            **shared,
        ),
        _mfu_row(context, variant, device, dtype, step.map(lambda seconds: work / seconds / 1e12), shared, timing),
    ]


def flops_floor(device: Device, dtype: str, flops: float) -> tuple[float | None, str]:
    """Return (minimum time in seconds for these FLOPs at the dtype's peak rate, source of the rate).

    If no peak rate is known, return (None, reason).
    """
    limit_tflops, limit_source = gemm_limit(device, _gemm_dtype(dtype))
    if limit_tflops is None:
        return None, limit_source
    return flops / (limit_tflops * 1e12), f"model FLOPs at {limit_source}"


def _mfu_row(context: Context, variant: str, device: Device, dtype: str, tflops: Estimate, shared: dict, timing: Timing) -> Row:
    """Return the row with the model FLOPs utilisation (MFU), which is the FLOPs per second divided by the peak of the device.

    The peak is the published one. If no peak is published, the row has no value.
    """
    published = peak(device, gemm_path(_gemm_dtype(dtype), device))
    peak_tflops = published.published_tflops
    if peak_tflops is None:
        reason = f"no peak to divide by: {published.reason or 'no published value'}"
        return context.absent_row(variant, "mfu", reason, **shared)
    share = tflops.map(lambda rate: rate / peak_tflops)
    # The limit of the MFU can exceed 1, because the device may run at a higher clock frequency than the published peak assumes.
    limit = published.limit_tflops / peak_tflops if published.limit_tflops else None
    return timed_row(
        context,
        variant,
        "mfu",
        share,
        timing,
        limit=(limit, f"the peak at the maximum clock; {published.limit_source}"),
        **shared,
    )


def _gemm_dtype(dtype: str) -> str:
    """Return the format that matrix products of this dtype use. For float32 it is TF32 if PyTorch allows TF32."""
    return "tf32" if dtype == "fp32" and torch.backends.cuda.matmul.fp32_precision == "tf32" else dtype


def step_ceiling(
    context: Context, dtype: str, items: int, flops: ModelFlops, traffic: dict[str, float]
) -> tuple[float | None, str]:
    """Compute the throughput ceiling (upper bound) of a step after warm-up on one device.

    The ceiling is computed from the shapes of the model and the rates measured in this run. It ignores the time of the host, of
    element-wise kernels and of communication.

    Args:
        context: context of the experiment.
        dtype: number format of the step.
        items: number of tokens or images in a batch.
        flops: FLOPs of the step per token or image.
        traffic: a dict that maps each cause, such as the optimizer, to the bytes that a step moves outside matrix products.

    Returns:
        (tokens or images per second, how they were computed), or (None, reason) if this run has measured no rates.
    """
    gemm, stream = context.best_gemm(dtype), stream_ceiling(context.upstream)
    if gemm is None or stream is None:
        return None, NO_CEILINGS
    tflops, bandwidth_gb_s = not_none(gemm.value), not_none(stream.value)
    arithmetic = flops.forward_backward * items / (tflops * 1e12)
    moving = sum(traffic.values()) / (bandwidth_gb_s * 1e9)
    basis = (
        f"{arithmetic * 1e3:.3g} ms of products at the measured {tflops:.4g} TFLOPS, "
        f"then {moving * 1e3:.3g} ms for {' and '.join(traffic)} at {bandwidth_gb_s:.4g} GB/s"
    )
    return items / (arithmetic + moving), basis


def step_forecasts(
    context: Context,
    variant: str,
    dtype: str,
    item: str,
    items: int,
    flops: ModelFlops,
    traffic: dict[str, float],
    kind: str = TRAINING_STEP,
) -> list[Forecast]:
    """Predict the throughput of a step after warm-up on one device.

    The prediction is the throughput ceiling (see `step_ceiling`) multiplied by the share of its own ceiling that a reference
    machine reached.

    Args:
        context: context of the experiment.
        variant: variant of the predicted row.
        dtype: number format of the step.
        item: unit of the throughput, "token" or "image".
        items, flops, traffic: arguments of `step_ceiling`.
        kind: TRAINING_STEP for a step that is compiled or captured in a graph, EAGER_STEP for any other.
    """
    ceiling, basis = step_ceiling(context, dtype, items, flops, traffic)
    if ceiling is None:
        expected = Expected(None, None, None, None, basis)
    else:
        expected = expected_share(context.device, kind, ceiling, basis, dtype if kind == EAGER_STEP else "")
    return [expected.forecast(variant, f"{item}s_per_s", dtype, {"batch": items, "step": "steady"})]


def rate_forecast(context: Context, work: Workload, dtype: str, kind: str = TRAINING_STEP) -> Forecast:
    """Predict the throughput of a step after warm-up on one device, as `step_forecasts` does."""
    return step_forecasts(context, work.name, dtype, work.item, work.items, work.flops, work.traffic(dtype), kind)[0]


@dataclass(frozen=True)
class Contender:
    """One implementation of a training step, timed by `compare_steps` together with others.

    Args:
        name: name of the implementation in the speed-up rows.
        dtype: number format of the matrix products, and dtype of the rows.
        params: params of the rows. `compare_steps` adds the batch size.
        build: function that returns the training engine.
        least_flops: minimum FLOPs per token or image with which the step can be computed. None uses `Workload.least_flops`.
    """

    name: str
    dtype: str
    params: dict
    build: Callable[[], TorchEngine]
    least_flops: float | None = None


def compare_steps(
    context: Context,
    work: Workload,
    batch: Batch,
    contenders: list[Contender],
    source: str,
    time_limit_s: float,
    minimum_samples: int = MINIMUM_SAMPLES,
) -> Result:
    """Time the steps of several implementations in alternation. Return their rows and samples.

    Each implementation has rows for the step time, the throughput, the MFU, and its speed-up over the first implementation. All
    engines are in memory at once, so the peak memory is not measured. If they do not fit into memory, the rows have a reason
    instead of a value.

    Args:
        context: context of the experiment.
        work: workload of the step.
        batch: batch on the device, shared by all implementations.
        contenders: implementations to compare. The first one is the baseline of the speed-ups.
        source: data source of the rows.
        time_limit_s: total timing budget in seconds for all implementations.
        minimum_samples: minimum number of samples of each implementation. If necessary, timing continues beyond the time limit to
            take them.
    """
    try:
        with memory_released():
            # Build all engines before the first sample, because the timing alternates between them.
            steps: list[Callable[[], object]] = [partial(contender.build().train_step, batch) for contender in contenders]
            sampling = {"minimum_samples": minimum_samples, "time_limit_s": time_limit_s}
            timings = time_interleaved(steps, context.device, cold=False, **sampling)
            del steps  # delete the last references to the engines, so that their memory can be freed
    except torch.OutOfMemoryError as error:
        return Result([_absent(context, work, c, out_of_memory_reason(error), source) for c in contenders], pd.DataFrame())
    rows: list[Row] = []
    frames: list[pd.DataFrame] = []
    for contender, timing in zip(contenders, timings, strict=True):
        params = _params(work, contender)
        shared = {"dtype": contender.dtype, "params": params, "data_source": source}
        least = contender.least_flops or work.least_flops
        rows += speed_rows(context, work.name, work.item, work.items, timing, work.flops, least, shared)
        frames.append(sample_frame(timing, work.name, contender.dtype, params).assign(kind="steady step"))
    for contender, timing in zip(contenders[1:], timings[1:], strict=True):
        params = _params(work, contender) | {"over": contenders[0].name}
        shared = {"dtype": contender.dtype, "params": params, "data_source": source}
        rows.append(speedup_row(context, work.name, timing, timings[0], NO_SPEEDUP_LIMIT, **shared))
    return Result(rows, pd.concat(frames, ignore_index=True), source)


def part_report(report: Report, part: int, parts: int) -> Report:
    """Return a function that reports the progress of one of several parts, such as the training run with one seed.

    Args:
        report: function that reports the progress of all parts together.
        part: index of the part, from 0.
        parts: number of parts. All parts have the same number of steps.
    """
    return lambda done, total, note: report(part * total + done, parts * total, note)


@contextmanager
def memory_released() -> Iterator[None]:
    """Context manager that frees memory on exit: unreferenced tensors, and the accelerator's cached memory."""
    try:
        yield
    finally:
        release_memory()


def _params(work: Workload, contender: Contender) -> dict:
    return {"batch": work.items, "step": "steady"} | contender.params


def _absent(context: Context, work: Workload, contender: Contender, reason: str, source: str) -> Row:
    return context.absent_row(
        work.name, "step_time_s", reason, dtype=contender.dtype, params=_params(work, contender), data_source=source
    )
