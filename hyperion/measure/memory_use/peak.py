"""Measure the peak memory of a region or of one call."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from hyperion.hardware import Device
from hyperion.units import GIB

_STATUS, _CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")


@dataclass(frozen=True)
class PeakMemory:
    """The peak memory of a region.

    Args:
        metric: "peak_memory_gib" (allocated memory of tensors on a GPU) or "peak_rss_gib" (resident host memory of the whole
            process, including interpreter and libraries).
        gib: the peak in GiB; None if the system does not report it.
        reason: why `gib` is None, else "".
    """

    metric: str
    gib: float | None
    reason: str = ""


class PeakMemoryRegion:
    """Context manager that sets `.peak` to the peak memory of the region, including memory allocated before it."""

    peak: PeakMemory

    def __init__(self, device: Device):
        self.device = device

    def __enter__(self) -> "PeakMemoryRegion":
        self._error = ""
        if self.device.kind != "cpu":
            torch.cuda.synchronize(self.device.torch_device)
            torch.cuda.reset_peak_memory_stats(self.device.torch_device)
            return self
        try:
            _CLEAR.write_text("5")  # resets VmHWM; see proc(5)
        except OSError as error:
            self._error = f"peak resident size cannot be reset here: {error.strerror}"
        return self

    def __exit__(self, *exception) -> None:
        if self.device.kind != "cpu":
            torch.cuda.synchronize(self.device.torch_device)
            self.peak = PeakMemory("peak_memory_gib", torch.cuda.max_memory_allocated(self.device.torch_device) / GIB)
        elif self._error:
            self.peak = PeakMemory("peak_rss_gib", None, self._error)
        else:
            kib = next(int(line.split()[1]) for line in _STATUS.read_text().splitlines() if line.startswith("VmHWM"))
            self.peak = PeakMemory("peak_rss_gib", kib * 1024 / GIB)


_MEMORY_EVENT = "[memory]"


def allocated_peak(device: Device, call: Callable[[], object], standing_bytes: int = 0) -> int:
    """Call a function once and return the allocator's peak in bytes, including workspaces from the allocator.

    On a GPU this is the allocator's peak over all memory of the process. The CPU allocator has no counter, but reports every
    allocation and release to the profiler.

    Args:
        standing_bytes: CPU only: size of the existing tensors to include.
    """
    if device.kind != "cpu":
        torch.cuda.synchronize(device.torch_device)
        torch.cuda.reset_peak_memory_stats(device.torch_device)
        call()
        torch.cuda.synchronize(device.torch_device)
        return torch.cuda.max_memory_allocated(device.torch_device)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as watch:
        call()
    level = peak = standing_bytes
    profiler: Any = watch.profiler  # torch types neither the profiler's results nor its memory events
    for event in profiler.kineto_results.events():
        if event.name() == _MEMORY_EVENT:
            level += event.nbytes()
            peak = max(peak, level)
    return peak
