"""Run a job on several ranks, with torchrun or mpirun in a subprocess.

The output of rank 0 is streamed, and each rank has its own log. If the job fails, the error names the root-cause rank.
"""

import contextlib
import errno
import json
import os
import signal
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from subprocess import Popen, TimeoutExpired
from typing import Any

import psutil

from hyperion.hardware.cpu import read_cpu
from hyperion.processes.child_process import GRACE_S, child_environment, is_alive, kill_session
from hyperion.processes.fork_server import ForkedWorker, start_worker
from hyperion.processes.job import INTERRUPTED, Job, JobError, OutputHandler, last_lines
from hyperion.processes.rank_errors import (
    RankError,
    RankExit,
    RankStack,
    collective_timed_out,
    collective_timeout_error,
    first_failure,
    job_timeout_error,
    rank_error,
    read_stack,
)
from hyperion.processes.this_rank import more_ranks_than_devices
from hyperion.results.files import write_atomically
from hyperion.terminal import exit_on_sigterm

# Exit code of a process that SIGTERM ended, as shells report it (128 + 15).
_ENDED_BY_SIGTERM = 128 + signal.SIGTERM
_PROBE_S = 2.0
_POLL_S = 0.1
# When a rank fails, torchrun sends SIGTERM to the other ranks. They can neither continue nor save their state, so the launcher
# kills them after this number of seconds.
_PEERS_GRACE_S = 5.0
_STACKS_S = 2.0
_REAP_S = 10.0


def run_ranks(
    job: Job,
    on_line: Callable[[str], object] = print,
    on_progress: Callable[[int, int, str], object] = lambda done, total, note: None,
    log_folder: Path | None = None,
) -> list[dict]:
    """Run a job on `job.ranks` ranks under torchrun or `job.mpirun`. Return the results of its function in rank order.

    Each rank enters `process_group` before it calls the function. The ranks inherit the environment, except for torchrun's own
    variables. With several nodes, every node calls `run_ranks` with the same job and gets the results of all ranks.

    Args:
        job: the job. Its field `ranks` must be set.
        on_line: called with each line that rank 0 prints to stdout or stderr.
        on_progress: called with (done, total, note) for each call to `report_progress` on rank 0.
        log_folder: folder for the logs: rank-<n>.log of every rank, and torchrun.log; default: a temporary folder.

    Raises:
        RankError: a rank raised an exception or was killed, or the job exceeded its timeout. The error names the first rank
            that failed, with its signal or traceback. After a timeout, it contains the stack of every rank. All processes of the
            job end within seconds after a rank has failed.
        HyperionError: the job cannot run, because its module is not found, it has more ranks than devices, or another process
            uses the port. No rank is started in this case.
    """
    require_launchable(job)
    if job.ranks_per_node > (cores := read_cpu().cores):
        on_line(f"WARNING: {job.ranks_per_node} ranks share {cores} CPU cores and cannot all run at once: times are meaningless")
    with tempfile.TemporaryDirectory(prefix="hyperion-ranks-") as temporary:
        folder = Path(temporary)
        logs = folder / "logs" if log_folder is None else log_folder.resolve()
        logs.mkdir(parents=True, exist_ok=True)
        # Remove the logs of an earlier job in this folder, because it may have had more ranks.
        for earlier in logs.glob("rank-*.log"):
            earlier.unlink()
        torchrun = Torchrun(job, folder, logs, OutputHandler(on_line, on_progress))
        stacks = None
        with _forward_sigterm(torchrun) as received:
            try:
                torchrun.start()
                if torchrun.follow(job.timeout_s):
                    torchrun.request_stacks()
                    stacks = torchrun.stacks()
            finally:
                torchrun.end()
            where = f"{job.entry}; the ranks' logs are in {logs}" if log_folder else job.entry
            if stacks is not None:
                raise job_timeout_error(job, stacks, where)
            answers = torchrun.answers()
            if torchrun.exit_code != 0 or answers is None:
                raise _sigterm_error(job) if received.is_set() and not _saved(torchrun) else _failure(job, torchrun, where)
        return answers


