"""Peak memory sees what was held, and the roofline's arithmetic."""

import mmap

import pytest

from hyperion.hardware import detect_cpu
from hyperion.measure import Ceilings, PeakMemoryRegion


def test_peak_sees_memory_that_was_freed_again():
    held_gib = 0.25
    with PeakMemoryRegion(detect_cpu()) as idle:
        pass
    # Anonymous pages of our own: an allocator might serve the block from pages that were resident before.
    with PeakMemoryRegion(detect_cpu()) as busy, mmap.mmap(-1, int(held_gib * 2**30)) as block:
        for page in range(0, len(block), mmap.PAGESIZE):
            block[page] = 1
    if idle.peak.gib is None:
        pytest.skip(idle.peak.reason)
    assert busy.peak.metric == "peak_rss_gib"
    assert busy.peak.gib - idle.peak.gib == pytest.approx(held_gib, rel=0.2)


def test_least_time_is_the_larger_of_arithmetic_and_traffic():
    ceilings = Ceilings(tflops=100.0, bandwidth_gb_s=1000.0, source="hand example")
    assert ceilings.ridge_flop_per_byte == 100.0
    assert ceilings.least_time_s(flops=1e12, traffic_bytes=1e9) == pytest.approx(0.01)
    assert ceilings.least_time_s(flops=1e12, traffic_bytes=1e11) == pytest.approx(0.1)
    assert Ceilings(100.0, None, "").least_time_s(1e12, 1e11) == pytest.approx(0.01)
