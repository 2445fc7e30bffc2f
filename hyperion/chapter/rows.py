"""The columns that every timed row carries: its statistics, its check, the device's state, and the limit that bounds it."""

import json
from collections.abc import Iterable

import pandas as pd

from hyperion.hardware import Device, gemm_path, lookup, peak
from hyperion.measure import Ceilings, Timing, Verification
from hyperion.measure.clock import checks
from hyperion.results import Estimate, Row

# A working set this many times the last-level cache leaves at most a tenth of its traffic in it.
_CACHE_MULTIPLE = 10


def gemm_limit(device: Device, dtype: str) -> tuple[float | None, str]:
    """(TFLOPS at the maximum clock, its source), or (None, why there is none)."""
    found = peak(device, gemm_path(dtype, device))
    if found.limit_tflops is None:
        return None, f"no limit: {found.reason}"
    return found.limit_tflops, found.limit_source


def bandwidth_limit(device: Device, traffic_bytes: int) -> tuple[float | None, str]:
    """(GB/s of device memory, its source), or (None, why there is none).

    Args:
        traffic_bytes: what one call moves; a small working set may stay in the last-level cache, which is another path.
    """
    found, reason = lookup(device)
    if found is None:
        return None, f"no limit: {reason}"
    if found.memory_bandwidth_limit_gb_s is None:
        return None, f"no limit: {found.memory_bandwidth_source}"
    cache = device.last_level_cache_bytes or 0
    if traffic_bytes < _CACHE_MULTIPLE * cache:
        sizes = f"{traffic_bytes / 2**20:.0f} MiB of traffic, {cache / 2**20:.0f} MiB of last-level cache"
        return None, f"no limit: part of the output may stay in the cache ({sizes})"
    return found.memory_bandwidth_limit_gb_s, f"device memory: {found.memory_bandwidth_source}"


def datasheet_ceilings(device: Device, dtype: str) -> tuple[Ceilings | None, str]:
    """Ceilings to predict from, published values where there are any, and what they are; (None, reason) without."""
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


def stream_ceiling(rows: Iterable[Row]) -> Row | None:
    """The fastest measured stream among the largest arrays, None without any: smaller ones may owe their rate to a cache."""
    streams = [row for row in rows if row.metric == "bandwidth_gb_s" and row.value is not None and not row.hot]
    largest = max((row.params["elements"] for row in streams), default=None)
    return max((row for row in streams if row.params["elements"] == largest), key=lambda row: row.value, default=None)


def timed_columns(estimate: Estimate, timing: Timing, verification: Verification | None = None) -> dict:
    """Interval, check and device state of a row whose value is `estimate`, derived from `timing`."""
    state = timing.telemetry
    columns = {
        "n": estimate.n,
        "ci_low": estimate.ci_low,
        "ci_high": estimate.ci_high,
        "clock_mhz": state.clock_mhz,
        "power_w": state.power_w,
        "throttle": state.throttle,
    }
    if verification is not None:
        columns |= {"check": verification.name, "check_error": verification.error, "check_tolerance": verification.tolerance}
    return columns


def sample_frame(timing: Timing, variant: str, dtype: str, params: dict) -> pd.DataFrame:
    """Raw samples in seconds, one a line, and how they were taken.

    Raises:
        HarnessError: the parameters call the caches cold, or hot, and they were not.
    """
    checks.require_cache_label(params.get("cache"), timing.cold)
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


def out_of_memory_reason(error: Exception) -> str:
    """One line for a row whose sizes did not fit."""
    return f"out of memory: {str(error).splitlines()[0]}"
