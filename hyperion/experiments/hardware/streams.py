"""One stream of memory with flushed caches as rows: what the sweep over sizes and the one over formats have in common."""

import pandas as pd
import torch

from hyperion.chapter.context import Context, Forecast
from hyperion.chapter.rows import bandwidth_limit, out_of_memory_reason, sample_frame, timed_columns
from hyperion.measure import FORMATS, OPERATIONS, REDUCTIONS, BandwidthMeasurement, Timing, Verification, measure_bandwidth
from hyperion.results import Row


def stream_params(elements: int) -> dict:
    """Parameters of a stream's row."""
    return {"elements": elements, "cache": "cold"}


def stream_bytes(operation: str, dtype: str, elements: int) -> int:
    """Bytes that one call reads and writes."""
    return (OPERATIONS | REDUCTIONS)[operation].arrays * elements * FORMATS[dtype].bytes


def stream_forecast(context: Context, operation: str, dtype: str, elements: int) -> Forecast:
    """The datasheet's bandwidth where the data cannot stay in a cache, else None with the reason."""
    limit, source = bandwidth_limit(context.device, stream_bytes(operation, dtype, elements))
    return Forecast(
        variant=operation, metric="bandwidth_gb_s", estimate=limit, basis=source, dtype=dtype, params=stream_params(elements)
    )


def measure_stream(
    context: Context, operation: str, dtype: str, elements: int
) -> tuple[BandwidthMeasurement | None, Row, list[pd.DataFrame]]:
    """Time and verify one stream: what was measured (None where memory did not suffice), its row, its samples."""
    params = stream_params(elements)
    try:
        measured = measure_bandwidth(
            operation, elements, dtype, context.device, seed=context.seed, time_limit_s=context.sizes["time_limit_s"]
        )
    except torch.OutOfMemoryError as error:
        reason = out_of_memory_reason(error)
        return None, context.row(operation, "bandwidth_gb_s", None, dtype=dtype, params=params, value_reason=reason), []
    row = stream_row(context, operation, dtype, params, measured.bytes, measured.timing, measured.verification)
    return measured, row, [sample_frame(measured.timing, operation, dtype, params)]


def stream_row(
    context: Context, variant: str, dtype: str, params: dict, traffic_bytes: int, timing: Timing, verification: Verification
) -> Row:
    """The rate of a timed stream with the limit of the memory, where its traffic must come from there."""
    rate = timing.estimate.map(lambda seconds: traffic_bytes / seconds / 1e9)
    limit, source = bandwidth_limit(context.device, traffic_bytes)
    return context.row(
        variant,
        "bandwidth_gb_s",
        rate.value,
        dtype=dtype,
        params=params,
        limit=limit,
        limit_source=source,
        **timed_columns(rate, timing, verification),
    )
