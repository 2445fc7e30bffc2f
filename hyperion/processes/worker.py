"""The processes that run jobs and notebooks: `python -m hyperion.processes.worker KIND arguments`.

job REQUEST ANSWER: the worker of a plain job.
rank FOLDER AGENT: one rank of a job, started by torchrun.
kernel LAUNCHER arguments: a notebook's kernel that ends with its launcher; the other arguments are ipykernel's.
"""

import contextlib
import faulthandler
import os
import runpy
import signal
import sys
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING

import psutil

from hyperion.errors import HyperionError
from hyperion.processes.child_process import die_with, do_not_outlive, pin_to_cores
from hyperion.processes.job import INTERRUPTED, load_entry
from hyperion.processes.ranks import JobFolder, rank_log, read_json, write_json

if TYPE_CHECKING:
    from hyperion.processes.group import World

# Gloo raises plain RuntimeErrors. With these texts: a peer closed its connection, or did not join in time.
_GLOO_MARKS = ("gloo/transport", "Connection closed by peer", "Connection reset by peer")
_STACKS_S = 0.5


def run_plain_job(request_file: str, answer_file: str) -> None:
    """Call the job's function and write its result, or its HyperionError, to the answer file."""
    request = read_json(Path(request_file))
    die_with(request["launcher"])
    pin_to_cores()
    try:
        answer = load_entry(request["entry"])(**request["params"])
    except HyperionError as error:
        write_json(Path(answer_file), {"error": error.as_dict()})
        sys.exit(error.exit_code)
    write_json(Path(answer_file), {"answer": answer})


def run_kernel(launcher: str, *arguments: str) -> None:
    """Tie this process to the launcher of that process number, then run ipykernel with the other arguments."""
    die_with(int(launcher))
    pin_to_cores()
    # With it ipykernel watches its parent, for systems where `die_with` gets no signal.
    os.environ["JPY_PARENT_PID"] = str(os.getppid())
    sys.argv[1:] = arguments
    runpy.run_module("ipykernel_launcher", run_name="__main__", alter_sys=True)


def run_rank(folder: str, agent: str) -> None:
    """Join the process group, call the entry, and write this rank's answer or error."""
    files, rank = JobFolder(Path(folder)), int(os.environ["RANK"])
    request = read_json(files.request)
    _redirect_output(rank_log(Path(request["logs"]), rank))
    die_with(int(agent))
    do_not_outlive(int(agent))
    _dump_stack_on_signals(files.stack(rank))
    write_json(files.pid(rank), os.getpid())
    with _record_errors(files, rank):
        answer, interruption = _work(request, files, rank)
        if interruption is None:
            write_json(files.record(rank), {"answer": answer})
            return
    _record(files, rank, interruption)
    sys.exit(INTERRUPTED)


def _dump_stack_on_signals(stack: Path) -> None:
    """Write the stack on SIGUSR1, which the launcher sends, and on SIGTERM, unless the entry handles it. Log it on a crash.

    faulthandler works without the interpreter, so a rank that hangs in C++ writes its stack too.
    """
    file = open(stack, "w")  # noqa: SIM115 - open until the process ends
    faulthandler.register(signal.SIGUSR1, file=file)
    faulthandler.register(signal.SIGTERM, file=file, chain=True)
    faulthandler.enable(all_threads=False)


def _work(request: dict, files: JobFolder, rank: int) -> tuple[dict | None, HyperionError | None]:
    """Return the entry's answer, or the error by which it says that it saved its state after SIGTERM.

    In both cases the ranks leave the group in order.
    """
    from hyperion.processes.group import process_group

    with process_group() as world, _record_errors(files, rank):
        try:
            answer = load_entry(request["entry"])(**request["params"])
        except HyperionError as error:
            if error.exit_code != INTERRUPTED:
                raise
            signal.signal(signal.SIGTERM, signal.SIG_IGN)  # the rank is already ending
            return None, error
        if request["nodes"] > 1:
            _gather_answers(answer, world, files)
    return answer, None


def _gather_answers(answer: dict, world: "World", files: JobFolder) -> None:
    """Write the answers of all ranks on each node: a launcher cannot read the files of other nodes."""
    import torch.distributed as dist

    answers = [None] * world.size
    dist.all_gather_object(answers, answer)
    if world.local_rank == 0:
        write_json(files.answers, answers)


@contextlib.contextmanager
def _record_errors(files: JobFolder, rank: int) -> Iterator[None]:
    """Write whatever is raised inside, then end the process at once: a normal exit would wait for peers."""
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
    """Write the error to the rank's record and to its log, and return the record."""
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
    # The user sees rank 0's log. A HyperionError, or a peer's failure, needs no traceback there.
    short = f"rank {rank} lost its peers: {record['raised']}" if lost_peer else record["raised"]
    print(short if lost_peer or message else record["traceback"], file=sys.stderr)
    return record


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    """Yield the error, then its causes."""
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def _is_lost_peer(error: BaseException) -> bool:
    """Return True if the error says that another rank is gone or late, so that this rank is not the root cause."""
    import torch.distributed as dist

    if isinstance(error, dist.DistBackendError | dist.DistNetworkError | dist.DistStoreError):
        return True
    return isinstance(error, RuntimeError) and any(mark in str(error) for mark in _GLOO_MARKS)


def _from_entry(frames: TracebackType | None) -> TracebackType | None:
    """Return the traceback without this file's frames, which every rank has."""
    while frames is not None and frames.tb_next is not None and frames.tb_frame.f_code.co_filename == __file__:
        frames = frames.tb_next
    return frames


def _request_peers_stacks(files: JobFolder) -> None:
    """Send SIGUSR1 to the other ranks of this node, before torchrun ends them: the stack of a missing rank shows where it is."""
    for pid in files.pids().values():
        with contextlib.suppress(psutil.NoSuchProcess):
            if pid != os.getpid() and psutil.Process(pid).ppid() == os.getppid():
                os.kill(pid, signal.SIGUSR1)
    time.sleep(_STACKS_S)


def _redirect_output(file: Path) -> None:
    """Redirect stdout and stderr of this process, C++ code and child processes to one file, in order of writing."""
    log = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    for stream in (1, 2):
        os.dup2(log, stream)
    os.close(log)


if __name__ == "__main__":
    kind, *rest = sys.argv[1:]
    {"job": run_plain_job, "rank": run_rank, "kernel": run_kernel}[kind](*rest)
