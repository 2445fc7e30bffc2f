"""How does throughput grow with the batch size, and at what batch size does a training step no longer fit into memory?"""

import gc
from dataclasses import dataclass, replace

import numpy as np
import pandas as pd
import torch

from hyperion.chapter.context import Context, Experiment, Forecast, Options, Report, Result
from hyperion.chapter.efficiency import REFERENCE_STEP, with_interval
from hyperion.chapter.rows import all_samples, checked, stream_ceiling
from hyperion.chapter.variants import merged, run_variant
from hyperion.errors import not_none
from hyperion.measure import FORMATS, NoMemoryCap, PeakMemory, PeakMemoryRegion, allocator_refusal, memory_cap
from hyperion.measure.clock.timing import MINIMUM_SAMPLES
from hyperion.models import ReferenceModel, reference_model
from hyperion.results import Row, independent_ratio_estimate
from hyperion.results.rows import OUT_OF_MEMORY
from hyperion.training import choose_precision
from hyperion.units import GIB, MIB
from hyperion.workloads.reference_steps import (
    LEAST_MEMORY,
    TrainingStep,
    host_time,
    least_memory_gib,
    step_params,
    step_rows,
    timed,
    update_of,
)
from hyperion.workloads.training_rows import step_forecasts

# The predicted largest batch is accepted if a batch of 0.75 times its size fits and one of 1.25 times its size does not.
_FITS, _DOES_NOT_FIT = 0.75, 1.25
# Estimated number of writes and reads of each matrix-product or convolution output in the forward and backward pass, by the
# product itself, the norm after it and the activation function after the norm.
_PASSES = 12


class BatchScalingOptions(Options):
    """Options for the `batch_scaling` experiment.

    Args:
        precision: dtype of the steps. "auto" chooses the dtype for the device.
        memory_limit_gib: memory limit of the process in GiB, smaller than the memory of the machine.
        time_limit_s: timing budget in seconds for each batch size.
        batches: a dict that maps the name of each reference model to its batch sizes.
        samples: minimum number of samples of each step. More are taken while the timing budget lasts.
    """

    precision: str
    memory_limit_gib: float
    time_limit_s: float
    batches: dict[str, tuple[int, ...]]
    samples: int = MINIMUM_SAMPLES


def forecast(context: Context) -> list[Forecast]:
    """Predict the largest batch that fits into memory, and the samples per second at each batch size in descending order."""
    options = BatchScalingOptions.of(context)
    dtype = _dtype(context, options)
    largest = [_forecast_largest(reference_model(name), dtype, options.memory_limit_gib) for name in options.batches]
    return largest + [
        _forecast_throughput(context, name, batch, dtype)
        for name, batches in options.batches.items()
        for batch in sorted(batches, reverse=True)
    ]


def run(context: Context, report: Report) -> Result:
    """Measure every model at all its batch sizes, in worker processes."""
    names = list(BatchScalingOptions.of(context).batches)
    # On a CPU, a process keeps memory pages after a model is deleted. They would count as memory of the next model, so each model
    # gets its own process. On a GPU, one process measures all models.
    groups = [[name] for name in names] if context.device.kind == "cpu" else [names]
    return merged([run_variant(context, report, sweep, {"names": group}) for group in groups])


EXPERIMENT = Experiment(
    forecast, run, options=BatchScalingOptions, forecast_reads=("gemm", "bandwidth", "launch_cost", "operator_cost")
)


def sweep(context: Context, report: Report, names: list[str]) -> Result:
    """Measure each model at all batch sizes, and test the largest batch that fits. Runs in a worker process."""
    rows: list[Row] = []
    frames: list[pd.DataFrame] = []
    for done, name in enumerate(names):
        report(done, len(names), name)
        model = _Sweep(context, reference_model(name))
        model.measure()
        rows += model.rows
        frames += model.frames
    report(len(names), len(names), "done")
    return Result(rows, all_samples(frames))


def _dtype(context: Context, options: BatchScalingOptions) -> str:
    return choose_precision(context.device, options.precision).dtype


