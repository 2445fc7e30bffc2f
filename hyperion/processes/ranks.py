"""Ranks of a Job: torchrun as a subprocess, its first rank streamed, every rank logged, the first failure named."""

import json
import os
import re
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path

import torch

from hyperion.errors import HyperionError
from hyperion.hardware import detect
from hyperion.processes.job import PROGRESS, Job, JobError, package_environment

# What torchrun sets for its workers: a launcher that runs under torchrun itself must not hand them down.
TORCHRUN_VARIABLES = (
    "RANK", "LOCAL_RANK", "GROUP_RANK", "ROLE_RANK", "ROLE_NAME", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE",
    "ROLE_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_ERROR_FILE", "TORCHELASTIC_MAX_RESTARTS",
    "TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_USE_AGENT_STORE", "TORCH_NCCL_ASYNC_ERROR_HANDLING",
)  # fmt: skip
_POLL_S = 0.1
_GRACE_S = 20.0
_TAIL = 30
# torchrun's own account of the first failure: "rank : 1 (local_rank: 1)" and "exitcode : -9 (pid: 77)".
_ROOT_CAUSE = re.compile(r"Root Cause.*?rank\s*:\s*(\d+).*?exitcode\s*:\s*(-?\d+)", re.DOTALL)


class RankError(JobError):
    """A rank that failed.

    Attributes:
        rank: the first to fail, None where several were ended by a timeout.
        signal: the name of the signal that ended it, "" where it raised.
    """

    def __init__(self, what: str, *, rank: int | None = None, signal: str = "", **columns):
        super().__init__(what, **columns)
        self.rank, self.signal = rank, signal


