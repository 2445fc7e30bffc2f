"""One call under PyTorch's profiler."""

from collections.abc import Callable

import torch
from torch.profiler import ProfilerActivity, profile

from hyperion.hardware import Device


def profiled(call: Callable[[], object], device: Device) -> profile:
    """Call a function once under the profiler, which records the kernels of a GPU, or the operators on a CPU."""
    gpu = device.kind != "cpu"
    with profile(activities=[ProfilerActivity.CUDA if gpu else ProfilerActivity.CPU]) as watch:
        call()
        if gpu:  # the profiler records only kernels that have finished before it stops
            torch.cuda.synchronize(device.torch_device)
    return watch
