"""Measure one device, and return the results as rows (`hyperion.results.Row`).

There are functions for matrix products and memory streams, which also measure the energy, for launches, for copies between host
and device, and for all-reduces. A memory stream reads or writes large arrays once per call. The outputs of all measured
operations are checked.
"""

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch

from hyperion.chapter.rows import bandwidth_limit, gemm_limit, out_of_memory_reason, timed_columns, unused_tf32
from hyperion.experiments.interconnect.collectives import busbw_limit
from hyperion.hardware import Device
from hyperion.measure import (
    COLLECTIVES,
    Energy,
    Gemm,
    energy_of,
    measure_bandwidth,
    measure_collective,
    measure_launch,
    measure_transfer,
)
from hyperion.measure.collectives.collectives import memory_needed
from hyperion.measure.products.gemm import RefusedProduct
from hyperion.measure.traffic.bandwidth import transfer_refusal
from hyperion.processes import RollCall, World
from hyperion.results import Estimate, Row
from hyperion.units import GIB

NOTEBOOK = "machine"
PRODUCT = "torch.mm"
_ENERGY_METRICS = {"gemm_tflops": "energy_j_per_tflop", "bandwidth_gb_s": "energy_j_per_gb"}


def gemm_rows(device: Device, dtype: str, size: int, *, cold: bool, time_limit_s: float) -> list[Row]:
    """Measure a square matrix product (M = N = K = `size`), and return a row with its rate and a row with its energy.

    If the device cannot compute the product, return one row that has the reason instead of a value.

    Args:
        device: the device to measure.
        dtype: number format of the product.
        size: number of rows and columns of the matrices.
        cold: if True, flush the caches before each sample.
        time_limit_s: limit for the measurement, in seconds.
    """
    params = {"m": size, "n": size, "k": size, "cache": "cold" if cold else "hot"}
    row = _row("gemm", PRODUCT, "gemm_tflops", params, dtype)
    supported, how = device.supports(dtype)
    if not supported:
        return [replace(row, value_reason=f"unsupported: {how}")]
    try:
        product = Gemm(size, size, size, dtype, device)
        timing, verification = product.measure(cold=cold, time_limit_s=time_limit_s)
    except torch.OutOfMemoryError as error:
        return [replace(row, value_reason=out_of_memory_reason(error))]
    except RefusedProduct as refusal:
        return [replace(row, value_reason=f"unsupported: {refusal.what}")]
    if unused := unused_tf32(dtype, verification.error):
        return [replace(row, value_reason=unused)]
    rate = timing.estimate.map(lambda seconds: product.flops / seconds / 1e12)
    limit, source = gemm_limit(device, dtype)
    columns = timed_columns(rate, timing, verification)
    row = replace(row, value=rate.value, limit=limit, limit_source=f"{source}; by {product.backend}", **columns)
    energy = energy_of(timing)
    return [row, _energy_row(row, energy, energy.j_per_tflop(product.flops))]


def stream_rows(device: Device, operation: str, dtype: str, elements: int, *, time_limit_s: float) -> list[Row]:
    """Measure a memory stream with cold caches, and return a row with its bandwidth and a row with its energy.

    If the arrays do not fit into memory, return one row that has the reason instead of a value.
    """
    row = _row("bandwidth", operation, "bandwidth_gb_s", {"elements": elements, "cache": "cold"}, dtype)
    try:
        measured = measure_bandwidth(operation, elements, dtype, device, time_limit_s=time_limit_s)
    except torch.OutOfMemoryError as error:
        return [replace(row, value_reason=out_of_memory_reason(error))]
    rate = measured.timing.estimate.map(lambda seconds: measured.bytes / seconds / 1e9)
    limit, source = bandwidth_limit(device, measured.bytes)
    columns = timed_columns(rate, measured.timing, measured.verification)
    row = replace(row, value=rate.value, limit=limit, limit_source=source, **columns)
    energy = energy_of(measured.timing)
    return [row, _energy_row(row, energy, energy.j_per_gb(measured.bytes))]


