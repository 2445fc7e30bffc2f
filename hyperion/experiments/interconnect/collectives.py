"""How fast do the devices of a machine talk to each other, by collective, format and size, and does the right thing arrive?

One launch of the ranks measures it all: the sweeps, an all-reduce beside products, and which kernels the library chose.
"""

import itertools
from dataclasses import replace

import pandas as pd
import torch.distributed as dist

from hyperion.chapter.context import Context, Experiment, Forecast, Result
from hyperion.chapter.ranks import least_free_bytes, ranks_of
from hyperion.chapter.rows import sample_frame
from hyperion.chapter.variants import Report, run_on_ranks
from hyperion.experiments.interconnect.collective_limits import foretold_s
from hyperion.experiments.interconnect.collective_rows import (
    NOBODY,
    ONE_DEVICE,
    kernel_rows,
    link_rows,
    overlap_rows,
    overlap_timings,
    sweep_rows,
    timed_rows,
)
from hyperion.measure import ALL_COLLECTIVES, Collective, collective_bytes, measure_collective, measure_overlap
from hyperion.measure.collectives.collectives import Buffers, kernels_of_collectives, memory_needed
from hyperion.processes import RollCall, World, process_group, roll_call, world
from hyperion.results import Row

Cell = tuple[Collective, str, int]
_TOGETHER = (
    "1: the links carry bytes while other parts of the device multiply; what the library's kernels take of those parts is "
    "left out"
)
_IN_TURNS = "0: gloo copies by the very cores that compute"


def forecast(context: Context) -> list[Forecast]:
    """Bus bandwidths at the largest sizes, how much of an all-reduce products hide, and why no latency is foretold."""
    ranks, sizes = ranks_of(context), context.sizes
    dtype = sizes["dtype"]
    if ranks < 2:
        return [Forecast(variant="all_reduce", metric="busbw_gb_s", estimate=None, basis=ONE_DEVICE, dtype=dtype)]
    largest = collective_bytes(max(sizes["bytes"]), dtype, ranks)
    asked = [(collective, largest) for collective in ALL_COLLECTIVES.values()]
    asked += [(ALL_COLLECTIVES["all_reduce"], collective_bytes(size, dtype, ranks)) for size in sizes["all_reduce_bytes"]]
    told = [_rate_forecast(context, collective, size, ranks) for collective, size in asked]
    estimate, basis = (0.0, _IN_TURNS) if context.device.kind == "cpu" else (1.0, _TOGETHER)
    for size in sizes["overlap_bytes"]:
        params = {"bytes": collective_bytes(size, dtype, ranks), "ranks": ranks}
        told.append(
            Forecast(variant="overlap", metric="overlap_share", estimate=estimate, basis=basis, dtype=dtype, params=params)
        )
    unknown = "no estimate: nothing measured so far tells what a message costs without its bytes"
    for metric in ("latency_s", "recommended_bytes"):
        told.append(
            Forecast(variant="all_reduce", metric=metric, estimate=None, basis=unknown, dtype=dtype, params={"ranks": ranks})
        )
    return told


def run(context: Context, report: Report) -> Result:
    """All collectives on all devices, each verified on every rank; a single device checks values, and says what it cannot."""
    ranks = ranks_of(context)
    if ranks < 2:
        with process_group(context.sizes["hang_timeout_s"]):
            return check_alone(context, report)
    return run_on_ranks(context, report, measure_on_rank, ranks=ranks)[0]


EXPERIMENT = Experiment(forecast, run, forecast_reads=("bandwidth",))


def cells(context: Context, ranks: int) -> list[Cell]:
    """(collective, dtype, bytes): the sweep in one format, a few sizes in others, and the largest all-reduces."""
    sizes = context.sizes
    asked = [(sizes["dtype"], wanted) for wanted in sizes["bytes"]]
    asked += itertools.product(sizes["other_dtypes"], sizes["other_bytes"])
    every = list(itertools.product(ALL_COLLECTIVES.values(), asked))
    every += [(ALL_COLLECTIVES["all_reduce"], (sizes["dtype"], wanted)) for wanted in sizes["all_reduce_bytes"]]
    # Small sizes are rounded up to an element for each rank, and may then be the same.
    return list(dict.fromkeys((c, dtype, collective_bytes(wanted, dtype, ranks)) for c, (dtype, wanted) in every))


