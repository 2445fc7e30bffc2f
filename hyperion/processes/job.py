"""Run functions as jobs. A job runs in a process of its own, with its own memory, settings and exit code.

The launcher is the process that starts the job, and the worker is the process that runs it. The launcher streams the output
of the worker, enforces a timeout, and raises the worker's error. The worker ends when its launcher ends.
"""

import codecs
import importlib
import io
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, fields
from pathlib import Path

from hyperion.errors import HyperionError
from hyperion.garbage import imports_only
from hyperion.processes.child_process import GRACE_S, child_environment
from hyperion.processes.fork_server import ForkedWorker, start_worker

# Exit code of a worker that received SIGTERM, saved its state, and can be started again. The value is EX_TEMPFAIL in
# <sysexits.h>.
INTERRUPTED = 75
KILLED_REMEDY = "the operating system sends SIGKILL when memory runs out: choose smaller sizes or free memory, then run again"
_PROGRESS = "@progress "
_LAST_LINES = 40
_POLL_S = 0.2
_PIPE_BYTES = 1 << 16  # capacity of a pipe


class JobError(HyperionError):
    """Raised when a worker raised an exception, was killed, or exceeded its timeout.

    Attributes:
        exit_code: exit code for a command that fails with this error. It is the exit code of the HyperionError that the worker
            raised, or 75 if the worker received SIGTERM and saved its state.
    """

    def __init__(self, what: str, *, where: object = None, next_step: str | None = None, exit_code: int = 2):
        super().__init__(what, where=where, next_step=next_step)
        self.exit_code = exit_code


@dataclass(frozen=True)
class Job:
    """A function to run in a worker process, with its arguments and the options of the process.

    Args:
        function: the worker calls `function(**params)`, which returns a JSON-serializable dict. The function must be defined at
            the top level of a module, because the worker imports it from there.
        params: JSON-serializable keyword arguments of the function.
        timeout_s: seconds after which the worker receives SIGTERM. It receives SIGKILL 30 s later.
        python: path of the Python interpreter of the worker.
        ranks: total number of ranks on all nodes, for `run_ranks`; None for one worker without ranks, for `run_job`.
        nodes: number of hosts. Each host runs the same number of ranks and calls `run_ranks` with the same job.
        rendezvous: rendezvous endpoint of torchrun, as "host:port"; "" on a single host.
        mpirun: path of the mpirun that starts the ranks, so that they can call MPI; "" if torchrun starts them.

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
    mpirun: str = ""

    def __post_init__(self):
        entry_of(self.function)

    @property
    def entry(self) -> str:
        """Name of the function as "package.module:name"."""
        return entry_of(self.function)

    @property
    def ranks_per_node(self) -> int:
        """Number of ranks that each host starts."""
        return (self.ranks or 1) // self.nodes

    def request(self) -> dict:
        """Return the job as a JSON-serializable dict for the process that runs it."""
        values = {field.name: getattr(self, field.name) for field in fields(self) if field.name != "function"}
        return values | {"entry": self.entry}


def entry_of(function: Callable) -> str:
    """Return the name of a function as "package.module:name", so that another process can import the function.

    Raises:
        HyperionError: the function is not defined at the top level of an importable module. Examples are lambdas, nested
            functions, methods, and functions in a notebook or a script.
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
    """Import and return the function with a name in the form that `entry_of` returns."""
    module, name = entry.split(":")
    with imports_only():
        return getattr(importlib.import_module(module), name)


def run_job(
    job: Job,
    on_line: Callable[[str], object] = print,
    on_progress: Callable[[int, int, str], object] = lambda done, total, note: None,
) -> dict:
    """Run a job in a process of its own, and return the result of its function. The process inherits the environment.

    Args:
        job: the job. Its field `ranks` must be None.
        on_line: called with each line that the worker prints.
        on_progress: called with (done, total, note) for each call to `report_progress` in the worker.

    Raises:
        JobError: the worker raised an exception, was killed by a signal, or exceeded its timeout. If the worker raised a
            HyperionError, the JobError has the same message. Otherwise, the message contains the last lines of the worker's
            log.
    """
    if job.ranks is not None:
        raise JobError(
            f"run_job starts one plain worker, but the job {job.entry} asks for {job.ranks} ranks",
            where="run_job",
            next_step="call run_ranks, or omit ranks",
        )
    with tempfile.TemporaryDirectory(prefix="hyperion-job-") as folder:
        request, answer = Path(folder) / "request.json", Path(folder) / "answer.json"
        request.write_text(json.dumps(job.request()), "utf-8")
        output = OutputHandler(on_line, on_progress)
        worker = start_worker(job.python, ["job", str(request), str(answer)], child_environment())
        try:
            timed_out = _stream(worker, job.timeout_s, output)
        finally:
            _end(worker)
        if timed_out:
            raise JobError(
                f"{job.entry} exceeded its timeout of {job.timeout_s:g} s and was ended\n" + "".join(output.last_lines),
                where=f"worker process {worker.pid}",
                next_step="find out from the log above where the worker hung, or raise the timeout",
            )
        if worker.returncode != 0:
            raise _worker_error(answer, worker.returncode) if answer.exists() else _exit_error(job, worker, output.last_lines)
        return json.loads(answer.read_text())["answer"]


