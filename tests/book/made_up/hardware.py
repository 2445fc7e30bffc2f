"""Rows of hardware chapters that no machine measured: test data, valid by every rule of a row."""

import math

import pandas as pd

from hyperion.results import Row, median_estimate

HARDWARE = "01_hardware_exploration"
PEAKS = {"fp64": 66.9, "fp32": 66.9, "tf32": 494.7, "fp16": 989.5, "bf16": 989.5}
REACHED = {"fp64": 0.93, "fp32": 0.76, "tf32": 0.84, "fp16": 0.71, "bf16": 0.79}


def timed(random, notebook, experiment, variant, metric, rate, limit, **columns):
    """A row whose value scatters around `rate`."""
    estimate = median_estimate(rate * random.normal(1, 0.01, 40)).map(lambda value: min(value, 0.999 * (limit or math.inf)))
    source = "data sheet: units x operations per clock x maximum clock" if limit else "no limit: no data sheet entry"
    return Row(
        notebook=notebook,
        experiment=experiment,
        variant=variant,
        metric=metric,
        value=estimate.value,
        n=estimate.n,
        ci_low=estimate.ci_low,
        ci_high=estimate.ci_high,
        limit=limit,
        **{"limit_source": source} | columns,
    )


def gemm_rows(random, peaks):
    rows = []
    for dtype, peak in peaks.items():
        for size in (1024, 2048, 4096, 8192, 16384):
            params = {"m": size, "n": size, "k": size, "cache": "cold"}
            rate = (peak or 0.4) * REACHED[dtype] * (1 - math.exp(-((size / 3000) ** 1.6)))
            check = {"check": "slice against float64", "check_error": 2e-4, "check_tolerance": 1e-3}
            rows.append(
                timed(
                    random,
                    HARDWARE,
                    "gemm",
                    "torch.mm",
                    "gemm_tflops",
                    rate,
                    peak,
                    dtype=dtype,
                    params=params,
                    predicted=(peak or 0.5) * 0.95,
                    clock_mhz=1755.0,
                    power_w=640.0,
                    **check,
                )
            )
            if dtype == "bf16":
                params = params | {"plain_loop_calls": 30}
                rows.append(
                    timed(random, HARDWARE, "gemm", "harness over plain loop", "speedup", 1.01, None, dtype=dtype, params=params)
                )
                rows.append(
                    timed(random, HARDWARE, "gemm", "plain loop", "gemm_tflops", rate, peak, dtype=dtype, params=params, **check)
                )
    rows.append(
        Row(
            notebook=HARDWARE,
            experiment="gemm",
            variant="torch.mm",
            metric="gemm_tflops",
            value=None,
            dtype="fp8",
            params={"m": 1024, "n": 1024, "k": 1024, "cache": "cold"},
            value_reason="unsupported: torch.mm takes no fp8",
        )
    )
    return rows


def bandwidth_rows(random, limit):
    rows = []
    for operation, factor in (("copy", 0.91), ("scale", 0.90), ("add", 0.925), ("triad", 0.93)):
        for millions in (10, 20, 50, 100, 200, 500):
            rate = (limit or 40) * factor * (1 - math.exp(-millions / 15))
            large = limit if millions >= 50 else None
            reason = {} if large else {"limit_source": "no limit: part of the output may stay in the cache (80 MiB)"}
            if large:
                reason = {"limit_source": "device memory: data sheet, HBM3e"}
            rows.append(
                timed(
                    random,
                    HARDWARE,
                    "bandwidth",
                    operation,
                    "bandwidth_gb_s",
                    rate,
                    large,
                    dtype="fp32",
                    params={"elements": millions * 10**6, "cache": "cold"},
                    predicted=limit,
                    check="against float64",
                    check_error=0.0,
                    check_tolerance=1e-7,
                    **reason,
                )
            )
    return rows


def roofline_rows(random, peaks):
    return [
        Row(
            notebook=HARDWARE,
            experiment="roofline",
            variant="measured ceilings",
            dtype=dtype,
            value=(peak or 0.4) / 3.9 * 1e3,
            metric="roofline_ridge_flop_per_byte",
        )
        for dtype, peak in peaks.items()
    ]


def time_samples(rows):
    frames = [
        pd.DataFrame({"variant": r.variant, "dtype": r.dtype, "params": "{}", "index": range(3), "time_s": [0.1, 0.11, 0.1]})
        for r in rows
    ]
    return pd.concat(frames, ignore_index=True)