def measure_on_rank(context: Context, report: Report) -> Result:
    """A rank's side: every cell in turn. Samples are the slowest rank's, so rank 0 has the rows of all."""
    here, todo = world(), cells(context, world().size)
    rows, frames, sweeps = [], [], {}
    with roll_call(context.sizes["hang_timeout_s"]) as roll:
        roll.step("agreeing on the memory there is")
        free = least_free_bytes(here)
        for done, (collective, dtype, size) in enumerate(todo):
            report(done, len(todo), f"{collective.name} {dtype} {size:,} B")
            if needed := _too_large(size, free):
                rows.append(_absent(context, (collective, dtype, size), here.size, needed))
                continue
            measured = measure_collective(collective, size, dtype, here, roll, time_limit_s=context.sizes["time_limit_s"])
            rows += timed_rows(context, measured, here.backend)
            params = {"bytes": size, "ranks": here.size, "backend": here.backend}
            frames.append(sample_frame(measured.timing, collective.name, dtype, params))
            sweeps.setdefault((collective.name, dtype), []).append(measured)
        report(len(todo), len(todo), "beside products, and with which kernels")
        for size in context.sizes["overlap_bytes"]:
            told, samples = _overlap(context, size, here, roll)
            rows, frames = rows + told, frames + samples
        rows += _kernels(context, here, roll, free)
        roll.step("the end of the measurement")
        dist.barrier()
    if here.rank:
        return Result([], pd.DataFrame())
    for sweep in sweeps.values():
        rows += sweep_rows(context, sweep)
    return Result([*rows, *link_rows(context, here)], pd.concat(frames, ignore_index=True))


def check_alone(context: Context, report: Report) -> Result:
    """What one device can show: that its library takes every call and format, and leaves the right values."""
    here, todo, rows = world(), cells(context, 1), []
    free = least_free_bytes(here)
    for done, (collective, dtype, size) in enumerate(todo):
        report(done, len(todo), f"{collective.name} {dtype} {size:,} B")
        reason = NOBODY if collective.name == "send_recv" else _too_large(size, free)
        if reason:
            rows.append(_absent(context, (collective, dtype, size), 1, reason))
            continue
        buffers = Buffers(collective, size, dtype, here, RollCall())
        buffers.prepare()
        buffers.call()
        verified = buffers.require_exact("on the only rank")
        row = _absent(context, (collective, dtype, size), 1, ONE_DEVICE, backend=here.backend)
        checked = {"check": verified.name, "check_error": verified.error, "check_tolerance": verified.tolerance}
        rows.append(replace(row, **checked))
    for variant, metric in (("overlap", "overlap_share"), ("all_reduce", "recommended_bytes"), ("topology", "count")):
        rows.append(context.row(variant, metric, None, params={"ranks": 1}, value_reason=ONE_DEVICE))
    return Result(rows, pd.DataFrame())


def _overlap(context: Context, size: int, here: World, roll: RollCall) -> tuple[list[Row], list[pd.DataFrame]]:
    """Rows and samples of an all-reduce beside products that last about as long."""
    dtype = context.sizes["dtype"]
    measured = measure_overlap(size, dtype, here, roll, time_limit_s=context.sizes["overlap_time_limit_s"])
    params = {"bytes": measured.bytes, "ranks": here.size, "backend": here.backend}
    frames = [
        sample_frame(timing, "overlap", dtype, params | {"what": what}) for what, timing in overlap_timings(measured).items()
    ]
    return overlap_rows(context, measured, here.backend), frames


def _kernels(context: Context, here: World, roll: RollCall, free: int) -> list[Row]:
    """Every collective's smallest and largest call once more, after all timing: rank 0 looks which kernels they launch."""
    dtype = context.sizes["dtype"]
    sizes = [collective_bytes(size, dtype, here.size) for size in context.sizes["bytes"] if memory_needed(size) <= free]
    seen = [(collective, dtype, size) for collective in ALL_COLLECTIVES.values() for size in (min(sizes), max(sizes))]
    if here.device.kind == "cpu":
        return kernel_rows(context, seen[:1], None, here)
    names = kernels_of_collectives(seen, here, roll)
    return [] if here.rank else kernel_rows(context, seen, names, here)


def _rate_forecast(context: Context, collective: Collective, size: int, ranks: int) -> Forecast:
    seconds, basis = foretold_s(context, collective, size, ranks)
    estimate = None if seconds is None else size * collective.bus_factor(ranks) / seconds / 1e9
    return Forecast(
        variant=collective.name,
        metric="busbw_gb_s",
        estimate=estimate,
        basis=basis,
        dtype=context.sizes["dtype"],
        params={"bytes": size, "ranks": ranks},
    )


def _too_large(size: int, free: int) -> str:
    needed = memory_needed(size)
    return f"needs {needed / 2**30:.1f} GiB on every rank, and {free / 2**30:.1f} are free" if needed > free else ""


def _absent(context: Context, cell: Cell, ranks: int, reason: str, **params) -> Row:
    collective, dtype, size = cell
    params = {"bytes": size, "ranks": ranks} | params
    return context.row(collective.name, "busbw_gb_s", None, dtype=dtype, params=params, value_reason=reason)
