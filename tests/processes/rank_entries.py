"""Functions of the jobs that test_ranks.py runs."""

import atexit
import ctypes
import os
import signal
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

from hyperion.processes import report_progress, roll_call, world
from tests.processes.waiting_rank import MARK, start_child


def total(values: list[float], names: list[str]) -> dict:
    """A sum over ranks, and variables of each rank's environment."""
    here = world()
    mine = torch.tensor([values[here.rank]])
    dist.all_reduce(mine)
    print(f"rank {here.rank} of {here.size}", flush=True)
    report_progress(here.rank, 2, f"from {here.rank}")
    return {"total": mine.item(), "rank": here.rank, "environment": {name: os.environ.get(name) for name in names}}


def fails(how: str) -> dict:
    """Rank 1 fails while rank 0 waits for it."""
    print(f"rank {world().rank} has begun", flush=True)
    if world().rank == 1:
        print("rank 1 stands alone", flush=True)
        if how == "raised":
            raise ValueError("the sum is wrong on purpose")
        _turn_for_ever()
    dist.all_reduce(torch.ones(1))
    return {}


def leaves_a_thread_of_gloo(folder: str) -> dict:
    """Return while a thread of gloo still needs the interpreter. An exit handler, Python and C leave a trace."""
    atexit.register((Path(folder) / f"exit-{world().rank}").touch)
    sys.stdout.write("by Python, without a newline")
    ctypes.CDLL(None).printf(b"by C, into a buffer")
    dist.all_reduce(torch.ones(1), async_op=True).get_future().then(lambda done: time.sleep(1.0))
    return {"rank": world().rank}


def dies() -> dict:
    """Rank 1 is killed while rank 0 waits for its message and hang detection watches both.

    Each leaves its process number in the folder that MARK names.
    """
    (Path(os.environ[MARK]) / f"pid-{world().rank}").write_text(str(os.getpid()))
    with roll_call(60.0) as roll:
        roll.step("a message from rank 1")
        if world().rank == 1:
            print("rank 1 stands alone", flush=True)
            start_child()
            os.kill(os.getpid(), signal.SIGKILL)
        dist.recv(torch.ones(1), 1)
    return {}


def _turn_for_ever() -> None:
    while True:
        time.sleep(0.05)
