"""torchrun for one node, tied to its launcher: `python -m hyperion.processes.rank_agent FOLDER`.

It is torch.distributed.run with three things added: it ends with its launcher and leaves nothing behind, it refuses an
entry that does not exist before N interpreters are started, and it writes down how each rank ended.
"""

import ast
import contextlib
import hashlib
import importlib.util
import json
import os
import shutil
import sys
from pathlib import Path

import psutil

from hyperion.errors import HyperionError
from hyperion.processes.lifeline import die_with, kill_session
from hyperion.processes.notes import Notes, read, write


def main(folder: str) -> None:
    """Run the request's ranks; exit code 0 when all of them answered."""
    notes = Notes(Path(folder))
    request = read(notes.request)
    die_with(request["launcher"])
    try:
        require_entry(request["entry"])
    except HyperionError as error:
        write(notes.ends, {"error": error.as_dict()})
        sys.exit(error.exit_code)
    try:
        _run(arguments(request, folder), notes)
    finally:
        for pid in notes.pids().values():
            kill_session(pid, ours=_is_child(pid))
        if os.getppid() != request["launcher"]:
            shutil.rmtree(folder, ignore_errors=True)  # nobody is left to read it


def _run(command: list[str], notes: Notes) -> None:
    from torch.distributed import run as torchrun
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    try:
        torchrun.main(command)
    except ChildFailedError as failed:
        # Times are whole seconds here: torchrun's record of them.
        ends = {rank: {"code": end.exitcode, "time": end.timestamp} for rank, end in failed.failures.items()}
        write(notes.ends, {"ends": ends})
        sys.exit(1)


def _is_child(pid: int) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        return psutil.Process(pid).ppid() == os.getpid()
    return False


def arguments(request: dict, folder: str) -> list[str]:
    """torchrun's command line for a request."""
    meeting = ["--standalone", "--nnodes=1"]
    if request["rendezvous"]:
        # Nodes find each other by this name: jobs that follow each other at one address do not meet.
        name = json.dumps([request[key] for key in ("entry", "params", "ranks", "nodes")], sort_keys=True)
        meeting = [
            f"--nnodes={request['nodes']}", "--rdzv-backend=c10d", f"--rdzv-endpoint={request['rendezvous']}",
            f"--rdzv-id={hashlib.sha256(name.encode()).hexdigest()[:16]}",
        ]  # fmt: skip
    return [
        *meeting, f"--nproc-per-node={request['ranks'] // request['nodes']}", "--max-restarts=0",
        "--monitor-interval=0.1", f"--log-dir={folder}/torchrun", "-m", "hyperion.processes.rank_worker",
        folder, str(os.getpid()),
    ]  # fmt: skip


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
    if found.origin and found.origin.endswith(".py") and not _binds(Path(found.origin).read_text(), function):
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
