"""What does a larger batch buy, and where does it end? Throughput and memory by batch, up to the batch that does not fit."""

import gc
from dataclasses import dataclass, replace

import numpy as np
import pandas as pd
import torch

from hyperion.chapter.context import Context, Experiment, Forecast, Result
from hyperion.chapter.rows import stream_ceiling
from hyperion.chapter.variants import merged, run_variant
from hyperion.experiments.steps.reference_steps import (
    GIB,
    LEAST_MEMORY,
    TrainingStep,
    forecast_step,
    least_memory_gib,
    processes_of,
    step_params,
    step_rows,
    timed,
    update_of,
)
from hyperion.measure import FORMATS, NoMemoryCap, PeakMemory, PeakMemoryRegion, allocator_refusal
from hyperion.measure.memory_use.allocation import memory_cap
from hyperion.models import ReferenceModel, reference_model
from hyperion.results import Row, independent_ratio_estimate
from hyperion.training import choose_precision
from hyperion.workloads.step_forecasts import host_time

# The line of memory over batch is held to be right within a quarter.
_FITS, _DOES_NOT_FIT = 0.75, 1.25


def forecast(context: Context) -> list[Forecast]:
    """The largest batch that fits, then samples per second of every batch, the largest first."""
    dtype = _dtype(context)
    largest = [_forecast_largest(context, reference_model(name), dtype) for name in context.sizes["batches"]]
    return largest + [
        _with_host(context, replace(foretold, basis=_shared_basis(context, dtype) or foretold.basis), name, batch)
        for name, batches in context.sizes["batches"].items()
        for batch in sorted(batches, reverse=True)
        for foretold in forecast_step(context, name, batch, dtype)
    ]


def run(context: Context, report) -> Result:
    """Sweep every model, in processes of their own."""
    groups = processes_of(context, list(context.sizes["batches"]))
    return merged([run_variant(context, report, sweep, {"names": names}) for names in groups])


EXPERIMENT = Experiment(forecast, run, forecast_reads=("gemm", "bandwidth", "launch_cost", "operator_cost"))


def sweep(context: Context, report, names: list[str]) -> Result:
    """The worker's side: for each model the timed batches, then its memory up to the batch that does not fit."""
    rows: list[Row] = []
    frames: list[pd.DataFrame] = []
    for done, name in enumerate(names):
        report(done, len(names), name)
        model = _Sweep(context, reference_model(name))
        model.measure()
        rows += model.rows
        frames += model.frames
    report(len(names), len(names), "done")
    return Result(rows, pd.concat(frames, ignore_index=True) if frames else pd.DataFrame())


def _dtype(context: Context) -> str:
    return choose_precision(context.device, context.sizes["precision"]).dtype


def _shared_basis(context: Context, dtype: str) -> str:
    """What the throughputs of all batches rest on, in one sentence; "" without ceilings."""
    gemm, stream = context.best_upstream("gemm_tflops", dtype), stream_ceiling(context.upstream)
    if gemm is None or stream is None:
        return ""
    return (
        f"products at the measured {gemm.value:.4g} TFLOPS, then optimizer and activations at {stream.value:.4g} GB/s: the "
        "update weighs the more the smaller the batch"
    )


def _with_host(context: Context, foretold: Forecast, name: str, batch: int) -> Forecast:
    """The throughput once the host has its time too, which hardly depends on the batch."""
    if foretold.estimate is None:
        return foretold
    device_s, (host_s, told) = batch / foretold.estimate, host_time(context, name, batch, foretold.dtype)
    if context.device.kind == "cpu":
        seconds, how = device_s + host_s, "and the host's time for its operators on top"
    else:
        seconds, how = max(device_s, host_s), "or the host's time for its operators, where that is longer"
    return replace(foretold, estimate=batch / seconds, basis=f"{foretold.basis}; {how} ({told})")


def _forecast_largest(context: Context, model: ReferenceModel, dtype: str) -> Forecast:
    cap = context.sizes["memory_limit_gib"]
    held, sample = _bytes_by_shapes(model, dtype)
    basis = (
        f"{cap:g} GiB, less {held / GIB:.3g} GiB of weights, gradients and moments, over {sample / 2**20:.3g} MiB a sample: "
        "the input, and the output of each product kept twice"
    )
    return Forecast(
        variant=model.name,
        metric="count",
        estimate=_largest_by_shapes(model, dtype, cap),
        basis=basis,
        dtype=dtype,
        params={"what": "largest batch"},
    )


def _bytes_by_shapes(model: ReferenceModel, dtype: str) -> tuple[int, int]:
    """(bytes that do not depend on the batch, bytes a sample): each product's output is kept twice, as it is and as its
    norm or activation leaves it."""
    sample = 2 * model.activations * FORMATS[dtype].bytes + 4 * torch.Size(model.sample_shape).numel()
    return update_of(model).held_bytes * model.parameter_count, sample


def _largest_by_shapes(model: ReferenceModel, dtype: str, cap_gib: float) -> float:
    held, sample = _bytes_by_shapes(model, dtype)
    return (cap_gib * GIB - held) / sample


@dataclass(frozen=True)
class Point:
    """What a batch took of the cap, None with the reason where it was refused or cannot be read."""

    batch: int
    gib: float | None
    cap_gib: float
    reason: str


