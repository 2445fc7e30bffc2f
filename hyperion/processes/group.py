"""Process groups: who this process is among its ranks, and torch.distributed set up for it and taken down again.

torchrun's variables (RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, MASTER_PORT …) say who the ranks are, whoever started
them; without these variables a process is alone, and its group has one rank.
"""

import atexit
import contextlib
import faulthandler
import functools
import itertools
import os
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from datetime import timedelta

import torch
import torch.distributed as dist

from hyperion.errors import HyperionError
from hyperion.hardware import Device, Facts, collect_facts, detect, detect_cpu
from hyperion.hardware.facts import VISIBLE_DEVICE_VARIABLES

BACKENDS = ("nccl", "gloo")
# A group that gave up is taken down within this time, or left to the end of the process.
_ABANDON_S = 5.0


class GroupError(HyperionError):
    """A process group that cannot be made as asked."""


@dataclass(frozen=True)
class World:
    """This process among its ranks.

    Args:
        rank: number of this process, from 0.
        size: number of processes.
        local_rank: its number on this node, which is the number of its device.
        backend: "nccl" (RCCL on AMD) or "gloo"; "" without a process group.
        device: the device of this rank.
        group: what its collectives run in; None for the default group.
    """

    rank: int
    size: int
    local_rank: int
    backend: str
    device: Device
    group: dist.ProcessGroup | None = None

    def alone(self) -> "World":
        """This process in a group of its own, where the same program has nobody to talk to. Every rank calls it."""
        group, _ = dist.new_subgroups(1)
        return replace(self, rank=0, size=1, group=group)


@dataclass(frozen=True)
class Place:
    """What torchrun's variables say about this process; `local_size` counts the ranks of this node."""

    rank: int
    size: int
    local_rank: int
    local_size: int


def world() -> World:
    """This process among its ranks: rank 0 of 1, backend "", when no process group is up."""
    if not dist.is_initialized():
        return World(0, 1, 0, "", _device(0))
    place, backend = place_of(os.environ), dist.get_backend()
    local_rank = place.local_rank if place else 0
    device = _device(local_rank) if "nccl" in backend else detect_cpu(_facts())
    return World(dist.get_rank(), dist.get_world_size(), local_rank, backend, device)


@contextlib.contextmanager
def process_group(timeout_s: float = 600.0, backend: str | None = None) -> Iterator[World]:
    """Context manager: torch.distributed is up inside, on this rank's device, and down afterwards.

    Under torchrun every rank enters it; a process that nobody gave a rank gets a group of its own, which DDP and FSDP2
    need, without opening a port. It can be entered again after it was left. After an exception the group is abandoned
    rather than taken down in order: nothing waits for peers that may be dead.

    Args:
        timeout_s: seconds a rank waits for its peers: at the start, and in every collective.
        backend: "nccl", or "gloo", whose ranks compute on the CPU also where there are GPUs. None: nccl on GPUs, gloo
            on a CPU.

    Raises:
        GroupError: a group is up already, torchrun's variables are incomplete, this node has more ranks than GPUs, the
            backend does not suit the machine, or a peer did not come.
    """
    _require_none_up()
    place = place_of(os.environ)
    backend, device = choose_device(place, backend, _facts())
    torch_device = torch.device(device.torch_device)
    if torch_device.type != "cpu":
        torch.cuda.set_device(torch_device)
    _initialize(place or Place(0, 1, 0, 1), backend, torch_device, timedelta(seconds=timeout_s), alone=place is None)
    try:
        yield world()
    except BaseException:
        _abandon(backend)
        raise
    else:
        # The code inside may have ended the group itself.
        if dist.is_initialized():
            if backend == "gloo":
                _ended.extend(dist.distributed_c10d._world.pg_map)
            dist.destroy_process_group()


def place_of(environment: Mapping[str, str]) -> Place | None:
    """The place that torchrun's variables give a process; None when they give none.

    Raises:
        GroupError: some of the variables are missing, or are no numbers that fit together.
    """
    if "RANK" not in environment and "WORLD_SIZE" not in environment:
        return None
    size = environment.get("WORLD_SIZE")
    needed = ["RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"] + ["LOCAL_RANK"] * (size != "1")
    if missing := [name for name in needed if not environment.get(name)]:
        raise _misled(f"{', '.join(missing)} not set, though other variables of torchrun are")
    _require_port(environment["MASTER_PORT"])
    rank, size = _number(environment, "RANK"), _number(environment, "WORLD_SIZE")
    local_rank = _number(environment, "LOCAL_RANK", 0)
    local_size = _number(environment, "LOCAL_WORLD_SIZE", local_rank + 1)
    if not (0 <= rank < size and 0 <= local_rank < local_size <= size):
        raise _misled(f"rank {rank} of {size} ranks, {local_rank} of {local_size} on this node: these do not fit together")
    return Place(rank, size, local_rank, local_size)


def meeting_place(environment: Mapping[str, str]) -> tuple[str, int]:
    """Address and port of the job's store, from MASTER_ADDR and MASTER_PORT.

    Raises:
        GroupError: one is missing, or the port is none.
    """
    if missing := [name for name in ("MASTER_ADDR", "MASTER_PORT") if not environment.get(name)]:
        raise _misled(f"{', '.join(missing)} not set")
    return environment["MASTER_ADDR"], _require_port(environment["MASTER_PORT"])


