"""Turn timings and matrix-product results into rows, and look up the ceilings that a run has measured.

A ceiling is the highest matrix-product rate, or the highest memory bandwidth, that an earlier chapter of the run measured.
"""

from collections.abc import Iterable
from typing import Any

import pandas as pd

from hyperion.chapter.context import Context
from hyperion.errors import not_none
from hyperion.hardware import Device, gemm_path, lookup, peak
from hyperion.measure import FORMATS, Ceilings, Collective, Timing, Verification, format_of
from hyperion.measure.clock.timing import require_cache_label
from hyperion.results import Estimate, Row, ratio_estimate
from hyperion.results.rows import OUT_OF_MEMORY, canonical_params, idle_rows
from hyperion.units import MIB

# Basis of a forecast that needs the ceilings of chapter 1.1.
NO_CEILINGS = "no estimate: this run has measured no ceilings (01_hardware_exploration)"
# Minimum traffic of a call, as a multiple of the last-level cache size, for which the memory bandwidth is a limit. At most a
# tenth of this traffic can stay in the cache.
CACHE_MULTIPLE = 10


def timed_columns(estimate: Estimate, timing: Timing, verification: Verification | None = None) -> dict:
    """Return the columns for interval, check and device state, for a row whose value is `estimate`.

    Args:
        estimate: value of the row, computed from `timing`.
        timing: timing of the calls.
        verification: verification of the timed output. None for a value that needs no check.
    """
    columns = estimate.columns | timing.telemetry.row_columns()
    return columns if verification is None else columns | check_columns(verification)


