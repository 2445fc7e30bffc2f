"""The first roofline: where do the two ceilings measured in this run meet?"""

import pandas as pd

from hyperion.chapter.context import Context, Experiment, Forecast, Result
from hyperion.chapter.rows import datasheet_ceilings, stream_ceiling
from hyperion.errors import HyperionError


def forecast(context: Context) -> list[Forecast]:
    """The ridge of the datasheet's roofline, for each dtype measured."""
    forecasts = []
    for dtype in reversed(_measured_dtypes(context)):
        ceilings, basis = datasheet_ceilings(context.device, dtype)
        forecasts.append(
            Forecast(
                variant="measured ceilings",
                metric="roofline_ridge_flop_per_byte",
                estimate=ceilings.ridge_flop_per_byte if ceilings else None,
                basis=basis,
                dtype=dtype,
            )
        )
    return forecasts


def run(context: Context, report) -> Result:
    """The ridge of each dtype, from the best rows of `gemm` and `bandwidth` in this run.

    Raises:
        HyperionError: one of the two has not run.
    """
    bandwidth = stream_ceiling(context.upstream)
    if bandwidth is None or not _measured_dtypes(context):
        raise HyperionError(
            "a roofline needs both ceilings", where=context.notebook, next_step="run gemm and bandwidth in this run first"
        )
    rows, points = [], []
    for dtype in _measured_dtypes(context):
        gemm = context.best_upstream("gemm_tflops", dtype)
        ridge = gemm.value * 1e3 / bandwidth.value
        rows.append(context.row("measured ceilings", "roofline_ridge_flop_per_byte", ridge, dtype=dtype))
        points.append({"dtype": dtype, "tflops": gemm.value, "bandwidth_gb_s": bandwidth.value, "ridge": ridge})
    return Result(rows, pd.DataFrame(points))


EXPERIMENT = Experiment(forecast, run, reads=("gemm", "bandwidth"))


def _measured_dtypes(context: Context) -> list[str]:
    dtypes = dict.fromkeys(row.dtype for row in context.upstream if row.metric == "gemm_tflops")
    return [dtype for dtype in dtypes if context.best_upstream("gemm_tflops", dtype) is not None]
