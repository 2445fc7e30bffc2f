"""Measure bandwidth: STREAM in one memory, and copies between host and device and between GPUs.

Bytes of STREAM (copy, scale, add, triad, dot) are those of the definition: each input read once, the output written once. The
read that a CPU cache does before a write is not counted. A copy between memories counts each byte once, because a link transfers
it once; every such copy is compared bit for bit.

Source of the operations and of the bytes: McCalpin, Memory Bandwidth and Machine Balance in Current High Performance
Computers, 1995. Source of dot: BabelStream.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import permutations

import torch

from hyperion.errors import HyperionError
from hyperion.hardware import Device
from hyperion.measure.clock.timing import MINIMUM_SAMPLES, Timing, time_function
from hyperion.measure.clock.verify import FORMATS, Verification, poison_bits, verify_bits, verify_elementwise, verify_sum
from hyperion.results import Estimate

SCALAR = 0.4
# A power of two, so that scaling is exact. A dot product of 500 M terms of variance 1/16 then stays below 65504, the largest
# fp16 number, by more than eleven standard deviations.
_DOT_SCALE = 0.25
DIRECTIONS = ("host to device", "device to host")
ONE_MEMORY = "no accelerator: host and device are one memory"
_WORD = 8


@dataclass(frozen=True)
class Operation:
    """A STREAM operation.

    Args:
        inputs: number of input arrays.
        flops_per_element: FLOPs per element.
        run: (output, *inputs) -> None; writes into the given output.
        reference: the operation on float64 tensors; None if the output is one sum over all elements.
    """

    name: str
    inputs: int
    flops_per_element: int
    run: Callable
    reference: Callable | None

    @property
    def arrays(self) -> int:
        """Number of arrays that one call reads or writes; a scalar output does not count."""
        return self.inputs + (self.reference is not None)


OPERATIONS = {
    operation.name: operation
    for operation in (
        Operation("copy", 1, 0, lambda out, a: out.copy_(a), lambda a: a),
        Operation("scale", 1, 1, lambda out, a: torch.mul(a, SCALAR, out=out), lambda a: SCALAR * a),
        Operation("add", 2, 1, lambda out, a, b: torch.add(a, b, out=out), lambda a, b: a + b),
        Operation("triad", 2, 2, lambda out, a, b: torch.add(a, b, alpha=SCALAR, out=out), lambda a, b: a + SCALAR * b),
    )
}
# These only read, so they are kept apart from the operations above. On a GPU the timed call also copies the scalar result into
# the output.
REDUCTIONS = {"dot": Operation("dot", 2, 2, lambda out, a, b: torch.dot(a, b, out=out), None)}


@dataclass(frozen=True)
class BandwidthMeasurement:
    """The timing of one verified operation.

    Args:
        elements: elements per array.
        bytes: bytes read plus bytes written by one call.
    """

    operation: str
    elements: int
    dtype: str
    bytes: int
    timing: Timing
    verification: Verification


def measure_bandwidth(
    operation: str,
    elements: int,
    dtype: str,
    device: Device,
    *,
    seed: int = 0,
    time_limit_s: float = 2.0,
    minimum_samples: int = MINIMUM_SAMPLES,
) -> BandwidthMeasurement:
    """Time one operation with flushed caches and a preallocated output, then verify the output of the timed calls.

    Args:
        operation: copy, scale, add, triad or dot.
        elements: elements per array; arrays × elements × itemsize bytes are allocated.
        dtype: fp64, fp32, fp16 or bf16.
        minimum_samples: at least 3; use more if power must be sampled for longer.
    """
    chosen, number_format = (OPERATIONS | REDUCTIONS)[operation], FORMATS[dtype]
    generator = torch.Generator(device.torch_device).manual_seed(seed)
    options = {"device": device.torch_device, "dtype": number_format.storage}
    inputs = tuple(torch.randn(elements, generator=generator, **options) for _ in range(chosen.inputs))
    if chosen.reference is None:
        inputs[0].mul_(_DOT_SCALE)
    output = torch.full((elements,) if chosen.reference else (), float("nan"), **options)
    timing = time_function(
        lambda: chosen.run(output, *inputs), device, time_limit_s=time_limit_s, minimum_samples=minimum_samples
    )
    if chosen.reference is None:
        verification = verify_sum(output, inputs, number_format)
    else:
        roundoff = torch.finfo(number_format.storage).eps
        verification = verify_elementwise(output, chosen.reference, inputs, tolerance=roundoff)
    traffic = chosen.arrays * elements * number_format.bytes
    return BandwidthMeasurement(operation, elements, dtype, traffic, timing, verification)


@dataclass(frozen=True)
class CopyMeasurement:
    """The timing of one verified copy of `bytes` bytes.

    Args:
        source, destination: torch devices ("cpu", "cuda:0").
        pinned: whether the host memory is page-locked, so that the device accesses it directly; None between GPUs.
        clock: the clock of the timing.
        timing: seconds of one copy with hot caches.
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
    """Return why copies between host and device are not possible, or ""."""
    return ONE_MEMORY if device.kind == "cpu" else ""


