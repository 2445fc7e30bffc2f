"""Initialize and destroy the process group of torch.distributed, and synchronize ranks with barriers in the store of a job.

Without torchrun's environment variables, the process group has one rank.
"""

import atexit
import contextlib
import faulthandler
import itertools
import os
import threading
import time
from collections.abc import Iterator
from datetime import timedelta

import torch
import torch.distributed as dist

# These names are documented, but they are not in torch's __all__.
from torch.distributed import HashStore, PrefixStore, Store, TCPStore  # pyright: ignore[reportPrivateImportUsage]
from torch.distributed.rendezvous import rendezvous

from hyperion.errors import HyperionError
from hyperion.processes.this_rank import (
    GroupError,
    RankInfo,
    World,
    choose_device,
    environment_error,
    machine_facts,
    parse_port,
    rank_info,
    world,
)

ENVIRONMENT = "env://"  # torch's init method in which the ranks meet at MASTER_ADDR and MASTER_PORT
# Time limit in seconds for destroying a group after an error. If the limit is exceeded, the group remains until the process ends.
_ABANDON_S = 5.0
# _CONNECT_S: time limit for connecting to the job's store. _POLL_S: polling interval of a barrier.
_CONNECT_S = 30.0
_POLL_S = 0.002


@contextlib.contextmanager
def process_group(timeout_s: float = 600.0, backend: str | None = None, init_method: str = ENVIRONMENT) -> Iterator[World]:
    """Context manager that initializes torch.distributed on the device of this rank, and destroys the group on exit.

    Under torchrun, every rank must enter the block. A process without torchrun's variables gets a group of one rank, because DDP
    and FSDP2 need a group. No port is opened for this group. A process can use the context manager repeatedly, but not nested.
    After an exception, the group is aborted, so that this rank does not wait for ranks that may have died.

    Args:
        timeout_s: seconds that a rank waits for the other ranks, at the start and in every collective.
        backend: "nccl" or "gloo". With gloo, the ranks compute on the CPU even if there are GPUs. None selects nccl if there are
            GPUs, else gloo.
        init_method: where the ranks find each other. With "env://", they meet at MASTER_ADDR and MASTER_PORT. With
            "file:///path", they meet through a file on a disk that all ranks share, and the launcher sets only RANK, WORLD_SIZE
            and LOCAL_RANK. Each job needs a new file, because ranks that find the keys of an earlier job do not meet. A
            `StoreBarrier` works only with "env://".

    Raises:
        GroupError: a process group already exists, torchrun's variables are incomplete, this node has more ranks than GPUs,
            the machine does not support the backend, the init method is unknown, or another rank did not join in time.
    """
    _require_no_group()
    if init_method != ENVIRONMENT and not init_method.startswith("file:///"):
        raise GroupError(f"unknown init method {init_method!r}", where="process_group", next_step="use env:// or file:///path")
    info = rank_info(os.environ, address=init_method == ENVIRONMENT)
    if info is None and init_method != ENVIRONMENT:
        raise environment_error(f"RANK and WORLD_SIZE are not set, but {init_method} needs them")
    backend, device = choose_device(info, backend, machine_facts())
    torch_device = torch.device(device.torch_device)
    if torch_device.type != "cpu":
        # Set the device before creating the group, because NCCL and tensors on "cuda" use the current device of the process.
        torch.cuda.set_device(torch_device)
    _initialize(info, backend, torch_device, timedelta(seconds=timeout_s), init_method)
    try:
        yield world()
    except BaseException:
        _abort(backend)
        raise
    else:
        # The code in the block may have destroyed the group itself.
        if dist.is_initialized():
            if backend == "gloo":
                _old_groups.extend(dist.distributed_c10d._world.pg_map)
            dist.destroy_process_group()


class StoreBarrier:
    """Barriers for the ranks of a job. They use counters in the job's store. Use each name for one barrier only.

    NCCL's barrier is a kernel that spins on every GPU until all ranks arrive, which disturbs measurements on other ranks. In a
    StoreBarrier, a waiting rank sleeps.

    Args:
        timeout_s: seconds that `wait` waits for the other ranks.
    """

    def __init__(self, timeout_s: float = 600.0):
        self._store = job_store("barriers")
        self._timeout_s = timeout_s

    def arrive(self, name: str) -> None:
        """Record that this rank has arrived, and return immediately."""
        self._store.add(name, 1)

    def is_complete(self, name: str, ranks: int) -> bool:
        """Return True if at least `ranks` ranks have arrived."""
        # Adding 0 reads the counter. `get` would block if no rank has arrived yet.
        return self._store.add(name, 0) >= ranks

    def wait(self, name: str, ranks: int) -> None:
        """Record that this rank has arrived, and wait until `ranks` ranks have arrived.

        Raises:
            HyperionError: some ranks did not arrive before the timeout.
        """
        self.arrive(name)
        deadline = time.monotonic() + self._timeout_s
        while not self.is_complete(name, ranks):
            if time.monotonic() > deadline:
                arrived = self._store.add(name, 0)
                raise HyperionError(
                    f"{arrived} of {ranks} ranks arrived at barrier {name!r} within {self._timeout_s:g} s",
                    where="StoreBarrier.wait",
                    next_step="see the logs of the other ranks",
                )
            time.sleep(_POLL_S)


