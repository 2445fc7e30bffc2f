"""Functions of the jobs that test_ranks.py runs."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

from hyperion.errors import HyperionError
from hyperion.processes import report_progress, world

MARK = "HYPERION_TEST_RANKS"


def total(values: list[float], names: list[str]) -> dict:
    """A sum over ranks, and variables of each rank's environment."""
    here = world()
    mine = torch.tensor([values[here.rank]])
    dist.all_reduce(mine)
    print(f"rank {here.rank} of {here.size}", flush=True)
    report_progress(here.rank, 2, f"from {here.rank}")
    return {"total": mine.item(), "rank": here.rank, "environment": {name: os.environ.get(name) for name in names}}


def fails(how: str) -> dict:
    """Rank 1 fails while rank 0 waits for it. Each leaves its process number in the folder that MARK names."""
    if MARK in os.environ:
        (Path(os.environ[MARK]) / f"pid-{world().rank}").write_text(str(os.getpid()))
    if world().rank == 1:
        print("rank 1 stands alone", flush=True)
        if how == "killed":
            _child()
            os.kill(os.getpid(), signal.SIGKILL)
        if how == "raised":
            raise ValueError("the sum is wrong on purpose")
        _turn_for_ever()
    dist.all_reduce(torch.ones(1))
    return {}


def waits(folder: str, saves: bool) -> dict:
    """Write the process number of torchrun to FOLDER/ready and wait. After SIGTERM save, if `saves`."""
    _child()
    received = []
    if saves:
        signal.signal(signal.SIGTERM, lambda number, frame: received.append(number))
    ready = Path(folder) / "ready"
    ready.with_suffix(".new").write_text(sys.argv[-1])
    ready.with_suffix(".new").rename(ready)
    while not received:
        time.sleep(0.05)
    (Path(folder) / "saved").touch()
    raise _Interrupted("stopped on purpose; the state was saved", next_step="start again")


class _Interrupted(HyperionError):
    exit_code = 75


def _child() -> None:
    """Start a child of the rank, as a data loader does; it ignores SIGTERM."""
    code = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(1, flush=True); time.sleep(600)"
    child = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    with contextlib.closing(child.stdout) as output:
        output.readline()


def _turn_for_ever() -> None:
    while True:
        time.sleep(0.05)