def run_ranks(
    job: Job,
    on_line: Callable[[str], object] = print,
    on_progress: Callable[[int, int, str], object] = lambda done, total, note: None,
    log_folder: Path | None = None,
) -> list[dict]:
    """Run a job on `job.ranks` ranks, each of which enters a process group first; the answers of all in rank order.

    Args:
        on_line, on_progress: as in `run_job`, told of rank 0.
        log_folder: keeps every rank's output as rank-<n>.log; a temporary folder when left out.

    Raises:
        RankError: a rank raised, was killed, or the job ran past its timeout: the first that failed is named, with its
            own error or the end of its log. No process of the job is left.
        HyperionError: more ranks than devices, or a rendezvous port that is taken.
    """
    _require_devices(job)
    _require_free_port(job.rendezvous)
    with tempfile.TemporaryDirectory(prefix="hyperion-ranks-") as made:
        folder = Path(made)
        (folder / "request.json").write_text(json.dumps(asdict(job) | {"launcher": os.getpid()}))
        launcher = subprocess.Popen(
            _command(job, folder), env=_environment(job), stdin=subprocess.DEVNULL,
            stdout=(folder / "torchrun.log").open("w"), stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip
        try:
            timed_out = _watch(launcher, job.timeout_s, _Tail(folder / "rank-0.log", on_line, on_progress))
            if timed_out:
                where = _stacks(folder, job.ranks)
        finally:
            _end(launcher)
            _keep_logs(folder, log_folder)
        if timed_out:
            raise RankError(
                f"{job.entry} on {job.ranks} ranks ran past its timeout of {job.timeout_s:g} s and was ended\n{where}",
                where="run_ranks", next_step="look where each rank stood, above, or allow it more time",
            )  # fmt: skip
        if launcher.returncode != 0:
            raise _first_failure(job, folder)
        return [json.loads((folder / f"answer-{rank}.json").read_text())["answer"] for rank in range(job.ranks)]


def _require_devices(job: Job) -> None:
    device = detect()
    if device.kind != "cpu" and job.ranks > torch.cuda.device_count() * job.nodes:
        raise HyperionError(
            f"{job.ranks} ranks asked, and this machine has {torch.cuda.device_count()} devices",
            where=job.entry, next_step=f"ask for at most {torch.cuda.device_count()} ranks",
        )  # fmt: skip


def _require_free_port(rendezvous: str) -> None:
    host, _, port = rendezvous.rpartition(":")
    if not host:
        return
    with socket.socket() as probe:
        try:
            probe.bind((host, int(port)))
        except OSError as error:
            raise HyperionError(
                f"port {port} is taken: {error.strerror}", where=rendezvous, next_step="choose another port, or none at all"
            ) from error


def _command(job: Job, folder: Path) -> list[str]:
    if job.rendezvous:
        meeting = ["--nnodes", str(job.nodes), "--rdzv-backend", "c10d", "--rdzv-endpoint", job.rendezvous]
    else:
        meeting = ["--standalone"]
    return [
        job.python, "-m", "torch.distributed.run", *meeting, f"--nproc-per-node={job.ranks // job.nodes}",
        "-m", "hyperion.processes.rank_worker", str(folder),
    ]  # fmt: skip


def _environment(job: Job) -> Mapping[str, str]:
    inherited = {name: value for name, value in package_environment().items() if name not in TORCHRUN_VARIABLES}
    threads = max(1, (os.cpu_count() or 1) // job.ranks)
    return {"OMP_NUM_THREADS": str(threads)} | inherited


class _Tail:
    """Rank 0's log as it grows."""

    def __init__(self, path: Path, on_line, on_progress):
        self.path, self.on_line, self.on_progress = path, on_line, on_progress
        self.read, self.rest = 0, ""

    def follow(self) -> None:
        if not self.path.exists():
            return
        with self.path.open(errors="replace") as file:
            file.seek(self.read)
            *lines, self.rest = (self.rest + file.read()).split("\n")
            self.read = file.tell()
        for line in lines:
            if line.startswith(PROGRESS):
                self.on_progress(*json.loads(line.removeprefix(PROGRESS)))
            else:
                self.on_line(line)


def _watch(launcher: subprocess.Popen, timeout_s: float, tail: _Tail) -> bool:
    """Follow the job until it ends; whether the timeout struck."""
    deadline = time.monotonic() + timeout_s
    while launcher.poll() is None:
        if time.monotonic() > deadline:
            return True
        tail.follow()
        time.sleep(_POLL_S)
    tail.follow()
    return False


def _stacks(folder: Path, ranks: int) -> str:
    """Where each rank stands: faulthandler writes it into the rank's log on SIGUSR1."""
    for path in folder.glob("pid-*"):
        with suppress(ProcessLookupError):
            os.kill(int(path.read_text()), signal.SIGUSR1)
    time.sleep(1.0)
    return "\n".join(f"rank {rank}:\n{_end_of(folder / f'rank-{rank}.log')}" for rank in range(ranks))


def _end(launcher: subprocess.Popen) -> None:
    """Leave no process behind: SIGTERM to the whole session, time to save, then SIGKILL."""
    if launcher.poll() is None:
        launcher.terminate()
        try:
            launcher.wait(_GRACE_S)
        except subprocess.TimeoutExpired:
            os.killpg(launcher.pid, signal.SIGKILL)
            launcher.wait()
    with suppress(ProcessLookupError):
        os.killpg(launcher.pid, signal.SIGKILL)


def _keep_logs(folder: Path, log_folder: Path | None) -> None:
    if log_folder is not None:
        log_folder.mkdir(parents=True, exist_ok=True)
        for log in folder.glob("*.log"):
            (log_folder / log.name).write_bytes(log.read_bytes())


def _first_failure(job: Job, folder: Path) -> RankError:
    """The error of the rank that failed first; its peers failed because of it."""
    named = _ROOT_CAUSE.search((folder / "torchrun.log").read_text(errors="replace"))
    rank, code = (int(named[1]), int(named[2])) if named else (None, 1)
    told = {r: json.loads((folder / f"answer-{r}.json").read_text()) for r in range(job.ranks)
            if (folder / f"answer-{r}.json").exists()}  # fmt: skip
    failed = {r: answer for r, answer in told.items() if "answer" not in answer}
    if code < 0:
        name = signal.Signals(-code).name
        return RankError(
            f"rank {rank} of {job.ranks} was killed by {name}\n{_end_of(folder / f'rank-{rank}.log')}",
            rank=rank, signal=name, where=job.entry, next_step="read the end of its log, above",
        )  # fmt: skip
    if failed:
        rank = min(failed, key=lambda r: failed[r]["time"])
        if error := failed[rank].get("error"):
            return RankError(f"rank {rank}: {error['what']}", rank=rank, where=error["where"], next_step=error["next_step"])
        return RankError(
            f"rank {rank} of {job.ranks} failed\n{failed[rank]['traceback']}",
            rank=rank, where=job.entry, next_step="read its traceback, above",
        )  # fmt: skip
    return RankError(
        f"{job.entry} failed on {job.ranks} ranks\n{_end_of(folder / 'torchrun.log')}",
        rank=rank, where=job.entry, next_step="read torchrun's log, above",
    )  # fmt: skip


def _end_of(log: Path) -> str:
    lines = log.read_text(errors="replace").splitlines() if log.exists() else []
    return "\n".join(line for line in lines[-_TAIL:] if not line.startswith(PROGRESS))
