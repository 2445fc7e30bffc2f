"""Limits of a collective's bus bandwidth: the links of the data sheet, and whether the switch reduces."""

import os

from hyperion.hardware import Device, lookup
from hyperion.measure import Collective

LOOPBACK = "no limit: gloo's ranks share a host, and their messages are memory copies over loopback"
# NCCL's switch for reductions within NVSwitch (NVLink SHARP).
_NVLS = "NCCL_NVLS_ENABLE"
_PATHS = {
    "send_recv": "link, from each device to one other, one direction",
    "all_to_all": "link, from each device to all others at once, one direction",
}


def busbw_limit(device: Device, collective: Collective, ranks: int) -> tuple[float | None, str]:
    """Return (GB/s that the links allow, its source), or (None, why there is no limit).

    Bus bandwidth counts the bytes that must cross a device's link in one direction. An all-reduce within the switch is the
    exception: the switch adds, and a device sends each byte once instead of almost twice.
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
    factor = max(1.0, collective.bus_factor(ranks))
    return link * factor, f"link, each byte sent once because the switch may add (NVLS): {factor:g} x {link:g} GB/s, {source}"


def link_limit(device: Device, collective: Collective, ranks: int) -> tuple[float | None, str]:
    """Return (GB/s in one direction of all links that a device's bytes can use at once, its source), or (None, why not)."""
    found, reason = lookup(device)
    if found is None:
        return None, reason
    link, source = found.link_limit_gb_s(ranks)
    # In a ring of messages a device sends to one peer only, however many ranks there are.
    return found.link_limit_gb_s(2) if link is not None and collective.name == "send_recv" else (link, source)


def switch_can_add(device: Device) -> bool:
    """Return whether the switch can reduce: NVSwitch from Hopper on. AMD's links have no switch."""
    return device.kind == "cuda" and int(device.arch.removeprefix("sm_")) >= 90


def switch_is_off() -> bool:
    """Return whether the environment forbids NCCL to reduce in the switch."""
    return os.environ.get(_NVLS) == "0"