def peer_refusal(devices: Sequence[Device]) -> str:
    """Return why copies between devices are not possible, or ""."""
    if any(device.kind == "cpu" for device in devices):
        return ONE_MEMORY
    return "" if len(devices) > 1 else f"GPUs visible: {len(devices)}; a copy from one to another needs two"


def measure_transfer(
    direction: str, count: int, device: Device, *, pinned: bool, time_limit_s: float = 1.0, seed: int = 0
) -> CopyMeasurement:
    """Time and verify a copy of `count` bytes between the host and a device.

    A copy from or to pinned memory is asynchronous and is timed on the device's clock. A copy of pageable memory blocks the
    host, which moves the bytes through a pinned buffer of the driver; it is timed on the host's clock between two
    synchronisations.

    Args:
        direction: "host to device" or "device to host".
        count: bytes.
        device: a GPU.
        pinned: whether the host memory is page-locked.

    Raises:
        HyperionError: the device is a CPU.
    """
    if transfer_refusal(device):
        raise HyperionError(transfer_refusal(device), where=device.name, next_step="run it on a machine with a GPU")
    host = _random_bytes(count, seed)
    if pinned:
        host = host.pin_memory()
    outward = direction == DIRECTIONS[0]
    source = host if outward else host.to(device.torch_device)
    destination = torch.empty_like(host, device=device.torch_device) if outward else torch.empty_like(host, pin_memory=pinned)
    return measure_copy(source, destination, device, pinned=pinned, time_limit_s=time_limit_s)


def peer_pairs(devices: Sequence[Device]) -> list[tuple[Device, Device]]:
    """Return all ordered pairs (source, destination) of different devices; a link may be slower in one direction."""
    return list(permutations(devices, 2))


def measure_between(
    source: Device, destination: Device, count: int, *, time_limit_s: float = 0.5, seed: int = 0
) -> CopyMeasurement:
    """Time and verify a copy of `count` bytes from one device to another, on the clock of the source.

    PyTorch copies between GPUs on the source's stream, and both streams wait for the copy.
    """
    original = _random_bytes(count, seed).to(source.torch_device)
    copied = torch.empty(count, dtype=torch.uint8, device=destination.torch_device)
    return measure_copy(original, copied, source, pinned=None, time_limit_s=time_limit_s)


def measure_copy(
    source: torch.Tensor, destination: torch.Tensor, device: Device, *, pinned: bool | None, time_limit_s: float
) -> CopyMeasurement:
    """Poison the destination, time copies into it, and compare the result bit for bit.

    Args:
        source, destination: uint8 tensors of the same length.
        device: device whose clock and stream are used.
        pinned: whether the host memory is page-locked. False times on the host's clock.
        time_limit_s: as in `time_function`.
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
    """Return random bytes on the host."""
    words = torch.empty(-(-count // _WORD), dtype=torch.int64)
    words.random_(-(2**63), None, generator=torch.Generator().manual_seed(seed))
    return words.view(torch.uint8)[:count]
