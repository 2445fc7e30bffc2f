"""How fast do bytes travel between memories: host and device, one GPU and another? And how much does one tensor get?"""

import gc

import pandas as pd
import torch

from hyperion.chapter.context import Context, Experiment, Forecast, Result
from hyperion.chapter.rows import out_of_memory_reason, sample_frame, timed_columns
from hyperion.errors import HyperionError
from hyperion.hardware import Device, detect, lookup
from hyperion.measure import (
    DIRECTIONS,
    CopyMeasurement,
    largest_allocation,
    measure_between,
    measure_transfer,
    peer_pairs,
    peer_refusal,
    transfer_refusal,
)
from hyperion.results import Row

GIB, KIB, MIB = 2**30, 2**10, 2**20
PEERS, ALLOCATION = "peer to peer", "one tensor"
_NO_HOST_LINK = "no datasheet value: the link to the host belongs to the machine, not to the device"


def forecast(context: Context) -> list[Forecast]:
    """The link's datasheet rate for each pair of GPUs, all of the memory for one tensor; nothing for the host's link."""
    devices = visible_devices(context)
    pairs = [] if peer_refusal(devices) else peer_pairs(devices)
    return [
        _allocation_forecast(context),
        *(_peer_forecast(context, source, destination, len(devices)) for source, destination in pairs),
        *(_host_forecast(*cell) for cell in ([] if transfer_refusal(context.device) else _cells(context))),
    ]


def run(context: Context, report) -> Result:
    """Copies by direction, memory and size, then over every pair of GPUs, then the largest tensor."""
    devices = visible_devices(context)
    work = [lambda cell=cell: _host_copy(context, *cell) for cell in _cells(context)]
    if refusal := transfer_refusal(context.device):
        work = [lambda d=direction: ([_absent(context, d, {}, f"unavailable: {refusal}")], []) for direction in DIRECTIONS]
    if refusal_of_peers := peer_refusal(devices):
        work.append(lambda: ([_absent(context, PEERS, {}, f"unavailable: {refusal_of_peers}")], []))
    else:
        work += [lambda pair=pair: _peer_copy(context, *pair, len(devices)) for pair in peer_pairs(devices)]
    work.append(lambda: ([_allocation_row(context)], []))
    rows: list[Row] = []
    frames: list[pd.DataFrame] = []
    for done, measure in enumerate(work):
        new_rows, new_frames = measure()
        rows += new_rows
        frames += new_frames
        report(done + 1, len(work), rows[-1].variant)
    return Result(rows, pd.concat(frames, ignore_index=True) if frames else pd.DataFrame())


EXPERIMENT = Experiment(forecast, run)


def visible_devices(context: Context) -> list[Device]:
    """All devices that this process sees; the CPU alone where it computes on that."""
    if context.device.kind == "cpu":
        return [context.device]
    return [detect(index=index) for index in range(torch.cuda.device_count())]


def _cells(context: Context) -> list[tuple[str, bool, int]]:
    sizes = [size * KIB for size in context.sizes["kib"]]
    return [(direction, pinned, size) for direction in DIRECTIONS for pinned in (True, False) for size in sizes]


def _host_params(pinned: bool, size: int) -> dict:
    return {"memory": "pinned" if pinned else "pageable", "bytes": size, "cache": "hot"}


def _host_forecast(direction: str, pinned: bool, size: int) -> Forecast:
    params = _host_params(pinned, size)
    return Forecast(variant=direction, metric="bandwidth_gb_s", estimate=None, basis=_NO_HOST_LINK, params=params)


def _host_copy(context: Context, direction: str, pinned: bool, size: int) -> tuple[list[Row], list[pd.DataFrame]]:
    params = _host_params(pinned, size)
    try:
        copied = measure_transfer(
            direction, size, context.device, pinned=pinned, time_limit_s=context.sizes["time_limit_s"], seed=context.seed
        )
    except torch.OutOfMemoryError as error:
        return [_absent(context, direction, params, out_of_memory_reason(error))], []
    return _measured(context, direction, params, copied, None, f"no limit: {_NO_HOST_LINK}")