def report_progress(done: int, total: int, note: str = "") -> None:
    """Report the progress of this worker to its launcher. The launcher then calls `on_progress` with the same arguments."""
    print(_PROGRESS + json.dumps([done, total, note]), flush=True)


class OutputHandler:
    """Passes the output lines and progress reports of a worker to functions, and stores the last lines for error messages.

    Args:
        on_line: called with each line, without the newline.
        on_progress: called with (done, total, note) for each progress report.

    Attributes:
        last_lines: the last 40 lines that the worker printed, without progress reports.
    """

    def __init__(self, on_line: Callable[[str], object], on_progress: Callable[[int, int, str], object]):
        self.on_line, self.on_progress = on_line, on_progress
        self.last_lines: list[str] = []

    def handle(self, line: str) -> None:
        """Handle one line, which ends with a newline."""
        if line.startswith(_PROGRESS):
            self.on_progress(*json.loads(line.removeprefix(_PROGRESS)))
            return
        self.last_lines.append(line)
        # A job can print for hours, but an error message needs only the last lines.
        del self.last_lines[:-_LAST_LINES]
        self.on_line(line.rstrip("\n"))


def last_lines(log: str) -> str:
    """Return the last 40 lines of a log.

    Progress reports are omitted. The C++ frames and the list of modules that Python prints after a crash are omitted too.
    """
    noise = (_PROGRESS, "frame #", "Extension modules:")
    return "".join([line for line in log.splitlines(keepends=True) if not line.startswith(noise)][-_LAST_LINES:])


def _stream(worker: subprocess.Popen[str] | ForkedWorker, timeout_s: float, output: OutputHandler) -> bool:
    """Handle the output of the worker until the worker ends. Return True if the worker exceeded its timeout."""
    timed_out = threading.Event()

    def on_timeout():
        timed_out.set()
        worker.terminate()

    # The signals come from timers, because the functions that handle the output may block. After SIGTERM the worker can save its
    # state. SIGKILL ends it.
    timers = [threading.Timer(timeout_s, on_timeout), threading.Timer(timeout_s + GRACE_S, worker.kill)]
    for timer in timers:
        timer.daemon = True
        timer.start()
    try:
        for line in _lines_until_the_end(worker):
            output.handle(line)
        worker.wait()
    finally:
        for timer in timers:
            timer.cancel()
    return timed_out.is_set()


def _lines_until_the_end(worker: subprocess.Popen[str] | ForkedWorker) -> Iterator[str]:
    """Yield the lines that a worker prints, until the worker has ended.

    The end of the pipe would be too late: a process that the worker has started may keep the pipe open.
    """
    assert worker.stdout is not None
    descriptor, rest, ended = worker.stdout.fileno(), "", False
    decoder = io.IncrementalNewlineDecoder(codecs.getincrementaldecoder("utf-8")("replace"), translate=True)
    while True:
        # If the worker has ended, everything that it printed is in the pipe.
        ended = ended or worker.poll() is not None
        if not select.select([descriptor], [], [], 0 if ended else _POLL_S)[0]:
            if ended:
                break
            continue
        data = os.read(descriptor, _PIPE_BYTES)
        *lines, rest = (rest + decoder.decode(data, not data)).split("\n")
        yield from (f"{line}\n" for line in lines)
        if ended or not data:
            break
    if rest:
        yield rest


def _end(worker: subprocess.Popen[str] | ForkedWorker) -> None:
    """End the worker if it is still running. This happens, for example, if the launcher was interrupted.

    The worker has `GRACE_S` seconds to save its state.
    """
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
    """Return the HyperionError that the worker raised, as a JobError."""
    error = json.loads(answer.read_text())["error"]
    return JobError(error["what"], where=error["where"], next_step=error["next_step"], exit_code=code)


def _exit_error(job: Job, worker: subprocess.Popen[str] | ForkedWorker, lines: list[str]) -> JobError:
    """Return the error for a worker that wrote no answer. It contains the exit code or signal, and the last lines of the log."""
    code = worker.returncode
    cause = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"failed with exit code {code}"
    remedy = KILLED_REMEDY if code == -signal.SIGKILL else "read the traceback above"
    return JobError(f"{job.entry} {cause}\n" + "".join(lines), where=f"worker process {worker.pid}", next_step=remedy)
