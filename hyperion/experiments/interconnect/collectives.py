"""How fast do the devices of a machine exchange data, and are the results correct?

The experiment times collectives at several message sizes and in several number formats. It also times an all-reduce that runs
concurrently with matrix products, and records which kernels the communication library launches. The ranks are started once for
all measurements.
"""

import itertools
import os
import re
from dataclasses import replace

import pandas as pd
import psutil
import torch
import torch.distributed as dist

from hyperion.chapter.context import Context, Experiment, Forecast, Options, Report, Result
from hyperion.chapter.efficiency import Expected, expected_busbw
from hyperion.chapter.rows import all_samples, check_columns, link_limit, sample_frame, stream_ceiling, timed_columns, timed_row
from hyperion.chapter.variants import run_on_ranks
from hyperion.errors import not_none
from hyperion.hardware import Device, detect
from hyperion.hardware.topology import topology_of
from hyperion.measure import (
    ALL_COLLECTIVES,
    Collective,
    CollectiveMeasurement,
    CollectiveOverlap,
    Timing,
    collective_bytes,
    fit_latency_bandwidth,
    half_rate_size,
    measure_collective,
    measure_overlap,
    recommended_bucket,
)
from hyperion.measure.collectives.collectives import Buffers, algorithm_of, kernels_of_collectives, memory_needed
from hyperion.measure.collectives.latency_bandwidth import FLAT, SHARE
from hyperion.processes import RollCall, World, process_group, roll_call, world
from hyperion.results import Estimate, Row
from hyperion.units import GIB

Cell = tuple[Collective, str, int]  # one measurement: (collective, dtype, message size in bytes)
_ONE_DEVICE = "one device: no byte crosses a link"
_NO_PEER = "one device: there is no peer to send to"
_TOGETHER = (
    "1: the links carry bytes while other parts of the device multiply; what the library's kernels take of those parts is "
    "left out"
)
_IN_TURNS = "0: gloo copies by the very cores that compute"
# Memory traffic in bytes per byte sent over loopback: the byte is copied into and out of a socket buffer, and each copy reads and
# writes it once.
_LOOPBACK_TRAFFIC = 4


class CollectivesOptions(Options):
    """Options for the `collectives` experiment.

    Args:
        dtype: number format measured at all message sizes.
        bytes: message sizes in bytes, defined for each collective as in nccl-tests.
        other_dtypes: number formats measured in addition to `dtype`.
        other_bytes: message sizes in bytes for the formats in `other_dtypes`.
        all_reduce_bytes: additional message sizes in bytes for the all-reduce in `dtype`.
        time_limit_s: timing budget in seconds for each combination of collective, format and size.
        overlap_bytes: message sizes in bytes of the all-reduces that run concurrently with matrix products.
        overlap_time_limit_s: timing budget in seconds for each size in `overlap_bytes`.
        hang_timeout_s: if no rank makes progress for this many seconds, report the ranks that are behind.
        ranks: maximum number of ranks to start.
        cpu_ranks: number of ranks on a CPU.
    """

    dtype: str
    bytes: tuple[int, ...]
    other_dtypes: tuple[str, ...]
    other_bytes: tuple[int, ...]
    all_reduce_bytes: tuple[int, ...]
    time_limit_s: float
    overlap_bytes: tuple[int, ...]
    overlap_time_limit_s: float
    hang_timeout_s: float
    ranks: int = 8
    cpu_ranks: int = 2

    def ranks_on(self, device: Device) -> int:
        """Return the number of ranks to start: one per GPU, or `cpu_ranks` on a CPU, but at most `ranks`."""
        return min(self.cpu_ranks if device.kind == "cpu" else torch.cuda.device_count(), self.ranks)


