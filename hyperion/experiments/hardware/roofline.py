"""Roofline of chapter 1.1: at which arithmetic intensity do this run's two measured ceilings meet?

This intensity is the ridge point. Below it, memory bandwidth limits the rate; above it, arithmetic does.
"""

import pandas as pd

from hyperion.chapter.context import Context, Experiment, Forecast, Options, Report, Result
from hyperion.chapter.rows import datasheet_ceilings, stream_ceiling
from hyperion.errors import HyperionError, not_none
from hyperion.results import Row

VARIANT, METRIC = "measured ceilings", "roofline_ridge_flop_per_byte"


def forecast(context: Context) -> list[Forecast]:
    """Predict the ridge point of each measured dtype in FLOP per byte, from the data sheet."""
    forecasts = []
    for dtype in reversed(_fastest_products(context)):
        ceilings, basis = datasheet_ceilings(context.device, dtype)
        ridge = ceilings.ridge_flop_per_byte if ceilings else None
        forecasts.append(Forecast(VARIANT, METRIC, ridge, basis, dtype=dtype))
    return forecasts


def run(context: Context, report: Report) -> Result:
    """Compute each dtype's ridge point from this run's fastest matrix product and fastest stream.

    Raises:
        HyperionError: this run has no rows of `gemm` or no rows of `bandwidth`.
    """
    stream, products = stream_ceiling(context.upstream), _fastest_products(context)
    if stream is None or not products:
        raise HyperionError(
            "a roofline needs the rows of both gemm and bandwidth",
            where=context.notebook,
            next_step="run gemm and bandwidth in this run first",
        )
    bandwidth_gb_s = not_none(stream.value)
    rows, points = [], []
    for dtype, product in products.items():
        tflops = not_none(product.value)
        ridge = tflops * 1e3 / bandwidth_gb_s
        rows.append(context.row(VARIANT, METRIC, ridge, dtype=dtype))
        points.append({"dtype": dtype, "tflops": tflops, "bandwidth_gb_s": bandwidth_gb_s, "ridge": ridge})
    return Result(rows, pd.DataFrame(points))


EXPERIMENT = Experiment(forecast, run, options=Options, reads=("gemm", "bandwidth"))


def _fastest_products(context: Context) -> dict[str, Row]:
    """Return a dict that maps each dtype to the row of its fastest matrix product with cold caches."""
    dtypes = dict.fromkeys(row.dtype for row in context.upstream if row.metric == "gemm_tflops")
    found = {dtype: context.best_gemm(dtype) for dtype in dtypes}
    return {dtype: row for dtype, row in found.items() if row is not None}
