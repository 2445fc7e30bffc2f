"""What does a larger batch buy, and where does it end? Throughput and memory by batch, up to the batch that does not fit."""

import gc
from dataclasses import replace

import numpy as np
import pandas as pd
import torch

from hyperion.experiments.columns import stream_ceiling
from hyperion.experiments.context import Context, Experiment, Forecast, Result
from hyperion.experiments.reference_steps import (
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
from hyperion.experiments.variants import merged, run_variant
from hyperion.measure import FORMATS, NoMemoryCap, PeakMemory, PeakMemoryRegion, allocator_refusal, memory_cap
from hyperion.models import ReferenceModel, reference_model
from hyperion.results import Row, independent_ratio_estimate
from hyperion.training import choose_precision

# The line through the two largest batches is held to be right within a quarter.
_FITS, _DOES_NOT_FIT = 0.75, 1.25


def forecast(context: Context) -> list[Forecast]:
    """The largest batch that fits, then samples per second of every batch, the largest first."""
    dtype = _dtype(context)
    largest = [_forecast_largest(context, reference_model(name), dtype) for name in context.sizes["batches"]]
    return largest + [
        replace(foretold, basis=_shared_basis(context, dtype) or foretold.basis)
        for name, batches in context.sizes["batches"].items()
        for batch in sorted(batches, reverse=True)
        for foretold in forecast_step(context, name, batch, dtype)
    ]


def run(context: Context, report) -> Result:
    """Sweep every model, in processes of their own."""
    function = "hyperion.experiments.batch_scaling:sweep"
    groups = processes_of(context, list(context.sizes["batches"]))
    return merged([run_variant(context, report, function, {"names": names}) for names in groups])


EXPERIMENT = Experiment(forecast, run, forecast_reads=("gemm", "bandwidth"))


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


def _forecast_largest(context: Context, model: ReferenceModel, dtype: str) -> Forecast:
    """From shapes alone: each product's output is kept twice, as it is and as its norm or activation leaves it."""
    cap = context.sizes["memory_limit_gib"]
    held = update_of(model).held_bytes * model.parameter_count
    sample = 2 * model.activations * FORMATS[dtype].bytes + 4 * int(np.prod(model.sample_shape))
    basis = (
        f"{cap:g} GiB, less {held / GIB:.3g} GiB of weights, gradients and moments, over {sample / 2**20:.3g} MiB a sample: "
        "the input, and the output of each product kept twice"
    )
    return Forecast(
        variant=model.name, metric="count", estimate=(cap * GIB - held) / sample, basis=basis, dtype=dtype,
        params={"what": "largest batch"},
    )  # fmt: skip


class _Sweep:
    """The rows and samples of one model's sweep."""

    def __init__(self, context: Context, model: ReferenceModel):
        self.context, self.model, self.dtype = context, model, _dtype(context)
        self.rows: list[Row] = []
        self.frames: list[pd.DataFrame] = []

    def measure(self) -> None:
        """First all that is timed, then, under a cap, all that is filled."""
        sizes = self.context.sizes
        batches = self.time_batches(sorted(sizes["batches"][self.model.name]))
        try:
            with memory_cap(self.context.device, sizes["memory_limit_gib"]) as capacity_gib:
                self.fill_memory(batches, capacity_gib)
        except NoMemoryCap as error:
            self._row("count", None, {"what": "largest batch"}, value_reason=error.what)

    def _row(self, metric: str, value: float | None, params: dict, **columns) -> None:
        row = self.context.row(self.model.name, metric, value, dtype=self.dtype, params=params, **columns)
        self.rows.append(row)

    def time_batches(self, batches: list[int]) -> list[int]:
        """Rows of every batch until one does not fit, efficiencies among them; the batches that did."""
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
                "batch_efficiency", share.value, step_params(batch), n=share.n, ci_low=low, ci_high=high, limit=1.0,
                limit_source="the best of the batches measured, by construction",
            )  # fmt: skip
        return list(seconds)

    def fill_memory(self, batches: list[int], capacity_gib: float) -> None:
        """Peak memory by batch, the line through the two largest, and a step on either side of where it meets the cap."""
        peaks = [self.peak(batch, "steady") for batch in batches]
        known = [(batch, peak.gib) for batch, peak in zip(batches, peaks, strict=True) if peak.gib is not None]
        if len(known) < 2:
            reason = peaks[-1].reason if peaks else "no batch was measured"
            self._row("count", None, {"what": "largest batch"}, value_reason=f"no line through fewer than two: {reason}")
            return
        (small, low), (large, high) = known[-2:]
        slope = (high - low) / (large - small)
        if slope <= 0:
            reason = f"no slope: batch {large} took no more memory than batch {small}"
            self._row("count", None, {"what": "largest batch"}, value_reason=reason)
            return
        largest = int(large + (capacity_gib - high) / slope)
        self._row("sample_memory_mib", slope * 1024, {"what": "slope", "batches": [small, large]})
        inside, outside = (self.peak(max(1, round(share * largest)), "probe") for share in (_FITS, _DOES_NOT_FIT))
        wrong = (inside.gib is None) + (outside.gib is not None)
        self._row(
            "count", float(largest), {"what": "largest batch"}, check_error=float(wrong), check_tolerance=0.0,
            check=f"wrong verdicts: {_FITS} of it fits, {_DOES_NOT_FIT} does not",
        )  # fmt: skip

    def peak(self, batch: int, kind: str) -> PeakMemory:
        """Peak memory of two steps of a fresh model (the second has moments), as a row; out of memory is one too."""
        device = self.context.device
        gc.collect()
        if device.kind != "cpu":
            torch.cuda.empty_cache()  # what smaller batches left cached lies in pieces
        try:
            with PeakMemoryRegion(device) as region:
                step = TrainingStep(self.model.name, batch, self.dtype, device, self.context.seed)
                step.once()
                step.once()
            peak = region.peak
        except (RuntimeError, MemoryError) as error:
            refusal = allocator_refusal(error, device)
            if refusal is None:
                raise
            peak = PeakMemory(region.peak.metric, None, f"out of memory: {refusal}")
        self._row(
            peak.metric, peak.gib, {"batch": batch, "step": kind}, value_reason=peak.reason,
            limit=least_memory_gib(self.model, batch), limit_source=LEAST_MEMORY,
        )  # fmt: skip
        return peak
