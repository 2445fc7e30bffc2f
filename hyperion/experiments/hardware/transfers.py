"""How fast are copies between host and device and between GPUs, and how large can a single tensor be?"""

import gc
from collections.abc import Callable
from functools import partial

import pandas as pd
import torch

from hyperion.chapter.context import Context, Experiment, Forecast, Options, Report, Result
from hyperion.chapter.efficiency import expected_peer_copy
from hyperion.chapter.rows import all_samples, check_columns, out_of_memory_reason, sample_frame, timed_row
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
from hyperion.units import GIB, KIB, MIB

PEERS, ALLOCATION = "peer to peer", "one tensor"
_NO_HOST_LINK = "no datasheet value: the link to the host belongs to the machine, not to the device"

# Rows and samples of one copy.
Measured = tuple[list[Row], list[pd.DataFrame]]


class TransfersOptions(Options):
    """Options for the `transfers` experiment.

    Args:
        kib: sizes in KiB of the host-device copies.
        peer_mib: size in MiB of the GPU-to-GPU copies.
        step_mib: resolution in MiB of the search for the largest tensor.
        cpu_cap_gib: largest tensor in GiB that the search allocates on a CPU, capped at a quarter of the memory.
        time_limit_s: timing budget in seconds for each copy.
    """

    kib: tuple[int, ...]
    peer_mib: int
    step_mib: int
    cpu_cap_gib: float
    time_limit_s: float

    def cap_gib(self, device: Device) -> float | None:
        """Return the size in GiB at which the search for the largest tensor stops, or None on a GPU.

        On a CPU the search must stop early, because other processes also need memory.
        """
        return min(self.cpu_cap_gib, device.memory_bytes / GIB / 4) if device.kind == "cpu" else None


def forecast(context: Context) -> list[Forecast]:
    """Predict the size of the largest tensor that can be allocated, and the rate of copies between each pair of GPUs.

    The predicted size is that of the whole memory or, on a CPU, the limit set by the profile.

    Host-device copies have no prediction.
    """
    options, devices = TransfersOptions.of(context), visible_devices(context)
    limit, basis = _allocation_limit(options, context.device)
    forecasts = [Forecast(ALLOCATION, "largest_allocation_gib", limit, basis)]
    for source, destination in [] if peer_refusal(devices) else peer_pairs(devices):
        limit, basis = _peer_limit(source, destination, len(devices))
        params = _peer_params(source, destination, options)
        expected = expected_peer_copy(source, params["bytes"], limit, basis)
        forecasts.append(expected.forecast(PEERS, "bandwidth_gb_s", params=params))
    for direction, pinned, size in [] if transfer_refusal(context.device) else _cells(options):
        params = _host_params(pinned, size)
        forecasts.append(Forecast(direction, "bandwidth_gb_s", None, _NO_HOST_LINK, params=params))
    return forecasts


def run(context: Context, report: Report) -> Result:
    """Time host-device copies and copies between every pair of GPUs, then find the largest tensor that can be allocated.

    Host-device copies are timed in both directions, with pinned and pageable host memory, at several sizes.
    """
    options, devices = TransfersOptions.of(context), visible_devices(context)
    work: list[Callable[[], Measured]]
    if refusal := transfer_refusal(context.device):
        work = [partial(_absent, context, direction, {}, f"unavailable: {refusal}") for direction in DIRECTIONS]
    else:
        work = [partial(_host_copy, context, options, *cell) for cell in _cells(options)]
    if refusal := peer_refusal(devices):
        work.append(partial(_absent, context, PEERS, {}, f"unavailable: {refusal}"))
    else:
        work += [partial(_peer_copy, context, options, *pair, len(devices)) for pair in peer_pairs(devices)]
    rows: list[Row] = []
    frames: list[pd.DataFrame] = []
    for done, measure in enumerate(work, 1):
        new_rows, new_frames = measure()
        rows += new_rows
        frames += new_frames
        report(done, len(work) + 1, rows[-1].variant)
    rows.append(_allocation_row(context, options))
    report(len(work) + 1, len(work) + 1, ALLOCATION)
    return Result(rows, all_samples(frames))


EXPERIMENT = Experiment(forecast, run, options=TransfersOptions)


