"""Main program of processes that run jobs and notebook kernels: `python -m hyperion.processes.worker KIND arguments`.

job REQUEST ANSWER LAUNCHER: run a job without ranks. REQUEST and ANSWER are files, and LAUNCHER is the process ID of the process
    that started this one.
agent FOLDER LAUNCHER: run the rank agent of a job, which starts its ranks.
rank FOLDER AGENT: run one rank of a job. The rank ends with the process with the ID AGENT: the one that started it or, if mpirun
    started it, the rank agent.
fork-server SOCKET: fork for each request that arrives on the socket with this descriptor. Each fork becomes a job or an agent.
kernel LAUNCHER arguments: run the kernel of a notebook, which ends when the process with the ID LAUNCHER ends. The other
    arguments are passed to ipykernel.
"""

import atexit
import contextlib
import errno
import faulthandler
import gc
import logging
import os
import runpy
import signal
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import NoReturn

import psutil

from hyperion.errors import HyperionError
from hyperion.garbage import collect_rarely, imports_only
from hyperion.processes.child_process import die_with, do_not_outlive, pin_to_cores
from hyperion.processes.fork_server import fork_own_server, run_fork_server
from hyperion.processes.job import INTERRUPTED, load_entry
from hyperion.processes.mpi import adopt_mpi_rank
from hyperion.processes.ranks import JobFolder, rank_log, read_json, write_json
from hyperion.processes.this_rank import World

# Gloo raises RuntimeError for all errors. If the message contains one of these strings, another rank closed its connection or did
# not join in time.
_GLOO_MARKS = ("gloo/transport", "Connection closed by peer", "Connection reset by peer")
_STACKS_S = 0.5


def run_plain_job(request_file: str, answer_file: str, launcher: str) -> NoReturn:
    """Call the function of the job, write its result or its HyperionError to the answer file, and end the process."""
    die_with(int(launcher))
    request = read_json(Path(request_file))
    pin_to_cores()
    try:
        function = load_entry(request["entry"])
        gc.freeze()  # no collection needs to search what was imported
        answer = function(**request["params"])
    except HyperionError as error:
        write_json(Path(answer_file), {"error": error.as_dict()})
        _end(error.exit_code)
    write_json(Path(answer_file), {"answer": answer})
    _end(0)


def run_kernel(launcher: str, *arguments: str) -> None:
    """Run ipykernel with the given arguments, and end this process when its launcher ends.

    Args:
        launcher: process ID of the launcher.
    """
    die_with(int(launcher))
    pin_to_cores()
    # Make ipykernel watch its parent process. This is needed on systems where `die_with` requests no signal.
    os.environ["JPY_PARENT_PID"] = str(os.getppid())
    sys.argv[1:] = arguments
    logging.getLogger("tornado.general").addFilter(_socket_was_open)
    runpy.run_module("ipykernel_launcher", run_name="__main__", alter_sys=True)


def _socket_was_open(record: logging.LogRecord) -> bool:
    """Logging filter: return False for the error of a socket that ipykernel closed before its last use.

    While ipykernel 7 shuts down, it may flush its output after it has closed its sockets. All cells have then run, and the
    traceback that tornado logs would only alarm the reader.
    """
    error = record.exc_info[1] if record.exc_info else None
    return getattr(error, "errno", None) != errno.ENOTSOCK


def run_agent(folder: str, launcher: str) -> None:
    """Run the rank agent, which ends when the process with the ID LAUNCHER ends."""
    from hyperion.processes import rank_agent

    rank_agent.main(folder, int(launcher))


def run_rank(folder: str, agent: str) -> NoReturn:
    """Join the process group, call the function of the job, write its result or error to a file, and end the process."""
    files = JobFolder(Path(folder))
    request = read_json(files.request)
    if request["mpirun"]:
        adopt_mpi_rank()
        # The launcher ends a rank and its child processes through their process group, so the rank creates one. PermissionError
        # means that mpirun has already created it.
        with contextlib.suppress(PermissionError):
            os.setsid()
    rank = int(os.environ["RANK"])
    # Redirect first, so that everything that follows is in the rank's own log.
    _redirect_output(rank_log(Path(request["logs"]), rank))
    if not request["mpirun"]:  # under mpirun, the parent is mpirun, which the agent ends
        die_with(int(agent))
    do_not_outlive(int(agent))
    _dump_stack_on_signals(files.stack(rank))
    # Publish the process ID only now. The launcher sends SIGUSR1 to this ID, and without the handler the signal would end the
    # process.
    write_json(files.pid(rank), os.getpid())
    with _record_errors(files, rank):
        answer, interruption = _work(request, files, rank)
        if interruption is None:
            write_json(files.record(rank), {"answer": answer})
    if interruption is not None:
        _record(files, rank, interruption)
    _end(0 if interruption is None else INTERRUPTED)


def _end(code: int) -> NoReturn:
    """Wait for threads and call the exit handlers, as Python does at its end, then end the process.

    The interpreter is not finalized, because threads of gloo outlive their group (see `hyperion.processes.group`). If such a
    thread needs the lock of an interpreter that is being finalized, for example to release a tensor, C++ aborts the process
    ("terminate called without an active exception"), and a job would fail although its results are complete.
    """
    threading._shutdown()  # pyright: ignore[reportAttributeAccessIssue]  # typeshed lacks it
    atexit._run_exitfuncs()
    mpi = sys.modules.get("mpi4py.MPI")
    if mpi is not None and mpi.Is_initialized() and not mpi.Is_finalized():
        mpi.Finalize()  # mpirun expects this of every rank; mpi4py would do it in the skipped finalization
    os._exit(code)  # there is no output to flush, because `child_environment` switches buffers off


