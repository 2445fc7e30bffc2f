"""Rows of the interconnect chapter: of a timed collective, of a sweep over sizes, of an overlap, of the machine's links."""

import itertools
import re

import torch

from hyperion.chapter.context import Context
from hyperion.chapter.rows import timed_columns
from hyperion.experiments.interconnect.collective_limits import busbw_limit, switch_can_add, switch_is_off
from hyperion.hardware import Device, detect
from hyperion.hardware.topology import topology_of
from hyperion.measure import CollectiveMeasurement, Overlap, Timing, fit_latency_bandwidth, half_rate_size
from hyperion.measure.collectives.collectives import algorithm_of
from hyperion.measure.collectives.latency_bandwidth import SHARE, recommended_bucket
from hyperion.processes import World
from hyperion.results import Row

ONE_DEVICE = "one device: no byte crosses a link"
NOBODY = "one device: there is nobody to send to"
_FLAT = "the times do not grow with the size by more than they scatter"


def timed_rows(context: Context, measured: CollectiveMeasurement, backend: str) -> list[Row]:
    """Time, algorithm bandwidth and bus bandwidth of one cell."""
    seconds = measured.timing.estimate
    limit, source = busbw_limit(context.device, measured.collective, measured.ranks)
    rows = [
        ("collective_time_s", seconds, {}),
        ("algbw_gb_s", seconds.map(measured.algbw_gb_s), {}),
        ("busbw_gb_s", seconds.map(measured.busbw_gb_s), {"limit": limit, "limit_source": source}),
    ]
    return [
        context.row(
            measured.collective.name,
            metric,
            estimate.value,
            dtype=measured.dtype,
            params={"bytes": measured.bytes, "ranks": measured.ranks, "backend": backend},
            **columns,
            **timed_columns(estimate, measured.timing, measured.verification),
        )
        for metric, estimate, columns in rows
    ]


def sweep_rows(context: Context, sweep: list[CollectiveMeasurement]) -> list[Row]:
    """Latency and bandwidth of one collective, the size from which on it gets half of what it reaches at most, and the size
    that the fit recommends; nothing of fewer than three sizes."""
    first = sweep[0]
    if len(sweep) < 3:
        return []
    factor, sizes = first.collective.bus_factor(first.ranks), [m.bytes for m in sweep]
    fit = fit_latency_bandwidth([size * factor / 1e9 for size in sizes], [m.timing.samples_s for m in sweep])
    half = half_rate_size(sizes, [m.busbw_gb_s(m.timing.estimate.value) for m in sweep])
    bucket = recommended_bucket(fit, first.collective.name, factor, sizes)
    params = {"smallest": min(sizes), "largest": max(sizes), "ranks": first.ranks}

    def row(metric: str, estimate=None, value: float | None = None, more: dict | None = None, reason: str = "") -> Row:
        told = {} if estimate is None else {"n": estimate.n, "ci_low": estimate.ci_low, "ci_high": estimate.ci_high}
        return context.row(
            first.collective.name,
            metric,
            value if estimate is None else estimate.value,
            dtype=first.dtype,
            params=params | (more or {}),
            value_reason=reason,
            **told,
        )

    flat = fit.s_per_gb.ci_low <= 0
    rate = None if flat else fit.s_per_gb.map(lambda s_per_gb: 1 / s_per_gb)
    note = {"share": SHARE, "note": "" if bucket.bytes is None else bucket.reason}
    return [
        row("latency_s", fit.latency_s),
        row("fit_deviation", value=fit.deviation),
        row("half_busbw_bytes", value=half, reason="the smallest size already reaches half" if half is None else ""),
        row("asymptotic_busbw_gb_s", rate, reason=_FLAT if flat else ""),
        row("recommended_bytes", bucket.bytes, more=note, reason=bucket.reason if bucket.bytes is None else ""),
    ]


def overlap_rows(context: Context, measured: Overlap, backend: str) -> list[Row]:
    """An all-reduce and products alone and at once, the share that was hidden, and what a step would still wait for."""
    params = {"bytes": measured.bytes, "ranks": measured.ranks, "backend": backend}
    rows = [
        context.row(
            "overlap",
            "call_time_s",
            timing.estimate.value,
            dtype=measured.dtype,
            params=params | {"what": what},
            limit_source="no limit: the three are held against each other",
            **timed_columns(timing.estimate, timing),
        )
        for what, timing in overlap_timings(measured).items()
    ]
    for metric, estimate, more in (
        ("overlap_share", measured.share, {}),
        ("share", measured.exposed_share, {"of": "the all_reduce, that the products still wait for"}),
    ):
        columns = timed_columns(estimate, measured.both, measured.verification)
        rows.append(context.row("overlap", metric, estimate.value, dtype=measured.dtype, params=params | more, **columns))
    return rows


def overlap_timings(measured: Overlap) -> dict[str, Timing]:
    """The three timings of an overlap, by what was timed."""
    return {"products": measured.compute, "all_reduce": measured.collective, "both at once": measured.both}


def kernel_rows(context: Context, cells: list, names: list[str] | None, here: World) -> list[Row]:
    """What each cell's call launched, and what its name tells of the algorithm.

    Args:
        cells: (collective, dtype, bytes).
        names: of their kernels; None where nobody saw them.
    """
    reason = "the profiler saw no kernel for each call" if names is None else ""
    if here.device.kind == "cpu":
        reason = f"{here.backend} does not tell which algorithm it chose"
    rows = []
    for (collective, dtype, size), name in zip(cells, names or [""] * len(cells), strict=True):
        params = {"bytes": size, "ranks": here.size, "backend": here.backend, "kernel": name, "algorithm": "unknown"}
        if name:
            may_add = switch_can_add(here.device) and not switch_is_off()
            params["algorithm"] = algorithm_of(name, switch_may_add=may_add)
        params["what"] = "kernels"
        rows.append(
            context.row(collective.name, "count", None if reason else 1.0, dtype=dtype, params=params, value_reason=reason)
        )
    return rows


def link_rows(context: Context, here: World) -> list[Row]:
    """Between how many pairs of devices a copy goes directly, and between each pair what a message takes."""
    params = {"what": "pairs of devices with direct access", "pairs": here.size * (here.size - 1), "ranks": here.size}
    if here.device.kind == "cpu":
        reason = "no GPUs: the ranks are processes of one host"
        return [context.row("topology", "count", None, params=params, value_reason=reason)]
    pairs = list(itertools.permutations(range(here.size), 2))
    direct = sum(torch.cuda.can_device_access_peer(one, other) for one, other in pairs)
    return [context.row("topology", "count", float(direct), params=params), *_pair_rows(context, devices_of(here))]


def devices_of(here: World) -> list[Device]:
    """The devices of this host that ranks run on, or its CPU."""
    if here.device.kind == "cpu":
        return [here.device]
    return [detect(index=index) for index in range(min(here.size, torch.cuda.device_count()))]


def _pair_rows(context: Context, devices: list[Device]) -> list[Row]:
    topology = topology_of(devices)
    rows = []
    for (one, other), word in topology.links.items():
        meaning = topology.meanings.get(word, word)
        links = re.fullmatch(r"NV(\d+)", word)
        params = {
            "what": "links",
            "from": one,
            "to": other,
            "link": word,
            "meaning": meaning,
            "source": topology.source,
            "NUMA node": "unknown" if topology.numa_nodes[one] is None else str(topology.numa_nodes[one]),
        }
        value, reason = (float(links[1]), "") if links else (None, f"no links to count: {meaning}")
        rows.append(context.row("topology", "count", value, params=params, value_reason=reason))
    return rows
