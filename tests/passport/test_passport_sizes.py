"""Sizes follow the time and the memory that there is."""

from dataclasses import replace

import pytest

from hyperion.hardware import detect_cpu
from hyperion.hardware.floors import STREAMS
from hyperion.passport import measure
from hyperion.passport.measure import gemm_size, stream_bytes

CPU = detect_cpu()


def test_a_product_is_as_large_as_its_time_allows():
    assert gemm_size(CPU, "fp32", 0.0) == 256
    # 3 x 1024 x 1024 x 4 bytes are more than an eighth of 32 MiB.
    assert gemm_size(replace(CPU, memory_bytes=32 << 20), "fp32", 100.0) == 512


@pytest.mark.parametrize("operation", STREAMS)
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_a_stream_leaves_the_caches_when_its_time_allows_and_never_the_memory(operation, dtype):
    small = replace(CPU, last_level_cache_bytes=2 << 20, memory_bytes=512 << 20)
    assert stream_bytes(small, operation, dtype, 1000.0) == 32 << 20
    assert stream_bytes(small, operation, dtype, 0.0) <= 8 << 20


def test_an_array_is_five_times_as_large_as_the_last_cache():
    """A copy then moves ten times the size of the cache, from which on the memory is a limit of its rate."""
    large = replace(CPU, last_level_cache_bytes=16 << 20, memory_bytes=4 << 30)
    assert stream_bytes(large, "copy", "fp32", 1000.0) == 80 << 20


def test_the_time_of_an_array_is_that_of_its_eighth_part_eight_times(monkeypatch):
    monkeypatch.setattr(measure, "_call_s", lambda function, device: 0.5)
    assert measure._stream_s(CPU, "copy", "fp32", 1 << 20) == 4.0