def _dump_stack_on_signals(stack: Path) -> None:
    """Write the stack to a file on SIGUSR1 and SIGTERM, and to the log on a crash.

    The launcher sends SIGUSR1. SIGTERM writes no stack if the function of the job installs its own handler. faulthandler does
    not need the interpreter, so even a rank that hangs in C++ code writes its stack.
    """
    file = open(stack, "w")  # noqa: SIM115 - open until the process ends
    faulthandler.register(signal.SIGUSR1, file=file)
    # With chain=True, the signal still ends the process after the stack is written.
    faulthandler.register(signal.SIGTERM, file=file, chain=True)
    faulthandler.enable(all_threads=False)


def _work(request: dict, files: JobFolder, rank: int) -> tuple[dict | None, HyperionError | None]:
    """Call the function of the job, and return (result of the function, None).

    If the function saved its state after SIGTERM, it raises a HyperionError with the exit code `INTERRUPTED`. In this case,
    return (None, the error). In both cases, all ranks leave the process group normally.
    """
    with imports_only():
        from hyperion.processes.group import process_group

    # The inner context manager records an error before the rank leaves the group, because leaving may wait for other ranks.
    with process_group() as world, _record_errors(files, rank):
        try:
            function = load_entry(request["entry"])
            gc.freeze()  # as in `run_plain_job`
            answer = function(**request["params"])
        except HyperionError as error:
            if error.exit_code != INTERRUPTED:
                raise
            signal.signal(signal.SIGTERM, signal.SIG_IGN)  # ignore SIGTERM, because the rank is already ending
            return None, error
        if request["nodes"] > 1:
            _gather_answers(answer, world, files)
    return answer, None


def _gather_answers(answer: dict, world: World, files: JobFolder) -> None:
    """Write the results of all ranks to a file on each node, because a launcher cannot read the files of other nodes."""
    import torch.distributed as dist

    answers = [None] * world.size
    dist.all_gather_object(answers, answer)
    if world.local_rank == 0:
        write_json(files.answers, answers)


@contextlib.contextmanager
def _record_errors(files: JobFolder, rank: int) -> Iterator[None]:
    """Write any exception in the block to a file, then end the process immediately. A normal exit may wait for other ranks."""
    try:
        yield
    except BaseException as error:
        record = _record(files, rank, error)
        if record["timed_out"]:
            _request_peers_stacks(files)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(record["exit_code"])


def _record(files: JobFolder, rank: int, error: BaseException) -> dict:
    """Write the error to the record file and the log of the rank, and return the record."""
    message = error.as_dict() if isinstance(error, HyperionError) else None
    texts = [str(link).lower() for link in _chain(error)]
    lost_peer = any(map(_is_lost_peer, _chain(error)))
    record = {
        "time": time.time(),
        "raised": "".join(traceback.format_exception_only(error)).strip(),
        "traceback": "".join(traceback.format_exception(type(error), error, _from_entry(error.__traceback__))),
        "error": message,
        "exit_code": error.exit_code if isinstance(error, HyperionError) else 1,
        "lost_peer": lost_peer,
        "timed_out": lost_peer and any("timed out" in text or "timeout" in text for text in texts),
    }
    write_json(files.record(rank), record)
    # The user sees the log of rank 0. It needs no traceback for a HyperionError or for the failure of another rank.
    short = f"rank {rank} lost its peers: {record['raised']}" if lost_peer else record["raised"]
    print(short if lost_peer or message else record["traceback"], file=sys.stderr)
    return record


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    """Yield the error and its chain of causes, from the error to the root cause."""
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def _is_lost_peer(error: BaseException) -> bool:
    """Return True if the error was caused by another rank that ended or was late. This rank is then not the root cause."""
    import torch.distributed as dist

    if isinstance(error, dist.DistBackendError | dist.DistNetworkError | dist.DistStoreError):
        return True
    return isinstance(error, RuntimeError) and any(mark in str(error) for mark in _GLOO_MARKS)


def _from_entry(frames: TracebackType | None) -> TracebackType | None:
    """Return the traceback from the first frame of the job. The frames before it are in this file on every rank."""
    while frames is not None and frames.tb_next is not None and frames.tb_frame.f_code.co_filename == __file__:
        frames = frames.tb_next
    return frames


def _request_peers_stacks(files: JobFolder) -> None:
    """Send SIGUSR1 to the other ranks of this node before torchrun ends them, so that they write their stacks.

    The stack of a missing rank shows where the rank is.
    """
    for pid in files.pids().values():
        with contextlib.suppress(psutil.NoSuchProcess):
            if pid != os.getpid() and psutil.Process(pid).ppid() == os.getppid():
                os.kill(pid, signal.SIGUSR1)
    time.sleep(_STACKS_S)


def _redirect_output(file: Path) -> None:
    """Redirect stdout and stderr to one file, including the output of C++ code and of child processes."""
    log = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    for stream in (1, 2):
        os.dup2(log, stream)
    os.close(log)


if __name__ == "__main__":
    collect_rarely()
    kind, *rest = sys.argv[1:]
    if kind == "fork-server":
        kind, *rest = run_fork_server(int(*rest))
    if kind == "agent":
        # The agent's own server forks the ranks.
        kind, *rest = fork_own_server() or (kind, *rest)
    {"job": run_plain_job, "agent": run_agent, "rank": run_rank, "kernel": run_kernel}[kind](*rest)
