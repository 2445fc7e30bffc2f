"""What ties a process to the one that started it: it inherits the environment, and does not outlive it."""

import contextlib
import ctypes
import os
import signal
import sys
import threading
import time
from pathlib import Path

import psutil

# Time that a process which was asked to end gets to save what it has.
GRACE_S = 30.0
# What torchrun's agent sets for its ranks. A job that a rank starts is not that rank: it must not find them. All else is
# inherited as it is, NCCL's settings and OMP_NUM_THREADS above all.
TORCHRUN_VARIABLES = (
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    "GROUP_RANK",
    "GROUP_WORLD_SIZE",
    "ROLE_RANK",
    "ROLE_NAME",
    "ROLE_WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
    "TORCHELASTIC_RESTART_COUNT",
    "TORCHELASTIC_MAX_RESTARTS",
    "TORCHELASTIC_RUN_ID",
    "TORCHELASTIC_USE_AGENT_STORE",
    "TORCHELASTIC_ERROR_FILE",
)
# Variables that stand for torchrun's own options (PET_NNODES …): they were meant for another call of it.
_TORCHRUN_OPTIONS = "PET_"
_PR_SET_PDEATHSIG = 1
_LOOK_S = 1.0


def child_environment() -> dict[str, str]:
    """The environment of a child: this one without torchrun's variables, and with this same hyperion importable."""
    package_parent = str(Path(__file__).resolve().parents[2])
    inherited = {
        name: value
        for name, value in os.environ.items()
        if name not in TORCHRUN_VARIABLES and not name.startswith(_TORCHRUN_OPTIONS)
    }
    path = os.pathsep.join([package_parent, *filter(None, [inherited.get("PYTHONPATH")])])
    return inherited | {"PYTHONPATH": path, "PYTHONUNBUFFERED": "1"}


def die_with(launcher: int) -> None:
    """Ask Linux for a SIGTERM when the parent ends, however it ends; if it already has, stop here."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != launcher:
        sys.exit("the launcher ended before the worker began")


def has_ended(pid: int) -> bool:
    """Whether no process of this number does anything any more."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return not lives(psutil.Process(pid))
    return True


def lives(process: psutil.Process) -> bool:
    """Whether the process still does something: a zombie only waits for its parent."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    return False


def processes_below(leader: int) -> list[psutil.Process]:
    """What a process that leads a session has started and what is in that session: children of children, orphans too."""
    found: set[psutil.Process] = set()
    with contextlib.suppress(psutil.NoSuchProcess):
        found.update(psutil.Process(leader).children(recursive=True))
    for process in psutil.process_iter():
        with contextlib.suppress(ProcessLookupError, PermissionError):
            if process.pid != leader and os.getsid(process.pid) == leader:
                found.add(process)
    return list(found)


def kill_session(leader: int, ours: bool) -> None:
    """SIGKILL for a process that leads a session of its own, and for whatever it started in it.

    Args:
        leader: its process number.
        ours: whether the process of that number, if there is one, is still it. A number is given to another process only
            when no process of the session is left.
    """
    if ours or not psutil.pid_exists(leader):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(leader, signal.SIGKILL)


def do_not_outlive(launcher: int) -> None:
    """End this process `GRACE_S` after its launcher at the latest, though it may catch SIGTERM and wait for dead peers."""

    def watch() -> None:
        while not has_ended(launcher):
            time.sleep(_LOOK_S)
        os.kill(os.getpid(), signal.SIGTERM)  # where Linux did not send it
        time.sleep(GRACE_S)
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=watch, daemon=True, name="hyperion-lifeline").start()
