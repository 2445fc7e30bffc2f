"""A Job: work that needs a process of its own, so that its memory, its settings and its death are its own.

The launcher streams the worker's output, enforces a timeout, and raises what the worker raised. A worker whose
launcher died dies too.
"""

import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path

from hyperion.errors import HyperionError

PROGRESS = "@progress "
_GRACE_S = 30.0
_LOG_TAIL = 40


class JobError(HyperionError):
    """A worker that raised, was killed, or ran out of time."""


@dataclass(frozen=True)
class Job:
    """What a worker process is to do.

    Args:
        entry: "package.module:function"; called with `params`, it returns a JSON-able dict.
        params: JSON-able keyword arguments.
        timeout_s: seconds after which the worker is ended: SIGTERM first, SIGKILL 30 s later.
        python: interpreter of the worker.
        ranks: processes that do it together (see `run_ranks`); None for one plain worker.
        nodes: hosts they are spread over, equally.
        rendezvous: "host:port" where the hosts meet; "" on a single host.
    """

    entry: str
    params: dict = field(default_factory=dict)
    timeout_s: float = 3600.0
    python: str = sys.executable
    ranks: int | None = None
    nodes: int = 1
    rendezvous: str = ""


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
    with tempfile.TemporaryDirectory(prefix="hyperion-job-") as folder:
        request, answer = Path(folder) / "request.json", Path(folder) / "answer.json"
        request.write_text(json.dumps(asdict(job) | {"launcher": os.getpid()}))
        command = [job.python, "-m", "hyperion.processes.worker", str(request), str(answer)]
        tail: list[str] = []
        worker = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace", env=package_environment()
        )
        try:
            timed_out = _stream(worker, job.timeout_s, tail, on_line, on_progress)
        finally:
            _end(worker)
        if timed_out:
            raise JobError(
                f"{job.entry} ran past its timeout of {job.timeout_s:g} s and was ended\n" + "".join(tail),
                where=f"worker process {worker.pid}",
                next_step="look at the log above for where it stood still, or allow it more time",
            )
        if worker.returncode != 0:
            raise _told(answer) if answer.exists() else _failure(job, worker, tail)
        return json.loads(answer.read_text())["answer"]


def report_progress(done: int, total: int, note: str = "") -> None:
    """Called within a worker: tell the launcher how far the work is."""
    print(PROGRESS + json.dumps([done, total, note]), flush=True)


def package_environment() -> dict[str, str]:
    """The environment as it is, with this hyperion on the path and output unbuffered."""
    # The worker must find this same hyperion wherever the launcher was started; all else is inherited as it is.
    package_parent = str(Path(__file__).resolve().parents[2])
    inherited = os.environ.get("PYTHONPATH")
    path = f"{package_parent}{os.pathsep}{inherited}" if inherited else package_parent
    return os.environ | {"PYTHONPATH": path, "PYTHONUNBUFFERED": "1"}


def _stream(worker, timeout_s: float, tail: list[str], on_line, on_progress) -> bool:
    """Pass the worker's output on until it ends; whether the timeout struck."""
    struck = threading.Event()

    def strike():
        struck.set()
        worker.terminate()

    timers = [threading.Timer(timeout_s, strike), threading.Timer(timeout_s + _GRACE_S, worker.kill)]
    for timer in timers:
        timer.daemon = True
        timer.start()
    try:
        for line in worker.stdout:
            if line.startswith(PROGRESS):
                on_progress(*json.loads(line.removeprefix(PROGRESS)))
                continue
            tail.append(line)
            del tail[:-_LOG_TAIL]
            on_line(line.rstrip("\n"))
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
            worker.wait(_GRACE_S)
        except subprocess.TimeoutExpired:
            worker.kill()
            worker.wait()
    worker.stdout.close()


def _told(answer: Path) -> JobError:
    """The worker's own account of what a user can put right."""
    error = json.loads(answer.read_text())["error"]
    return JobError(error["what"], where=error["where"], next_step=error["next_step"])


def _failure(job: Job, worker, tail: list[str]) -> JobError:
    code = worker.returncode
    cause = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"failed with exit code {code}"
    remedy = "read the traceback above"
    if code == -signal.SIGKILL:
        remedy = (
            "the system kills with SIGKILL when memory runs out: choose smaller sizes, or free memory, and run again"
        )
    return JobError(f"{job.entry} {cause}\n" + "".join(tail), where=f"worker process {worker.pid}", next_step=remedy)