def timed_row(
    context: Context,
    variant: str,
    metric: str,
    estimate: Estimate,
    timing: Timing,
    verification: Verification | None = None,
    limit: tuple[float | None, str] = (None, ""),
    **columns: Any,
) -> Row:
    """Return a row with a value computed from a timing, and with its interval, limit, check and device state.

    Args:
        context: context of the experiment.
        variant, metric: variant of the experiment, and name of the metric.
        estimate: value in the unit of the metric.
        timing: timing from which the value was computed.
        verification: verification of the timed output. None for a value that needs no check.
        limit: (limit of the value, source of the limit), or (None, reason why there is no limit).
        columns: additional columns, such as dtype and params.
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
    **columns: Any,
) -> Row:
    """Return the row with the speed-up of `timing` over `baseline`.

    The two must have been timed in alternation, so that clock drift cancels.
    """
    ratio = ratio_estimate(timing.samples_s, baseline.samples_s)
    return timed_row(context, variant, "speedup", ratio, timing, verification, (None, why_no_limit), **columns)


def checked(name: str, error: float, tolerance: float) -> dict:
    """Return the columns of a check.

    Args:
        name: name of the check, which states what was compared.
        error: error that was found.
        tolerance: largest allowed error.
    """
    return {"check": name, "check_error": error, "check_tolerance": tolerance}


def check_columns(verification: Verification) -> dict:
    """Return the check columns with the values of a verification."""
    return checked(verification.name, verification.error, verification.tolerance)


def sample_frame(timing: Timing, variant: str, dtype: str, params: dict) -> pd.DataFrame:
    """Return a table with one line per raw sample: its time in seconds, and the conditions of the timing.

    Raises:
        HarnessError: `params` states that the caches were "cold" or "hot", but the samples were taken in the other state.
    """
    require_cache_label(params.get("cache"), timing.cold)
    return pd.DataFrame(
        {
            "variant": variant,
            "dtype": dtype,
            "params": canonical_params(params),
            "index": range(len(timing.samples_s)),
            "time_s": timing.samples_s,
            "warm": timing.warm,
            "drift": timing.drift.relative,
            "unsteady": timing.unsteady,
            "stopped": timing.stopped,
        }
    )


def all_samples(frames: list[pd.DataFrame]) -> pd.DataFrame:
    """Return the samples of several variants as one table, which is empty if there are no samples."""
    return pd.concat(frames, ignore_index=True) if frames else pd.DataFrame()


def out_of_memory_reason(error: Exception) -> str:
    """Return the `value_reason` of a row whose data did not fit into memory. It starts with `OUT_OF_MEMORY`."""
    return OUT_OF_MEMORY + str(error).splitlines()[0]


def gemm_limit(device: Device, dtype: str) -> tuple[float | None, str]:
    """Return the limit of a matrix product: (TFLOPS at the maximum clock, source), or (None, reason why there is no limit)."""
    found = peak(device, gemm_path(dtype, device))
    if found.limit_tflops is None:
        return None, f"no limit: {found.reason}"
    return found.limit_tflops, found.limit_source or ""


def bandwidth_limit(device: Device, traffic_bytes: int) -> tuple[float | None, str]:
    """Return the limit of a bandwidth: (GB/s of the device memory, source), or (None, reason why there is no limit).

    Args:
        device: device of the memory.
        traffic_bytes: bytes that one call reads and writes. If this number is small, part of them may stay in the last-level
            cache, to which this limit does not apply.
    """
    found, reason = lookup(device)
    if found is None:
        return None, f"no limit: {reason}"
    if found.memory_bandwidth_limit_gb_s is None:
        return None, f"no limit: {found.memory_bandwidth_source}"
    cache = device.last_level_cache_bytes or 0
    if traffic_bytes < CACHE_MULTIPLE * cache:
        sizes = f"{traffic_bytes / MIB:.0f} MiB of traffic, {cache / MIB:.0f} MiB of last-level cache"
        return None, f"no limit: part of the output may stay in the cache ({sizes})"
    return found.memory_bandwidth_limit_gb_s, f"device memory: {found.memory_bandwidth_source}"


def link_limit(device: Device, collective: Collective, ranks: int) -> tuple[float | None, str]:
    """Return the limit of a collective's bus bandwidth: (GB/s, source), or (None, reason why there is no limit).

    It is the rate in one direction of all links that a device can use at once.
    """
    found, reason = lookup(device)
    if found is None:
        return None, reason
    link, source = found.link_limit_gb_s(ranks)
    # In a ring, a device sends to only one peer, for any number of ranks.
    return found.link_limit_gb_s(2) if link is not None and collective.name == "send_recv" else (link, source)


def datasheet_ceilings(device: Device, dtype: str) -> tuple[Ceilings | None, str]:
    """Return (ceilings from the data sheet, their description), or (None, reason why there are no ceilings).

    Predictions use these ceilings.
    """
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


def product_bytes(device: Device, dtype: str, m: int, n: int, k: int) -> int:
    """Return the minimum memory traffic of a matrix product: the bytes of both operands and of the output."""
    number_format = format_of(dtype, device)
    # Operands (M, K) and (K, N) in the input format, output (M, N) in the output format.
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
    """Return the row with the rate of a matrix product in TFLOPS. Its limit is the peak of the number format."""
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
    """Return the row with the rate of a matrix product.

    If the product's output is wrong, the row has a reason instead of a value.
    """
    if wrong := wrong_product(dtype, verification):
        return absent_product(context, variant, dtype, params, wrong)
    return rate_row(context, variant, dtype, params, rate, timing, verification, backend)


def absent_product(context: Context, variant: str, dtype: str, params: dict, reason: str) -> Row:
    """Return the row of a matrix product whose rate could not be measured, with the reason."""
    return context.absent_row(variant, "gemm_tflops", reason, dtype=dtype, params=params)


def wrong_product(dtype: str, verification: Verification) -> str:
    """Return the reason why the output of a matrix product is wrong for its number format, or "" if it is correct."""
    if not verification.passed:
        return f"wrong output: relative error {verification.error:.3g} above {verification.tolerance:.3g}"
    return unused_tf32(dtype, verification.error)


def unused_tf32(dtype: str, error: float) -> str:
    """Return the reason why a tf32 product with this relative error was not computed in TF32, or "" if it was.

    For other formats, return "". A library may compute in fp32 although TF32 is allowed. The measured rate is then not a TF32
    rate.
    """
    # TF32 rounds operands to 10 mantissa bits, so a smaller error shows that the TF32 units were not used.
    ignored = dtype == "tf32" and error < FORMATS["fp32"].gemm_tolerance
    return "TF32 was allowed, but the product has the accuracy of fp32" if ignored else ""


def maf_row(rows: Iterable[Row], dtype: str) -> Row | None:
    """Return the row with the maximum achievable FLOPS (MAF) of a dtype.

    The row is that of the fastest matrix product found by the search over shapes or, without a search, of the fastest square
    product. Return None if the run has no matrix product in this dtype.
    """
    measured = [r for r in rows if (r.metric, r.dtype, r.hot) == ("gemm_tflops", dtype, False) and r.value is not None]
    found = [r for r in measured if r.experiment == "best_products" and r.variant == "fastest found"]
    squares = [row for row in measured if row.experiment == "gemm"]
    chosen = found or squares
    return max(idle_rows(chosen), key=lambda row: not_none(row.value), default=None)


def stream_ceiling(rows: Iterable[Row]) -> Row | None:
    """Return the row of the fastest memory stream with the largest arrays, or None if the rows contain no streams.

    Streams with smaller arrays are ignored, because their data may come from a cache. Streams measured while other processes used
    the CPU cores are used only if there are no others.
    """
    streams = [row for row in rows if row.metric == "bandwidth_gb_s" and row.value is not None and not row.hot]
    largest = max((row.params["elements"] for row in streams), default=None)
    largest_streams = [row for row in streams if row.params["elements"] == largest]
    return max(idle_rows(largest_streams), key=lambda row: not_none(row.value), default=None)
