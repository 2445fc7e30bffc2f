"""What bounds a collective's bus bandwidth, and what is foretold of its time."""

import os

from hyperion.chapter.context import Context
from hyperion.chapter.rows import stream_ceiling
from hyperion.hardware import Device, lookup
from hyperion.measure import Collective

LOOPBACK = "no limit: gloo's ranks share a host, and their messages are memory copies over loopback"
# Written into a socket's buffer and read out of it: two copies, each a read and a write.
_LOOPBACK_COPIES = 4
# NCCL's switch for reductions within NVSwitch (NVLink SHARP).
_NVLS = "NCCL_NVLS_ENABLE"
_PATHS = {
    "send_recv": "link, from each device to one other, one direction",
    "all_to_all": "link, from each device to all others at once, one direction",
}


def busbw_limit(device: Device, collective: Collective, ranks: int) -> tuple[float | None, str]:
    """(GB/s, source) that the links allow, or (None, why there is no limit).

    Bus bandwidth counts what must cross a device's link in one direction. An all-reduce within the switch is the exception:
    the switch adds, and a device sends each byte once instead of almost twice.
    """
    if device.kind == "cpu":
        return None, LOOPBACK
    link, source = _link(device, collective, ranks)
    if link is None:
        return None, f"no limit: {source}"
    if collective.name != "all_reduce" or not switch_can_add(device):
        return link, f"{_PATHS.get(collective.name, 'link')}: {source}"
    if switch_is_off():
        return link, f"link: {source}; NVLS off ({_NVLS}=0)"
    factor = max(1.0, collective.bus_factor(ranks))
    return (link * factor, f"link, each byte sent once because the switch may add (NVLS): {factor:g} x {link:g} GB/s, {source}")


def foretold_s(context: Context, collective: Collective, size_bytes: int, ranks: int) -> tuple[float | None, str]:
    """(seconds, basis) of a message large enough for its latency not to matter, at the rate of link or memory; (None, reason)
    where no rate is known."""
    rate, words = _rate(context, collective, ranks)
    if rate is None:
        return None, words
    return size_bytes * collective.bus_factor(ranks) / rate / 1e9, f"f x S at {words}; the latency, unknown yet, left out"


def switch_can_add(device: Device) -> bool:
    """NVSwitch adds from Hopper on, where NCCL chooses so; AMD's links have no switch."""
    return device.kind == "cuda" and int(device.arch.removeprefix("sm_")) >= 90


def switch_is_off() -> bool:
    """Whether the environment forbids NCCL to let the switch add."""
    return os.environ.get(_NVLS) == "0"


def _link(device: Device, collective: Collective, ranks: int) -> tuple[float | None, str]:
    """(GB/s in one direction of the links that a device's bytes can take at once, source), or (None, why not)."""
    found, reason = lookup(device)
    if found is None:
        return None, reason
    link, source = found.link_limit_gb_s(ranks)
    # In a ring of messages a device sends to one other alone, in whatever company.
    return found.link_limit_gb_s(2) if link is not None and collective.name == "send_recv" else (link, source)


def _rate(context: Context, collective: Collective, ranks: int) -> tuple[float | None, str]:
    if context.device.kind != "cpu":
        link, source = _link(context.device, collective, ranks)
        return link, source if link is None else f"the link's {link:g} GB/s ({source})"
    stream = stream_ceiling(context.upstream)
    if stream is None:
        return None, "no measured memory bandwidth in this run: run 01_hardware_exploration first"
    rate = stream.value / _LOOPBACK_COPIES / ranks
    words = (
        f"{rate:.3g} GB/s: memory moves {stream.value:.3g} GB/s (measured in 1.1), a byte over loopback is copied into the "
        f"kernel and out of it, {_LOOPBACK_COPIES} bytes of memory traffic, and {ranks} ranks do so at once"
    )
    return rate, words
