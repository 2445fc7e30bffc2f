"""Functions of the jobs that test_fork_server.py runs."""

import os
import random
import signal
import sys
import time
from pathlib import Path


def describe(names=()):
    """Return what distinguishes a fork from a fresh process, and what must not."""
    import numpy as np

    return {
        "parent": os.getppid(),
        "parent_leads_a_session": os.getsid(os.getppid()) == os.getppid(),
        "torch": "torch" in sys.modules,
        "folder": os.getcwd(),
        "first": sys.path[0],
        "variables": {name: os.environ.get(name) for name in names},
        "random": [random.random(), float(np.random.rand())],
        "sockets": [link for link in _open_files() if link.startswith(("socket:", "anon_inode:"))],
        "ignored": ignored(),
    }


def ignored():
    """Return the numbers of SIGINT and SIGTERM if this process ignores them."""
    return [int(number) for number in (signal.SIGINT, signal.SIGTERM) if signal.getsignal(number) is signal.SIG_IGN]


def _open_files():
    """Return the names of the open files, without that of the listing itself."""
    with os.scandir("/proc/self/fd") as files:
        return [os.readlink(file) for file in list(files) if os.path.lexists(file)]


def wait_for_the_end(folder, seconds=100.0):
    """Write the process IDs of this worker and its parent, and wait. On SIGTERM, leave a file."""

    def end(number, frame):
        (Path(folder) / "ended").write_text(str(number))
        sys.exit(1)

    signal.signal(signal.SIGTERM, end)
    (Path(folder) / "pids.new").write_text(f"{os.getpid()} {os.getppid()}")
    (Path(folder) / "pids.new").rename(Path(folder) / "pids")
    time.sleep(seconds)
    return {"waited": True}


def threads():
    import torch

    return {"parent": os.getppid(), "threads": torch.get_num_threads()}


def matmul():
    """Return a product that torch computes on several threads."""
    import torch

    torch.set_num_threads(2)
    left = torch.arange(512 * 512, dtype=torch.float64).reshape(512, 512) % 7
    return {"sum": float((left @ left).sum())}
