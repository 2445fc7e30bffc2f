"""Rows of caches, formats in memory, copies between memories and launches that no machine measured: test data."""

import math

import pandas as pd

from hyperion.results import Row
from tests.book.made_up.hardware import time_samples, timed

LIMITS = "04_limits_explained"
MIB = 2**20
CHECK = {"check": "float64 slice", "check_error": 0.0, "check_tolerance": 1e-7}


def levels_chapters(random, limited: bool):
    """(notebook, experiment, rows, samples) of the four: a GPU's with a datasheet, or those of a CPU that has none."""
    experiments = {
        "memory_levels": _level_rows(random, limited),
        "stream_formats": _format_rows(random, limited),
        "transfers": _gpu_transfers(random, gpus=4) if limited else cpu_transfers(),
        "launch_cost": _launch_rows(random, limited),
    }
    frames = {name: time_samples(rows) for name, rows in experiments.items()}
    return [(LIMITS, name, rows, pd.DataFrame(frames[name])) for name, rows in experiments.items()]


def _row(random, experiment, variant, metric, rate, limit, **columns):
    return timed(random, LIMITS, experiment, variant, metric, rate, limit, **columns)


def _level_rows(random, gpu: bool) -> list[Row]:
    caches = {"last-level cache": (60 * MIB, 1)} if gpu else {"L1": (2**15, 2), "L2": (MIB, 2), "L3": (32 * MIB, 1)}
    rows = [
        Row(
            notebook=LIMITS,
            experiment="memory_levels",
            variant=name,
            metric="cache_bytes",
            value=float(size),
            params={"caches": count},
        )
        for name, (size, count) in caches.items()
    ]
    sizes = [4096 * 2**step for step in range(20 if gpu else 15)]
    for operation, share in (("read", 1.0), ("copy", 0.8)):
        for size in sizes:
            rate = share * (_gpu_rate(size) if gpu else _cpu_rate(size))
            limit, source = None, "no limit: another level than device memory, and data sheets state no rate of caches"
            if gpu and size > 20 * 60 * MIB:
                limit, source = 4800.0, "device memory: data sheet, HBM3e"
            elif size > caches[list(caches)[-1]][0]:
                source = "no limit: a cache still serves part of it (some MiB of working set)"
            elif gpu and size < 256 * 1024:
                source = "no limit: mostly launching (one element takes 2.1 of these 2.3 us)"
            timing = "in a graph, on the device's clock" if gpu else "in a row, on the host's clock"
            params = {"working_set_bytes": size, "cache": "hot", "level": "memory" if limit else "cache", "timed": timing}
            rows.append(
                _row(
                    random,
                    "memory_levels",
                    operation,
                    "bandwidth_gb_s",
                    rate,
                    limit,
                    dtype="fp32",
                    params=params,
                    limit_source=source,
                    **CHECK,
                )
            )
    return rows


def _gpu_rate(size: int) -> float:
    """Launches of 2 us, then a cache of 9 TB/s, then memory."""
    rate = 9000 if size <= 30 * MIB else 6000 if size <= 64 * MIB else 4300
    return size / 1e9 / (2e-6 + size / 1e9 / rate)


def _cpu_rate(size: int) -> float:
    return 180 if size <= 2**15 else 105 if size <= MIB else 60 if size <= 16 * MIB else 9