def _number(environment: Mapping[str, str], name: str, default: int | None = None) -> int:
    text = environment.get(name) or str(default)
    if not text.isascii() or not text.isdecimal() or len(text) > 9:
        raise _misled(f"{name} is {text!r}, not a whole number from 0")
    return int(text)


def _require_port(text: str) -> int:
    port = _number({"MASTER_PORT": text}, "MASTER_PORT")
    if port > 65535:
        raise _misled(f"MASTER_PORT is {port}, above 65535")
    return port


def choose_device(place: Place | None, backend: str | None, facts: Facts) -> tuple[str, Device]:
    """The backend and the device of a rank: each has a GPU to itself where there are GPUs.

    Raises:
        GroupError: no such backend, nccl without a GPU, or more ranks on this node than GPUs.
    """
    if backend not in (None, *BACKENDS):
        raise GroupError(f"there is no backend {backend!r}", where="process_group", next_step=f"choose {' or '.join(BACKENDS)}")
    # A GPU that torch sees and cannot open is an error, told by `detect`, and not a reason to compute on the CPU.
    gpus = bool(facts.gpus or facts.gpu_error)
    if backend == "gloo" or not gpus:
        if backend == "nccl":
            raise GroupError("nccl needs GPUs, and PyTorch sees none", where="process_group", next_step="leave the backend out")
        return "gloo", detect_cpu(facts)
    index, ranks = (place.local_rank, place.local_size) if place else (0, 1)
    if facts.gpus and ranks > len(facts.gpus):
        raise more_ranks_than_devices(ranks, len(facts.gpus))
    return "nccl", detect(facts, index)


def more_ranks_than_devices(ranks: int, devices: int) -> GroupError:
    """The refusal of two ranks on one GPU, which NCCL would refuse later and less clearly."""
    hiding = ", ".join(f"{name}={os.environ[name]}" for name in VISIBLE_DEVICE_VARIABLES if name in os.environ)
    return GroupError(
        f"{ranks} ranks on a node where PyTorch sees {devices} GPU{'s' * (devices != 1)}",
        where=f"visible-device variables: {hiding or 'none set'}",
        next_step=f"start at most {devices} rank{'s' * (devices != 1)} on this node",
    )


def _initialize(place: Place, backend: str, device: torch.device, timeout: timedelta, alone: bool) -> None:
    """Each group of a process gets names of its own in the store: what an earlier one left there leads nobody astray."""
    try:
        store = dist.HashStore() if alone else _common_store(place, timeout)
        store.set_timeout(timeout)
        dist.init_process_group(
            backend,
            store=dist.PrefixStore(f"hyperion/{next(_groups)}", store),
            rank=place.rank,
            world_size=place.size,
            timeout=timeout,
            device_id=None if device.type == "cpu" else device,
        )
    except (dist.DistStoreError, dist.DistNetworkError) as error:
        raise GroupError(
            f"rank {place.rank} of {place.size} met no peers within {timeout.total_seconds():g} s: {error}",
            where=f"MASTER_ADDR={os.environ.get('MASTER_ADDR')} MASTER_PORT={os.environ.get('MASTER_PORT')}",
            next_step="see that all ranks were started and that this address is reached from every node",
        ) from error


# Groups of gloo that were left stay referenced until the process ends. A DDP model can outlive its group; were it the last
# to hold it, gloo's threads would be joined while Python's lock is held, which they need to let go of the last all-reduce
# (seen with PyTorch 2.13: a process that made such models stood still within fifty groups).
_ended: list[dist.ProcessGroup] = []
_groups = itertools.count()
_stores: dict[tuple[Place, str, str], dist.Store] = {}


def _common_store(place: Place, timeout: timedelta) -> dist.Store:
    """The ranks' meeting place, one a process: rank 0 could not open its port a second time."""
    address = (place, os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"])
    if address not in _stores:
        _stores[address], _, _ = next(dist.rendezvous("env://", place.rank, place.size, timeout=timeout))
    return _stores[address]


@functools.cache
def _facts() -> Facts:
    return collect_facts()


@functools.cache
def _device(index: int) -> Device:
    return detect(_facts(), index)


def _require_none_up() -> None:
    if dist.is_initialized():
        raise GroupError(
            "a process group is up already",
            where=f"rank {dist.get_rank()} of {dist.get_world_size()}",
            next_step="ask hyperion.processes.world() about it, or leave it first",
        )


def _misled(what: str) -> GroupError:
    return GroupError(
        what,
        where="environment of this process",
        next_step="start the ranks with torchrun or run_ranks, or unset RANK and WORLD_SIZE for one plain process",
    )


def _abandon(backend: str) -> None:
    """End the group without its peers. Gloo cannot: it waits for what was begun, and so would the end of the process."""
    if not dist.is_initialized():
        return
    abort = dist.distributed_c10d._abort_process_group if backend == "nccl" else dist.destroy_process_group
    ending = threading.Thread(target=abort, daemon=True, name="hyperion-abandon-group")
    ending.start()
    ending.join(_ABANDON_S)
    if ending.is_alive():
        atexit.register(_end_process_soon)


def _end_process_soon() -> None:
    """Let the other exit handlers do their work, then end the process, though gloo's threads still wait for a peer."""
    faulthandler.dump_traceback_later(_ABANDON_S, exit=True, file=open(os.devnull, "w"))  # noqa: SIM115 - until the end