def forecast(context: Context) -> list[Forecast]:
    """Predict the bus bandwidth of the largest messages and the overlap of an all-reduce with matrix products.

    Latencies have no prediction.
    """
    options = CollectivesOptions.of(context)
    dtype, ranks = options.dtype, options.ranks_on(context.device)
    if ranks < 2:
        return [Forecast("all_reduce", "busbw_gb_s", None, _ONE_DEVICE, dtype=dtype)]
    largest = collective_bytes(max(options.bytes), dtype, ranks)
    cells = [(collective, largest) for collective in ALL_COLLECTIVES.values()]
    cells += [(ALL_COLLECTIVES["all_reduce"], collective_bytes(size, dtype, ranks)) for size in options.all_reduce_bytes]
    forecasts = []
    for collective, size in cells:
        expected = _expected_busbw(context, collective, ranks, size)
        forecasts.append(expected.forecast(collective.name, "busbw_gb_s", dtype, {"bytes": size, "ranks": ranks}))
    estimate, basis = (0.0, _IN_TURNS) if context.device.kind == "cpu" else (1.0, _TOGETHER)
    for size in options.overlap_bytes:
        params = {"bytes": collective_bytes(size, dtype, ranks), "ranks": ranks}
        forecasts.append(Forecast("overlap", "overlap_share", estimate, basis, dtype=dtype, params=params))
    unknown = "no estimate: no measurement before this one shows the latency of a message"
    for metric in ("latency_s", "recommended_bytes"):
        forecasts.append(Forecast("all_reduce", metric, None, unknown, dtype=dtype, params={"ranks": ranks}))
    return forecasts


def run(context: Context, report: Report) -> Result:
    """Measure all collectives on all devices. With a single device, check the results of the calls without timing them."""
    options = CollectivesOptions.of(context)
    ranks = options.ranks_on(context.device)
    if ranks < 2:
        with process_group(options.hang_timeout_s):
            return _check_alone(context, report)
    return run_on_ranks(context, report, measure_on_rank, ranks=ranks)[0]


EXPERIMENT = Experiment(forecast, run, options=CollectivesOptions, forecast_reads=("bandwidth",))


def _expected_busbw(context: Context, collective: Collective, ranks: int, size: int) -> Expected:
    """Predict the bus bandwidth of a large message.

    On a CPU there is only a ceiling, computed from the measured memory bandwidth.
    """
    if context.device.kind != "cpu":
        return expected_busbw(context.device, collective, ranks, size)
    stream = stream_ceiling(context.upstream)
    if stream is None:
        return Expected(None, None, None, None, "no measured memory bandwidth in this run: run 01_hardware_exploration first")
    memory = not_none(stream.value)
    rate = memory / _LOOPBACK_TRAFFIC / ranks
    basis = (
        f"{rate:.3g} GB/s: memory moves {memory:.3g} GB/s (measured in 1.1), a byte over loopback is copied into the "
        f"kernel and out of it, {_LOOPBACK_TRAFFIC} bytes of memory traffic, and {ranks} ranks do so at once; without the latency"
    )
    return Expected(rate, None, None, None, basis)


def cells(options: CollectivesOptions, ranks: int) -> list[Cell]:
    """Return (collective, dtype, bytes) of all measurements. Only the format `options.dtype` is measured at all sizes."""
    sizes = [(options.dtype, size) for size in options.bytes]
    sizes += itertools.product(options.other_dtypes, options.other_bytes)
    every = list(itertools.product(ALL_COLLECTIVES.values(), sizes))
    every += [(ALL_COLLECTIVES["all_reduce"], (options.dtype, size)) for size in options.all_reduce_bytes]
    # A size below one element per rank is rounded up, so several sizes may become equal.
    return list(dict.fromkeys((c, dtype, collective_bytes(size, dtype, ranks)) for c, (dtype, size) in every))


def measure_on_rank(context: Context, report: Report) -> Result:
    """Take part in all measurements as one rank.

    The time of a collective is that of the slowest rank. So one row covers all ranks, and only rank 0 returns rows.
    """
    options, here = CollectivesOptions.of(context), world()
    todo = cells(options, here.size)
    rows: list[Row] = []
    frames: list[pd.DataFrame] = []
    sweeps: dict[tuple[str, str], list[CollectiveMeasurement]] = {}
    with roll_call(options.hang_timeout_s) as roll:
        roll.step("agreeing on the memory there is")
        # All ranks agree on this before the first measurement: if they skipped different messages, they would wait for each other
        # forever.
        free = least_free_bytes(here)
        for done, (collective, dtype, size) in enumerate(todo):
            report(done, len(todo), f"{collective.name} {dtype} {size:,} B")
            if too_large := _too_large(size, free):
                rows.append(_absent(context, (collective, dtype, size), here.size, too_large))
                continue
            measured = measure_collective(collective, size, dtype, here, roll, time_limit_s=options.time_limit_s)
            rows += timed_rows(context, measured, busbw_limit(context.device, collective, here.size), {"backend": here.backend})
            params = {"bytes": size, "ranks": here.size, "backend": here.backend}
            frames.append(sample_frame(measured.timing, collective.name, dtype, params))
            sweeps.setdefault((collective.name, dtype), []).append(measured)
        report(len(todo), len(todo), "overlap with products, and kernels")
        for size in options.overlap_bytes:
            measured = measure_overlap(size, options.dtype, here, roll, time_limit_s=options.overlap_time_limit_s)
            overlap_rows, overlap_frames = _overlap_rows(context, measured, here.backend)
            rows, frames = rows + overlap_rows, frames + overlap_frames
        rows += _kernel_rows(context, options, here, roll, free)
        roll.step("the end of the measurement")
        dist.barrier()
    if here.rank:
        return Result([], pd.DataFrame())
    for sweep in sweeps.values():
        rows += _sweep_rows(context, sweep)
    return Result([*rows, *_link_rows(context, here)], all_samples(frames))


