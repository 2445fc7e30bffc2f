"""Arithmetic intensity of what the hardware chapter measures: FLOP per byte that must cross the memory's pins.

Source: Williams, Waterman, Patterson, Roofline, CACM 52 (2009) 65-76. Every operand is counted once: the least traffic.
"""

from hyperion.results import Row

ELEMENT_BYTES = {"fp64": 8, "fp32": 4, "tf32": 4, "fp16": 2, "bf16": 2, "fp8": 1, "int8": 1}
# Per element: floating-point operations and arrays read or written.
STREAMS = {"copy": (0, 2), "scale": (1, 2), "add": (1, 3), "triad": (2, 3)}


def element_bytes(dtype: str) -> int:
    """Bytes of one element of a row's dtype; every fp8 format has one."""
    return ELEMENT_BYTES[dtype.split("_")[0]]


def gemm_intensity(row: Row) -> float:
    """FLOP per byte of a matrix product: 2·M·N·K over its three matrices."""
    m, n, k = (row.params[name] for name in "mnk")
    return 2 * m * n * k / (element_bytes(row.dtype) * (m * k + k * n + m * n))


def stream_intensity(row: Row) -> float:
    """FLOP per byte of a memory stream, 0 for a copy."""
    flops, arrays = STREAMS[row.variant]
    return flops / (arrays * element_bytes(row.dtype))
