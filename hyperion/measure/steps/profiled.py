"""One call under PyTorch's profiler, and a profiler whose trace is only exported."""

import warnings
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from hyperion.errors import HyperionError
from hyperion.hardware import Device


class TraceProfiler(profile):
    """PyTorch's profiler for callers that export its trace or read the raw events, and never call `events`.

    With `acc_events=True`, the profiler makes a Python object of each record when it stops, which takes longer than the profiled
    steps. Without it, some versions of PyTorch warn that only the last cycle is kept. Here, a profiler has only one cycle.
    """

    def __init__(self, activities: Iterable[ProfilerActivity], **options: Any):
        super().__init__(activities=activities, acc_events=False, **options)

    def prepare_trace(self) -> None:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Warning: Profiler clears events")
            super().prepare_trace()


def profiled(call: Callable[[], object], device: Device) -> profile:
    """Call a function once under the profiler, which records the kernels of a GPU, or the operators on a CPU."""
    gpu = device.kind != "cpu"
    with profile(activities=[ProfilerActivity.CUDA if gpu else ProfilerActivity.CPU]) as watch:
        call()
        if gpu:  # the profiler records only kernels that have finished before it stops
            torch.cuda.synchronize(device.torch_device)
    return watch


def profiled_events(call: Callable[[], object], device: Device) -> list[Any]:
    """Call a function once under the profiler. Return the events of a GPU and of the host, or the operators on a CPU.

    Raises:
        HyperionError: the profiler recorded no kernel on the GPU.
    """
    events = list(profiled(call, device).events() or [])
    if device.kind != "cpu" and not any(map(is_on_gpu, events)):
        raise HyperionError(
            "the profiler recorded no kernel on the GPU",
            where=f"torch {torch.__version__}, {device.name}",
            next_step="detach other profilers, and check the permissions of CUPTI or roctracer",
        )
    return events


def is_on_gpu(event: Any) -> bool:
    """Return True if this event of the profiler is a kernel, a copy or a memory fill on a GPU."""
    return event.device_type.name != "CPU"


def device_seconds(call: Callable[[], object], device: Device) -> float:
    """Return the busy time of a GPU during one call, in seconds.

    This is the sum of the times of all kernels and copies, without the gaps between them, in which the GPU waits for the host.

    Raises:
        HyperionError: the profiler recorded no kernel on the GPU.
    """
    return sum(event.time_range.elapsed_us() for event in profiled_events(call, device) if is_on_gpu(event)) / 1e6
