"""torchrun for one node, tied to its launcher: `python -m hyperion.processes.rank_agent FOLDER`.

It is torch.distributed.run with three things added: it ends with its launcher and leaves nothing behind, it refuses an
entry that does not exist before N interpreters are started, and it writes
down how each rank ended.
"""

import ast
import contextlib
import hashlib
import importlib.util
import json
import os
import shutil
import signal
import sys
import time
from pathlib import Path
from subprocess import Popen

import psutil

from hyperion.errors import HyperionError
from hyperion.hardware.cpu import read_cpu
from hyperion.processes.lifeline import GRACE_S, die_with, has_ended, kill_session, lives
from hyperion.processes.notes import Notes, read, write
from hyperion.processes.share import keep_to_share
from hyperion.processes.starting import start

_POLL_S = 0.1


def main(folder: str) -> None:
    """Run the request's ranks; exit code 0 when all of them answered."""
    notes = Notes(Path(folder))
    request = read(notes.request)
    die_with(request["launcher"])
    keep_to_share()
    try:
        require_entry(request["entry"])
    except HyperionError as error:
        write(notes.ends, {"error": error.as_dict()})
        sys.exit(error.exit_code)
    # The cores are shared out among the ranks, unless the user did that: torchrun would give each a single thread.
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, read_cpu().cores // (request["ranks"] // request["nodes"]))))
    ranks = _Ranks()
    try:
        _run(arguments(request, folder), notes, ranks)
    finally:
        ranks.end()
        if has_ended(request["launcher"]):
            shutil.rmtree(folder, ignore_errors=True)  # nobody is left to read it


def _run(command: list[str], notes: Notes, ranks: "_Ranks") -> None:
    from torch.distributed import run as torchrun
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.elastic.multiprocessing.subprocess_handler import SubprocessHandler

    SubprocessHandler._popen = lambda handler, rank_command, environment: ranks.start(rank_command, environment)
    try:
        torchrun.main(command)
    except ChildFailedError as failed:
        # Times are whole seconds here: torchrun's record of them.
        ends = {rank: {"code": end.exitcode, "time": end.timestamp} for rank, end in failed.failures.items()}
        write(notes.ends, {"ends": ends})
        sys.exit(1)
    except SignalException:  # it was asked to end, and has ended the ranks itself, some with SIGKILL: none failed
        raise
    except Exception:
        write(notes.ends, {"ends": ranks.exit_codes()})
        raise


class _Ranks:
    """The ranks that torchrun starts here, in sessions of their own, as it has them."""

    def __init__(self):
        self.started: list[psutil.Process] = []
        self._handles: dict[int, Popen] = {}

    def start(self, command: tuple[str, ...], environment: dict[str, str]) -> Popen:
        """A rank by torchrun's command, `python -u -m module arguments`."""
        module, *arguments = command[command.index("-m") + 1 :]
        process = start(command[0], module, arguments, environment, stdout=sys.stdout, new_session=True)
        self._handles[int(environment["RANK"])] = process
        with contextlib.suppress(psutil.NoSuchProcess):
            self.started.append(psutil.Process(process.pid))
        return process

    def exit_codes(self) -> dict[int, dict]:
        """The exit codes of ranks that have ended of their own accord, for a torchrun that broke before it told them. Those
        that it ended itself by then ended by SIGTERM.
        """
        codes = {rank: handle.poll() for rank, handle in self._handles.items()}
        return {rank: {"code": code} for rank, code in codes.items() if code not in (None, -signal.SIGTERM)}

    def end(self) -> None:
        """Leave no process behind. torchrun did its part, unless more than one signal came: when a launcher with threads is
        killed Linux sends one for each of them, and the second ends torchrun while its ranks still save.
        """
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        living = [rank for rank in self.started if lives(rank)]
        for rank in living:
            rank.terminate()
        deadline = time.monotonic() + GRACE_S
        while any(map(lives, living)) and time.monotonic() < deadline:
            time.sleep(_POLL_S)
        for rank in self.started:
            kill_session(rank.pid, ours=rank.is_running())


def arguments(request: dict, folder: str) -> list[str]:
    """torchrun's command line for a request."""
    meeting = ["--standalone", "--nnodes=1"]
    if request["rendezvous"]:
        # Nodes find each other by this name: jobs that follow each other at one address do not meet.
        name = json.dumps([request[key] for key in ("entry", "params", "ranks", "nodes")], sort_keys=True)
        meeting = [
            f"--nnodes={request['nodes']}",
            "--rdzv-backend=c10d",
            f"--rdzv-endpoint={request['rendezvous']}",
            f"--rdzv-id={hashlib.sha256(name.encode()).hexdigest()[:16]}",
        ]
    return [
        *meeting,
        f"--nproc-per-node={request['ranks'] // request['nodes']}",
        "--max-restarts=0",
        "--monitor-interval=0.1",
        f"--log-dir={folder}/torchrun",
        "-m",
        "hyperion.processes.rank_worker",
        folder,
        str(os.getpid()),
    ]


def require_entry(entry: str) -> None:
    """Refuse an entry that is not there. Its module is read and not imported: that is the ranks' work.

    Raises:
        HyperionError: it is not written "package.module:function", or there is no such module or function.
    """
    module, _, function = entry.partition(":")
    if not (module and function):
        raise _no_entry(f"{entry!r} is no entry", 'write it as "package.module:function"')
    try:
        found = importlib.util.find_spec(module)
    except ModuleNotFoundError:
        found = None
    if found is None:
        raise _no_entry(f"there is no module {module!r}", f"see that {sys.executable} finds it: PYTHONPATH, the folder")
    if found.origin and found.origin.endswith(".py") and not _binds(Path(found.origin).read_text(encoding="utf-8"), function):
        raise _no_entry(f"module {module!r} has no {function!r}", f"name a function of {found.origin}")


def _binds(source: str, name: str) -> bool:
    """Whether a module's text may bind the name: by a definition, an assignment or an import."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name in (name, "__getattr__"):
            return True
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store) and node.id == name:
            return True
        if isinstance(node, ast.alias) and (node.asname or node.name.split(".")[0]) in (name, "*"):
            return True
    return False


def _no_entry(what: str, next_step: str) -> HyperionError:
    return HyperionError(what, where="the job's entry", next_step=next_step)


if __name__ == "__main__":
    main(*sys.argv[1:])
