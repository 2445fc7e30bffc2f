"""One rank's side of a Job: `python -m hyperion.processes.rank_worker FOLDER AGENT`, started by torchrun."""

import contextlib
import faulthandler
import os
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
from hyperion.processes.job import INTERRUPTED, load_entry
from hyperion.processes.lifeline import die_with, do_not_outlive
from hyperion.processes.notes import Notes, log_of, read, write

if TYPE_CHECKING:
    from hyperion.processes.group import World

# How gloo says that a peer closed its connection, or did not come in time; as plain RuntimeErrors.
_GLOO_MARKS = ("gloo/transport", "Connection closed by peer", "Connection reset by peer")
_STACKS_S = 0.5


def main(folder: str, agent: str) -> None:
    """Join the group, call the entry, write this rank's answer, or what became of it and when."""
    notes, rank = Notes(Path(folder)), int(os.environ["RANK"])
    request = read(notes.request)
    _write_to_own_log(log_of(Path(request["logs"]), rank))
    die_with(int(agent))
    do_not_outlive(int(agent))
    _say_where_it_stands(notes.stack(rank))
    write(notes.pid(rank), os.getpid())
    with _telling(notes, rank):
        answer, interruption = _work(request, notes, rank)
        if interruption is None:
            write(notes.record(rank), {"answer": answer})
            return
    _tell(notes, rank, interruption)
    sys.exit(INTERRUPTED)


def _say_where_it_stands(stack: Path) -> None:
    """On SIGUSR1, with which the launcher asks; on SIGTERM, with which torchrun ends a rank, unless the entry handles it
    itself; on a crash, in the log. A rank that hangs in C++ answers too.
    """
    file = open(stack, "w")  # noqa: SIM115 - open as long as the process
    faulthandler.register(signal.SIGUSR1, file=file)
    faulthandler.register(signal.SIGTERM, file=file, chain=True)
    faulthandler.enable(all_threads=False)


def _work(request: dict, notes: Notes, rank: int) -> tuple[dict | None, HyperionError | None]:
    """What the entry answered, or that it was asked to stop and saved: then the ranks part in order all the same."""
    from hyperion.processes.group import process_group

    with process_group() as world, _telling(notes, rank):
        try:
            answer = load_entry(request["entry"])(**request["params"])
        except HyperionError as error:
            if error.exit_code != INTERRUPTED:
                raise
            signal.signal(signal.SIGTERM, signal.SIG_IGN)  # it does what it was asked to
            return None, error
        if request["nodes"] > 1:
            _share_answers(answer, world, notes)
    return answer, None


def _share_answers(answer: dict, world: "World", notes: Notes) -> None:
    """Ranks of other nodes write their answers where this node's launcher cannot read them."""
    import torch.distributed as dist

    answers = [None] * world.size
    dist.all_gather_object(answers, answer)
    if world.local_rank == 0:
        write(notes.answers, answers)


@contextlib.contextmanager
def _telling(notes: Notes, rank: int) -> Iterator[None]:
    """Whatever is raised inside is written down at once, then the process ends: an orderly end would wait for peers."""
    try:
        yield
    except BaseException as error:
        record = _tell(notes, rank, error)
        if record["timed_out"]:
            _ask_peers_where_they_stand(notes)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(record["exit_code"])


def _tell(notes: Notes, rank: int, error: BaseException) -> dict:
    own_words = error.as_dict() if isinstance(error, HyperionError) else None
    texts = [str(link) for link in _links(error)]
    lost_peer = any(_is_lost_peer(link) for link in _links(error))
    record = {
        "time": time.time(),
        "raised": "".join(traceback.format_exception_only(error)).strip(),
        "traceback": "".join(traceback.format_exception(type(error), error, _from_entry(error.__traceback__))),
        "error": own_words,
        "exit_code": error.exit_code if own_words else 1,
        "lost_peer": lost_peer,
        "timed_out": lost_peer and any("timed out" in text.lower() or "timeout" in text.lower() for text in texts),
    }
    write(notes.record(rank), record)
    # The user watches rank 0's log: what is no fault of this rank, or comes in its own words, needs no traceback there.
    short = f"rank {rank} lost its peers: {record['raised']}" if lost_peer else record["raised"]
    print(short if lost_peer or own_words else record["traceback"], file=sys.stderr)
    return record


def _links(error: BaseException | None) -> Iterator[BaseException]:
    """The error and what it was raised from."""
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def _is_lost_peer(error: BaseException) -> bool:
    """Whether an error says that another rank is gone or late: then this rank is not the one to blame."""
    import torch.distributed as dist

    if isinstance(error, dist.DistBackendError | dist.DistNetworkError | dist.DistStoreError):
        return True
    return isinstance(error, RuntimeError) and any(mark in str(error) for mark in _GLOO_MARKS)


def _from_entry(frames: TracebackType | None) -> TracebackType | None:
    """The traceback from the entry on: how this file called it helps nobody."""
    while frames is not None and frames.tb_next is not None and frames.tb_frame.f_code.co_filename == __file__:
        frames = frames.tb_next
    return frames


def _ask_peers_where_they_stand(notes: Notes) -> None:
    """Before torchrun ends the others because of this rank: who did not come is still somewhere."""
    for pid in notes.pids().values():
        with contextlib.suppress(psutil.NoSuchProcess):
            if pid != os.getpid() and psutil.Process(pid).ppid() == os.getppid():
                os.kill(pid, signal.SIGUSR1)
    time.sleep(_STACKS_S)


def _write_to_own_log(file: Path) -> None:
    """Output of this process, C++ included, and of its children, in one file in the order it came."""
    log = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    for stream in (1, 2):
        os.dup2(log, stream)
    os.close(log)


if __name__ == "__main__":
    main(*sys.argv[1:])
