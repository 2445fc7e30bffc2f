"""Why is the fastest matrix product of each format slower than the data-sheet peak?

This experiment takes no measurements of its own. From the rows of the run, it computes four factors: the effects of clock
frequency, incomplete tiles, memory traffic and launches. A factor "unexplained" accounts for the remaining difference.
"""

from math import prod

import pandas as pd

from hyperion.chapter.context import Context, Experiment, Forecast, Options, Report, Result
from hyperion.chapter.rows import maf_row, product_bytes, stream_ceiling
from hyperion.errors import not_none
from hyperion.measure import Gap, Product, explain_gap, nominal_peak
from hyperion.results import Row

WHOLE = "measured / peak"
_SQUARE, _SEARCHED = "gemm", "best_products"
_EXACT = 1e-9  # tolerance of the check that the product of all factors is measured / peak; allows for rounding only


def forecast(context: Context) -> list[Forecast]:
    """Return no forecasts, because the factors are computed from existing rows."""
    return []


def run(context: Context, report: Report) -> Result:
    """Compute, for each format, the factors of the fastest square product and of the fastest product found by the search."""
    rows: list[Row] = []
    formats = list(dict.fromkeys(row.dtype for row in context.upstream if _is_product(row)))
    for done, dtype in enumerate(formats):
        report(done, len(formats), dtype)
        for experiment in (_SQUARE, _SEARCHED):
            rows += _rows_of(context, dtype, experiment)
    report(len(formats), len(formats), "done")
    return Result(rows, pd.DataFrame())


EXPERIMENT = Experiment(forecast, run, options=Options, reads=(_SQUARE, _SEARCHED, "bandwidth", "launch_cost"))


def _is_product(row: Row) -> bool:
    return row.metric == "gemm_tflops" and row.experiment in (_SQUARE, _SEARCHED)


def _rows_of(context: Context, dtype: str, experiment: str) -> list[Row]:
    """Return the rows with the factors of the fastest matrix product of `experiment` in one number format.

    If the factors cannot be computed, return one row with the reason. If the experiment has no matrix products in this format,
    return no rows.
    """
    rows = [row for row in context.upstream if _is_product(row) and (row.experiment, row.dtype) == (experiment, dtype)]
    if not rows:
        return []
    best = maf_row(rows, dtype)
    if best is None:
        reason = next((row.value_reason for row in rows if row.value_reason), "no product with a cold cache was measured")
        return [context.absent_row(WHOLE, "share", reason, dtype=dtype, params={"of": experiment})]
    m, n, k = (best.params[side] for side in "mnk")
    shape = {"of": experiment, "m": m, "n": n, "k": k}
    peak, reason = nominal_peak(context.device, dtype)
    if peak is None:
        return [context.absent_row(WHOLE, "share", f"no peak: {reason}", dtype=dtype, params=shape)]
    stream = stream_ceiling(context.upstream)
    gap = explain_gap(
        Product("matmul", 1, m, n, k, dtype, "NT", product_bytes(context.device, dtype, m, n, k)),
        not_none(best.value),
        peak,
        clock_mhz=best.clock_mhz,
        bandwidth_gb_s=stream.value if stream else None,
        launch_time_s=_launch_time_s(context),
    )
    return _gap_rows(context, dtype, shape, best, gap)


def _gap_rows(context: Context, dtype: str, shape: dict, best: Row, gap: Gap) -> list[Row]:
    """Return a row with the measured rate divided by the peak, then one row for each factor.

    The check of each row compares the product of all factors with the measured rate divided by the peak.
    """
    whole = gap.measured_tflops / gap.peak.tflops
    together = prod(step.factor for step in gap.factors if step.factor is not None)
    shared: dict = {
        "check": "product of all factors = measured / peak",
        "check_error": abs(together / whole - 1),
        "check_tolerance": _EXACT,
        "clock_mhz": best.clock_mhz,
        "power_w": best.power_w,
        "throttle": best.throttle,
    }
    rows = [
        context.row(
            WHOLE,
            "share",
            whole,
            dtype=dtype,
            params=shape | {"step": 0, "peak_tflops": gap.peak.tflops},
            n=best.n,
            ci_low=not_none(best.ci_low) / gap.peak.tflops,
            ci_high=not_none(best.ci_high) / gap.peak.tflops,
            limit_source=gap.peak.source,
            **shared,
        )
    ]
    for place, step in enumerate(gap.factors, 1):
        columns = {"value_reason": step.reason} if step.factor is None else {"limit_source": step.reason} | shared
        rows.append(context.row(step.name, "share", step.factor, dtype=dtype, params=shape | {"step": place}, **columns))
    return rows


def _launch_time_s(context: Context) -> float | None:
    """Return the launch time in seconds included in the measured time of a matrix product, or None if it was not measured.

    On a GPU the result is 0: times are measured with CUDA events, and the next launch is always queued before the device needs
    it.
    """
    if context.device.kind != "cpu":
        return 0.0
    launches = [row.value for row in context.upstream if (row.metric, row.variant) == ("launch_time_s", "eager")]
    return next((seconds for seconds in launches if seconds is not None), None)
