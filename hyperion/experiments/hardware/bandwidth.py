"""How fast does this machine stream memory, by operation and size, and how near its datasheet is that?"""

import pandas as pd

from hyperion.chapter.context import Context, Experiment, Forecast, Result
from hyperion.experiments.hardware.streams import measure_stream, stream_forecast
from hyperion.measure import OPERATIONS
from hyperion.results import Row


def forecast(context: Context) -> list[Forecast]:
    """The datasheet's bandwidth for every cell whose data cannot stay in a cache."""
    cells = sorted(_cells(context), key=lambda cell: (-cell[1], cell[0] != "copy"))
    return [stream_forecast(context, operation, context.sizes["dtype"], elements) for operation, elements in cells]


def run(context: Context, report) -> Result:
    """Time every operation and size with flushed caches and verify each."""
    rows: list[Row] = []
    frames: list[pd.DataFrame] = []
    cells = _cells(context)
    for done, (operation, elements) in enumerate(cells):
        report(done, len(cells), f"{operation} {elements / 1e6:g} M")
        _, row, samples = measure_stream(context, operation, context.sizes["dtype"], elements)
        rows.append(row)
        frames += samples
    report(len(cells), len(cells), "done")
    return Result(rows, pd.concat(frames, ignore_index=True) if frames else pd.DataFrame())


EXPERIMENT = Experiment(forecast, run)


def _cells(context: Context) -> list[tuple[str, int]]:
    return [(operation, int(millions * 1e6)) for operation in OPERATIONS for millions in context.sizes["millions"]]