class Torchrun:
    """A torchrun process that runs as a subprocess in its own session.

    Args:
        job: the job that torchrun starts.
        folder: folder for the files that the processes exchange (see `JobFolder`).
        logs: folder for the log of each rank and the log of torchrun.
        output: handler of the lines that rank 0 prints.
    """

    def __init__(self, job: Job, folder: Path, logs: Path, output: OutputHandler):
        self.job, self.files, self.logs, self.output = job, JobFolder(folder), logs, output
        self.ranks: dict[int, psutil.Process] = {}
        self.agent: Popen[str] | ForkedWorker | None = None
        self._killed: set[int] = set()
        self._failed_first: set[int] = set()
        self._failed_at = float("inf")
        self._terminating = False
        self._bytes_read, self._partial_line = 0, b""

    @property
    def exit_code(self) -> int | None:
        """Exit code of torchrun; None while it is running."""
        return None if self.agent is None else self.agent.returncode

    def start(self) -> None:
        """Start torchrun, and return immediately. torchrun starts the ranks within seconds."""
        write_json(self.files.request, self.job.request() | {"launcher": os.getpid(), "logs": str(self.logs)})
        with open(torchrun_log(self.logs), "w", encoding="utf-8") as log:
            self.agent = start_worker(
                self.job.python,
                ["agent", str(self.files.folder)],
                child_environment(),
                stdout=log,
                # torchrun has its own session, so that Ctrl-C reaches only the launcher, which then ends the job cleanly.
                new_session=True,
            )

    def follow(self, timeout_s: float) -> bool:
        """Handle the output of rank 0 until torchrun ends. Return True if torchrun is still running after `timeout_s` seconds."""
        deadline = time.monotonic() + timeout_s
        while self._agent_runs():
            if time.monotonic() > deadline:
                return True
            self._poll_ranks()
            time.sleep(_POLL_S)
        self._poll_ranks()
        return False

    def terminate(self) -> None:
        """Send SIGTERM to torchrun, which forwards it to every rank, so that the ranks save their state."""
        self._terminating = True
        if self.agent is not None:
            self.agent.terminate()

    def end(self) -> None:
        """End all processes of the job: send SIGTERM, wait up to `GRACE_S` seconds, then send SIGKILL."""
        if self.agent is None:
            return
        try:
            if self._agent_runs():
                self.terminate()
            deadline = time.monotonic() + GRACE_S
            while (self._agent_runs() or any(map(is_alive, self.ranks.values()))) and time.monotonic() < deadline:
                self._poll_ranks()
                time.sleep(_POLL_S)
        finally:
            self._find_ranks()
            self._kill_ranks()
            with contextlib.suppress(TimeoutExpired):  # torchrun reads the exit codes of its ranks and ends
                self.agent.wait(_PEERS_GRACE_S)
            self.agent.kill()
            self.agent.wait()
            deadline = time.monotonic() + _REAP_S
            while any(map(is_alive, self.ranks.values())) and time.monotonic() < deadline:
                time.sleep(_POLL_S)
            self._read_output()

    def request_stacks(self) -> None:
        """Send SIGUSR1 to every rank, so that it writes its stack to a file. `stacks` reads these files.

        Even a rank that hangs in C++ code writes its stack.
        """
        alive = {rank: process for rank, process in self.ranks.items() if is_alive(process)}
        for process in alive.values():
            process.send_signal(signal.SIGUSR1)
        deadline = time.monotonic() + _STACKS_S
        while not all(map(self._stack, alive)) and time.monotonic() < deadline:
            time.sleep(_POLL_S)
        time.sleep(_POLL_S)  # faulthandler writes the frames one by one, so wait until all of them are written

    def stacks(self) -> list[RankStack]:
        """Return the stack of each rank of this node at the time of the last SIGUSR1."""
        return [read_stack(rank, self._stack(rank), "answer" in (self._record(rank) or {})) for rank in self._local_ranks()]

    def exits(self) -> list[RankExit]:
        """Return the exit of each rank of this node. Unknown fields have their default values."""
        codes = (read_json(self.files.ends) or {}).get("ends", {})
        return [
            RankExit(
                rank,
                self._record(rank),
                **codes.get(str(rank), {}),
                killed_by_launcher=rank in self._killed,
                failed_first=rank in self._failed_first,
            )
            for rank in self._local_ranks()
        ]

    def refusal(self) -> dict | None:
        """Return the error that prevented the rank agent from starting ranks, or None if there was none."""
        return (read_json(self.files.ends) or {}).get("error")

    def answers(self) -> list[dict] | None:
        """Return the results of all ranks of all nodes in rank order, or None if a result is missing."""
        records = [self._record(rank) for rank in self._local_ranks()]
        answers = [record["answer"] for record in records if record and "answer" in record]
        if not answers or len(answers) < len(records):
            return None
        return read_json(self.files.answers) or answers

    def _local_ranks(self) -> list[int]:
        return list(range(self.job.ranks_per_node)) if self.job.nodes == 1 else sorted(self.ranks)

    def _agent_runs(self) -> bool:
        return self.agent is not None and self.agent.poll() is None

    def _poll_ranks(self) -> None:
        """Handle new output of rank 0. Kill the other ranks `_PEERS_GRACE_S` seconds after a rank has failed."""
        self._find_ranks()
        self._read_output()
        if not self._failed_first:
            self._failed_first = set(filter(self._has_failed, self.ranks))
            self._failed_at = time.monotonic() if self._failed_first else float("inf")
        if not self._terminating and time.monotonic() - self._failed_at > _PEERS_GRACE_S:
            self._kill_peers()

    def _kill_peers(self) -> None:
        alive = {rank for rank, process in self.ranks.items() if is_alive(process)}
        if alive:
            self.request_stacks()
            self._killed |= alive
            self._kill_ranks()

    def _find_ranks(self) -> None:
        for rank, pid in self.files.pids().items():
            if rank not in self.ranks:
                with contextlib.suppress(psutil.NoSuchProcess):
                    # psutil also stores the start time of the process, so is_running() is False if another process has reused
                    # the ID.
                    self.ranks[rank] = psutil.Process(pid)

    def _has_failed(self, rank: int) -> bool:
        """Return True if the rank has ended without a result, unless it saved its state after SIGTERM."""
        if is_alive(self.ranks[rank]):
            return False
        record = self._record(rank)
        return record is None or ("answer" not in record and record["exit_code"] != INTERRUPTED)

    def _kill_ranks(self) -> None:
        for process in self.ranks.values():
            kill_session(process.pid, ours=process.is_running())

    def _read_output(self) -> None:
        log = rank_log(self.logs, 0)
        if not log.exists():
            return
        with open(log, "rb") as file:
            file.seek(self._bytes_read)
            new = file.read()
        self._bytes_read += len(new)
        # Split bytes and not decoded text, because the bytes that were read last may end in the middle of a character.
        *lines, self._partial_line = (self._partial_line + new).split(b"\n")
        for line in lines:
            self.output.handle(line.decode(errors="replace") + "\n")

    def _stack(self, rank: int) -> str:
        file = self.files.stack(rank)
        return file.read_text(errors="replace") if file.exists() else ""

    def _record(self, rank: int) -> dict | None:
        return read_json(self.files.record(rank))


