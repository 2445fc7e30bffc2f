"""At which working-set sizes do the caches end?

The experiment measures the bandwidth of repeated reads and copies of the same bytes. The number of these bytes is the working
set. If it fits into a cache, the bandwidth can exceed that of the memory.
"""

import pandas as pd
import torch

from hyperion.chapter.context import Context, Experiment, Forecast, Options, Report, Result
from hyperion.chapter.efficiency import expected_repeated_stream
from hyperion.chapter.rows import all_samples, bandwidth_limit, out_of_memory_reason, sample_frame, timed_row
from hyperion.experiments.hardware.reasons import LAUNCHING
from hyperion.hardware import Device
from hyperion.measure import SWEEPS, CacheCapacity, CachePoint, cache_capacities, measure_cache_sweep, sweep_sizes
from hyperion.results import Row
from hyperion.units import MIB

# The bandwidth of device memory is a limit only for working sets at least this many times as large as the last-level cache. The
# cache then serves at most a twentieth of the bytes. This is no more than the gap between the fastest stream and its limit.
_BEYOND_CACHE = 20


class MemoryLevelsOptions(Options):
    """Options for the `memory_levels` experiment.

    Args:
        dtype: number format of the arrays.
        step: measure every `step`-th size in the list of working sets, starting from the largest. 1 measures all sizes.
        largest_mib: largest working set in MiB, capped at one eighth of the device memory.
        time_limit_s: timing budget in seconds for each working set and operation.
    """

    dtype: str
    step: int
    largest_mib: int
    time_limit_s: float


def forecast(context: Context) -> list[Forecast]:
    """Predict the bandwidth of working sets much larger than the caches, starting with the largest.

    Smaller working sets have no prediction.
    """
    options = MemoryLevelsOptions.of(context)
    sizes = sorted(_sizes(options, context.device), reverse=True)
    return [_forecast(context, operation, options.dtype, size) for size in sizes for operation in SWEEPS]


def run(context: Context, report: Report) -> Result:
    """Record the cache capacities that the system reports, then time reads and copies of every working set."""
    options = MemoryLevelsOptions.of(context)
    sizes = _sizes(options, context.device)
    rows = [_capacity_row(context, capacity) for capacity in cache_capacities(context.device)]
    frames: list[pd.DataFrame] = []
    for done, operation in enumerate(SWEEPS):
        report(done, len(SWEEPS), operation)
        try:
            points = measure_cache_sweep(
                operation, context.device, dtype=options.dtype, sizes=sizes, seed=context.seed, time_limit_s=options.time_limit_s
            )
        except torch.OutOfMemoryError as error:
            absent = {"dtype": options.dtype, "params": copy_params(sizes[-1]), "value_reason": out_of_memory_reason(error)}
            rows.append(context.row(operation, "bandwidth_gb_s", None, **absent))
            continue
        for point in points:
            row = _row(context, point)
            rows.append(row)
            frames.append(sample_frame(point.timing, operation, point.dtype, row.params).assign(how=point.how))
    report(len(SWEEPS), len(SWEEPS), "done")
    return Result(rows, all_samples(frames))


EXPERIMENT = Experiment(forecast, run, options=MemoryLevelsOptions)


def copy_params(working_set: int) -> dict:
    """Return the params of the row for repeated reads or copies of one working set."""
    return {"working_set_bytes": working_set, "cache": "hot"}


def point_row(context: Context, variant: str, point: CachePoint, *, limit: float | None = None, limit_source: str) -> Row:
    """Return the row with the bandwidth of repeated reads or copies of one working set."""
    rate = point.bandwidth_gb_s
    params = copy_params(point.working_set_bytes) | {"level": point.level, "timed": _how_timed(point, context.device)}
    return timed_row(
        context,
        variant,
        "bandwidth_gb_s",
        rate,
        point.timing,
        point.verification,
        limit=(limit, limit_source),
        dtype=point.dtype,
        params=params,
    )


def _how_timed(point: CachePoint, device: Device) -> str:
    """Describe how the calls were made and timed.

    The description is part of the row's identity. It therefore omits the number of calls, which differs between runs.
    """
    if point.captured:
        return "in a graph, on the device's clock"
    if point.long:
        return "call by call, on the device's clock"
    return "in a row, on the host's clock" + ("" if device.kind == "cpu" else ", launches included")


def _sizes(options: MemoryLevelsOptions, device: Device) -> list[int]:
    """Return the working sets in bytes, in ascending order."""
    most = min(options.largest_mib * MIB, device.memory_bytes // 8)
    sizes = sweep_sizes(cache_capacities(device), device.memory_bytes)
    while sizes[-1] < _BEYOND_CACHE * (device.last_level_cache_bytes or 0) and 2 * sizes[-1] <= most:
        sizes.append(2 * sizes[-1])
    # The first slice counts from the largest size, which must stay because it is the least served by caches. The second slice
    # restores ascending order.
    return [size for size in sizes if size <= most][:: -options.step][::-1]


def _forecast(context: Context, operation: str, dtype: str, size: int) -> Forecast:
    expected = expected_repeated_stream(context.device, operation, size, *_limit(context.device, size))
    return expected.forecast(operation, "bandwidth_gb_s", dtype, copy_params(size))


def _limit(device: Device, working_set: int) -> tuple[float | None, str]:
    """Return (limit in GB/s, source of the limit), or (None, reason why there is no limit).

    The limit is the bandwidth of device memory. It applies only if the working set is much larger than the caches.
    """
    cache = device.last_level_cache_bytes
    if cache is None:
        return None, "no limit: a cache of unknown size may serve it"
    if working_set <= cache:
        return None, "no limit: another level than device memory, and data sheets state no rate of caches"
    if working_set < _BEYOND_CACHE * cache:
        sizes = f"{working_set / MIB:.4g} MiB of working set, {cache / MIB:.4g} MiB of last-level cache"
        return None, f"no limit: a cache still serves part of it ({sizes})"
    return bandwidth_limit(device, working_set)


def _row(context: Context, point: CachePoint) -> Row:
    limit, source = _limit(context.device, point.working_set_bytes)
    if limit is None and point.launch_bound:
        launch, call = (1e6 * timing.estimate.value for timing in (point.launch, point.timing))
        source = f"{LAUNCHING} (one element takes {launch:.2g} of these {call:.2g} us)"
    return point_row(context, point.operation, point, limit=limit, limit_source=source)


def _capacity_row(context: Context, capacity: CacheCapacity) -> Row:
    return context.row(capacity.name, "cache_bytes", float(capacity.bytes), params={"caches": capacity.count})
