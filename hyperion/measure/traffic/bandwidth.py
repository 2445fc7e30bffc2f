"""Measure the bandwidth of STREAM operations in one memory, of copies between host and device, and of copies between GPUs.

The STREAM operations are copy, scale, add, triad and dot. Their bytes are counted as STREAM defines them: each input is read
once, and the output is written once. Before a write, a CPU cache may read the old data from memory. This read is not counted.

For a copy between two memories, each byte counts once, because the link transfers it once. After the timing, the destination is
compared with the source bit for bit.

Source of the operations and of the bytes: McCalpin, Memory Bandwidth and Machine Balance in Current High Performance
Computers, 1995. Source of dot: BabelStream.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import permutations

import torch

from hyperion.errors import HyperionError
from hyperion.hardware import Device
from hyperion.measure.clock.timing import Timing, time_function
from hyperion.measure.clock.verify import FORMATS, Verification, poison_bits, verify_bits, verify_elementwise, verify_sum
from hyperion.results import Estimate

SCALAR = 0.4
# Factor for one input of the dot product. It is a power of two, so that scaling is exact. The terms of the dot product then have
# a variance of 1/16. The largest fp16 number, 65504, is more than eleven standard deviations of a sum of 500 million such terms.
_DOT_SCALE = 0.25
DIRECTIONS = ("host to device", "device to host")
ONE_MEMORY = "no accelerator: host and device are one memory"
_WORD = 8


@dataclass(frozen=True)
class Operation:
    """A STREAM operation.

    Args:
        name: name of the operation.
        inputs: number of input arrays.
        run: function (output, *inputs) -> None that writes the result into `output`.
        reference: function (*inputs) that returns the result for float64 tensors. None if the output is one sum over all
            elements.
    """

    name: str
    inputs: int
    run: Callable
    reference: Callable | None

    @property
    def arrays(self) -> int:
        """Number of arrays that one call reads or writes. A scalar output is not counted."""
        return self.inputs + (self.reference is not None)


OPERATIONS = {
    operation.name: operation
    for operation in (
        Operation("copy", 1, lambda out, a: out.copy_(a), lambda a: a),
        Operation("scale", 1, lambda out, a: torch.mul(a, SCALAR, out=out), lambda a: SCALAR * a),
        Operation("add", 2, lambda out, a, b: torch.add(a, b, out=out), lambda a, b: a + b),
        Operation("triad", 2, lambda out, a, b: torch.add(a, b, alpha=SCALAR, out=out), lambda a, b: a + SCALAR * b),
    )
}
# These operations only read arrays, so they are not part of `OPERATIONS`. On a GPU, the timed call also copies the scalar result
# to the output.
REDUCTIONS = {"dot": Operation("dot", 2, lambda out, a, b: torch.dot(a, b, out=out), None)}


@dataclass(frozen=True)
class BandwidthMeasurement:
    """The timing of one STREAM operation and the check of its output.

    Args:
        operation: name of the operation.
        elements: number of elements per array.
        dtype: dtype of the arrays.
        bytes: bytes read plus bytes written by one call.
        timing: seconds of one call with flushed caches.
        verification: check of the output of the timed calls.
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
    minimum_span_s: float = 0.0,
) -> BandwidthMeasurement:
    """Time one STREAM operation with flushed caches, and verify the output of the timed calls.

    The output is allocated before the timing.

    Args:
        operation: "copy", "scale", "add", "triad" or "dot".
        elements: number of elements per array. The allocated memory is number of arrays × elements × itemsize bytes.
        dtype: "fp64", "fp32", "fp16" or "bf16".
        seed: seed of the inputs.
        time_limit_s: see `time_function`.
        minimum_span_s: see `time_interleaved`. With a longer span, the power can be read more often.
    """
    chosen, number_format = (OPERATIONS | REDUCTIONS)[operation], FORMATS[dtype]
    generator = torch.Generator(device.torch_device).manual_seed(seed)
    options = {"device": device.torch_device, "dtype": number_format.storage}
    inputs = tuple(torch.randn(elements, generator=generator, **options) for _ in range(chosen.inputs))
    if chosen.reference is None:
        inputs[0].mul_(_DOT_SCALE)
    # An element that no call writes stays NaN and fails the check.
    output = torch.full((elements,) if chosen.reference else (), float("nan"), **options)
    timing = time_function(lambda: chosen.run(output, *inputs), device, time_limit_s=time_limit_s, minimum_span_s=minimum_span_s)
    if chosen.reference is None:
        verification = verify_sum(output, inputs, number_format)
    else:
        roundoff = torch.finfo(number_format.storage).eps
        verification = verify_elementwise(output, chosen.reference, inputs, tolerance=roundoff)
    traffic = chosen.arrays * elements * number_format.bytes
    return BandwidthMeasurement(operation, elements, dtype, traffic, timing, verification)


