"""torchrun and its ranks on this node, from start to the death of the last process. The launcher's side."""

import os
import signal
import time
from contextlib import suppress
from pathlib import Path
from subprocess import Popen, TimeoutExpired

import psutil

from hyperion.processes.child_process import GRACE_S, child_environment, is_alive, kill_session, start
from hyperion.processes.job import INTERRUPTED, Job, OutputHandler
from hyperion.processes.job_folder import JobFolder, rank_log, read_json, torchrun_log, write_json
from hyperion.processes.rank_errors import RankExit, RankStack, read_stack

_POLL_S = 0.1
# When a rank fails, torchrun sends SIGTERM to its peers. They cannot continue or save, and are killed after this time.
_PEERS_GRACE_S = 5.0
_STACKS_S = 2.0
_REAP_S = 10.0


class Torchrun:
    """torchrun as a subprocess in its own session.

    Args:
        folder: for the files that the processes exchange (`JobFolder`).
        logs: folder for one log per rank, and torchrun's own.
        output: handles the lines of rank 0.
    """

    def __init__(self, job: Job, folder: Path, logs: Path, output: OutputHandler):
        self.job, self.files, self.logs, self.output = job, JobFolder(folder), logs, output
        self.ranks: dict[int, psutil.Process] = {}
        self.agent: Popen[str] | None = None
        self._killed: set[int] = set()
        self._failed_first: set[int] = set()
        self._failed_at = float("inf")
        self._terminating = False
        self._bytes_read, self._partial_line = 0, b""

    @property
    def exit_code(self) -> int | None:
        """torchrun's exit code; None while it runs."""
        return None if self.agent is None else self.agent.returncode

    def start(self) -> None:
        """Start torchrun. Its ranks follow within seconds."""
        write_json(self.files.request, self.job.request() | {"launcher": os.getpid(), "logs": str(self.logs)})
        with open(torchrun_log(self.logs), "w", encoding="utf-8") as log:
            self.agent = start(
                self.job.python,
                "hyperion.processes.rank_agent",
                [str(self.files.folder)],
                child_environment(),
                stdout=log,
                new_session=True,
            )

    def follow(self, timeout_s: float) -> bool:
        """Pass rank 0's output on until torchrun ends. Return True if `timeout_s` passed before."""
        deadline = time.monotonic() + timeout_s
        while self._agent_runs():
            if time.monotonic() > deadline:
                return True
            self._poll_ranks()
            time.sleep(_POLL_S)
        self._poll_ranks()
        return False

    def terminate(self) -> None:
        """Send SIGTERM to every rank, through torchrun: they save their state."""
        self._terminating = True
        if self.agent is not None:
            self.agent.terminate()

    def end(self) -> None:
        """Leave no process behind: SIGTERM, `GRACE_S` to save, then SIGKILL."""
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
            with suppress(TimeoutExpired):  # torchrun reads the exit codes of its ranks and ends
                self.agent.wait(_PEERS_GRACE_S)
            self.agent.kill()
            self.agent.wait()
            deadline = time.monotonic() + _REAP_S
            while any(map(is_alive, self.ranks.values())) and time.monotonic() < deadline:
                time.sleep(_POLL_S)
            self._read_output()

    def request_stacks(self) -> None:
        """Send SIGUSR1 to every rank; `stacks` reads the answers. A rank that hangs in C++ answers too."""
        alive = {rank: process for rank, process in self.ranks.items() if is_alive(process)}
        for process in alive.values():
            process.send_signal(signal.SIGUSR1)
        deadline = time.monotonic() + _STACKS_S
        while not all(map(self._stack, alive)) and time.monotonic() < deadline:
            time.sleep(_POLL_S)
        time.sleep(_POLL_S)  # faulthandler writes frame by frame: wait for the last ones

    def stacks(self) -> list[RankStack]:
        """Return the stack of each rank of this node at its last signal."""
        return [read_stack(rank, self._stack(rank), "answer" in (self._record(rank) or {})) for rank in self._local_ranks()]

    def exits(self) -> list[RankExit]:
        """Return how each rank of this node ended, as far as is known."""
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
        """Return the error with which the agent refused to start ranks; None if it did not."""
        return (read_json(self.files.ends) or {}).get("error")

    def answers(self) -> list[dict] | None:
        """Return the answers of all ranks of all nodes in rank order; None if one is missing."""
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
        """Read rank 0's output, and kill the peers of a failed rank when their time is over."""
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
                with suppress(psutil.NoSuchProcess):
                    self.ranks[rank] = psutil.Process(pid)

    def _has_failed(self, rank: int) -> bool:
        """Return True if the rank ended without an answer and without saving its state after SIGTERM."""
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
        *lines, self._partial_line = (self._partial_line + new).split(b"\n")
        for line in lines:
            self.output.handle(line.decode(errors="replace") + "\n")

    def _stack(self, rank: int) -> str:
        file = self.files.stack(rank)
        return file.read_text(errors="replace") if file.exists() else ""

    def _record(self, rank: int) -> dict | None:
        return read_json(self.files.record(rank))
