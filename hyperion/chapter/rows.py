"""Columns of timed rows: statistics, check, device state and limit; rows of matrix products; ceilings found in a run's rows."""

import json
from collections.abc import Iterable

import pandas as pd

from hyperion.chapter.context import Context
from hyperion.errors import not_none
from hyperion.hardware import Device, gemm_path, lookup, peak
from hyperion.measure import FORMATS, Ceilings, Timing, Verification, format_of
from hyperion.measure.clock.timing import require_cache_label
from hyperion.results import Estimate, Row, ratio_estimate
from hyperion.units import MIB

# A call that moves this many times the last-level cache leaves at most a tenth of its traffic in it.
_CACHE_MULTIPLE = 10


def timed_columns(estimate: Estimate, timing: Timing, verification: Verification | None = None) -> dict:
    """Return interval, check and device state of a row whose value is `estimate`, derived from `timing`."""
    state = timing.telemetry
    columns = {
        "n": estimate.n,
        "ci_low": estimate.ci_low,
        "ci_high": estimate.ci_high,
        "clock_mhz": state.clock_mhz,
        "power_w": state.power_w,
        "throttle": state.throttle,
    }
    return columns if verification is None else columns | check_columns(verification)


def timed_row(
    context: Context,
    variant: str,
    metric: str,
    estimate: Estimate,
    timing: Timing,
    verification: Verification | None = None,
    limit: tuple[float | None, str] = (None, ""),
    **columns,
) -> Row:
    """Return the row of a value derived from a timing: its interval, limit, check and the device's state.

    Args:
        estimate: the value, in the unit of the metric.
        verification: of the timed output; None for a value that needs no check.
        limit: (limit of the value, its source), or (None, why there is none).
        columns: further columns, such as dtype and params.
    """
    columns |= timed_columns(estimate, timing, verification)
    return context.row(variant, metric, estimate.value, limit=limit[0], limit_source=limit[1], **columns)


def speedup_row(
    context: Context,
    variant: str,
    timing: Timing,
    baseline: Timing,
    why_no_limit: str,
    verification: Verification | None = None,
    **columns,
) -> Row:
    """Return the row of the speed-up of one timing over another. The two were timed in turn, so a drift cancels."""
    ratio = ratio_estimate(timing.samples_s, baseline.samples_s)
    return timed_row(context, variant, "speedup", ratio, timing, verification, (None, why_no_limit), **columns)


def checked(name: str, error: float, tolerance: float) -> dict:
    """Return the columns of a check: what was compared, the error, and the largest error allowed."""
    return {"check": name, "check_error": error, "check_tolerance": tolerance}


def check_columns(verification: Verification) -> dict:
    """Return the columns that store a verification."""
    return checked(verification.name, verification.error, verification.tolerance)


def sample_frame(timing: Timing, variant: str, dtype: str, params: dict) -> pd.DataFrame:
    """Return the raw samples in seconds, one a line, and how they were taken.

    Raises:
        HarnessError: `params` says "cold" or "hot" of the caches, and the samples were taken otherwise.
    """
    require_cache_label(params.get("cache"), timing.cold)
    return pd.DataFrame(
        {
            "variant": variant,
            "dtype": dtype,
            "params": json.dumps(params, sort_keys=True),
            "index": range(len(timing.samples_s)),
            "time_s": timing.samples_s,
            "warm": timing.warm,
            "drift": timing.drift.relative,
            "unsteady": timing.unsteady,
            "stopped": timing.stopped,
        }
    )


def all_samples(frames: list[pd.DataFrame]) -> pd.DataFrame:
    """Return the samples of an experiment's variants as one table, empty without any."""
    return pd.concat(frames, ignore_index=True) if frames else pd.DataFrame()


def out_of_memory_reason(error: Exception) -> str:
    """Return the `value_reason` of a row whose sizes did not fit into memory."""
    return f"out of memory: {str(error).splitlines()[0]}"


def gemm_limit(device: Device, dtype: str) -> tuple[float | None, str]:
    """Return (TFLOPS at the maximum clock, its source), or (None, why there is none)."""
    found = peak(device, gemm_path(dtype, device))
    if found.limit_tflops is None:
        return None, f"no limit: {found.reason}"
    return found.limit_tflops, found.limit_source or ""


