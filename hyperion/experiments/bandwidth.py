"""How fast does this machine stream memory, by operation and size, and how near its datasheet is that?"""

import pandas as pd
import torch

from hyperion.experiments.columns import bandwidth_limit, out_of_memory_reason, sample_frame, timed_columns
from hyperion.experiments.context import Context, Experiment, Forecast, Result
from hyperion.measure import FORMATS, OPERATIONS, BandwidthMeasurement, measure_bandwidth
from hyperion.results import Row


def forecast(context: Context) -> list[Forecast]:
    """The datasheet's bandwidth for every cell whose data cannot stay in a cache."""
    cells = sorted(_cells(context), key=lambda cell: (-cell[1], cell[0] != "copy"))
    return [_forecast(context, operation, elements) for operation, elements in cells]


def run(context: Context, report) -> Result:
    """Time every operation and size with flushed caches and verify each."""
    rows: list[Row] = []
    frames: list[pd.DataFrame] = []
    cells = _cells(context)
    for done, (operation, elements) in enumerate(cells):
        report(done, len(cells), f"{operation} {elements / 1e6:g} M")
        params = _params(elements)
        try:
            measured = measure_bandwidth(
                operation, elements, context.sizes["dtype"], context.device,
                seed=context.seed, time_limit_s=context.sizes["time_limit_s"],
            )  # fmt: skip
        except torch.OutOfMemoryError as error:
            reason = out_of_memory_reason(error)
            rows.append(_row_columns(context, operation, params, None, value_reason=reason))
            continue
        rows.append(_row(context, measured))
        frames.append(sample_frame(measured.timing, operation, measured.dtype, params))
    report(len(cells), len(cells), "done")
    return Result(rows, pd.concat(frames, ignore_index=True) if frames else pd.DataFrame())


EXPERIMENT = Experiment(forecast, run)


def _cells(context: Context) -> list[tuple[str, int]]:
    return [(operation, int(millions * 1e6)) for operation in OPERATIONS for millions in context.sizes["millions"]]


def _params(elements: int) -> dict:
    return {"elements": elements, "cache": "cold"}


def _forecast(context: Context, operation: str, elements: int) -> Forecast:
    traffic = OPERATIONS[operation].arrays * elements * FORMATS[context.sizes["dtype"]].bytes
    limit, source = bandwidth_limit(context.device, traffic)
    return Forecast(
        variant=operation, metric="bandwidth_gb_s", estimate=limit, basis=source, dtype=context.sizes["dtype"],
        params=_params(elements),
    )  # fmt: skip


def _row(context: Context, measured: BandwidthMeasurement) -> Row:
    rate = measured.timing.estimate.map(lambda seconds: measured.bytes / seconds / 1e9)
    limit, source = bandwidth_limit(context.device, measured.bytes)
    return _row_columns(
        context, measured.operation, _params(measured.elements), rate.value, limit=limit, limit_source=source,
        **timed_columns(rate, measured.timing, measured.verification),
    )  # fmt: skip


def _row_columns(context: Context, operation: str, params: dict, value: float | None, **columns) -> Row:
    return context.row(operation, "bandwidth_gb_s", value, dtype=context.sizes["dtype"], params=params, **columns)
