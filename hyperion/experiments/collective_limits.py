"""What bounds a collective's bus bandwidth, and what is foretold of its time."""

import os

from hyperion.experiments.columns import stream_ceiling
from hyperion.experiments.context import Context
from hyperion.hardware import Device, lookup
from hyperion.measure import Collective

LOOPBACK = "no limit: gloo's ranks share a host, and their messages are memory copies over loopback"
# Assumed before anything is measured, and said in the basis: a launch and a few handshakes of a kernel on every device, or
# a few system calls and context switches on a CPU.
_DEVICE_LATENCY_S, _HOST_LATENCY_S = 20e-6, 200e-6
# Written into a socket's buffer and read out of it: two copies, each a read and a write.
_LOOPBACK_COPIES = 4
# NCCL's switch for reductions within NVSwitch (NVLink SHARP).
_NVLS = "NCCL_NVLS_ENABLE"


def busbw_limit(device: Device, collective: Collective, ranks: int) -> tuple[float | None, str]:
    """(GB/s, source) that the links allow, or (None, why there is no limit).

    Bus bandwidth counts what must cross a device's link in one direction. An all-reduce within the switch is the exception:
    the switch adds, and a device sends each byte once instead of almost twice.
    """
    if device.kind == "cpu":
        return None, LOOPBACK
    found, reason = lookup(device)
    link, source = (None, reason) if found is None else found.link_limit_gb_s(ranks)
    if link is None:
        return None, f"no limit: {source}"
    if collective.name != "all_reduce" or not _switch_can_add(device):
        return link, f"link: {source}"
    if os.environ.get(_NVLS) == "0":
        return link, f"link: {source}; NVLS off ({_NVLS}=0)"
    factor = max(1.0, collective.bus_factor(ranks))
    return link * factor, f"link, each byte sent once because the switch may add (NVLS): {factor:g} x {link:g} GB/s, {source}"


def foretold_s(context: Context, collective: Collective, size_bytes: int, ranks: int) -> tuple[float | None, str]:
    """(seconds, basis) from an assumed latency and the rate of link or memory; (None, reason) where no rate is known."""
    rate, latency_s, words = _rate(context, ranks)
    if rate is None:
        return None, words
    crossing = size_bytes * collective.bus_factor(ranks)
    return latency_s + crossing / rate / 1e9, f"{latency_s * 1e6:g} us assumed for each call, then f x S at {words}"


def _rate(context: Context, ranks: int) -> tuple[float | None, float, str]:
    if context.device.kind != "cpu":
        found, reason = lookup(context.device)
        link, source = (None, reason) if found is None else found.link_limit_gb_s(ranks)
        return link, _DEVICE_LATENCY_S, source if link is None else f"the link's {link:g} GB/s ({source})"
    stream = stream_ceiling(context.upstream)
    if stream is None:
        return None, _HOST_LATENCY_S, "no measured memory bandwidth in this run: run 01_hardware_exploration first"
    rate = stream.value / _LOOPBACK_COPIES / ranks
    words = (
        f"{rate:.3g} GB/s: memory moves {stream.value:.3g} GB/s (measured in 1.1), a byte over loopback is copied into the "
        f"kernel and out of it, {_LOOPBACK_COPIES} bytes of memory traffic, and {ranks} ranks do so at once"
    )
    return rate, _HOST_LATENCY_S, words


def _switch_can_add(device: Device) -> bool:
    """NVSwitch adds from Hopper on, where NCCL chooses so; AMD's links have no switch."""
    return device.kind == "cuda" and int(device.arch.removeprefix("sm_")) >= 90