def _forecast_throughput(context: Context, name: str, batch: int, dtype: str) -> Forecast:
    """Predict samples per second from the device time of a step and the host time of its operators.

    The device time is that of the step's matrix products and memory traffic.
    """
    forecast = forecast_on_device(context, name, batch, dtype)
    if forecast.ceiling is None:
        return forecast
    device_s, (host_s, source) = batch / forecast.ceiling, host_time(context, name, batch, dtype)
    if context.device.kind == "cpu":
        seconds, how = device_s + host_s, "plus the host's time for its operators"
    else:
        seconds, how = max(device_s, host_s), "or the host's time for its operators, if this is longer"
    basis = f"{_device_basis(context, dtype)}; {how} ({source})"
    model = replace(forecast, estimate=batch / seconds, basis=basis, ceiling=None, low=None, high=None)
    return with_interval(context.device, REFERENCE_STEP, model)


def forecast_on_device(context: Context, name: str, batch: int, dtype: str) -> Forecast:
    """Predict samples per second from the matrix-product rate and the memory bandwidth measured in chapter 1.1.

    The predicted step time is the time of the matrix products plus the time to move the bytes of optimizer and activations.
    """
    model = reference_model(name)
    traffic: dict[str, float] = {
        "optimizer": update_of(model).traffic_bytes * model.parameter_count,
        "activations": batch * model.activations * _PASSES * FORMATS[dtype].bytes,
    }
    (forecast,) = step_forecasts(context, name, dtype, "sample", batch, model.flops, traffic)
    return forecast


def _device_basis(context: Context, dtype: str) -> str:
    """Return the text that explains the predicted throughputs. It is the same for every batch size."""
    product = not_none(not_none(context.best_gemm(dtype)).value)
    stream = not_none(not_none(stream_ceiling(context.upstream)).value)
    return (
        f"products at the measured {product:.4g} TFLOPS, then optimizer and activations at {stream:.4g} GB/s; the "
        "share of the update is larger for smaller batches"
    )


def _forecast_largest(model: ReferenceModel, dtype: str, cap_gib: float) -> Forecast:
    held, sample = _bytes_by_shapes(model, dtype)
    basis = (
        f"{cap_gib:g} GiB, less {held / GIB:.3g} GiB of weights, gradients and moments, divided by {sample / MIB:.3g} MiB per "
        "sample for the input and two copies of the output of each product"
    )
    return Forecast(
        model.name, "count", _largest_by_shapes(model, dtype, cap_gib), basis, dtype=dtype, params={"what": "largest batch"}
    )


def _bytes_by_shapes(model: ReferenceModel, dtype: str) -> tuple[int, int]:
    """Estimate the memory of a training step as (bytes independent of the batch size, bytes per sample).

    The estimate uses the shapes of the model. It assumes that each output of a matrix product is stored twice: before and after
    the norm or activation function that follows.
    """
    sample = 2 * model.activations * FORMATS[dtype].bytes + 4 * torch.Size(model.sample_shape).numel()
    return update_of(model).held_bytes * model.parameter_count, sample


def _largest_by_shapes(model: ReferenceModel, dtype: str, cap_gib: float) -> float:
    held, sample = _bytes_by_shapes(model, dtype)
    return (cap_gib * GIB - held) / sample


@dataclass(frozen=True)
class Point:
    """Memory of training steps at one batch size.

    Attributes:
        batch: batch size.
        gib: memory in GiB, or None if the batch does not fit or the memory cannot be read.
        cap_gib: largest memory in GiB that the process may use.
        reason: reason why `gib` is None, or an empty string.
    """

    batch: int
    gib: float | None
    cap_gib: float
    reason: str