@contextlib.contextmanager
def _forward_sigterm(torchrun: Torchrun) -> Iterator[threading.Event]:
    """Forward SIGTERM from this process to the ranks, so that the ranks save their state.

    This context manager yields an event, which is set when SIGTERM arrives. If other code than `run_command` has installed a
    SIGTERM handler, this handler is not replaced, and nothing is forwarded.
    """
    received, earlier = threading.Event(), signal.getsignal(signal.SIGTERM)
    # Python installs signal handlers in the main thread only.
    default = threading.current_thread() is threading.main_thread() and earlier in (signal.SIG_DFL, exit_on_sigterm)

    def forward(number, frame) -> None:
        received.set()
        torchrun.terminate()

    if default:
        signal.signal(signal.SIGTERM, forward)
    try:
        yield received
    finally:
        if default:
            signal.signal(signal.SIGTERM, earlier)
    if received.is_set():
        signal.raise_signal(signal.SIGTERM)  # end this process too, now that the ranks have ended


def _saved(torchrun: Torchrun) -> bool:
    return any(end.error and end.error["exit_code"] == INTERRUPTED for end in torchrun.exits())


def _sigterm_error(job: Job) -> RankError:
    return RankError(
        f"{job.entry} was stopped by SIGTERM",
        signal="SIGTERM",
        where=f"{job.ranks} ranks",
        next_step="start the job again",
        exit_code=_ENDED_BY_SIGTERM,
    )