def launch_rows(device: Device, *, time_limit_s: float) -> list[Row]:
    """Measure the time that the host needs to launch the smallest kernel.

    The kernel is launched by a single call and, if the device supports graphs, as part of a graph.
    """
    cost = measure_launch(device, time_limit_s=time_limit_s)
    rows = []
    for variant, timing, calls in (("eager", cost.eager, cost.eager_calls), ("graph", cost.graph, cost.graph_kernels)):
        row = _row("launch", variant, "launch_time_s", {"calls": calls})
        if timing is None:
            rows.append(replace(row, value_reason=f"unsupported: {cost.graph_reason}"))
            continue
        seconds = timing.estimate
        rows.append(replace(row, value=seconds.value, **timed_columns(seconds, timing, cost.verification)))
    return rows


def transfer_rows(device: Device, direction: str, count: int, *, pinned: bool, time_limit_s: float) -> list[Row]:
    """Measure the bandwidth of a copy of `count` bytes between host and device.

    Args:
        device: the device to measure.
        direction: direction of the copy; see `measure_transfer`.
        count: number of bytes.
        pinned: whether the host memory is pinned.
        time_limit_s: limit for the measurement, in seconds.
    """
    row = _row("transfer", direction, "bandwidth_gb_s", {"bytes": count, "pinned": pinned, "cache": "hot"})
    if refusal := transfer_refusal(device):
        return [replace(row, value_reason=f"unsupported: {refusal}")]
    measured = measure_transfer(direction, count, device, pinned=pinned, time_limit_s=time_limit_s)
    rate = measured.bandwidth_gb_s
    columns = timed_columns(rate, measured.timing, measured.verification)
    return [replace(row, value=rate.value, limit_source="no limit: the host's link is not in a device's data sheet", **columns)]


def all_reduce_row(here: World, roll: RollCall, dtype: str, size_bytes: int, *, time_limit_s: float) -> Row:
    """Measure the bus bandwidth of an all-reduce over all ranks. Every rank must call this function."""
    device, collective = here.device, COLLECTIVES["all_reduce"]
    params = {"bytes": size_bytes, "ranks": here.size, "backend": here.backend}
    row = _row("collectives", "all_reduce", "busbw_gb_s", params, dtype)
    if (needed := memory_needed(size_bytes)) > device.memory_bytes:
        reason = f"needs {needed / GIB:.1f} GiB, the device has {device.memory_bytes / GIB:.1f}"
        return replace(row, value_reason=reason)
    measured = measure_collective(collective, size_bytes, dtype, here, roll, time_limit_s=time_limit_s)
    rate = measured.timing.estimate.map(measured.busbw_gb_s)
    limit, source = busbw_limit(device, collective, here.size)
    columns = timed_columns(rate, measured.timing, measured.verification)
    return replace(row, value=rate.value, limit=limit, limit_source=source, **columns)


def with_params(rows: Iterable[Row], rank: int | None = None, **params: Any) -> list[Row]:
    """Return the rows with additional params and with the rank that measured them."""
    return [replace(row, params=row.params | params, rank=rank) for row in rows]


def _row(experiment: str, variant: str, metric: str, params: dict, dtype: str = "") -> Row:
    """Return a row without a value."""
    return Row(notebook=NOTEBOOK, experiment=experiment, variant=variant, metric=metric, value=None, dtype=dtype, params=params)


def _energy_row(row: Row, energy: Energy, joules: Estimate | None) -> Row:
    """Return the row with the energy of the work whose rate is in `row`. Both values come from the same samples."""
    params = row.params | ({"power_scope": energy.scope} if energy.scope else {})
    if energy.counter_difference is not None:
        params["counter_difference"] = round(energy.counter_difference, 4)
    bare = _row(row.experiment, row.variant, _ENERGY_METRICS[row.metric], params, row.dtype)
    if joules is None:
        return replace(bare, value_reason=energy.reason)
    state = {name: getattr(row, name) for name in ("clock_mhz", "power_w", "throttle", "host_load", "host_steal")}
    return replace(bare, value=joules.value, **joules.columns, **state)
