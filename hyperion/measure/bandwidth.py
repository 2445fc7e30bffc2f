"""STREAM-style bandwidth: copy, scale, add, triad, written from their definitions.

Source of the operations and of what counts as a byte: McCalpin, Memory Bandwidth and Machine Balance in Current High
Performance Computers, 1995. Bytes are those the operation names (each input read once, the output written once); the read
that a CPU cache adds before a write is not counted.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from hyperion.hardware import Device
from hyperion.measure.dtypes import FORMATS
from hyperion.measure.timing import Timing, time_function
from hyperion.measure.verify import Verification, verify_elementwise

SCALAR = 0.4


@dataclass(frozen=True)
class Operation:
    """An element-wise operation: its arrays, arithmetic per element, and the call that does it into a given output."""

    name: str
    inputs: int
    flops_per_element: int
    run: Callable
    reference: Callable

    @property
    def arrays(self) -> int:
        return self.inputs + 1


OPERATIONS = {
    operation.name: operation
    for operation in (
        Operation("copy", 1, 0, lambda out, a: out.copy_(a), lambda a: a),
        Operation("scale", 1, 1, lambda out, a: torch.mul(a, SCALAR, out=out), lambda a: SCALAR * a),
        Operation("add", 2, 1, lambda out, a, b: torch.add(a, b, out=out), lambda a, b: a + b),
        Operation("triad", 2, 2, lambda out, a, b: torch.add(a, b, alpha=SCALAR, out=out), lambda a, b: a + SCALAR * b),
    )
}


@dataclass(frozen=True)
class BandwidthMeasurement:
    """One verified, timed operation over `elements` elements an array.

    Args:
        bytes: bytes read plus bytes written by one call.
    """

    operation: str
    elements: int
    dtype: str
    bytes: int
    timing: Timing
    verification: Verification


def measure_bandwidth(
    operation: str, elements: int, dtype: str, device: Device, *, seed: int = 0, time_limit_s: float = 2.0
) -> BandwidthMeasurement:
    """Time one operation with flushed caches and preallocated output, then verify what the timed calls left.

    Args:
        operation: copy, scale, add or triad.
        elements: elements per array; arrays × elements × itemsize bytes are allocated.
    """
    chosen, number_format = OPERATIONS[operation], FORMATS[dtype]
    generator = torch.Generator(device.torch_device).manual_seed(seed)
    options = {"device": device.torch_device, "dtype": number_format.storage}
    inputs = tuple(torch.randn(elements, generator=generator, **options) for _ in range(chosen.inputs))
    output = torch.full((elements,), float("nan"), **options)
    timing = time_function(lambda: chosen.run(output, *inputs), device, time_limit_s=time_limit_s)
    roundoff = torch.finfo(number_format.storage).eps
    verification = verify_elementwise(output, chosen.reference, inputs, tolerance=roundoff)
    traffic = chosen.arrays * elements * number_format.bytes
    return BandwidthMeasurement(operation, elements, dtype, traffic, timing, verification)
