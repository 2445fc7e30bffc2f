"""What experiments on matrix products share: the roofline's rate of a shape, a row of a measured product, and one without."""

from hyperion.chapter.context import Context
from hyperion.chapter.rows import datasheet_ceilings, gemm_limit, timed_columns
from hyperion.hardware import Device
from hyperion.measure import FORMATS, Timing, Verification, format_of
from hyperion.results import Estimate, Row


def roofline_tflops(device: Device, dtype: str, m: int, n: int, k: int) -> tuple[float | None, str]:
    """(TFLOPS that data sheet peak and bandwidth allow, what they are), or (None, why there is no estimate)."""
    ceilings, basis = datasheet_ceilings(device, dtype)
    if ceilings is None:
        return None, basis
    chosen, flops = format_of(dtype, device), 2 * m * n * k
    traffic = (m + n) * k * chosen.bytes + m * n * chosen.output.itemsize
    return flops / ceilings.least_time_s(flops, traffic) / 1e12, basis


def product_row(
    context: Context,
    variant: str,
    dtype: str,
    params: dict,
    rate: Estimate,
    timing: Timing,
    verification: Verification,
    backend: str,
) -> Row:
    """The rate of a product (TFLOPS) below the peak of its format; one whose output is wrong has no rate."""
    wrong = wrong_product(dtype, verification)
    if wrong:
        return absent_product(context, variant, dtype, params, wrong)
    limit, source = gemm_limit(context.device, dtype)
    return context.row(
        variant,
        "gemm_tflops",
        rate.value,
        dtype=dtype,
        params=params,
        limit=limit,
        limit_source=f"{source}; by {backend}",
        **timed_columns(rate, timing, verification),
    )


def absent_product(context: Context, variant: str, dtype: str, params: dict, reason: str) -> Row:
    """A product without a rate, and why."""
    return context.row(variant, "gemm_tflops", None, dtype=dtype, params=params, value_reason=reason)


def wrong_product(dtype: str, verification: Verification) -> str:
    """Why a product is not what its format's name says, or ""."""
    if not verification.passed:
        return f"wrong output: relative error {verification.error:.3g} above {verification.tolerance:.3g}"
    if dtype == "tf32" and verification.error < FORMATS["fp32"].gemm_tolerance:
        return "TF32 was allowed, but the product has the accuracy of fp32"
    return ""


def maf_row(rows: list[Row], dtype: str) -> Row | None:
    """The fastest product of a dtype: what the search over shapes found, where the run has one, else the best square."""
    measured = [r for r in rows if (r.metric, r.dtype, r.hot) == ("gemm_tflops", dtype, False) and r.value is not None]
    found = [r for r in measured if r.experiment == "best_products" and r.variant == "fastest found"]
    squares = [row for row in measured if row.experiment == "gemm"]
    return max(found or squares, key=lambda row: row.value, default=None)