def _format_rows(random, gpu: bool) -> list[Row]:
    limit = 4800.0 if gpu else None
    source = "device memory: data sheet, HBM3e" if gpu else "no limit: unknown: the system does not tell its memory channels"
    rows = []
    for dtype, size in {"fp64": 8, "fp32": 4, "fp16": 2, "bf16": 2}.items():
        for operation, share in {"copy": 0.9, "scale": 0.89, "add": 0.92, "triad": 0.92, "dot": 0.93}.items():
            slow = 0.03 if not gpu and operation == "dot" and size == 2 else 1
            rows.append(
                _row(
                    random,
                    "stream_formats",
                    operation,
                    "bandwidth_gb_s",
                    (limit or 20) * share * slow,
                    limit,
                    dtype=dtype,
                    params={"elements": 2**30 // size, "cache": "cold"},
                    limit_source=source,
                    **CHECK,
                )
            )
    params = {"elements": 2**28, "cache": "hot", "plain_loop_calls": 10}
    rows.append(
        _row(random, "stream_formats", "copy over a plain loop of copy_", "speedup", 1.012, None, dtype="fp32", params=params)
    )
    for name in ("copy", "plain copy_"):
        rows.append(
            _row(
                random,
                "stream_formats",
                name,
                "bandwidth_gb_s",
                (limit or 20) * 0.9,
                limit,
                dtype="fp32",
                params=params,
                limit_source=source,
                **CHECK,
            )
        )
    for operation, joules in (("copy", 0.12), ("triad", 0.11), ("dot", 0.1)):
        told = {"dtype": "fp32", "params": {"elements": 2**28, "cache": "cold"}}
        rows.append(
            _row(random, "stream_formats", operation, "energy_j_per_gb", joules, None, power_w=520.0, **told)
            if gpu
            else _absent("stream_formats", operation, "energy_j_per_gb", "no power: counters need rights", **told)
        )
    return rows


def _gpu_transfers(random, gpus: int) -> list[Row]:
    rows = []
    for direction, best in (("host to device", 55.0), ("device to host", 53.0)):
        for memory, share in (("pinned", 1.0), ("pageable", 0.25)):
            for size in (2**16, 2**20, 2**24, 2**28):
                params = {"memory": memory, "bytes": size, "cache": "hot"}
                rate = best * share / (1 + 4e5 / size)
                rows.append(_copy(random, direction, rate, None, params, "no limit: no datasheet value: the link to the host"))
    for source in range(gpus):
        for destination in set(range(gpus)) - {source}:
            params = {"source": source, "destination": destination, "bytes": 2**28, "cache": "hot", "direct": True}
            rows.append(_copy(random, "peer to peer", 380.0, 450.0, params, "any peer; data sheet"))
    return [*rows, _tensor(138.1, 139.8, "all of the device's memory, as reported by PyTorch")]


def cpu_transfers() -> list[Row]:
    """There is nothing to copy between, and a cap on the largest tensor."""
    reason = "unavailable: no accelerator: host and device are one memory"
    names = ("host to device", "device to host", "peer to peer")
    cap = "the profile's cap on this process: a CPU's memory is never taken whole"
    return [*(_absent("transfers", name, "bandwidth_gb_s", reason) for name in names), _tensor(0.98, 1.0, cap)]


def _copy(random, variant, rate, limit, params, source) -> Row:
    return _row(random, "transfers", variant, "bandwidth_gb_s", rate, limit, params=params, limit_source=source, **CHECK)


def _tensor(gib: float, limit: float, source: str) -> Row:
    return Row(
        notebook=LIMITS,
        experiment="transfers",
        variant="one tensor",
        metric="largest_allocation_gib",
        value=gib,
        limit=limit,
        limit_source=source,
        check="written and read back",
        check_error=0.0,
        check_tolerance=0.0,
    )


def _launch_rows(random, gpu: bool) -> list[Row]:
    eager, graph = (4.1e-6, 1.3e-6) if gpu else (0.9e-6, None)
    rows = [_row(random, "launch_cost", "eager", "launch_time_s", eager, None, params={"kernels": 500}, **CHECK)]
    if graph:
        rows.append(_row(random, "launch_cost", "graph", "launch_time_s", graph, None, params={"kernels": 1000}, **CHECK))
    else:
        rows.append(_absent("launch_cost", "graph", "launch_time_s", "unavailable: a CPU has no graphs", params={"kernels": 0}))
    timing = "in a graph, on the device's clock" if gpu else "in a row, on the host's clock"
    for kib in (4, 64, 1024, 4096, 16384, 65536, 262144) if gpu else (4, 16, 64, 256, 1024):
        size = kib * 1024
        rate = size / 1e9 / (eager / 3 + size / 1e9 / (5000 if gpu else 60))
        params = {"working_set_bytes": size, "cache": "hot", "timed": timing}
        rows.append(
            _row(
                random,
                "launch_cost",
                "copy",
                "bandwidth_gb_s",
                rate,
                None,
                dtype="fp32",
                params=params,
                limit_source="no limit: it is measured where launches weigh, not memory",
                **CHECK,
            )
        )
    crossing = math.floor(eager * 2 / 3 * (5e12 if gpu else 60e9))
    crossing *= 1 if gpu else 2.5
    basis = "a copy's time on the device = the host's time to launch a kernel eagerly"
    rows.append(
        Row(
            notebook=LIMITS,
            experiment="launch_cost",
            variant="copy",
            metric="worthwhile_bytes",
            value=float(crossing),
            n=31,
            ci_low=0.8 * crossing,
            ci_high=1.3 * crossing,
            params={"set_equal": basis, "launches": 1 if gpu else 2},
        )
    )
    return rows


def _absent(experiment, variant, metric, reason, **columns) -> Row:
    return Row(notebook=LIMITS, experiment=experiment, variant=variant, metric=metric, value=None, value_reason=reason, **columns)
