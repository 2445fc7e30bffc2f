"""Determine the rank and the device of this process from torchrun's environment variables and the process group.

torchrun's environment variables (RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, MASTER_PORT …) define the ranks. Any launcher may set
them. This module does not import torch, so that a process without a group need not load it.
"""

import functools
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from hyperion.errors import HyperionError
from hyperion.hardware import Device, MachineFacts, collect_facts, detect, detect_cpu
from hyperion.hardware.facts import VISIBLE_DEVICE_VARIABLES

if TYPE_CHECKING:
    import torch.distributed as dist

BACKENDS = ("nccl", "gloo")


class GroupError(HyperionError):
    """Raised when a process group cannot be initialized."""


@dataclass(frozen=True)
class World:
    """The rank and device of this process, and the number of ranks.

    Args:
        rank: rank of this process, counted from 0.
        size: number of ranks.
        local_rank: rank of this process on its node, which is the index of its GPU.
        backend: "nccl" (RCCL on AMD) or "gloo"; "" without a process group.
        device: the device of this rank.
        group: process group for the collectives; None for the default group.
    """

    rank: int
    size: int
    local_rank: int
    backend: str
    device: Device
    group: "dist.ProcessGroup | None" = None

    def alone(self) -> "World":
        """Return a world of size 1 with its own process group. A program runs in this world without communication.

        Creating the groups is a collective operation, so every rank must call this method.
        """
        import torch.distributed as dist

        group, _ = dist.new_subgroups(1)
        return replace(self, rank=0, size=1, group=group)


@dataclass(frozen=True)
class RankInfo:
    """Values of torchrun's environment variables for this process. `local_size` is the number of ranks on this node."""

    rank: int
    size: int
    local_rank: int
    local_size: int


def world() -> World:
    """Return the rank, device and number of ranks of this process.

    Without a process group, the rank is 0, the size is 1 and the backend is "".
    """
    dist = sys.modules.get("torch.distributed")  # without this module loaded, there is no process group
    if dist is None or not dist.is_initialized():
        return World(0, 1, 0, "", _visible_device(0))
    # No address is needed, because the ranks of the group may have met through a file.
    info, backend = rank_info(os.environ, address=False), dist.get_backend()
    local_rank = info.local_rank if info else 0
    device = _visible_device(local_rank) if "nccl" in backend else detect_cpu(machine_facts())
    return World(dist.get_rank(), dist.get_world_size(), local_rank, backend, device)


def rank_info(environment: Mapping[str, str], address: bool = True) -> RankInfo | None:
    """Parse torchrun's environment variables. Return None if neither RANK nor WORLD_SIZE is set.

    Args:
        environment: environment variables.
        address: whether MASTER_ADDR and MASTER_PORT must be set.

    Raises:
        GroupError: a variable is missing or is not a whole number, or two variables contradict each other.
    """
    if "RANK" not in environment and "WORLD_SIZE" not in environment:
        return None
    needed = ["RANK", "WORLD_SIZE"] + ["MASTER_ADDR", "MASTER_PORT"] * address
    # With a single rank, the local rank is 0.
    needed += ["LOCAL_RANK"] * (environment.get("WORLD_SIZE") != "1")
    if missing := [name for name in needed if not environment.get(name)]:
        raise environment_error(f"{', '.join(missing)} not set, though other variables of torchrun are")
    if address:
        parse_port(environment["MASTER_PORT"])
    rank, size = _parse_number(environment, "RANK"), _parse_number(environment, "WORLD_SIZE")
    local_rank = _parse_number(environment, "LOCAL_RANK", 0)
    local_size = _parse_number(environment, "LOCAL_WORLD_SIZE", local_rank + 1)
    if not (0 <= rank < size and 0 <= local_rank < local_size <= size):
        raise environment_error(f"rank {rank} of {size} ranks contradicts local rank {local_rank} of {local_size} on this node")
    return RankInfo(rank, size, local_rank, local_size)


def _parse_number(environment: Mapping[str, str], name: str, default: int | None = None) -> int:
    text = environment.get(name) or str(default)
    # isdecimal alone would also accept the digits of other scripts.
    if not text.isascii() or not text.isdecimal() or len(text) > 9:
        raise environment_error(f"{name} is {text!r}, not a whole number from 0")
    return int(text)


def parse_port(text: str) -> int:
    """Return the number of a TCP port.

    Raises:
        GroupError: `text` is not a whole number from 0 to 65535.
    """
    port = _parse_number({"MASTER_PORT": text}, "MASTER_PORT")
    if port > 65535:
        raise environment_error(f"MASTER_PORT is {port}, above 65535")
    return port


def choose_device(info: RankInfo | None, backend: str | None, facts: MachineFacts) -> tuple[str, Device]:
    """Return the backend and the device of a rank. With nccl, each rank has its own GPU.

    Raises:
        GroupError: the backend is unknown, nccl was requested without a GPU, or this node has more ranks than GPUs.
    """
    if backend not in (None, *BACKENDS):
        raise GroupError(f"there is no backend {backend!r}", where="process_group", next_step=f"choose {' or '.join(BACKENDS)}")
    # If torch sees a GPU but cannot open it, use nccl, so that `detect` raises an error instead of silently using the CPU.
    gpus = bool(facts.gpus or facts.gpu_error)
    if backend == "gloo" or not gpus:
        if backend == "nccl":
            raise GroupError("nccl needs GPUs, and PyTorch sees none", where="process_group", next_step="omit the backend")
        return "gloo", detect_cpu(facts)
    index, ranks = (info.local_rank, info.local_size) if info else (0, 1)
    if facts.gpus and ranks > len(facts.gpus):
        raise more_ranks_than_devices(ranks, len(facts.gpus))
    return "nccl", detect(facts, index)


def more_ranks_than_devices(ranks: int, devices: int) -> GroupError:
    """Return the error for a node with more ranks than GPUs.

    NCCL would also raise an error, but later and with a message that is harder to understand.
    """
    hiding = ", ".join(f"{name}={os.environ[name]}" for name in VISIBLE_DEVICE_VARIABLES if name in os.environ)
    return GroupError(
        f"{ranks} ranks on a node where PyTorch sees {devices} GPU{'s' * (devices != 1)}",
        where=f"visible-device variables: {hiding or 'none set'}",
        next_step=f"start at most {devices} rank{'s' * (devices != 1)} on this node",
    )


def environment_error(what: str) -> GroupError:
    """Return the error for wrong or missing variables of torchrun."""
    return GroupError(
        what,
        where="environment of this process",
        next_step="start the ranks with torchrun or run_ranks, or unset RANK and WORLD_SIZE for one plain process",
    )


@functools.cache
def machine_facts() -> MachineFacts:
    """Return the facts about this machine. They are collected once for each process."""
    return collect_facts()


@functools.cache
def _visible_device(index: int) -> Device:
    return detect(machine_facts(), index)