@dataclass(frozen=True)
class CopyMeasurement:
    """The timing of one copy between two memories.

    Args:
        source, destination: PyTorch devices, such as "cpu" and "cuda:0".
        bytes: number of copied bytes.
        pinned: whether the host memory is page-locked, so that the device can access it directly. None for a copy between GPUs.
        clock: description of the clock that measured the time.
        timing: seconds of one copy with hot caches.
        verification: comparison of the destination with the source.
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
        """Bandwidth in GB/s (10⁹ bytes per second), with its 95 % confidence interval."""
        return self.timing.estimate.map(lambda seconds: self.bytes / seconds / 1e9)


def transfer_refusal(device: Device) -> str:
    """Return the reason why copies between the host and this device are not possible, or "" if they are."""
    return ONE_MEMORY if device.kind == "cpu" else ""


def peer_refusal(devices: Sequence[Device]) -> str:
    """Return the reason why copies between these devices are not possible, or "" if they are."""
    if any(device.kind == "cpu" for device in devices):
        return ONE_MEMORY
    return "" if len(devices) > 1 else f"GPUs visible: {len(devices)}; a copy from one to another needs two"


def measure_transfer(
    direction: str, count: int, device: Device, *, pinned: bool, time_limit_s: float = 1.0, seed: int = 0
) -> CopyMeasurement:
    """Time a copy between the host and a device, and verify it.

    A copy from or to pinned memory is asynchronous and is timed on the device's clock. A copy from or to pageable memory blocks
    the host, because the host moves the bytes through a pinned buffer of the driver. It is timed on the host's clock, between two
    synchronisations.

    Args:
        direction: "host to device" or "device to host".
        count: number of bytes.
        device: a GPU.
        pinned: whether the host memory is page-locked.
        time_limit_s: see `time_function`.
        seed: seed of the copied bytes.

    Raises:
        HyperionError: the device is a CPU.
    """
    if transfer_refusal(device):
        raise HyperionError(transfer_refusal(device), where=device.name, next_step="run this measurement on a machine with a GPU")
    host = _random_bytes(count, seed)
    if pinned:
        host = host.pin_memory()
    outward = direction == DIRECTIONS[0]
    source = host if outward else host.to(device.torch_device)
    destination = torch.empty_like(host, device=device.torch_device) if outward else torch.empty_like(host, pin_memory=pinned)
    return measure_copy(source, destination, device, pinned=pinned, time_limit_s=time_limit_s)


def peer_pairs(devices: Sequence[Device]) -> list[tuple[Device, Device]]:
    """Return all ordered pairs (source, destination) of different devices.

    Both directions of a link are included, because one direction may be slower than the other.
    """
    return list(permutations(devices, 2))


def measure_between(
    source: Device, destination: Device, count: int, *, time_limit_s: float = 0.5, seed: int = 0
) -> CopyMeasurement:
    """Time a copy of `count` bytes from one GPU to another, and verify it.

    The copy is timed on the clock of the source, because PyTorch runs it on the stream of the source. The streams of both GPUs
    wait for the copy.
    """
    original = _random_bytes(count, seed).to(source.torch_device)
    copied = torch.empty(count, dtype=torch.uint8, device=destination.torch_device)
    return measure_copy(original, copied, source, pinned=None, time_limit_s=time_limit_s)


def measure_copy(
    source: torch.Tensor, destination: torch.Tensor, device: Device, *, pinned: bool | None, time_limit_s: float
) -> CopyMeasurement:
    """Time copies from one tensor to another. Then compare the two tensors bit for bit.

    Before the timing, the destination is filled with wrong values, so that a copy that writes nothing is detected.

    Args:
        source, destination: uint8 tensors of the same length.
        device: device whose clock and stream are used.
        pinned: whether the host memory is page-locked. If False, the copies are timed on the host's clock. None for a copy
            between GPUs.
        time_limit_s: see `time_function`.
    """
    poison_bits(destination, source)
    blocking = pinned is False
    timing = time_function(
        # non_blocking lets the host enqueue the next copy. It has no effect on pageable memory.
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
    """Return a tensor of `count` random bytes on the host."""
    words = torch.empty(-(-count // _WORD), dtype=torch.int64)
    # Draw 8 bytes at a time, over the whole range of int64.
    words.random_(-(2**63), None, generator=torch.Generator().manual_seed(seed))
    return words.view(torch.uint8)[:count]
