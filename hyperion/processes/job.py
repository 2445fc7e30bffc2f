"""A Job: work that needs a process of its own, so that its memory, its settings and its death are its own.

The launcher streams the worker's output, enforces a timeout, and raises what the worker raised. A worker whose
launcher died dies too.
"""

import importlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from pathlib import Path

from hyperion.errors import HyperionError
from hyperion.processes.lifeline import GRACE_S, child_environment
from hyperion.processes.output import Listener
from hyperion.processes.starting import start

# A worker that was asked to end, saved, and is to be started again: EX_TEMPFAIL of <sysexits.h>.
INTERRUPTED = 75
KILLED_REMEDY = "the system kills with SIGKILL when memory runs out: choose smaller sizes, or free memory, and run again"


class JobError(HyperionError):
    """A worker that raised, was killed, or ran out of time. It has the exit code of the worker's own HyperionError: 75
    says that the worker was asked to end, and saved."""

    def __init__(self, what: str, *, where: object = None, next_step: str | None = None, exit_code: int = 2):
        super().__init__(what, where=where, next_step=next_step)
        self.exit_code = exit_code


@dataclass(frozen=True)
class Job:
    """What a worker process is to do.

    Args:
        function: called in the worker as `function(**params)`; returns a JSON-able dict. It is defined at the top level of a
            module, from which the worker imports it.
        params: JSON-able keyword arguments.
        timeout_s: seconds after which the worker is ended: SIGTERM first, SIGKILL 30 s later.
        python: interpreter of the worker.
        ranks: processes, on all nodes together, that do it with each other (`run_ranks`); None: one plain worker
            (`run_job`).
        nodes: hosts that share the ranks evenly; each of them calls `run_ranks` with the same job.
        rendezvous: "host:port" where the hosts meet; "" on a single host.

    Raises:
        HyperionError: the worker cannot import the function.
    """

    function: Callable[..., dict]
    params: dict = field(default_factory=dict)
    timeout_s: float = 3600.0
    python: str = sys.executable
    ranks: int | None = None
    nodes: int = 1
    rendezvous: str = ""

    def __post_init__(self):
        entry_of(self.function)

    @property
    def entry(self) -> str:
        """The function as "package.module:name"."""
        return entry_of(self.function)

    def request(self) -> dict:
        """Return the job as JSON-able values, for the process that runs it."""
        values = {field.name: getattr(self, field.name) for field in fields(self) if field.name != "function"}
        return values | {"entry": self.entry}

    @property
    def ranks_per_node(self) -> int:
        """Ranks that each host starts."""
        return self.ranks // self.nodes


def entry_of(function: Callable) -> str:
    """Return "package.module:name", by which another process imports the function.

    Raises:
        HyperionError: it is not at the top level of a module that can be imported: a lambda, a nested function, a method, or
            a function of a notebook or a script.
    """
    module, name = getattr(function, "__module__", None), getattr(function, "__qualname__", "")
    if not module or module == "__main__" or not name.isidentifier():
        raise HyperionError(
            f"a worker process cannot import {name or function} from {module or 'no module'}",
            where="function of a job",
            next_step="define the function with `def` at the top level of a module, and import it from there",
        )
    return f"{module}:{name}"


def load_entry(entry: str) -> Callable:
    """Import the function that `entry_of` named."""
    module, name = entry.split(":")
    return getattr(importlib.import_module(module), name)


def run_job(
    job: Job,
    on_line: Callable[[str], object] = print,
    on_progress: Callable[[int, int, str], object] = lambda done, total, note: None,
) -> dict:
    """Run a job in a fresh process, which inherits the whole environment, and return what its entry returned.

    Args:
        on_line: called with each line the worker prints.
        on_progress: called with (done, total, note) for each progress report of the worker.

    Raises:
        JobError: the worker raised, was killed by a signal, or passed its timeout. The message is that of the worker's
            HyperionError, which names place and remedy; of any other end it holds the end of the worker's log.
    """
    if job.ranks is not None:
        raise JobError(
            f"{job.entry} is to run on ranks ({job.ranks}), and run_job starts one plain worker",
            where="run_job",
            next_step="call run_ranks, or leave ranks out",
        )
    with tempfile.TemporaryDirectory(prefix="hyperion-job-") as folder:
        request, answer = Path(folder) / "request.json", Path(folder) / "answer.json"
        request.write_text(json.dumps(job.request() | {"launcher": os.getpid()}), "utf-8")
        listener = Listener(on_line, on_progress)
        worker = start(job.python, "hyperion.processes.worker", [str(request), str(answer)], child_environment())
        try:
            timed_out = _stream(worker, job.timeout_s, listener)
        finally:
            _end(worker)
        if timed_out:
            raise JobError(
                f"{job.entry} ran past its timeout of {job.timeout_s:g} s and was ended\n" + "".join(listener.tail),
                where=f"worker process {worker.pid}",
                next_step="look at the log above for where it stood still, or allow it more time",
            )
        if worker.returncode != 0:
            raise _told(answer, worker.returncode) if answer.exists() else _failure(job, worker, listener.tail)
        return json.loads(answer.read_text())["answer"]


def _stream(worker, timeout_s: float, listener: Listener) -> bool:
    """Pass the worker's output on until it ends; whether the timeout struck."""
    struck = threading.Event()

    def strike():
        struck.set()
        worker.terminate()

    timers = [threading.Timer(timeout_s, strike), threading.Timer(timeout_s + GRACE_S, worker.kill)]
    for timer in timers:
        timer.daemon = True
        timer.start()
    try:
        for line in worker.stdout:
            listener.hear(line)
        worker.wait()
    finally:
        for timer in timers:
            timer.cancel()
    return struck.is_set()


def _end(worker) -> None:
    """Leave no process behind, also when the launcher was interrupted; the worker gets time to save first."""
    if worker.poll() is None:
        worker.terminate()
        try:
            worker.wait(GRACE_S)
        except subprocess.TimeoutExpired:
            worker.kill()
            worker.wait()
    worker.stdout.close()


def _told(answer: Path, code: int) -> JobError:
    """The worker's own account of what a user can put right."""
    error = json.loads(answer.read_text())["error"]
    return JobError(error["what"], where=error["where"], next_step=error["next_step"], exit_code=code)


def _failure(job: Job, worker, tail: list[str]) -> JobError:
    code = worker.returncode
    cause = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"failed with exit code {code}"
    remedy = KILLED_REMEDY if code == -signal.SIGKILL else "read the traceback above"
    return JobError(f"{job.entry} {cause}\n" + "".join(tail), where=f"worker process {worker.pid}", next_step=remedy)
