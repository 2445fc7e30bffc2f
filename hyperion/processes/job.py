"""A job: a function that runs in a fresh process, with its own memory, settings and exit code.

The launcher streams the worker's output, enforces a timeout, and raises the worker's error. The worker ends when its
launcher ends.
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
from hyperion.processes.child_process import GRACE_S, child_environment, start

# Exit code of a worker that received SIGTERM, saved its state and can be started again: EX_TEMPFAIL of <sysexits.h>.
INTERRUPTED = 75
KILLED_REMEDY = "the system kills with SIGKILL when memory runs out: choose smaller sizes, or free memory, and run again"
_PROGRESS = "@progress "
_LAST_LINES = 40


class JobError(HyperionError):
    """A worker raised, was killed, or timed out.

    Attributes:
        exit_code: that of the worker's HyperionError; 75 if the worker received SIGTERM and saved its state.
    """

    def __init__(self, what: str, *, where: object = None, next_step: str | None = None, exit_code: int = 2):
        super().__init__(what, where=where, next_step=next_step)
        self.exit_code = exit_code


@dataclass(frozen=True)
class Job:
    """What a worker process runs.

    Args:
        function: called in the worker as `function(**params)`; returns a JSON-able dict. It is defined at the top level of a
            module, from which the worker imports it.
        params: JSON-able keyword arguments.
        timeout_s: seconds after which the worker gets SIGTERM, and SIGKILL 30 s later.
        python: interpreter of the worker.
        ranks: number of ranks on all nodes together (`run_ranks`); None for one plain worker (`run_job`).
        nodes: number of hosts, which share the ranks evenly. Each host calls `run_ranks` with the same job.
        rendezvous: torchrun's rendezvous endpoint "host:port"; "" on a single host.

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

    @property
    def ranks_per_node(self) -> int:
        """Number of ranks that each host starts."""
        return (self.ranks or 1) // self.nodes

    def request(self) -> dict:
        """Return the job as JSON-able values, for the process that runs it."""
        values = {field.name: getattr(self, field.name) for field in fields(self) if field.name != "function"}
        return values | {"entry": self.entry}


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
    """Run a job in a fresh process that inherits the environment, and return what its function returned.

    Args:
        on_line: called with each line the worker prints.
        on_progress: called with (done, total, note) for each `report_progress` of the worker.

    Raises:
        JobError: the worker raised, was killed by a signal, or exceeded its timeout. The message is that of the worker's
            HyperionError; for any other error it contains the last lines of the worker's log.
    """
    if job.ranks is not None:
        raise JobError(
            f"run_job starts one plain worker, but the job {job.entry} asks for {job.ranks} ranks",
            where="run_job",
            next_step="call run_ranks, or omit ranks",
        )
    with tempfile.TemporaryDirectory(prefix="hyperion-job-") as folder:
        request, answer = Path(folder) / "request.json", Path(folder) / "answer.json"
        request.write_text(json.dumps(job.request() | {"launcher": os.getpid()}), "utf-8")
        output = OutputHandler(on_line, on_progress)
        worker = start(job.python, "hyperion.processes.worker", ["job", str(request), str(answer)], child_environment())
        try:
            timed_out = _stream(worker, job.timeout_s, output)
        finally:
            _end(worker)
        if timed_out:
            raise JobError(
                f"{job.entry} exceeded its timeout of {job.timeout_s:g} s and was ended\n" + "".join(output.last_lines),
                where=f"worker process {worker.pid}",
                next_step="see the log above for where it hung, or raise the timeout",
            )
        if worker.returncode != 0:
            raise _worker_error(answer, worker.returncode) if answer.exists() else _exit_error(job, worker, output.last_lines)
        return json.loads(answer.read_text())["answer"]


def report_progress(done: int, total: int, note: str = "") -> None:
    """Report the progress of a worker to its launcher, which calls its `on_progress`."""
    print(_PROGRESS + json.dumps([done, total, note]), flush=True)


class OutputHandler:
    """Pass a worker's lines and progress reports on, and store its last lines for an error message.

    Args:
        on_line: called with each line, without its newline.
        on_progress: called with (done, total, note) for each progress report.

    Attributes:
        last_lines: the last 40 lines.
    """

    def __init__(self, on_line: Callable[[str], object], on_progress: Callable[[int, int, str], object]):
        self.on_line, self.on_progress = on_line, on_progress
        self.last_lines: list[str] = []

    def handle(self, line: str) -> None:
        """Handle one line, which ends with its newline."""
        if line.startswith(_PROGRESS):
            self.on_progress(*json.loads(line.removeprefix(_PROGRESS)))
            return
        self.last_lines.append(line)
        del self.last_lines[:-_LAST_LINES]
        self.on_line(line.rstrip("\n"))


def last_lines(log: str) -> str:
    """Return the last 40 lines of a log, without progress reports and without the C++ frames and module lists of a crash."""
    noise = (_PROGRESS, "frame #", "Extension modules:")
    return "".join([line for line in log.splitlines(keepends=True) if not line.startswith(noise)][-_LAST_LINES:])


def _stream(worker: subprocess.Popen[str], timeout_s: float, output: OutputHandler) -> bool:
    """Pass the worker's output on until it ends. Return True if it timed out."""
    timed_out = threading.Event()

    def on_timeout():
        timed_out.set()
        worker.terminate()

    timers = [threading.Timer(timeout_s, on_timeout), threading.Timer(timeout_s + GRACE_S, worker.kill)]
    for timer in timers:
        timer.daemon = True
        timer.start()
    try:
        for line in worker.stdout or ():
            output.handle(line)
        worker.wait()
    finally:
        for timer in timers:
            timer.cancel()
    return timed_out.is_set()


def _end(worker: subprocess.Popen[str]) -> None:
    """Leave no process behind, also when the launcher is interrupted. The worker gets `GRACE_S` to save its state."""
    if worker.poll() is None:
        worker.terminate()
        try:
            worker.wait(GRACE_S)
        except subprocess.TimeoutExpired:
            worker.kill()
            worker.wait()
    if worker.stdout is not None:
        worker.stdout.close()


def _worker_error(answer: Path, code: int) -> JobError:
    """The HyperionError that the worker raised."""
    error = json.loads(answer.read_text())["error"]
    return JobError(error["what"], where=error["where"], next_step=error["next_step"], exit_code=code)


def _exit_error(job: Job, worker: subprocess.Popen[str], lines: list[str]) -> JobError:
    """The error of a worker that wrote no answer: its exit code or signal, and its last lines."""
    code = worker.returncode
    cause = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"failed with exit code {code}"
    remedy = KILLED_REMEDY if code == -signal.SIGKILL else "read the traceback above"
    return JobError(f"{job.entry} {cause}\n" + "".join(lines), where=f"worker process {worker.pid}", next_step=remedy)
