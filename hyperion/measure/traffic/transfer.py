"""Copies between memories: host to device and back, from pinned and from pageable memory, and from GPU to GPU.

Bytes are those of the message, counted once: a link carries each of them once, unlike a stream within one memory, whose bytes
are read and written. Every copy is compared bit for bit afterwards.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import permutations

import torch

from hyperion.errors import HyperionError
from hyperion.hardware import Device
from hyperion.measure.clock.timing import Timing, time_function
from hyperion.measure.clock.verify import Verification, poison_bits, verify_bits
from hyperion.results import Estimate

DIRECTIONS = ("host to device", "device to host")
ONE_MEMORY = "no accelerator: host and device are one memory"
_WORD = 8


@dataclass(frozen=True)
class CopyMeasurement:
    """One verified, timed copy of `bytes` bytes.

    Args:
        source, destination: torch devices ("cpu", "cuda:0").
        pinned: whether the host's side is page-locked memory, which a device reads and writes by itself; None where no side
            is the host's.
        clock: what the timing was read from.
        timing: seconds of one copy, caches as the copy before left them.
    """

    source: str
    destination: str
    bytes: int
    pinned: bool | None
    clock: str
    timing: Timing
    verification: Verification

    @property
    def bandwidth_gb_s(self) -> Estimate:
        """GB/s with its 95 % interval."""
        return self.timing.estimate.map(lambda seconds: self.bytes / seconds / 1e9)


def transfer_refusal(device: Device) -> str:
    """Why nothing can be copied between host and device, in words; "" where it can."""
    return ONE_MEMORY if device.kind == "cpu" else ""


def peer_refusal(devices: Sequence[Device]) -> str:
    """Why nothing can be copied between devices, in words; "" where it can."""
    if any(device.kind == "cpu" for device in devices):
        return ONE_MEMORY
    return "" if len(devices) > 1 else f"GPUs visible: {len(devices)}; a copy from one to another needs two"


def measure_transfer(
    direction: str, count: int, device: Device, *, pinned: bool, time_limit_s: float = 1.0, seed: int = 0
) -> CopyMeasurement:
    """Time and verify a copy of `count` bytes between the host and a device.

    A copy from or to pinned memory is asynchronous, and is timed on the device's own clock. One of pageable memory keeps the
    host busy, which moves the bytes through a pinned buffer of the driver: it is timed on the host's clock, from an idle
    device to an idle device.

    Args:
        direction: "host to device" or "device to host".
        pinned: whether the host's side is page-locked.

    Raises:
        HyperionError: the device is the host.
    """
    if transfer_refusal(device):
        raise HyperionError(transfer_refusal(device), where=device.name, next_step="run it where there is a GPU")
    host = _random_bytes(count, seed)
    if pinned:
        host = host.pin_memory()
    outward = direction == DIRECTIONS[0]
    source = host if outward else host.to(device.torch_device)
    destination = torch.empty_like(host, device=device.torch_device) if outward else torch.empty_like(host, pin_memory=pinned)
    return measure_copy(source, destination, device, pinned=pinned, time_limit_s=time_limit_s)


def peer_pairs(devices: Sequence[Device]) -> list[tuple[Device, Device]]:
    """All ordered pairs (source, destination) of different devices: a link may be slower one way."""
    return list(permutations(devices, 2))


def measure_between(
    source: Device, destination: Device, count: int, *, time_limit_s: float = 0.5, seed: int = 0
) -> CopyMeasurement:
    """Time and verify a copy of `count` bytes from one device's memory to another's, on the source's own clock.

    PyTorch copies between GPUs on the source's stream, and lets both streams wait for the copy.
    """
    original = _random_bytes(count, seed).to(source.torch_device)
    copied = torch.empty(count, dtype=torch.uint8, device=destination.torch_device)
    return measure_copy(original, copied, source, pinned=None, time_limit_s=time_limit_s)


def measure_copy(
    source: torch.Tensor, destination: torch.Tensor, device: Device, *, pinned: bool | None, time_limit_s: float
) -> CopyMeasurement:
    """Poison the destination, time copies into it, and compare what they left bit for bit.

    Args:
        source, destination: bytes (uint8) of one length.
        device: on whose clock and stream the copies are timed.
        pinned: whether the host's side is page-locked; False times on the host's clock.
    """
    poison_bits(destination, source)
    blocking = pinned is False
    timing = time_function(
        lambda: destination.copy_(source, non_blocking=not blocking),
        device,
        cold=False,
        time_limit_s=time_limit_s,
        back_to_back=1 if blocking else 0,
    )
    on_host = blocking or device.kind == "cpu"
    return CopyMeasurement(
        str(source.device),
        str(destination.device),
        source.numel() * source.element_size(),
        pinned,
        "the host's clock, from an idle device to an idle device" if on_host else "the device's clock",
        timing,
        verify_bits(destination, source),
    )


def _random_bytes(count: int, seed: int) -> torch.Tensor:
    """Bytes of any value on the host, drawn eight at a time."""
    words = torch.empty(-(-count // _WORD), dtype=torch.int64)
    words.random_(-(2**63), None, generator=torch.Generator().manual_seed(seed))
    return words.view(torch.uint8)[:count]