def _check_alone(context: Context, report: Report) -> Result:
    """Check that the communication library on one device supports every collective and format, with correct results."""
    here, rows = world(), []
    todo = cells(CollectivesOptions.of(context), 1)
    free = least_free_bytes(here)
    for done, (collective, dtype, size) in enumerate(todo):
        report(done, len(todo), f"{collective.name} {dtype} {size:,} B")
        reason = _NO_PEER if collective.name == "send_recv" else _too_large(size, free)
        if reason:
            rows.append(_absent(context, (collective, dtype, size), 1, reason))
            continue
        buffers = Buffers(collective, size, dtype, here, RollCall())
        buffers.prepare()
        buffers.call()
        verified = buffers.require_exact("on the only rank")
        row = _absent(context, (collective, dtype, size), 1, _ONE_DEVICE, backend=here.backend)
        rows.append(replace(row, **check_columns(verified)))
    for variant, metric in (("overlap", "overlap_share"), ("all_reduce", "recommended_bytes"), ("topology", "count")):
        rows.append(context.absent_row(variant, metric, _ONE_DEVICE, params={"ranks": 1}))
    return Result(rows, pd.DataFrame())


def _too_large(size: int, free: int) -> str:
    needed = memory_needed(size)
    return f"needs {needed / GIB:.1f} GiB on every rank, and {free / GIB:.1f} are free" if needed > free else ""


def _absent(context: Context, cell: Cell, ranks: int, reason: str, **params) -> Row:
    collective, dtype, size = cell
    params = {"bytes": size, "ranks": ranks} | params
    return context.absent_row(collective.name, "busbw_gb_s", reason, dtype=dtype, params=params)


def timed_rows(context: Context, measured: CollectiveMeasurement, limit: tuple[float | None, str], path: dict) -> list[Row]:
    """Return three rows with the time, algorithm bandwidth and bus bandwidth of one collective in one format and size.

    Args:
        context: context of the experiment.
        measured: the timing.
        limit: (limit of the bus bandwidth in GB/s, source), or (None, reason why there is no limit).
        path: params of the rows that describe how the bytes travelled, such as the backend.
    """
    seconds = measured.timing.estimate
    no_limit = None, ""
    rows: list[tuple[str, Estimate, tuple[float | None, str]]] = [
        ("collective_time_s", seconds, no_limit),
        ("algbw_gb_s", seconds.map(measured.algbw_gb_s), no_limit),
        ("busbw_gb_s", seconds.map(measured.busbw_gb_s), limit),
    ]
    return [
        timed_row(
            context,
            measured.collective.name,
            metric,
            estimate,
            measured.timing,
            measured.verification,
            bound,
            dtype=measured.dtype,
            params={"bytes": measured.bytes, "ranks": measured.ranks} | path,
        )
        for metric, estimate, bound in rows
    ]