def _failure(job: Job, torchrun: Torchrun, where: str) -> RankError:
    if refusal := torchrun.refusal():
        return RankError(**refusal)
    end = first_failure(torchrun.exits())
    if end is not None:
        log = rank_log(torchrun.logs, end.rank)
        # A rank that fails before it opens its own log writes to torchrun's log.
        log = (log if log.exists() else torchrun_log(torchrun.logs)).read_text(errors="replace")
        error = rank_error(job, end, log, where)
        return collective_timeout_error(job, error, torchrun.stacks()) if collective_timed_out(end, log) else error
    code = torchrun.exit_code or 0
    cause = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"failed with exit code {code}"
    # MPICH does not report which process ended with an exit code. If hang detection ended the job, its report is in the log of a
    # rank, so the error contains all logs.
    logs = [torchrun_log(torchrun.logs), *sorted(torchrun.logs.glob("rank-*.log"))]
    lines = "".join(last_lines(log.read_text(errors="replace")) for log in logs)
    parent = "mpirun" if job.mpirun else "torchrun"
    return RankError(
        f"{parent}, the parent of the {job.ranks} ranks of {job.entry}, {cause}\n{lines}",
        where=where,
        next_step=f"find out what ended {parent}; all ranks ended because {parent} ended",
        signal=signal.Signals(-code).name if code < 0 else "",
    )


def require_launchable(job: Job, devices: int | None = None) -> None:
    """Check the settings of a job before any process is started: ranks, nodes, rendezvous, timeout, GPUs and port.

    Args:
        job: the job to check.
        devices: number of GPUs that PyTorch sees on this node; None counts them. With 0, the ranks share the CPU.

    Raises:
        HyperionError: a setting is not possible. The message names the setting and the change to make.
    """
    _require_numbers(job)
    import torch  # imported here, because a job without ranks does not need torch

    devices = torch.cuda.device_count() if devices is None else devices
    if devices and job.ranks_per_node > devices:
        raise more_ranks_than_devices(job.ranks_per_node, devices)
    if job.rendezvous:
        _require_free_port(job)


def _require_numbers(job: Job) -> None:
    if job.ranks is None or job.ranks < 1:
        raise _job_error(job, f"run_ranks was called with ranks={job.ranks}", "set ranks to 1 or more")
    if job.nodes < 1 or job.ranks % job.nodes:
        raise _job_error(job, f"{job.nodes} nodes cannot share {job.ranks} ranks evenly", "set ranks to a multiple of nodes")
    if job.nodes > 1 and not job.rendezvous:
        raise _job_error(
            job, f"{job.nodes} nodes need a rendezvous", 'set rendezvous="host:port" with a host that all nodes reach'
        )
    if job.nodes > 1 and job.mpirun:
        raise _job_error(job, f"mpirun starts ranks on one node, not on {job.nodes}", "set nodes to 1, or omit mpirun")
    if job.rendezvous and not job.rendezvous.rpartition(":")[2].isdigit():
        raise _job_error(job, f"the rendezvous {job.rendezvous!r} has no port number", 'write it as "host:port"')
    if job.timeout_s <= 0:
        raise _job_error(job, f"the timeout is {job.timeout_s} s", "set timeout_s above 0")


