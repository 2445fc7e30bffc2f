"""How fast do the devices of a machine talk to each other, by collective, format and size, and does the right thing arrive?"""

import itertools

import pandas as pd
import torch
import torch.distributed as dist

from hyperion.experiments.collective_limits import busbw_limit, foretold_s
from hyperion.experiments.columns import sample_frame, timed_columns
from hyperion.experiments.context import Context, Experiment, Forecast, Result
from hyperion.experiments.ranks import ranks_of
from hyperion.experiments.variants import Report, run_on_ranks
from hyperion.measure import (
    COLLECTIVES,
    Collective,
    CollectiveMeasurement,
    collective_bytes,
    fit_latency_bandwidth,
    half_rate_size,
    measure_collective,
)
from hyperion.measure.collectives import memory_needed
from hyperion.processes import World, roll_call, world
from hyperion.results import Row

ONE_DEVICE = "one device: a collective takes at least two ranks"


def forecast(context: Context) -> list[Forecast]:
    """Each collective's bus bandwidth at the largest common size, and the time of the smallest all-reduce."""
    ranks, dtype = ranks_of(context), context.sizes["dtype"]
    if ranks < 2:
        return [Forecast(variant="all_reduce", metric="busbw_gb_s", estimate=None, basis=ONE_DEVICE, dtype=dtype)]
    smallest, largest = (collective_bytes(pick(context.sizes["bytes"]), dtype, ranks) for pick in (min, max))
    forecasts = [_forecast(context, collective, "busbw_gb_s", largest, ranks) for collective in COLLECTIVES.values()]
    return [*forecasts, _forecast(context, COLLECTIVES["all_reduce"], "collective_time_s", smallest, ranks)]


def run(context: Context, report: Report) -> Result:
    """All collectives on all devices, each verified on every rank; on a single device rows that say why there are none."""
    ranks = ranks_of(context)
    if ranks < 2:
        dtype, params = context.sizes["dtype"], {"ranks": ranks}
        return Result([_absent(context, name, dtype, params, ONE_DEVICE) for name in COLLECTIVES], pd.DataFrame())
    return run_on_ranks(context, report, "hyperion.experiments.collectives:measure_on_rank", ranks=ranks)[0]


EXPERIMENT = Experiment(forecast, run, forecast_reads=("bandwidth",))


def cells(context: Context, ranks: int) -> list[tuple[Collective, str, int]]:
    """(collective, dtype, bytes): the sweep in one format, a few sizes in others, and the largest all-reduces."""
    sizes = context.sizes
    asked = [(sizes["dtype"], wanted) for wanted in sizes["bytes"]]
    asked += itertools.product(sizes["other_dtypes"], sizes["other_bytes"])
    every = list(itertools.product(COLLECTIVES.values(), asked))
    every += [(COLLECTIVES["all_reduce"], (sizes["dtype"], wanted)) for wanted in sizes["all_reduce_bytes"]]
    # Small sizes are rounded up to an element for each rank, and may then be the same.
    return list(dict.fromkeys((c, dtype, collective_bytes(wanted, dtype, ranks)) for c, (dtype, wanted) in every))


def measure_on_rank(context: Context, report: Report) -> Result:
    """A rank's side: every cell in turn. Samples are the slowest rank's, so rank 0 has the rows of all."""
    here, todo = world(), cells(context, world().size)
    rows, frames, sweeps = [], [], {}
    with roll_call(context.sizes["hang_timeout_s"]) as roll:
        for done, (collective, dtype, size) in enumerate(todo):
            report(done, len(todo), f"{collective.name} {dtype} {size:,} B")
            if needed := _too_large(context, size):
                rows.append(_absent(context, collective.name, dtype, _params(size, here.size), needed))
                continue
            measured = measure_collective(
                collective, size, dtype, here, roll, time_limit_s=context.sizes["time_limit_s"]
            )
            rows += _rows(context, measured, here.backend)
            params = _params(size, here.size) | {"backend": here.backend}
            frames.append(sample_frame(measured.timing, collective.name, dtype, params))
            sweeps.setdefault((collective.name, dtype), []).append(measured)
        roll.step("the end of the measurement")
        dist.barrier()
    if here.rank:
        return Result([], pd.DataFrame())
    report(len(todo), len(todo), "done")
    for sweep in sweeps.values():
        rows += _fit_rows(context, sweep)
    return Result([*rows, _peer_row(context, here)], pd.concat(frames, ignore_index=True))