def _sweep_rows(context: Context, sweep: list[CollectiveMeasurement]) -> list[Row]:
    """Return the rows computed from the times of one collective at all message sizes.

    They give the latency, the bandwidth, the size that reaches half of the best rate, and the recommended size. With fewer than
    three sizes, the list is empty.
    """
    first = sweep[0]
    # A line has two unknowns, so only a third size shows how well it fits.
    if len(sweep) < 3:
        return []
    factor, sizes = first.collective.bus_factor(first.ranks), [m.bytes for m in sweep]
    fit = fit_latency_bandwidth([size * factor / 1e9 for size in sizes], [m.timing.samples_s.tolist() for m in sweep])
    half = half_rate_size(sizes, [m.busbw_gb_s(m.timing.estimate.value) for m in sweep])
    bucket = recommended_bucket(fit, first.collective.name, factor, sizes)
    params = {"smallest": min(sizes), "largest": max(sizes), "ranks": first.ranks}

    def row(metric: str, found: Estimate | float | None, reason: str = "", more: dict | None = None) -> Row:
        return context.row(
            first.collective.name,
            metric,
            found,
            dtype=first.dtype,
            params=params | (more or {}),
            value_reason=reason if found is None else "",
        )

    # If the interval of the fitted seconds per gigabyte contains zero, the fit does not determine a bandwidth.
    rate = None if fit.s_per_gb.ci_low <= 0 else fit.s_per_gb.map(lambda s_per_gb: 1 / s_per_gb)
    note = {"share": SHARE, "note": "" if bucket.bytes is None else bucket.reason}
    return [
        row("latency_s", fit.latency_s),
        row("fit_deviation", fit.deviation),
        row("half_busbw_bytes", half, "the smallest size already reaches half"),
        row("asymptotic_busbw_gb_s", rate, FLAT),
        row("recommended_bytes", bucket.bytes, bucket.reason, note),
    ]


def _overlap_rows(context: Context, measured: CollectiveOverlap, backend: str) -> tuple[list[Row], list[pd.DataFrame]]:
    """Return (rows, samples) of an all-reduce that runs concurrently with matrix products.

    The rows give the time of the all-reduce alone, of the matrix products alone, and of both together. One more row gives the
    share of the communication time that the matrix products hide.
    """
    params = {"bytes": measured.bytes, "ranks": measured.ranks, "backend": backend}
    timings: dict[str, Timing] = {"products": measured.compute, "all_reduce": measured.collective, "both at once": measured.both}
    rows, frames = [], []
    for what, timing in timings.items():
        rows.append(
            timed_row(
                context,
                "overlap",
                "call_time_s",
                timing.estimate,
                timing,
                limit=(None, "no limit: the three are held against each other"),
                dtype=measured.dtype,
                params=params | {"what": what},
            )
        )
        frames.append(sample_frame(timing, "overlap", measured.dtype, params | {"what": what}))
    for metric, estimate, more in (
        ("overlap_share", measured.share, {}),
        ("share", measured.exposed_share, {"of": "the all_reduce, that the products still wait for"}),
    ):
        columns = timed_columns(estimate, measured.both, measured.verification)
        rows.append(context.row("overlap", metric, estimate.value, dtype=measured.dtype, params=params | more, **columns))
    return rows, frames


def _kernel_rows(context: Context, options: CollectivesOptions, here: World, roll: RollCall, free: int) -> list[Row]:
    """Profile every collective at its smallest and its largest size. Return rows with the names of the kernels.

    Only rank 0 returns rows. The profiler slows calls down, so it runs after all timing. If no size fits into `free` bytes, there
    are no rows.
    """
    sizes = [collective_bytes(size, options.dtype, here.size) for size in options.bytes if memory_needed(size) <= free]
    if not sizes:
        return []
    called = [(collective, options.dtype, size) for collective in ALL_COLLECTIVES.values() for size in (min(sizes), max(sizes))]
    names, reason = None, ""
    if here.device.kind == "cpu":
        called, reason = called[:1], f"{here.backend} does not report which algorithm it chose"
    else:
        names = kernels_of_collectives(called, here, roll)
        reason = "the profiler saw no kernel for each call" if names is None else ""
    if here.rank:
        return []
    rows = []
    for (collective, dtype, size), name in zip(called, names or [""] * len(called), strict=True):
        params = {"bytes": size, "ranks": here.size, "backend": here.backend, "kernel": name, "algorithm": "unknown"}
        if name:
            may_add = switch_can_add(here.device) and not switch_is_off()
            params["algorithm"] = algorithm_of(name, switch_may_add=may_add)
        params["what"] = "kernels"
        rows.append(
            context.row(collective.name, "count", None if reason else 1.0, dtype=dtype, params=params, value_reason=reason)
        )
    return rows