class _Sweep:
    """The rows and samples of one model's sweep."""

    def __init__(self, context: Context, model: ReferenceModel):
        self.context, self.model, self.dtype = context, model, _dtype(context)
        self.rows: list[Row] = []
        self.frames: list[pd.DataFrame] = []

    def measure(self) -> None:
        """First all that is filled, in a process that has nothing to hide yet, then all that is timed."""
        batches = sorted(self.context.sizes["batches"][self.model.name])
        TrainingStep(self.model.name, 1, self.dtype, self.context.device).once()  # libraries and threads are there now
        try:
            self.fill_memory(batches)
        except NoMemoryCap as error:
            self._no_largest(error.what)
        filled, self.rows = self.rows, []
        self.time_batches(batches)
        self.rows += filled

    def _row(self, metric: str, value: float | None, params: dict, **columns) -> None:
        row = self.context.row(self.model.name, metric, value, dtype=self.dtype, params=params, **columns)
        self.rows.append(row)

    def time_batches(self, batches: list[int]) -> None:
        """Rows of every batch until one does not fit, efficiencies among them."""
        seconds: dict[int, np.ndarray] = {}
        for batch in batches:
            device = self.context.device
            try:
                step = TrainingStep(self.model.name, batch, self.dtype, device, self.context.seed)
                timing, learned = timed(step, device, self.context.sizes["time_limit_s"])
            except (RuntimeError, MemoryError) as error:
                refusal = allocator_refusal(error, device)
                if refusal is None:
                    raise
                self._row("samples_per_s", None, step_params(batch), value_reason=f"out of memory: {refusal}")
                break
            rows, frame = step_rows(self.context, self.model, batch, self.dtype, timing, learned)
            self.rows += rows
            self.frames.append(frame)
            seconds[batch] = timing.whole.samples_s / batch
            del step
            gc.collect()
        best = min(seconds, key=lambda batch: np.median(seconds[batch]), default=None)
        for batch, series in seconds.items():
            share = independent_ratio_estimate(series, seconds[best])
            low, high = (1.0, 1.0) if batch == best else (share.ci_low, share.ci_high)
            self._row(
                "batch_efficiency",
                share.value,
                step_params(batch),
                n=share.n,
                ci_low=low,
                ci_high=high,
                limit=1.0,
                limit_source="the best of the batches measured, by construction",
            )

    def fill_memory(self, batches: list[int]) -> None:
        """Memory by batch, the line through two that fit, and a step on either side of where it meets the cap."""
        cap = self.context.sizes["memory_limit_gib"]
        points = [self.used(batch, "steady") for batch in batches]
        # A small batch adds little to what a process holds anyway; one that fills half of the cap tells the slope well.
        half = int(_largest_by_shapes(self.model, self.dtype, cap) / 2)
        if half > batches[-1]:
            points.append(self.used(half, "half way"))
        known = [point for point in points if point.gib is not None]
        if len(known) < 2:
            self._no_largest(f"no line through fewer than two batches: {points[-1].reason}")
            return
        small, large = known[-2:]
        slope = (large.gib - small.gib) / (large.batch - small.batch)
        if slope <= 0:
            self._no_largest(f"no slope: batch {large.batch} took no more memory than batch {small.batch}")
            return
        self._row("sample_memory_mib", slope * 1024, {"what": "slope"})
        self._put_to_the_test(int(large.batch + (large.cap_gib - large.gib) / slope))

    def _put_to_the_test(self, largest: int) -> None:
        inside, outside = (self.used(max(1, round(share * largest)), "probe") for share in (_FITS, _DOES_NOT_FIT))
        wrong = (inside.gib is None) + (outside.gib is not None)
        self._row(
            "count",
            float(largest),
            {"what": "largest batch"},
            check_error=float(wrong),
            check_tolerance=0.0,
            check=f"wrong verdicts: {_FITS} of it fits, {_DOES_NOT_FIT} does not",
        )

    def _no_largest(self, reason: str) -> None:
        self._row("count", None, {"what": "largest batch"}, value_reason=reason)

    def used(self, batch: int, kind: str) -> Point:
        """What two steps of a fresh model (the second has moments) take of the cap; the peak of the process is a row."""
        device = self.context.device
        gc.collect()
        with memory_cap(device, self.context.sizes["memory_limit_gib"]) as cap:
            peak = self._peak(batch)
        self._row(
            peak.metric,
            peak.gib,
            {"batch": batch, "step": kind},
            value_reason=peak.reason,
            limit=least_memory_gib(self.model, batch),
            limit_source=LEAST_MEMORY,
        )
        taken = None if peak.gib is None else cap.gib - (cap.peak_gib - peak.gib)
        return Point(batch, taken, cap.gib, peak.reason)

    def _peak(self, batch: int) -> PeakMemory:
        device = self.context.device
        try:
            with PeakMemoryRegion(device) as region:
                step = TrainingStep(self.model.name, batch, self.dtype, device, self.context.seed)
                step.once()
                step.once()
        except (RuntimeError, MemoryError) as error:
            refusal = allocator_refusal(error, device)
            if refusal is None:
                raise
            return PeakMemory(region.peak.metric, None, f"out of memory: {refusal}")
        return region.peak
