"""Where does the rest of the peak go? From the data sheet to the fastest product of each format, factor by factor.

Nothing is measured: clock, tiles, memory and launch of a row that the run already holds say what each of them takes, and
what none of them explains is named so.
"""

from math import prod

import pandas as pd

from hyperion.chapter.context import Context, Experiment, Forecast, Result
from hyperion.chapter.product_rows import maf_row
from hyperion.chapter.rows import stream_ceiling
from hyperion.measure import Gap, Product, explain_gap, format_of, nominal_peak
from hyperion.results import Row

WHOLE = "measured / peak"
_SQUARE, _SEARCHED = "gemm", "best_products"
_EXACT = 1e-9  # the factors are floating-point numbers: their product is the whole but for rounding


def forecast(context: Context) -> list[Forecast]:
    """None: factors follow from rows that are there already."""
    return []


def run(context: Context, report) -> Result:
    """The factors of the fastest square and of the fastest product found, of every format that the run has rows of."""
    rows: list[Row] = []
    formats = _formats(context.upstream)
    for done, dtype in enumerate(formats):
        report(done, len(formats), dtype)
        for experiment in (_SQUARE, _SEARCHED):
            rows += _rows_of(context, dtype, experiment)
    report(len(formats), len(formats), "done")
    return Result(rows, pd.DataFrame())


EXPERIMENT = Experiment(forecast, run, reads=(_SQUARE, _SEARCHED, "bandwidth", "launch_cost"))


def _formats(rows: list[Row]) -> list[str]:
    return list(dict.fromkeys(row.dtype for row in rows if _is_product(row)))


def _is_product(row: Row) -> bool:
    return row.metric == "gemm_tflops" and row.experiment in (_SQUARE, _SEARCHED)


def _rows_of(context: Context, dtype: str, experiment: str) -> list[Row]:
    """The factors' rows; one that says why there are none; nothing where the experiment knows nothing of the format."""
    rows = [row for row in context.upstream if _is_product(row) and (row.experiment, row.dtype) == (experiment, dtype)]
    if not rows:
        return []
    best = maf_row(rows, dtype)
    if best is None:
        reason = next((row.value_reason for row in rows if row.value_reason), "no product with a cold cache was measured")
        return [context.row(WHOLE, "share", None, dtype=dtype, params={"of": experiment}, value_reason=reason)]
    shape = {"of": experiment} | {side: best.params[side] for side in "mnk"}
    peak, reason = nominal_peak(context.device, dtype)
    if peak is None:
        return [context.row(WHOLE, "share", None, dtype=dtype, params=shape, value_reason=f"no peak: {reason}")]
    stream = stream_ceiling(context.upstream)
    gap = explain_gap(
        _product(context, best),
        best.value,
        peak,
        clock_mhz=best.clock_mhz,
        bandwidth_gb_s=stream.value if stream else None,
        launch_time_s=_launch_time_s(context),
    )
    return _gap_rows(context, dtype, shape, best, gap)


def _gap_rows(context: Context, dtype: str, shape: dict, best: Row, gap: Gap) -> list[Row]:
    """The whole, then every factor in its place; each row's check is that all factors together make the whole."""
    whole = gap.measured_tflops / gap.peak.tflops
    together = prod(step.factor for step in gap.factors if step.factor is not None)
    check = {
        "check": "product of all factors = measured / peak",
        "check_error": abs(together / whole - 1),
        "check_tolerance": _EXACT,
    }
    state = {"clock_mhz": best.clock_mhz, "power_w": best.power_w, "throttle": best.throttle}
    rows = [
        context.row(
            WHOLE,
            "share",
            whole,
            dtype=dtype,
            params=shape | {"step": 0, "peak_tflops": gap.peak.tflops},
            n=best.n,
            ci_low=best.ci_low / gap.peak.tflops,
            ci_high=best.ci_high / gap.peak.tflops,
            limit_source=gap.peak.source,
            **check,
            **state,
        )
    ]
    for place, step in enumerate(gap.factors, 1):
        params = shape | {"step": place}
        if step.factor is None:
            rows.append(context.row(step.name, "share", None, dtype=dtype, params=params, value_reason=step.reason))
        else:
            rows.append(
                context.row(
                    step.name, "share", step.factor, dtype=dtype, params=params, limit_source=step.reason, **check, **state
                )
            )
    return rows


def _product(context: Context, row: Row) -> Product:
    m, n, k = (row.params[side] for side in "mnk")
    chosen = format_of(row.dtype, context.device)
    traffic = (m + n) * k * chosen.bytes + m * n * chosen.output.itemsize
    return Product("matmul", 1, m, n, k, row.dtype, "NT", traffic)


def _launch_time_s(context: Context) -> float | None:
    """Seconds of a launch inside of a product's time: none on a GPU, whose events time a queue that never runs dry."""
    if context.device.kind != "cpu":
        return 0.0
    launches = [row.value for row in context.upstream if (row.metric, row.variant) == ("launch_time_s", "eager")]
    return next((seconds for seconds in launches if seconds is not None), None)
