"""The peak of a region includes memory that was freed again."""

import mmap

import pytest

from hyperion.hardware import detect_cpu
from hyperion.measure import PeakMemoryRegion


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
