"""The ranks of a job as each of them sees it: which rank it is, on which device, and the process group they talk through."""

import functools
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from hyperion.errors import HyperionError
from hyperion.hardware import Device, detect


@dataclass(frozen=True)
class World:
    """This process among its peers.

    Args:
        rank: from 0.
        size: ranks in all.
        local_rank: rank among those of this host, which is the index of its device.
        backend: "nccl" (RCCL on AMD) or "gloo"; "" for a process without a group.
        device: of this rank.
    """

    rank: int
    size: int
    local_rank: int
    backend: str
    device: Device


_current: World | None = None


def world() -> World:
    """The world of the process group that is up; alone, rank 0 of 1."""
    return _current or _alone()


@functools.cache
def _alone() -> World:
    # Asking drivers and torch again for every cell of a grid costs more than the cell.
    return World(0, 1, 0, "", detect())


@contextmanager
def process_group(timeout_s: float = 600.0, backend: str | None = None) -> Iterator[World]:
    """Join the group that torchrun's variables describe; without them, a group of this process alone.

    Args:
        timeout_s: how long a collective may wait for a rank.
        backend: chosen from the device when left out.

    Raises:
        HyperionError: more ranks on this host than devices.
    """
    global _current
    local_rank = int(os.environ.get("LOCAL_RANK", 0))
    device = _device_of(local_rank)
    backend = backend or ("gloo" if device.kind == "cpu" else "nccl")
    options = {"backend": backend, "timeout": timedelta(seconds=timeout_s)}
    if device.kind != "cpu":
        torch.cuda.set_device(local_rank)
        options["device_id"] = torch.device(device.torch_device)
    if "RANK" in os.environ:
        dist.init_process_group(init_method="env://", **options)
    else:
        dist.init_process_group(store=dist.HashStore(), rank=0, world_size=1, **options)
    _current = World(dist.get_rank(), dist.get_world_size(), local_rank, backend, device)
    try:
        yield _current
    finally:
        _current = None
        dist.destroy_process_group()


def _device_of(local_rank: int) -> Device:
    device = detect()
    if device.kind == "cpu":
        return device
    present = torch.cuda.device_count()
    if local_rank >= present:
        raise HyperionError(
            f"local rank {local_rank} has no device: this host has {present}",
            where="process_group",
            next_step=f"start at most {present} ranks on a host",
        )
    return detect(index=local_rank)
