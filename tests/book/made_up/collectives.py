"""Rows of the interconnect chapter that no machine measured: test data, valid by every rule of a row."""

import itertools

import pandas as pd

from hyperion.results import Row
from tests.book.made_up.hardware import timed

INTERCONNECT = "03_interconnect"
FACTORS = {"all_reduce": 1.5, "broadcast": 1.0, "all_gather": 0.75, "reduce_scatter": 0.75, "all_to_all": 0.75}
FACTORS |= {"reduce": 1.0, "send_recv": 1.0}
OVERLAP_S = {"products": 3e-3, "all_reduce": 2e-3, "both at once": 3.5e-3}
SIZES = [64 * 8**power for power in range(9)]
LATENCY_S = 2e-5
MPI_GB_S = 3.0


def collectives_chapter(random, limited):
    """(notebook, experiment, rows, samples) of four ranks; without links there is no limit."""
    limit, rate = (450.0, 370.0) if limited else (None, 1.2)
    rows = [row for name, factor in FACTORS.items() for row in _sweep(random, name, factor, limit, rate)]
    rows.append(_row("topology", "count", 12.0, {"what": "pairs of devices with direct access", "pairs": 12, "ranks": 4}))
    rows += [*_links(limited), *_overlap(random)]
    return INTERCONNECT, "collectives", rows, pd.DataFrame({"time_s": [LATENCY_S]})


def mpi_chapter(random, gpus):
    """(notebook, experiment, rows, samples) of the same four ranks under mpirun: staged on GPUs, else in host memory."""
    params = {"ranks": 4, "backend": "mpi (Open MPI v5.0.11)", "path": "host-staged" if gpus else "host", "oversubscribed": False}
    checked = {"check": "equal to the expected values on every rank", "check_error": 0.0, "check_tolerance": 0.0}
    columns = {"dtype": "fp32", "limit_source": "no limit: made up", **checked}
    rows = []
    for name, size in itertools.product(("all_reduce", "broadcast", "reduce", "scatter", "gather"), SIZES[::2]):
        rate, cell = MPI_GB_S * size / (size + 65_536), {"params": params | {"bytes": size}}
        rows.append(timed(random, INTERCONNECT, "mpi_collectives", name, "busbw_gb_s", rate, None, **columns, **cell))
    return INTERCONNECT, "mpi_collectives", rows, pd.DataFrame({"time_s": [LATENCY_S]})


def _sweep(random, name, factor, limit, rate):
    rows = []
    checked = {"check": "equal to the expected values on every rank", "check_error": 0.0, "check_tolerance": 0.0}
    cells = [("fp32", size) for size in SIZES] + [("bf16", 65_536)]
    source = {} if limit else {"limit_source": "no limit: gloo's ranks share a host"}
    for dtype, size in cells:
        seconds = LATENCY_S + size * factor / rate / 1e9
        params = {"bytes": size, "ranks": 4}
        for metric, value, bound in (
            ("collective_time_s", seconds, None),
            ("algbw_gb_s", size / seconds / 1e9, None),
            ("busbw_gb_s", size * factor / seconds / 1e9, limit),
        ):
            more = source if metric == "busbw_gb_s" else {}
            rows.append(
                timed(
                    random, INTERCONNECT, "collectives", name, metric, value, bound, dtype=dtype, params=params, **checked, **more
                )
            )
    params = {"smallest": SIZES[0], "largest": SIZES[-1], "ranks": 4}
    rows.append(timed(random, INTERCONNECT, "collectives", name, "latency_s", LATENCY_S, None, dtype="fp32", params=params))
    rows.append(
        timed(random, INTERCONNECT, "collectives", name, "asymptotic_busbw_gb_s", rate, None, dtype="fp32", params=params)
    )
    advised = 9 * LATENCY_S * rate * 1e9 / factor
    rows.append(
        timed(
            random,
            INTERCONNECT,
            "collectives",
            name,
            "recommended_bytes",
            advised,
            None,
            dtype="fp32",
            params=params | {"share": 0.9, "note": ""},
        )
    )
    rows.append(_row(name, "fit_deviation", 0.3, params, dtype="fp32"))
    rows.append(_row(name, "half_busbw_bytes", LATENCY_S * rate * 1e9 / factor, params, dtype="fp32"))
    return rows


def _links(gpus):
    """Four GPUs on a switch and the kernel of one collective; of a CPU neither."""
    params = {"bytes": 64, "ranks": 4, "what": "kernels"}
    if not gpus:
        told = params | {"backend": "gloo", "kernel": "", "algorithm": "unknown"}
        return [_row("all_reduce", "count", None, told, dtype="fp32", value_reason="gloo does not tell")]
    told = params | {"backend": "nccl", "kernel": "ncclDevKernel_AllReduce_Sum_f32_RING_LL", "algorithm": "ring"}
    link = {"what": "links", "link": "NV18", "meaning": "18 NVLinks", "source": "NVML", "NUMA node": "0"}
    pairs = [(one, other) for one in range(4) for other in range(4) if one != other]
    links = [_row("topology", "count", 18.0, link | {"from": one, "to": other}) for one, other in pairs]
    return [*links, _row("all_reduce", "count", 1.0, told, dtype="fp32")]


def _overlap(random):
    params = {"bytes": 26_214_400, "ranks": 4, "backend": "nccl"}
    rows = [
        timed(
            random,
            INTERCONNECT,
            "collectives",
            "overlap",
            "call_time_s",
            seconds,
            None,
            dtype="fp32",
            params=params | {"what": what},
        )
        for what, seconds in OVERLAP_S.items()
    ]
    checked = {"check": "equal to the expected values on every rank", "check_error": 0.0, "check_tolerance": 0.0}
    hidden = timed(
        random,
        INTERCONNECT,
        "collectives",
        "overlap",
        "overlap_share",
        0.75,
        None,
        dtype="fp32",
        params=params,
        predicted=1.0,
        **checked,
    )
    return [*rows, hidden]


def _row(variant, metric, value, params, **columns):
    return Row(
        notebook=INTERCONNECT, experiment="collectives", variant=variant, metric=metric, value=value, params=params, **columns
    )
