"""Measure STREAM bandwidth: copy, scale, add, triad, and dot.

Bytes are those of the definition: each input read once, the output written once. The read that a CPU cache does before a write
is not counted.

Source of the operations and of the bytes: McCalpin, Memory Bandwidth and Machine Balance in Current High Performance
Computers, 1995. Source of dot: BabelStream.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from hyperion.hardware import Device
from hyperion.measure.clock.dtypes import FORMATS
from hyperion.measure.clock.timing import MINIMUM_SAMPLES, Timing, time_function
from hyperion.measure.clock.verify import Verification, verify_elementwise, verify_sum

SCALAR = 0.4
# A power of two, so that scaling is exact. A dot product of 500 M terms of variance 1/16 then stays below 65504, the largest
# fp16 number, by more than eleven standard deviations.
_DOT_SCALE = 0.25


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
