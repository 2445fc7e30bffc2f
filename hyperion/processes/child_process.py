"""Start child processes, pass the environment on to them, and end them with the process that started them."""

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import IO

import psutil

# Time between SIGTERM and SIGKILL, in which a process saves its state.
GRACE_S = 30.0
# CPU numbers, "0,1,2", on which a process and its children compute. Set for notebooks that run side by side.
CORES = "HYPERION_CORES"
# torchrun's agent sets these for its ranks. A job that a rank starts is not that rank and must not see them. All other
# variables are inherited unchanged, for example NCCL's settings and OMP_NUM_THREADS.
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
# Defaults of torchrun's own options (PET_NNODES …), meant for another call of torchrun.
_TORCHRUN_OPTIONS = "PET_"
_PR_SET_PDEATHSIG = 1
_POLL_S = 1.0


def child_environment() -> dict[str, str]:
    """Return this process's environment without torchrun's variables, and with this copy of hyperion on PYTHONPATH."""
    package_parent = str(Path(__file__).resolve().parents[2])
    inherited = {
        name: value
        for name, value in os.environ.items()
        if name not in TORCHRUN_VARIABLES and not name.startswith(_TORCHRUN_OPTIONS)
    }
    path = os.pathsep.join([package_parent, *filter(None, [inherited.get("PYTHONPATH")])])
    return inherited | {"PYTHONPATH": path, "PYTHONUNBUFFERED": "1"}


def start(
    python: str,
    module: str,
    arguments: list[str],
    environment: dict[str, str],
    stdout: int | IO | None = subprocess.PIPE,
    new_session: bool = False,
    folder: str | None = None,
) -> subprocess.Popen[str]:
    """Start `python -m module arguments` with stdout and stderr in one stream and an empty stdin.

    Args:
        stdout: a file, subprocess.PIPE for text that `.stdout` of the result reads, or None for that of this process.
        new_session: make the process the leader of a new session and process group.
        folder: working directory; by default that of this process.
    """
    return subprocess.Popen(
        [python, "-m", module, *arguments],
        stdin=subprocess.DEVNULL,
        stdout=stdout,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        env=environment,
        start_new_session=new_session,
        cwd=folder,
    )


def die_with(launcher: int) -> None:
    """Ask Linux for a SIGTERM when the parent ends, however it ends. Exit if it already ended.

    Args:
        launcher: process number of the parent.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    # The parent may have ended before prctl: then this process has another parent, and no signal comes.
    if os.getppid() != launcher:
        sys.exit("the launcher ended before the worker began")


def do_not_outlive(launcher: int) -> None:
    """Kill this process `GRACE_S` after its launcher ended, even if it catches SIGTERM and waits for dead peers."""

    def watch() -> None:
        while not has_ended(launcher):
            time.sleep(_POLL_S)
        os.kill(os.getpid(), signal.SIGTERM)  # for systems other than Linux, where `die_with` asks for no signal
        time.sleep(GRACE_S)
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=watch, daemon=True, name="hyperion-launcher-watch").start()


def pin_to_cores() -> None:
    """Pin this process to the cores that `CORES` names; without the variable, do nothing.

    Call it before torch is imported: torch counts the cores then to choose its number of threads.
    """
    cores = os.environ.get(CORES)
    if cores and hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {int(number) for number in cores.split(",")})


def has_ended(pid: int) -> bool:
    """Return True if no process of this number runs; a zombie has ended."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return not is_alive(psutil.Process(pid))
    return True


def is_alive(process: psutil.Process) -> bool:
    """Return True if the process runs. A zombie, which only waits for its parent to read its exit code, does not."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    return False


def descendants(leader: int) -> list[psutil.Process]:
    """Return the children of a session's leader, their children, and all orphans in its session."""
    found: set[psutil.Process] = set()
    with contextlib.suppress(psutil.NoSuchProcess):
        found.update(psutil.Process(leader).children(recursive=True))
    for process in psutil.process_iter():
        with contextlib.suppress(ProcessLookupError, PermissionError):
            if process.pid != leader and os.getsid(process.pid) == leader:
                found.add(process)
    return list(found)


def kill_session(leader: int, ours: bool) -> None:
    """Send SIGKILL to the leader of a session and to every process of its process group.

    Args:
        leader: its process number.
        ours: True if a process of that number is still the one that was started. Linux gives the number to another process
            only when the session is empty.
    """
    if ours or not psutil.pid_exists(leader):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(leader, signal.SIGKILL)
