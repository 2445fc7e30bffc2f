"""Peak memory of a region, reset before it: tensors on an accelerator, resident pages on a CPU."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from hyperion.hardware import Device
from hyperion.units import GIB

_STATUS, _CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")


@dataclass(frozen=True)
class PeakMemory:
    """Most memory in use at once within a region.

    Args:
        metric: "peak_memory_gib" (bytes that tensors held on the accelerator) or "peak_rss_gib" (resident host pages of
            the whole process, interpreter and libraries included): two quantities, so two names.
        gib: the peak, None when this system cannot tell.
        reason: why `gib` is None, else "".
    """

    metric: str
    gib: float | None
    reason: str = ""


class PeakMemoryRegion:
    """Context manager; after it, `.peak` is the region's peak. What was allocated before the region and is alive counts."""

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
    """Call it once; the peak in bytes, kernels' own needs included where the allocator serves them.

    An accelerator's allocator is asked for its peak, which holds all that this process has there. A CPU's allocator keeps no
    count, but tells the profiler of each piece that it hands out and takes back.

    Args:
        standing_bytes: CPU only: what the tensors take that are there already and count.
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
    for event in watch.profiler.kineto_results.events():
        if event.name() == _MEMORY_EVENT:
            level += event.nbytes()
            peak = max(peak, level)
    return peak
