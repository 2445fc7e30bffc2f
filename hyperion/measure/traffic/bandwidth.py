"""STREAM-style bandwidth: copy, scale, add, triad, and dot, written from their definitions.

Source of the operations and of what counts as a byte: McCalpin, Memory Bandwidth and Machine Balance in Current High
Performance Computers, 1995; dot is what BabelStream adds to them. Bytes are those the operation names (each input read
once, the output written once); the read that a CPU cache adds before a write is not counted.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from hyperion.hardware import Device
from hyperion.measure.clock.dtypes import FORMATS
from hyperion.measure.clock.timing import MINIMUM_SAMPLES, Timing, time_function
from hyperion.measure.clock.verify import Verification, verify_elementwise, verify_sum

SCALAR = 0.4
# A power of two, so that scaling rounds nothing: a dot product of 500 M terms of variance 1/16 stays below 65504, which
# is as far as fp16 goes, by more than eleven standard deviations.
_DOT_SCALE = 0.25


@dataclass(frozen=True)
class Operation:
    """A stream: its arrays, arithmetic per element, and the call that does it into a given output.

    Args:
        reference: the same operation on float64 tensors, None where the output is one sum over all elements.
    """

    name: str
    inputs: int
    flops_per_element: int
    run: Callable
    reference: Callable | None

    @property
    def arrays(self) -> int:
        """Arrays that one call reads or writes; a single number written is none."""
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
# They read only, which is another path than writing: no figure takes them for one of the operations above. On a GPU the
# library's result is copied into the output, one element, within the timed call.
REDUCTIONS = {"dot": Operation("dot", 2, 2, lambda out, a, b: torch.dot(a, b, out=out), None)}


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
    operation: str,
    elements: int,
    dtype: str,
    device: Device,
    *,
    seed: int = 0,
    time_limit_s: float = 2.0,
    minimum_samples: int = MINIMUM_SAMPLES,
) -> BandwidthMeasurement:
    """Time one operation with flushed caches and preallocated output, then verify what the timed calls left.

    Args:
        operation: copy, scale, add, triad or dot.
        elements: elements per array; arrays × elements × itemsize bytes are allocated.
        dtype: fp64, fp32, fp16 or bf16.
        minimum_samples: more of them where power is to be read beside for a while.
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