def _params(size: int, ranks: int) -> dict:
    return {"bytes": size, "ranks": ranks}


def _forecast(context: Context, collective: Collective, metric: str, size: int, ranks: int) -> Forecast:
    seconds, basis = foretold_s(context, collective, size, ranks)
    estimate = seconds
    if seconds is not None and metric == "busbw_gb_s":
        estimate = size * collective.bus_factor(ranks) / seconds / 1e9
    return Forecast(
        variant=collective.name, metric=metric, estimate=estimate, basis=basis, dtype=context.sizes["dtype"],
        params=_params(size, ranks),
    )  # fmt: skip


def _too_large(context: Context, size: int) -> str:
    """Why a size is not tried. The same on all ranks: one that ran out of memory alone would leave the others waiting."""
    needed, there = memory_needed(size), context.device.memory_bytes
    return f"needs {needed / 2**30:.1f} GiB, the device has {there / 2**30:.1f}" if needed > there else ""


def _absent(context: Context, name: str, dtype: str, params: dict, reason: str) -> Row:
    return context.row(name, "busbw_gb_s", None, dtype=dtype, params=params, value_reason=reason)


def _rows(context: Context, measured: CollectiveMeasurement, backend: str) -> list[Row]:
    seconds = measured.timing.estimate
    limit, source = busbw_limit(context.device, measured.collective, measured.ranks)
    rows = [
        ("collective_time_s", seconds, {}),
        ("algbw_gb_s", seconds.map(measured.algbw_gb_s), {}),
        ("busbw_gb_s", seconds.map(measured.busbw_gb_s), {"limit": limit, "limit_source": source}),
    ]
    return [
        context.row(
            measured.collective.name, metric, estimate.value, dtype=measured.dtype,
            params=_params(measured.bytes, measured.ranks) | {"backend": backend}, **columns,
            **timed_columns(estimate, measured.timing, measured.verification),
        )
        for metric, estimate, columns in rows
    ]  # fmt: skip


def _fit_rows(context: Context, sweep: list[CollectiveMeasurement]) -> list[Row]:
    """Latency and bandwidth of one collective, and the size from which on it gets half of what it reaches at most."""
    first = sweep[0]
    if len(sweep) < 3:
        return []
    crossing = [m.bytes * m.collective.bus_factor(m.ranks) / 1e9 for m in sweep]
    fit = fit_latency_bandwidth(crossing, [m.timing.samples_s for m in sweep])
    sizes, medians = [m.bytes for m in sweep], [m.timing.estimate.value for m in sweep]
    half = half_rate_size(sizes, [m.busbw_gb_s(seconds) for m, seconds in zip(sweep, medians, strict=True)])
    params = {"smallest": min(sizes), "largest": max(sizes), "ranks": first.ranks}

    def row(metric: str, value: float | None, **columns) -> Row:
        return context.row(first.collective.name, metric, value, dtype=first.dtype, params=params, **columns)

    latency, slope = fit.latency_s, fit.s_per_gb
    rows = [
        row("latency_s", latency.value, n=latency.n, ci_low=latency.ci_low, ci_high=latency.ci_high),
        row("fit_deviation", fit.deviation),
        row("half_busbw_bytes", half, value_reason="" if half else "the smallest size already reaches half"),
    ]
    if slope.ci_low <= 0:
        reason = "the times do not grow with the size by more than they scatter"
        return [*rows, row("asymptotic_busbw_gb_s", None, value_reason=reason)]
    rate = slope.map(lambda s_per_gb: 1 / s_per_gb)
    return [*rows, row("asymptotic_busbw_gb_s", rate.value, n=rate.n, ci_low=rate.ci_low, ci_high=rate.ci_high)]


def _peer_row(context: Context, here: World) -> Row:
    """Between how many pairs of devices a copy goes directly; the others go through the host's memory."""
    params = {"what": "pairs of devices with direct access", "pairs": here.size * (here.size - 1), "ranks": here.size}
    if here.device.kind == "cpu":
        reason = "no GPUs: the ranks are processes of one host"
        return context.row("topology", "count", None, params=params, value_reason=reason)
    pairs = itertools.permutations(range(here.size), 2)
    direct = sum(torch.cuda.can_device_access_peer(one, other) for one, other in pairs)
    return context.row("topology", "count", float(direct), params=params)
