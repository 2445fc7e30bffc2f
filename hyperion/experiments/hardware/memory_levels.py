"""Where do the caches end? Bandwidth of the same few bytes, read or copied again and again, by how many they are."""

import pandas as pd
import torch

from hyperion.chapter.context import Context, Experiment, Forecast, Result
from hyperion.chapter.rows import bandwidth_limit, out_of_memory_reason, sample_frame, timed_columns
from hyperion.hardware import Device
from hyperion.measure import SWEEPS, CachePoint, cache_capacities, measure_cache_sweep, sweep_sizes
from hyperion.results import Row

MIB = 2**20
# Caches that hold a twentieth of the working set can serve no more than a twentieth of its bytes: within what separates the
# fastest stream from its limit.
_BEYOND_CACHE = 20


def forecast(context: Context) -> list[Forecast]:
    """The datasheet's bandwidth for working sets that only device memory holds, the largest first; None for caches."""
    return [_forecast(context, operation, size) for size in sorted(_sizes(context), reverse=True) for operation in SWEEPS]


def run(context: Context, report) -> Result:
    """The capacities that the system tells, then reads and copies over every working set."""
    rows = [_capacity_row(context, capacity) for capacity in cache_capacities(context.device)]
    frames: list[pd.DataFrame] = []
    for done, operation in enumerate(SWEEPS):
        report(done, len(SWEEPS), operation)
        try:
            points = measure_cache_sweep(
                operation,
                context.device,
                dtype=context.sizes["dtype"],
                sizes=_sizes(context),
                seed=context.seed,
                time_limit_s=context.sizes["time_limit_s"],
            )
        except torch.OutOfMemoryError as error:
            rows.append(_absent(context, operation, out_of_memory_reason(error)))
            continue
        for point in points:
            row = _row(context, point)
            rows.append(row)
            frames.append(sample_frame(point.timing, operation, point.dtype, row.params).assign(how=point.how))
    report(len(SWEEPS), len(SWEEPS), "done")
    return Result(rows, pd.concat(frames, ignore_index=True) if frames else pd.DataFrame())


EXPERIMENT = Experiment(forecast, run)


def copy_params(working_set: int) -> dict:
    """Parameters by which rows of repeated work over one working set are told apart."""
    return {"working_set_bytes": working_set, "cache": "hot"}


def how_timed(point: CachePoint, device: Device) -> str:
    """How calls were made and timed, without the number of them, which differs between runs."""
    if point.captured:
        return "in a graph, on the device's clock"
    return "in a row, on the host's clock" + ("" if device.kind == "cpu" else ", launches included")


def point_row(context: Context, variant: str, point: CachePoint, **columns) -> Row:
    """The rate over one working set; `columns` say its limit."""
    rate = point.bandwidth_gb_s
    params = copy_params(point.working_set_bytes) | {"level": point.level, "timed": how_timed(point, context.device)}
    return context.row(
        variant,
        "bandwidth_gb_s",
        rate.value,
        dtype=point.dtype,
        params=params,
        **columns,
        **timed_columns(rate, point.timing, point.verification),
    )


def _sizes(context: Context) -> list[int]:
    """Working sets in bytes: the sweep's own, on to what no cache can have a part in, thinned and capped by the profile."""
    device, step = context.device, context.sizes["step"]
    most = min(context.sizes["largest_mib"] * MIB, device.memory_bytes // 8)
    sizes = sweep_sizes(cache_capacities(device), device.memory_bytes)
    while sizes[-1] < _BEYOND_CACHE * (device.last_level_cache_bytes or 0) and 2 * sizes[-1] <= most:
        sizes.append(2 * sizes[-1])
    kept = [size for size in sizes if size <= most]
    # Counted from the largest: it is the one that tells of memory.
    return kept[::-1][::step][::-1]


def _forecast(context: Context, operation: str, size: int) -> Forecast:
    limit, source = _limit(context.device, size)
    return Forecast(
        variant=operation,
        metric="bandwidth_gb_s",
        estimate=limit,
        basis=source,
        dtype=context.sizes["dtype"],
        params=copy_params(size),
    )


def _limit(device: Device, working_set: int) -> tuple[float | None, str]:
    """(GB/s of device memory, its source) for what no cache holds, or (None, why there is none)."""
    cache = device.last_level_cache_bytes
    if cache is None:
        return None, "no limit: a cache of unknown size may serve it"
    if working_set <= cache:
        return None, "no limit: another level than device memory, and data sheets tell no rate of caches"
    if working_set < _BEYOND_CACHE * cache:
        sizes = f"{working_set / MIB:.4g} MiB of working set, {cache / MIB:.4g} MiB of last-level cache"
        return None, f"no limit: a cache still serves part of it ({sizes})"
    return bandwidth_limit(device, working_set)


def _row(context: Context, point: CachePoint) -> Row:
    limit, source = _limit(context.device, point.working_set_bytes)
    if limit is None and point.launch_bound:
        launch, call = (1e6 * timing.estimate.value for timing in (point.launch, point.timing))
        source = f"no limit: mostly launching (one element takes {launch:.2g} of these {call:.2g} us)"
    return point_row(context, point.operation, point, limit=limit, limit_source=source)


def _capacity_row(context: Context, capacity) -> Row:
    params = {"caches": capacity.count}
    return context.row(capacity.name, "cache_bytes", float(capacity.bytes), params=params)


def _absent(context: Context, operation: str, reason: str) -> Row:
    params = copy_params(_sizes(context)[-1])
    return context.row(operation, "bandwidth_gb_s", None, dtype=context.sizes["dtype"], params=params, value_reason=reason)