def visible_devices(context: Context) -> list[Device]:
    """Return all GPUs visible to this process, or only the CPU if the process computes on it."""
    if context.device.kind == "cpu":
        return [context.device]
    return [detect(index=index) for index in range(torch.cuda.device_count())]


def _cells(options: TransfersOptions) -> list[tuple[str, bool, int]]:
    """Return one entry (direction, pinned, bytes) for each host-device copy to time."""
    return [(direction, pinned, kib * KIB) for direction in DIRECTIONS for pinned in (True, False) for kib in options.kib]


def _host_params(pinned: bool, size: int) -> dict:
    return {"memory": "pinned" if pinned else "pageable", "bytes": size, "cache": "hot"}


def _host_copy(context: Context, options: TransfersOptions, direction: str, pinned: bool, size: int) -> Measured:
    params = _host_params(pinned, size)
    try:
        copied = measure_transfer(
            direction, size, context.device, pinned=pinned, time_limit_s=options.time_limit_s, seed=context.seed
        )
    except torch.OutOfMemoryError as error:
        return _absent(context, direction, params, out_of_memory_reason(error))
    return _measured(context, direction, params, copied, None, f"no limit: {_NO_HOST_LINK}")


def _peer_params(source: Device, destination: Device, options: TransfersOptions) -> dict:
    return {"source": source.index, "destination": destination.index, "bytes": options.peer_mib * MIB, "cache": "hot"}


def _peer_limit(source: Device, destination: Device, devices: int) -> tuple[float | None, str]:
    """Return (GB/s that one GPU can send to another, source of this number), or (None, reason why there is no limit).

    The rate comes from the data sheet.
    """
    if not torch.cuda.can_device_access_peer(source.index, destination.index):
        return None, "copies go through the host: the GPUs cannot reach each other's memory"
    sheet, reason = lookup(source)
    if sheet is None:
        return None, reason
    # The rate of one particular pair of GPUs does not apply to other pairs.
    return sheet.link_limit_gb_s(devices if sheet.link_to_one_peer else 2)


def _peer_copy(context: Context, options: TransfersOptions, source: Device, destination: Device, devices: int) -> Measured:
    params = _peer_params(source, destination, options)
    try:
        copied = measure_between(source, destination, params["bytes"], time_limit_s=options.time_limit_s, seed=context.seed)
    except torch.OutOfMemoryError as error:
        return _absent(context, PEERS, params, out_of_memory_reason(error))
    direct = torch.cuda.can_device_access_peer(source.index, destination.index)
    limit, basis = _peer_limit(source, destination, devices)
    basis = basis if limit is not None else f"no limit: {basis}"
    return _measured(context, PEERS, params | {"direct": direct}, copied, limit, basis)


def _measured(
    context: Context, variant: str, params: dict, copied: CopyMeasurement, limit: float | None, limit_source: str
) -> Measured:
    rate = copied.bandwidth_gb_s
    row = timed_row(
        context, variant, "bandwidth_gb_s", rate, copied.timing, copied.verification, limit=(limit, limit_source), params=params
    )
    return [row], [sample_frame(copied.timing, variant, "", params).assign(clock=copied.clock)]


def _absent(context: Context, variant: str, params: dict, reason: str) -> Measured:
    return [context.absent_row(variant, "bandwidth_gb_s", reason, params=params)], []


def _allocation_limit(options: TransfersOptions, device: Device) -> tuple[float, str]:
    cap = options.cap_gib(device)
    if cap is not None:
        return cap, "the profile's cap on this process: a CPU's memory is never taken whole"
    return device.memory_bytes / GIB, "all of the device's memory, as reported by PyTorch"


def _allocation_row(context: Context, options: TransfersOptions) -> Row:
    """Return the row with the size of the largest tensor that can be allocated, written and read back.

    The size is found by bisection.
    """
    limit, source = _allocation_limit(options, context.device)
    # Reference cycles may still hold tensors of earlier experiments, such as a captured call and its graph.
    gc.collect()
    try:
        found = largest_allocation(context.device, step_bytes=options.step_mib * MIB, cap_gib=options.cap_gib(context.device))
    except HyperionError as error:
        return context.absent_row(ALLOCATION, "largest_allocation_gib", f"unavailable: {error}")
    return context.row(
        ALLOCATION,
        "largest_allocation_gib",
        found.gib,
        params={"step_mib": options.step_mib},
        limit=limit,
        limit_source=source,
        **check_columns(found.verification),
    )
