"""Start child processes with a suitable environment, and end them when the process that started them ends."""

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import IO

import psutil

# Number of seconds between SIGTERM and SIGKILL. In this time, a process can save its state.
GRACE_S = 30.0
# Environment variable with the numbers of the CPU cores that a process and its children use, such as "0,1,2". It is set when
# several notebooks run at the same time.
CORES = "HYPERION_CORES"
# torchrun's agent sets these variables for its ranks. A job that a rank starts must not inherit them. All other variables, such
# as NCCL's settings and OMP_NUM_THREADS, are inherited unchanged.
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
# Prefix of variables that set defaults for torchrun's options (PET_NNODES …). They are meant for another call of torchrun, so
# child processes do not inherit them.
_TORCHRUN_OPTIONS = "PET_"
# PR_SET_PDEATHSIG, an option of prctl(2): send this process a signal when its parent ends.
_PR_SET_PDEATHSIG = 1
_POLL_S = 1.0


def child_environment() -> dict[str, str]:
    """Return the environment for a child process.

    It is the environment of this process without torchrun's variables. PYTHONPATH starts with the folder that contains this
    copy of hyperion.
    """
    package_parent = str(Path(__file__).resolve().parents[2])
    inherited = {
        name: value
        for name, value in os.environ.items()
        if name not in TORCHRUN_VARIABLES and not name.startswith(_TORCHRUN_OPTIONS)
    }
    path = os.pathsep.join([package_parent, *filter(None, [inherited.get("PYTHONPATH")])])
    # Switch off output buffers, so that the launcher sees each line as soon as it is printed. By default, Python buffers output
    # to a pipe.
    return inherited | {"PYTHONPATH": path, "PYTHONUNBUFFERED": "1"}


def start(
    python: str,
    module: str,
    arguments: list[str],
    environment: dict[str, str],
    stdout: int | IO | None = subprocess.PIPE,
    new_session: bool = False,
    folder: str | None = None,
    before: Sequence[str] = (),
) -> subprocess.Popen[str]:
    """Start `python -m module arguments`. The process writes stdout and stderr to the same stream, and its stdin is empty.

    Args:
        python: path of the Python interpreter.
        module: name of the module to run.
        arguments: command-line arguments of the module.
        environment: all environment variables of the process.
        stdout: destination of the output: a file; subprocess.PIPE, to read it from `.stdout` of the result; or None for the
            stdout of this process.
        new_session: if True, make the process the leader of a new session and process group.
        folder: working directory of the child process; default: the working directory of this process.
        before: command that starts the interpreter, such as ["mpirun", "-n", "2"].
    """
    return subprocess.Popen(
        [*before, python, "-m", module, *arguments],
        stdin=subprocess.DEVNULL,
        stdout=stdout,
        stderr=subprocess.STDOUT,
        text=True,
        # The output of a killed process may end in the middle of a character.
        errors="replace",
        env=environment,
        start_new_session=new_session,
        cwd=folder,
    )


def die_with(launcher: int) -> None:
    """Ask Linux to send SIGTERM to this process when its parent ends for any reason. Exit if the parent has already ended.

    Args:
        launcher: process ID of the parent.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    # The parent may have ended before the call to prctl. This process then has another parent and receives no signal.
    if os.getppid() != launcher:
        sys.exit("the launcher ended before the worker began")


def do_not_outlive(launcher: int) -> None:
    """Start a thread that kills this process `GRACE_S` seconds after its launcher has ended.

    This ends the process even if it handles SIGTERM and waits for ranks that have died.
    """

    def watch() -> None:
        while not has_ended(launcher):
            time.sleep(_POLL_S)
        os.kill(os.getpid(), signal.SIGTERM)  # send SIGTERM here, because `die_with` requests it on Linux only
        time.sleep(GRACE_S)
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=watch, daemon=True, name="hyperion-launcher-watch").start()


def pin_to_cores() -> None:
    """Pin this process to the cores listed in the environment variable `CORES`. Do nothing if the variable is not set.

    Call this function before importing torch, because torch counts the cores during import to choose its number of threads.
    """
    cores = os.environ.get(CORES)
    if cores and hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {int(number) for number in cores.split(",")})


def has_ended(pid: int) -> bool:
    """Return True if no process with this ID is running. A zombie process counts as ended."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return not is_alive(psutil.Process(pid))
    return True


def is_alive(process: psutil.Process) -> bool:
    """Return True if the process is running.

    Return False for a zombie, which has ended and waits for its parent to read its exit code.
    """
    with contextlib.suppress(psutil.NoSuchProcess):
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    return False


def descendants(leader: int) -> list[psutil.Process]:
    """Return all descendants of a session's leader. Also return other processes of the session, whose parents have ended."""
    found: set[psutil.Process] = set()
    with contextlib.suppress(psutil.NoSuchProcess):
        found.update(psutil.Process(leader).children(recursive=True))
    for process in psutil.process_iter():
        with contextlib.suppress(ProcessLookupError, PermissionError):
            # A process whose parent has ended gets another parent, but keeps its session.
            if process.pid != leader and os.getsid(process.pid) == leader:
                found.add(process)
    return list(found)


def kill_session(leader: int, ours: bool) -> None:
    """Send SIGKILL to the leader of a session and to every process of its process group.

    Args:
        leader: process ID of the leader.
        ours: True if the process with this ID is still the process that the caller started. If False and a process has this ID,
            no signal is sent: Linux reuses an ID only when the session of this ID is empty.
    """
    if ours or not psutil.pid_exists(leader):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(leader, signal.SIGKILL)
