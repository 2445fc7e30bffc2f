"""Sizes that a device has time and memory for: as large as its cell allows, found by a call or two."""

import time
from collections.abc import Callable

import torch

from hyperion.errors import HyperionError
from hyperion.hardware import Device
from hyperion.measure import FORMATS, Gemm, matmul_precision
from hyperion.measure.traffic.bandwidth import OPERATIONS, REDUCTIONS

_LARGEST_GEMM, _SMALLEST_GEMM = 8192, 256
# Warm-up and thirty samples, each with a cache flush of about the same size.
_CALLS = 45
_PROBES = 3
_LARGEST_STREAM, _SMALLEST_STREAM = 1 << 30, 8 << 20
# Of a copy's traffic at most a tenth may stay in the last-level cache; more would be another path than memory.
_CACHE_MULTIPLE = 10


def gemm_size(device: Device, dtype: str, limit_s: float) -> int:
    """M = N = K, a power of two from 256 to 8192, whose samples take about `limit_s` and that fills no more than an eighth
    of the memory."""
    size = _SMALLEST_GEMM
    while size < _LARGEST_GEMM:
        wanted = 2 * size
        # Twice as large is eight times the work.
        needed_bytes = 3 * wanted**2 * max(4, FORMATS[dtype].bytes)
        if needed_bytes > device.memory_bytes / 8 or 8 * _CALLS * _gemm_s(device, dtype, size) > limit_s:
            break
        size = wanted
    return size


def stream_bytes(device: Device, operation: str, dtype: str, limit_s: float) -> int:
    """Bytes of one array: past the caches, as far as its samples take about `limit_s`."""
    cache = device.last_level_cache_bytes or 0
    wanted = max(_CACHE_MULTIPLE * cache // 2, _LARGEST_STREAM if device.kind != "cpu" else 64 << 20)
    wanted = min(wanted, device.memory_bytes // 16)
    while wanted > _SMALLEST_STREAM and _CALLS * _stream_s(device, operation, dtype, wanted) > limit_s:
        wanted //= 2
    return wanted // 4096 * 4096


def _gemm_s(device: Device, dtype: str, size: int) -> float:
    try:
        product = Gemm(size, size, size, dtype, device)
        with matmul_precision(FORMATS[dtype]):
            return _call_s(product, device)
    except (HyperionError, RuntimeError):
        return float("inf")  # what the library refuses, the measurement says in its words


def _stream_s(device: Device, operation: str, dtype: str, count: int) -> float:
    # An eighth of it will do: past the caches time grows with the bytes.
    chosen, storage = (OPERATIONS | REDUCTIONS)[operation], FORMATS[dtype].storage
    options = {"dtype": storage, "device": device.torch_device}
    inputs = [torch.zeros(count // 8 // storage.itemsize, **options) for _ in range(chosen.inputs)]
    output = torch.empty_like(inputs[0]) if operation in OPERATIONS else torch.empty((), **options)
    return 8 * _call_s(lambda: chosen.run(output, *inputs), device)


def _call_s(function: Callable[[], object], device: Device) -> float:
    """Seconds of the fastest of a few calls, after a first one that loads and allocates: others may use the machine, too."""
    synchronize = (lambda: None) if device.kind == "cpu" else lambda: torch.cuda.synchronize(device.torch_device)
    function()
    synchronize()
    fastest = float("inf")
    for _ in range(_PROBES):
        started = time.perf_counter()
        function()
        synchronize()
        fastest = min(fastest, time.perf_counter() - started)
    return fastest
