"""Does memory bandwidth depend on the number format?

A stream is a simple operation on large arrays: copy, scale, add, triad (scale and add) or dot (dot product). Every stream runs in
every format, on arrays with the same number of bytes. The copy is also compared with a plain loop of PyTorch's `copy_`. If the
power of the device can be read, the experiment also measures the energy per gigabyte moved.
"""

import pandas as pd
import torch

from hyperion.chapter.context import Context, Experiment, Forecast, Options, Report, Result
from hyperion.chapter.rows import all_samples, out_of_memory_reason, sample_frame, speedup_row, timed_columns
from hyperion.experiments.hardware.bandwidth import measure_stream, stream_bytes, stream_forecast, stream_params, stream_row
from hyperion.hardware import read
from hyperion.measure import (
    FORMATS,
    OPERATIONS,
    REDUCTIONS,
    BandwidthMeasurement,
    energy_of,
    measure_bandwidth,
    verify_elementwise,
)
from hyperion.measure.clock.timing import compare_with_plain_loop
from hyperion.results import Row
from hyperion.units import MIB

OPERATION_NAMES = (*OPERATIONS, *REDUCTIONS)
RATIO = "copy over a plain loop of copy_"


class StreamFormatsOptions(Options):
    """Options for the `stream_formats` experiment.

    Args:
        dtypes: number formats of the arrays.
        array_mib: size of one array in MiB, the same in every format.
        time_limit_s: timing budget in seconds for each operation and format.
        cross_check_dtype: number format of the copy that is compared with a plain loop.
        cross_check_calls: number of calls in each timing of the plain loop.
        energy_dtype: number format of the streams whose energy is measured.
        energy_s: seconds for which each stream runs while the power is read.
    """

    dtypes: tuple[str, ...]
    array_mib: int
    time_limit_s: float
    cross_check_dtype: str
    cross_check_calls: int
    energy_dtype: str
    energy_s: float

    def elements(self, dtype: str) -> int:
        """Return the number of elements in one array."""
        return self.array_mib * MIB // FORMATS[dtype].bytes


def forecast(context: Context) -> list[Forecast]:
    """Predict the bandwidth of every operation in every format from the bandwidths measured in chapter 1.1."""
    options = StreamFormatsOptions.of(context)
    return [
        stream_forecast(context, operation, dtype, options.elements(dtype))
        for operation in OPERATION_NAMES
        for dtype in options.dtypes
    ]


def run(context: Context, report: Report) -> Result:
    """Time and verify every operation in every format with flushed caches. Then run the plain loop and measure the energy."""
    options = StreamFormatsOptions.of(context)
    rows: list[Row] = []
    frames: list[pd.DataFrame] = []
    energy: list[Row] = []
    cells = [(operation, dtype) for dtype in options.dtypes for operation in OPERATION_NAMES]
    for done, (operation, dtype) in enumerate(cells):
        report(done, len(cells) + 1, f"{operation} {dtype}")
        measured, row, samples = measure_stream(context, operation, dtype, options.elements(dtype), options.time_limit_s)
        rows.append(row)
        frames += samples
        if dtype == options.energy_dtype:
            energy.append(_energy_row(context, operation, row, measured, options.energy_s))
    report(len(cells), len(cells) + 1, "comparison with a plain loop")
    cross_rows, cross_frames = _cross_check(context, options)
    report(len(cells) + 1, len(cells) + 1, "done")
    return Result(rows + cross_rows + energy, all_samples(frames + cross_frames))


EXPERIMENT = Experiment(forecast, run, options=StreamFormatsOptions, forecast_reads=("bandwidth",))


def _energy_row(context: Context, operation: str, rate: Row, measured: BandwidthMeasurement | None, energy_s: float) -> Row:
    """Return the row with the energy in joules that a stream needs per gigabyte of memory traffic.

    The stream runs again, long enough for several power readings. If the power cannot be read, the row's value is None, and the
    row gives the reason.

    Args:
        context: context of the experiment.
        operation: name of the stream.
        rate: row with the bandwidth of the same stream.
        measured: measurement of this bandwidth, or None if it failed.
        energy_s: seconds for which the stream runs.
    """
    identity: dict = {"variant": operation, "metric": "energy_j_per_gb", "dtype": rate.dtype, "params": rate.params}
    if measured is None:
        return context.row(value=None, value_reason=rate.value_reason, **identity)
    state = read(context.device)
    if state.power_w is None:
        reason = f"no power: {state.unreadable.get('power_w', 'it was not read')}"
        return context.row(value=None, value_reason=reason, **identity)
    longer = measure_bandwidth(
        operation,
        measured.elements,
        rate.dtype,
        context.device,
        seed=context.seed,
        time_limit_s=energy_s,
        minimum_span_s=energy_s,
    )
    energy = energy_of(longer.timing)
    joules = energy.j_per_gb(longer.bytes)
    if joules is None:
        return context.row(value=None, value_reason=energy.reason, **identity)
    columns = timed_columns(joules, longer.timing, longer.verification)
    return context.row(value=joules.value, limit_source="no limit: no datasheet value", **identity, **columns)


def _cross_check(context: Context, options: StreamFormatsOptions) -> tuple[list[Row], list[pd.DataFrame]]:
    """Time the copy with this library and with `destination.copy_(source)` in a plain loop. Return the ratio of the two rates.

    The two methods are timed in alternation.
    """
    dtype, calls = options.cross_check_dtype, options.cross_check_calls
    elements, number_format = options.elements(dtype), FORMATS[dtype]
    params = stream_params(elements) | {"cache": "hot", "plain_loop_calls": calls}
    try:
        generator = torch.Generator(context.device.torch_device).manual_seed(context.seed + 1)
        tensor: dict = {"device": context.device.torch_device, "dtype": number_format.storage}
        source = torch.randn(elements, generator=generator, **tensor)
        # Fill with NaN, so that the verification fails if the copy writes nothing.
        ours, theirs = (torch.full((elements,), float("nan"), **tensor) for _ in range(2))
        copy, plain = compare_with_plain_loop(
            lambda: OPERATIONS["copy"].run(ours, source), context.device, calls, plain=lambda: theirs.copy_(source)
        )
    except torch.OutOfMemoryError as error:
        reason = out_of_memory_reason(error)
        return [context.absent_row(RATIO, "speedup", reason, dtype=dtype, params=params)], []
    why = "no limit: the device's events and the host's clock on the same copy"
    rows = [speedup_row(context, RATIO, copy, plain, why, dtype=dtype, params=params)]
    frames = []
    traffic = stream_bytes("copy", dtype, elements)
    for name, timing, output in (("copy", copy, ours), ("plain copy_", plain, theirs)):
        # A copy must be bitwise exact.
        verification = verify_elementwise(output, lambda copied: copied, (source,), tolerance=0.0)
        rows.append(stream_row(context, name, dtype, params, traffic, timing, verification))
        frames.append(sample_frame(timing, name, dtype, params))
    return rows, frames