def bandwidth_limit(device: Device, traffic_bytes: int) -> tuple[float | None, str]:
    """Return (GB/s of device memory, its source), or (None, why there is none).

    Args:
        traffic_bytes: bytes read and written by one call. A small amount may stay in the last-level cache, whose bandwidth
            has another limit.
    """
    found, reason = lookup(device)
    if found is None:
        return None, f"no limit: {reason}"
    if found.memory_bandwidth_limit_gb_s is None:
        return None, f"no limit: {found.memory_bandwidth_source}"
    cache = device.last_level_cache_bytes or 0
    if traffic_bytes < _CACHE_MULTIPLE * cache:
        sizes = f"{traffic_bytes / MIB:.0f} MiB of traffic, {cache / MIB:.0f} MiB of last-level cache"
        return None, f"no limit: part of the output may stay in the cache ({sizes})"
    return found.memory_bandwidth_limit_gb_s, f"device memory: {found.memory_bandwidth_source}"


def datasheet_ceilings(device: Device, dtype: str) -> tuple[Ceilings | None, str]:
    """Return (the data sheet's ceilings for predictions, what they are), or (None, why there are none)."""
    found, reason = lookup(device)
    if found is None:
        return None, reason
    arithmetic = found.peak(gemm_path(dtype, device))
    if arithmetic.nominal_tflops is None:
        return None, arithmetic.reason or "no datasheet value"
    kind = "published peak" if arithmetic.published_tflops is not None else "cores x operations per cycle x nominal clock"
    bandwidth = found.memory_bandwidth_gb_s
    basis = f"roofline: {kind} {arithmetic.nominal_tflops:.4g} TFLOPS"
    basis += f", published {bandwidth:g} GB/s" if bandwidth else ", memory bandwidth unknown"
    return Ceilings(arithmetic.nominal_tflops, bandwidth, basis), basis


def roofline_tflops(device: Device, dtype: str, m: int, n: int, k: int) -> tuple[float | None, str]:
    """Return (TFLOPS that data sheet peak and bandwidth allow for a product, what they are), or (None, why not)."""
    ceilings, basis = datasheet_ceilings(device, dtype)
    if ceilings is None:
        return None, basis
    flops = 2 * m * n * k
    return flops / ceilings.least_time_s(flops, product_bytes(device, dtype, m, n, k)) / 1e12, basis


def product_bytes(device: Device, dtype: str, m: int, n: int, k: int) -> int:
    """Return the bytes of both operands and the output of a product, each counted once: the least memory traffic."""
    number_format = format_of(dtype, device)
    return (m + n) * k * number_format.bytes + m * n * number_format.output.itemsize


def rate_row(
    context: Context,
    variant: str,
    dtype: str,
    params: dict,
    rate: Estimate,
    timing: Timing,
    verification: Verification,
    backend: str,
) -> Row:
    """Return the row of a product's rate in TFLOPS, limited by the peak of its format."""
    limit, source = gemm_limit(context.device, dtype)
    bound = limit, f"{source}; by {backend}"
    return timed_row(context, variant, "gemm_tflops", rate, timing, verification, bound, dtype=dtype, params=params)


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
    """Return `rate_row`; for a product with a wrong output, which has no rate, the row with the reason."""
    if wrong := wrong_product(dtype, verification):
        return absent_product(context, variant, dtype, params, wrong)
    return rate_row(context, variant, dtype, params, rate, timing, verification, backend)


def absent_product(context: Context, variant: str, dtype: str, params: dict, reason: str) -> Row:
    """Return the row of a product that has no rate."""
    return context.absent_row(variant, "gemm_tflops", reason, dtype=dtype, params=params)


def wrong_product(dtype: str, verification: Verification) -> str:
    """Return why a product's output contradicts its format, "" if it does not."""
    if not verification.passed:
        return f"wrong output: relative error {verification.error:.3g} above {verification.tolerance:.3g}"
    if dtype == "tf32" and verification.error < FORMATS["fp32"].gemm_tolerance:
        return "TF32 was allowed, but the product has the accuracy of fp32"
    return ""


def maf_row(rows: Iterable[Row], dtype: str) -> Row | None:
    """Return the row of the maximum achievable rate (MAF) of a dtype, None if the run has measured no product in it.

    It is the fastest product found by the search over shapes, or the fastest square product if there was no search.
    """
    measured = [r for r in rows if (r.metric, r.dtype, r.hot) == ("gemm_tflops", dtype, False) and r.value is not None]
    found = [r for r in measured if r.experiment == "best_products" and r.variant == "fastest found"]
    squares = [row for row in measured if row.experiment == "gemm"]
    return max(found or squares, key=lambda row: not_none(row.value), default=None)


def stream_ceiling(rows: Iterable[Row]) -> Row | None:
    """Return the row of the fastest stream among the largest arrays, None without streams.

    Smaller arrays do not count: a cache may serve them.
    """
    streams = [row for row in rows if row.metric == "bandwidth_gb_s" and row.value is not None and not row.hot]
    largest = max((row.params["elements"] for row in streams), default=None)
    return max((row for row in streams if row.params["elements"] == largest), key=lambda row: not_none(row.value), default=None)
