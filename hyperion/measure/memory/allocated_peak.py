"""The most bytes that PyTorch's allocator had handed out at once, in one call: the same quantity on a GPU and on a CPU."""

from collections.abc import Callable

import torch
from torch.profiler import ProfilerActivity, profile

from hyperion.hardware import Device

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