class _Sweep:
    """Measures training steps of one model at all batch sizes. The results are collected in `rows` and `frames`."""

    def __init__(self, context: Context, model: ReferenceModel):
        self.context, self.model, self.options = context, model, BatchScalingOptions.of(context)
        self.dtype = _dtype(context, self.options)
        self.rows: list[Row] = []
        self.frames: list[pd.DataFrame] = []

    def measure(self) -> None:
        """Measure memory, then time the steps.

        Memory is measured first, because a step that runs after the timed steps could reuse memory that they freed. Such a step
        would seem to need less memory.
        """
        batches = sorted(self.options.batches[self.model.name])
        # The first step loads libraries and starts threads, whose memory must not count for any batch.
        TrainingStep(self.model.name, 1, self.dtype, self.context.device).once()
        try:
            self.fill_memory(batches)
        except NoMemoryCap as error:
            self._no_largest(error.what)
        # The memory rows are measured first and stored last.
        filled, self.rows = self.rows, []
        self.time_batches(batches)
        self.rows += filled

    def _row(self, metric: str, value: float | None, params: dict, **columns) -> None:
        row = self.context.row(self.model.name, metric, value, dtype=self.dtype, params=params, **columns)
        self.rows.append(row)

    def time_batches(self, batches: list[int]) -> None:
        """Time a step at each batch size until one does not fit. Add the rows with step times, throughputs and efficiencies."""
        seconds: dict[int, np.ndarray] = {}
        for batch in batches:
            device = self.context.device
            try:
                step = TrainingStep(self.model.name, batch, self.dtype, device, self.context.seed)
                timing, learned = timed(step, device, self.options.time_limit_s, self.options.samples)
            except (RuntimeError, MemoryError) as error:
                refusal = allocator_refusal(error, device)
                if refusal is None:
                    raise
                self._row("samples_per_s", None, step_params(batch), value_reason=OUT_OF_MEMORY + refusal)
                break
            rows, frame = step_rows(self.context, self.model, batch, self.dtype, timing, learned)
            self.rows += rows
            self.frames.append(frame)
            # Time per sample, in seconds.
            seconds[batch] = timing.whole.samples_s / batch
            del step  # free the memory of this step before a step with a larger batch is built
            gc.collect()
        if not seconds:
            return
        best = min(seconds, key=lambda batch: np.median(seconds[batch]))
        for batch, series in seconds.items():
            share = independent_ratio_estimate(series, seconds[best])
            # The best batch is compared with itself, so its efficiency is exactly 1.
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
        """Predict the largest batch size that fits into memory, and test this prediction.

        The prediction extrapolates a line through the memory of two batches that fit, because memory grows linearly with the
        batch size.
        """
        cap = self.options.memory_limit_gib
        points = [self.used(batch, "steady") for batch in batches]
        # Small batches add little to the memory of the process, so the slope needs a batch that fills half of the limit.
        half = int(_largest_by_shapes(self.model, self.dtype, cap) / 2)
        if half > batches[-1]:
            points.append(self.used(half, "half way"))
        known = [(point.batch, point.gib, point.cap_gib) for point in points if point.gib is not None]
        if len(known) < 2:
            self._no_largest(f"no line through fewer than two batches: {points[-1].reason}")
            return
        # Use the two largest batches that fit: noise affects their slope least.
        (small, small_gib, _), (large, large_gib, cap_gib) = known[-2:]
        slope = (large_gib - small_gib) / (large - small)
        if slope <= 0:
            self._no_largest(f"no slope: batch {large} took no more memory than batch {small}")
            return
        self._row("sample_memory_mib", slope * 1024, {"what": "slope"})
        # Extrapolate the line to the cap.
        self._test_largest(int(large + (cap_gib - large_gib) / slope))

    def _test_largest(self, largest: int) -> None:
        """Add the row with the predicted largest batch size.

        The row's check runs a smaller batch, which must fit, and a larger batch, which must not.
        """
        inside, outside = (self.used(max(1, round(share * largest)), "probe") for share in (_FITS, _DOES_NOT_FIT))
        wrong = (inside.gib is None) + (outside.gib is not None)
        self._row(
            "count",
            float(largest),
            {"what": "largest batch"},
            **checked(f"wrong verdicts: {_FITS} of it fits, {_DOES_NOT_FIT} does not", float(wrong), 0.0),
        )

    def _no_largest(self, reason: str) -> None:
        self._row("count", None, {"what": "largest batch"}, value_reason=reason)

    def used(self, batch: int, kind: str) -> Point:
        """Run two steps of a new model, add a row with the peak memory of the process, and return the memory as a Point.

        One step is not enough: the optimizer allocates its moments at the end of the first step, and they exist throughout the
        second.
        """
        device = self.context.device
        gc.collect()
        with memory_cap(device, self.options.memory_limit_gib) as cap:
            peak = self._peak(batch)
        self._row(
            peak.metric,
            peak.gib,
            {"batch": batch, "step": kind},
            value_reason=peak.reason,
            limit=least_memory_gib(self.model, batch),
            limit_source=LEAST_MEMORY,
        )
        # `cap.peak_gib` is the peak that a process at its cap would report, so the difference is the memory still free.
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
            return PeakMemory(region.peak.metric, None, OUT_OF_MEMORY + refusal)
        return region.peak