def job_store(prefix: str) -> Store:
    """Open a new connection to the job's store at MASTER_ADDR and MASTER_PORT. The prefix is added to all keys.

    Raises:
        GroupError: MASTER_ADDR or MASTER_PORT is not set, or the port is not valid.
    """
    if missing := [name for name in ("MASTER_ADDR", "MASTER_PORT") if not os.environ.get(name)]:
        raise environment_error(f"{', '.join(missing)} not set")
    store = connect_store(os.environ["MASTER_ADDR"], parse_port(os.environ["MASTER_PORT"]), _CONNECT_S)
    # The prefix contains the restart count, so that the ranks do not see keys from before a restart of the job.
    return PrefixStore(f"hyperion/{prefix}/{os.environ.get('TORCHELASTIC_RESTART_COUNT', 0)}", store)


def connect_store(host: str, port: int, timeout_s: float) -> Store:
    """Connect to a TCPStore whose server runs in another process."""
    return TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=timeout_s))


def _initialize(info: RankInfo | None, backend: str, device: torch.device, timeout: timedelta, init_method: str) -> None:
    """Initialize torch.distributed. Each group has its own prefix in the store, so it does not see keys of earlier groups."""
    # A HashStore is in the memory of this process, so a single process opens no port.
    alone, info = info is None, info or RankInfo(0, 1, 0, 1)
    try:
        store = HashStore() if alone else _shared_store(info, timeout, init_method)
        store.set_timeout(timeout)
        dist.init_process_group(
            backend,
            store=PrefixStore(f"hyperion/{next(_group_numbers)}", store),
            rank=info.rank,
            world_size=info.size,
            timeout=timeout,
            # With a device, NCCL creates its communicator, and raises its errors, here and not in the first collective.
            device_id=None if device.type == "cpu" else device,
        )
    except RuntimeError as error:
        # A store in a file raises a plain RuntimeError after a timeout.
        if not isinstance(error, dist.DistStoreError | dist.DistNetworkError) and "Wait timeout" not in str(error):
            raise
        address = f"MASTER_ADDR={os.environ.get('MASTER_ADDR')} MASTER_PORT={os.environ.get('MASTER_PORT')}"
        raise GroupError(
            f"rank {info.rank} of {info.size} did not reach the other ranks within {timeout.total_seconds():g} s: {error}",
            where=address if init_method == ENVIRONMENT else init_method,
            next_step="check that all ranks were started and that every node reaches this address or file",
        ) from error


# Gloo groups that this process has left. The list keeps a reference to each of them until the process ends. Otherwise, a DDP
# model that outlives its group could hold the last reference. Deleting the model would then join gloo's threads while this
# thread holds Python's global interpreter lock, which gloo's threads need to release the last all-reduce. The process would
# hang (seen with PyTorch 2.13, within fifty groups).
_old_groups: list[dist.ProcessGroup] = []
_group_numbers = itertools.count()
_stores: dict[tuple[RankInfo, str, str | None, str | None], Store] = {}


def _shared_store(info: RankInfo, timeout: timedelta, init_method: str) -> Store:
    """Return the job's store. All groups of a process share it, because rank 0 cannot open its port a second time."""
    address = (info, init_method, os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT"))
    if address not in _stores:
        _stores[address], _, _ = next(rendezvous(init_method, info.rank, info.size, timeout=timeout))
    return _stores[address]


def _require_no_group() -> None:
    if dist.is_initialized():
        raise GroupError(
            "there is already a process group",
            where=f"rank {dist.get_rank()} of {dist.get_world_size()}",
            next_step="use the existing group through hyperion.processes.world(), or destroy the existing group first",
        )


def _abort(backend: str) -> None:
    """Abort the process group without waiting for the other ranks.

    Gloo has no abort function, and its destructor waits for collectives in progress. Therefore the abort runs in a thread. If the
    thread has not finished after `_ABANDON_S` seconds, the process would also wait for gloo at exit, so an exit handler then ends
    the process.
    """
    if not dist.is_initialized():
        return
    abort = dist.distributed_c10d._abort_process_group if backend == "nccl" else dist.destroy_process_group
    aborting = threading.Thread(target=abort, daemon=True, name="hyperion-abort-group")
    aborting.start()
    aborting.join(_ABANDON_S)
    if aborting.is_alive():
        atexit.register(_end_process_soon)


def _end_process_soon() -> None:
    """End the process after `_ABANDON_S` seconds, even if gloo's threads still wait for another rank.

    The other exit handlers run first.
    """
    faulthandler.dump_traceback_later(_ABANDON_S, exit=True, file=open(os.devnull, "w"))  # noqa: SIM115 - until the end