def _link_rows(context: Context, here: World) -> list[Row]:
    """Return a row with the number of device pairs that can copy directly, and one row for the link of each pair."""
    params: dict = {"what": "pairs of devices with direct access", "pairs": here.size * (here.size - 1), "ranks": here.size}
    if here.device.kind == "cpu":
        reason = "no GPUs: the ranks are processes of one host"
        return [context.absent_row("topology", "count", reason, params=params)]
    # Ordered pairs: access from A to B does not imply access from B to A.
    pairs = list(itertools.permutations(range(here.size), 2))
    direct = sum(torch.cuda.can_device_access_peer(one, other) for one, other in pairs)
    rows = [context.row("topology", "count", float(direct), params=params)]
    topology = topology_of(devices_of(here))
    for (one, other), word in topology.links.items():
        meaning, node = topology.meanings.get(word, word), topology.numa_nodes[one]
        links = re.fullmatch(r"NV(\d+)", word)
        params = {
            "what": "links",
            "from": one,
            "to": other,
            "link": word,
            "meaning": meaning,
            "source": topology.source,
            "NUMA node": "unknown" if node is None else str(node),
        }
        value, reason = (float(links[1]), "") if links else (None, f"no links to count: {meaning}")
        rows.append(context.row("topology", "count", value, params=params, value_reason=reason))
    return rows


def devices_of(here: World) -> list[Device]:
    """Return the GPUs of this host on which ranks run, or the CPU if the ranks run on it."""
    if here.device.kind == "cpu":
        return [here.device]
    return [detect(index=index) for index in range(min(here.size, torch.cuda.device_count()))]


def least_free_bytes(here: World) -> int:
    """Return the free memory in bytes of the rank with the least free memory.

    On a GPU this is the free memory of the GPU. On a CPU it is the rank's share of the host's available memory. All ranks must
    call this function. They get the same result and so skip the same measurements. If only one rank ran out of memory, the others
    would wait for it.
    """
    if here.device.kind == "cpu":
        free = psutil.virtual_memory().available // here.size
    else:
        free = torch.cuda.mem_get_info(here.device.torch_device)[0]
    least = torch.tensor([free], dtype=torch.int64, device=here.device.torch_device)
    dist.all_reduce(least, dist.ReduceOp.MIN)
    return int(least)


LOOPBACK = "no limit: gloo's ranks share a host, and their messages are memory copies over loopback"
# NCCL's environment variable for reductions inside NVSwitch (NVLink SHARP).
_NVLS = "NCCL_NVLS_ENABLE"
_PATHS = {
    "send_recv": "link, from each device to one other, one direction",
    "all_to_all": "link, from each device to all others at once, one direction",
}


def busbw_limit(device: Device, collective: Collective, ranks: int) -> tuple[float | None, str]:
    """Return (GB/s that the links allow, source), or (None, reason why there is no limit).

    Bus bandwidth counts the bytes that must cross a device's link in one direction, so the limit is the rate of the link. There
    is one exception: if the switch between the devices performs the reduction of an all-reduce, a device sends each byte once
    instead of almost twice. The limit then exceeds the rate of the link.
    """
    if device.kind == "cpu":
        return None, LOOPBACK
    link, source = link_limit(device, collective, ranks)
    if link is None:
        return None, f"no limit: {source}"
    if collective.name != "all_reduce" or not switch_can_add(device):
        return link, f"{_PATHS.get(collective.name, 'link')}: {source}"
    if switch_is_off():
        return link, f"link: {source}; NVLS off ({_NVLS}=0)"
    # The bus factor of an all-reduce is 2 (N - 1) / N, the bytes sent by a ring. With NVLS each byte is sent once, so the
    # measured bus bandwidth can exceed the link rate by this factor.
    factor = max(1.0, collective.bus_factor(ranks))
    return link * factor, f"link, each byte sent once because the switch may add (NVLS): {factor:g} x {link:g} GB/s, {source}"


def switch_can_add(device: Device) -> bool:
    """Return True if the switch between the devices can perform reductions (NVLink SHARP).

    NVSwitch supports this since the Hopper generation. AMD GPUs are connected without a switch.
    """
    # sm_90 is Hopper.
    return device.kind == "cuda" and int(device.arch.removeprefix("sm_")) >= 90


def switch_is_off() -> bool:
    """Return True if the environment variable NCCL_NVLS_ENABLE=0 prevents NCCL from reducing in the switch."""
    return os.environ.get(_NVLS) == "0"