def _require_free_port(job: Job) -> None:
    """Raise an error if another process uses the rendezvous port of this host. torchrun of another node may use it."""
    host, _, port = job.rendezvous.rpartition(":")
    host = host.strip("[]")
    try:
        addresses = socket.getaddrinfo(host, int(port), type=socket.SOCK_STREAM)
    except (OSError, OverflowError) as error:
        raise _job_error(
            job, f"the host of the rendezvous {job.rendezvous} cannot be resolved: {error}", "name a host that can be reached"
        ) from error
    if not all(_is_free(family, address) for family, _, _, _, address in addresses):
        if job.nodes > 1 and _is_torch_store(host, int(port)):
            return
        raise _job_error(job, f"port {port} is used by another process", "choose another port, or omit rendezvous on one node")


def _is_free(family: int, address: tuple) -> bool:
    """Return True if the local port is free. Also return True for addresses of other hosts, which are not checked."""
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(
            socket.SOL_SOCKET, socket.SO_REUSEADDR, 1
        )  # set by torch too; a port that was closed recently then counts as free
        try:
            probe.bind(address)
        except OSError as error:
            return error.errno != errno.EADDRINUSE
    return True


def _is_torch_store(host: str, port: int) -> bool:
    """Return True if a torch TCPStore is listening on this port.

    The connection is made in a thread, because torch waits forever for an answer if another kind of server is listening.
    """
    import torch.distributed as dist

    from hyperion.processes.group import connect_store

    stores = []

    def connect() -> None:
        with contextlib.suppress(dist.DistError):
            stores.append(connect_store(host, port, _PROBE_S))

    probe = threading.Thread(target=connect, daemon=True, name="hyperion-probe")
    probe.start()
    probe.join(_PROBE_S)
    return bool(stores)


def _job_error(job: Job, what: str, next_step: str) -> JobError:
    return JobError(what, where=f"job {job.entry}", next_step=next_step)


@dataclass(frozen=True)
class JobFolder:
    """Paths of the files that the launcher, the rank agent and the ranks of a job exchange.

    All files are JSON and written atomically, except the stacks, which faulthandler writes.

    request: the job, the process ID of the launcher, and the folder of the logs.
    pid(rank): process ID of the rank, written when the rank is ready to handle signals.
    record(rank): {"answer": …} with the result of the rank, or the error that the rank raised (see worker.py).
    stack(rank): stack of the rank at the last SIGUSR1 or SIGTERM.
    ends: exit codes of the ranks as torchrun reported them, or the error that prevented the agent from starting ranks.
    answers: results of all ranks of all nodes. Written only if there are several nodes.
    """

    folder: Path

    @property
    def request(self) -> Path:
        return self.folder / "request.json"

    @property
    def ends(self) -> Path:
        return self.folder / "ends.json"

    @property
    def answers(self) -> Path:
        return self.folder / "answers.json"

    def pid(self, rank: int) -> Path:
        return self.folder / f"rank-{rank}.pid"

    def record(self, rank: int) -> Path:
        return self.folder / f"rank-{rank}.json"

    def stack(self, rank: int) -> Path:
        return self.folder / f"rank-{rank}.stack"

    def pids(self) -> dict[int, int]:
        """Return a dict that maps each rank that has started to its process ID."""
        return {int(file.stem.removeprefix("rank-")): read_json(file) for file in self.folder.glob("rank-*.pid")}


def read_json(file: Path) -> Any:
    """Return the content of a JSON file, or None if the file does not exist."""
    return json.loads(file.read_text()) if file.exists() else None


def write_json(file: Path, content: object) -> None:
    """Write a JSON file atomically: another process sees the complete file or no file."""
    write_atomically(file, json.dumps(content).encode())


def rank_log(logs: Path, rank: int) -> Path:
    """Return the path of a rank's log, which contains everything that the rank prints."""
    return logs / f"rank-{rank}.log"


def torchrun_log(logs: Path) -> Path:
    """Return the path of the log of torchrun or mpirun. It also contains what a rank prints before it opens its own log."""
    return logs / "torchrun.log"
