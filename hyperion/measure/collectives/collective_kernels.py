"""Which kernel a communication library launched for a collective: what can be known of its choice of algorithm from outside."""

import re
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from hyperion.hardware import Device
from hyperion.measure.collectives.collectives import Buffers, Collective
from hyperion.processes import RollCall, World

_KERNEL = re.compile(r"^(?:void )?(\w*(?:nccl|rccl|mscc)\w*Kernel\w*)", re.IGNORECASE)


def kernels_of_collectives(cells: Sequence[tuple[Collective, str, int]], here: World, roll: RollCall) -> list[str] | None:
    """Make each call once more, on every rank; rank 0, on a GPU, has the kernels' names. To be called after all timing: a
    profiler leaves its traces in what follows.

    Args:
        cells: (collective, dtype, bytes).
        roll: told of every collective that is started.
    """

    def call(collective: Collective, dtype: str, size: int) -> None:
        buffers = Buffers(collective, size, dtype, here, roll)
        buffers.prepare()
        buffers.call()

    calls = [partial(call, *cell) for cell in cells]
    if here.rank == 0 and here.device.kind != "cpu":
        return kernels_launched(calls, here.device)
    for one in calls:
        one()
    return None


def kernels_launched(calls: Sequence[Callable[[], object]], device: Device) -> list[str] | None:
    """The name of the kernel that each call launched, None where the profiler did not see one for each.

    Args:
        calls: collectives that all ranks call; a kernel each, as NCCL and RCCL launch them.
        device: a GPU.
    """
    with profile(activities=[ProfilerActivity.CUDA], acc_events=True) as profiler:
        for call in calls:
            call()
            torch.cuda.synchronize(device.torch_device)
    on_device = [event for event in profiler.events() if event.device_type == DeviceType.CUDA]
    found = [_KERNEL.match(event.name) for event in sorted(on_device, key=lambda event: event.time_range.start)]
    names = [match[1] for match in found if match]
    return names if len(names) == len(calls) else None


def algorithm_of(kernel: str, *, switch_may_add: bool) -> str:
    """What the name of NCCL's kernel tells of the algorithm, in words.

    NCCL builds one kernel for trees and one for all other algorithms, which bears the ring's name. Source: NVIDIA nccl,
    src/device/generate.py, best_kernel.

    Args:
        switch_may_add: whether the library could have chosen the switch (NVLS).
    """
    if "SendRecv" in kernel or "AlltoAll" in kernel:
        return "messages between pairs"
    if "TREE" in kernel:
        return "tree"
    if "RING" not in kernel:
        return "not told by the kernel's name"
    return "ring, or by way of the switch (NVLS)" if switch_may_add else "ring"
