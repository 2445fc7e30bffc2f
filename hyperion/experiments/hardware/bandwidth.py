"""How fast does this machine read and write memory, and how close does it come to the bandwidth in its data sheet?

A stream is a simple operation on large arrays, such as a copy or a sum. The experiment times several streams at several array
sizes.
"""

import pandas as pd
import torch

from hyperion.chapter.context import Context, Experiment, Forecast, Options, Report, Result
from hyperion.chapter.efficiency import expected_stream
from hyperion.chapter.rows import all_samples, bandwidth_limit, out_of_memory_reason, sample_frame, timed_row
from hyperion.measure import FORMATS, OPERATIONS, REDUCTIONS, BandwidthMeasurement, Timing, Verification, measure_bandwidth
from hyperion.results import Row


class BandwidthOptions(Options):
    """Options for the `bandwidth` experiment.

    Args:
        dtype: number format of the arrays.
        millions: array sizes in millions of elements.
        time_limit_s: timing budget in seconds for each operation and size.
    """

    dtype: str
    millions: tuple[float, ...]
    time_limit_s: float


def forecast(context: Context) -> list[Forecast]:
    """Predict the bandwidth of every operation and size whose arrays are too large for any cache."""
    options = BandwidthOptions.of(context)
    # The copy of the largest array comes first, because the reader is asked to guess the first forecast.
    cells = sorted(_cells(options), key=lambda cell: (-cell[1], cell[0] != "copy"))
    return [stream_forecast(context, operation, options.dtype, elements) for operation, elements in cells]


def run(context: Context, report: Report) -> Result:
    """Time every operation at every size with flushed caches, and verify each result."""
    options = BandwidthOptions.of(context)
    rows: list[Row] = []
    frames: list[pd.DataFrame] = []
    cells = _cells(options)
    for done, (operation, elements) in enumerate(cells):
        report(done, len(cells), f"{operation} {elements / 1e6:g} M")
        _, row, samples = measure_stream(context, operation, options.dtype, elements, options.time_limit_s)
        rows.append(row)
        frames += samples
    report(len(cells), len(cells), "done")
    return Result(rows, all_samples(frames))


EXPERIMENT = Experiment(forecast, run, options=BandwidthOptions)


def _cells(options: BandwidthOptions) -> list[tuple[str, int]]:
    return [(operation, int(millions * 1e6)) for operation in OPERATIONS for millions in options.millions]


def stream_params(elements: int) -> dict:
    """Return the params of the row for a stream over arrays with `elements` elements each."""
    return {"elements": elements, "cache": "cold"}


def stream_bytes(operation: str, dtype: str, elements: int) -> int:
    """Return the number of bytes that one call of the operation reads and writes."""
    return (OPERATIONS | REDUCTIONS)[operation].arrays * elements * FORMATS[dtype].bytes


def stream_forecast(context: Context, operation: str, dtype: str, elements: int) -> Forecast:
    """Predict the bandwidth of a stream. If its arrays may fit into a cache, give the reason why there is no prediction."""
    expected = expected_stream(context, operation, dtype, stream_bytes(operation, dtype, elements))
    return expected.forecast(operation, "bandwidth_gb_s", dtype, stream_params(elements))


def measure_stream(
    context: Context, operation: str, dtype: str, elements: int, time_limit_s: float
) -> tuple[BandwidthMeasurement | None, Row, list[pd.DataFrame]]:
    """Time and verify one stream.

    Returns:
        The measurement, its row and its samples. The measurement is None if the arrays do not fit into memory.
    """
    params = stream_params(elements)
    try:
        measured = measure_bandwidth(operation, elements, dtype, context.device, seed=context.seed, time_limit_s=time_limit_s)
    except torch.OutOfMemoryError as error:
        reason = out_of_memory_reason(error)
        return None, context.absent_row(operation, "bandwidth_gb_s", reason, dtype=dtype, params=params), []
    row = stream_row(context, operation, dtype, params, measured.bytes, measured.timing, measured.verification)
    return measured, row, [sample_frame(measured.timing, operation, dtype, params)]


def stream_row(
    context: Context, variant: str, dtype: str, params: dict, traffic_bytes: int, timing: Timing, verification: Verification
) -> Row:
    """Return the row with the bandwidth of a stream.

    The row's limit is the memory bandwidth if the arrays are too large for every cache.
    """
    rate = timing.estimate.map(lambda seconds: traffic_bytes / seconds / 1e9)
    limit, source = bandwidth_limit(context.device, traffic_bytes)
    return timed_row(
        context, variant, "bandwidth_gb_s", rate, timing, verification, limit=(limit, source), dtype=dtype, params=params
    )