def _peer_params(context: Context, source: Device, destination: Device) -> dict:
    return {"source": source.index, "destination": destination.index, "bytes": context.sizes["peer_mib"] * MIB, "cache": "hot"}


def _peer_limit(source: Device, destination: Device, devices: int) -> tuple[float | None, str]:
    """(GB/s that the datasheet gives one GPU to send to another, its source), or (None, why there is none)."""
    if not torch.cuda.can_device_access_peer(source.index, destination.index):
        return None, "copies go through the host: the GPUs cannot reach each other's memory"
    sheet, reason = lookup(source)
    if sheet is None:
        return None, reason
    # What is told of one particular peer holds for no other one.
    return sheet.link_limit_gb_s(devices if sheet.link_to_one_peer else 2)


def _peer_forecast(context: Context, source: Device, destination: Device, devices: int) -> Forecast:
    limit, basis = _peer_limit(source, destination, devices)
    params = _peer_params(context, source, destination)
    return Forecast(variant=PEERS, metric="bandwidth_gb_s", estimate=limit, basis=basis, params=params)


def _peer_copy(context: Context, source: Device, destination: Device, devices: int) -> tuple[list[Row], list[pd.DataFrame]]:
    params = _peer_params(context, source, destination)
    try:
        copied = measure_between(
            source, destination, params["bytes"], time_limit_s=context.sizes["time_limit_s"], seed=context.seed
        )
    except torch.OutOfMemoryError as error:
        return [_absent(context, PEERS, params, out_of_memory_reason(error))], []
    direct = torch.cuda.can_device_access_peer(source.index, destination.index)
    limit, basis = _peer_limit(source, destination, devices)
    basis = basis if limit is not None else f"no limit: {basis}"
    return _measured(context, PEERS, params | {"direct": direct}, copied, limit, basis)


def _measured(
    context: Context, variant: str, params: dict, copied: CopyMeasurement, limit: float | None, limit_source: str
) -> tuple[list[Row], list[pd.DataFrame]]:
    rate = copied.bandwidth_gb_s
    row = context.row(
        variant,
        "bandwidth_gb_s",
        rate.value,
        params=params,
        limit=limit,
        limit_source=limit_source,
        **timed_columns(rate, copied.timing, copied.verification),
    )
    return [row], [sample_frame(copied.timing, variant, "", params).assign(clock=copied.clock)]


def _absent(context: Context, variant: str, params: dict, reason: str) -> Row:
    return context.row(variant, "bandwidth_gb_s", None, params=params, value_reason=reason)


def _cap_gib(context: Context) -> float | None:
    """What a search on a CPU may take, a quarter of the memory at most; an accelerator's memory is nobody else's."""
    device = context.device
    return min(context.sizes["cpu_cap_gib"], device.memory_bytes / GIB / 4) if device.kind == "cpu" else None


def _allocation_limit(context: Context) -> tuple[float, str]:
    cap = _cap_gib(context)
    if cap is not None:
        return cap, "the profile's cap on this process: a CPU's memory is never taken whole"
    return context.device.memory_bytes / GIB, "all of the device's memory, as PyTorch tells it"


def _allocation_forecast(context: Context) -> Forecast:
    limit, basis = _allocation_limit(context)
    return Forecast(variant=ALLOCATION, metric="largest_allocation_gib", estimate=limit, basis=basis)


def _allocation_row(context: Context) -> Row:
    """The largest tensor that is granted, found by bisection, written and read back."""
    limit, source = _allocation_limit(context)
    step = context.sizes["step_mib"] * MIB
    gc.collect()  # tensors of earlier experiments that only cycles still hold, such as a captured call and its graph
    try:
        found = largest_allocation(context.device, step_bytes=step, cap_gib=_cap_gib(context))
    except HyperionError as error:
        return context.row(ALLOCATION, "largest_allocation_gib", None, value_reason=f"unavailable: {error}")
    check = found.verification
    params = {"step_mib": context.sizes["step_mib"]}
    return context.row(
        ALLOCATION,
        "largest_allocation_gib",
        found.gib,
        params=params,
        limit=limit,
        limit_source=source,
        check=check.name,
        check_error=check.error,
        check_tolerance=check.tolerance,
    )
