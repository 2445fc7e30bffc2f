"""torchrun and the ranks it started on this node, from their start to the death of the last of them."""

import os
import signal
import time
from contextlib import suppress
from pathlib import Path
from subprocess import Popen, TimeoutExpired

import psutil

from hyperion.processes.job import INTERRUPTED, Job
from hyperion.processes.lifeline import GRACE_S, child_environment, kill_session, lives
from hyperion.processes.notes import Notes, log_of, log_of_torchrun, read, write
from hyperion.processes.output import Listener
from hyperion.processes.starting import start
from hyperion.processes.verdict import End, Standing, standing

_POLL_S = 0.1
# Ranks that lost a peer cannot go on, nor save: torchrun asks them to end, and this long after the loss they are killed.
_PEERS_GRACE_S = 5.0
_STACKS_S = 2.0
_REAP_S = 10.0


class Torchrun:
    """torchrun as a subprocess of this process, in a session of its own.

    Args:
        folder: for what the processes tell each other.
        logs: for one log a rank, and torchrun's own.
        listener: hears rank 0.
    """

    def __init__(self, job: Job, folder: Path, logs: Path, listener: Listener):
        self.job, self.notes, self.logs, self.listener = job, Notes(folder), logs, listener
        self.ranks: dict[int, psutil.Process] = {}
        self._swept: set[int] = set()
        self._lost_first: set[int] = set()
        self._lost_since = float("inf")
        self._asked = False
        self._heard, self._rest = 0, b""
        self.agent: Popen | None = None

    def start(self) -> None:
        """Start torchrun; its ranks follow within seconds."""
        write(self.notes.request, self.job.request() | {"launcher": os.getpid(), "logs": str(self.logs)})
        with open(log_of_torchrun(self.logs), "w", encoding="utf-8") as log:
            self.agent = start(
                self.job.python,
                "hyperion.processes.rank_agent",
                [str(self.notes.folder)],
                child_environment(),
                stdout=log,
                new_session=True,
            )

    def follow(self, timeout_s: float) -> bool:
        """Pass on what rank 0 prints until torchrun ends; whether `timeout_s` passed before that."""
        deadline = time.monotonic() + timeout_s
        while self.agent.poll() is None:
            if time.monotonic() > deadline:
                return True
            self._look_after_ranks()
            time.sleep(_POLL_S)
        self._look_after_ranks()
        return False

    def ask_to_end(self) -> None:
        """SIGTERM for every rank: time to save."""
        self._asked = True
        if self.agent is not None:
            self.agent.terminate()

    def end(self) -> None:
        """Leave no process behind: SIGTERM, `GRACE_S` to save, then SIGKILL."""
        if self.agent is None:
            return
        try:
            if self.agent.poll() is None:
                self.ask_to_end()
            deadline = time.monotonic() + GRACE_S
            while (self.agent.poll() is None or any(map(lives, self.ranks.values()))) and time.monotonic() < deadline:
                self._look_after_ranks()
                time.sleep(_POLL_S)
        finally:
            self._find_ranks()
            self._kill_ranks()
            with suppress(TimeoutExpired):  # it reaps them and ends
                self.agent.wait(_PEERS_GRACE_S)
            self.agent.kill()
            self.agent.wait()
            deadline = time.monotonic() + _REAP_S
            while any(map(lives, self.ranks.values())) and time.monotonic() < deadline:
                time.sleep(_POLL_S)
            self._hear()

    def ask_where_they_stand(self) -> None:
        """With a signal that a hung process answers too; `standings` are the answers."""
        asked = {rank: process for rank, process in self.ranks.items() if lives(process)}
        for process in asked.values():
            process.send_signal(signal.SIGUSR1)
        deadline = time.monotonic() + _STACKS_S
        while not all(map(self._stack, asked)) and time.monotonic() < deadline:
            time.sleep(_POLL_S)
        time.sleep(_POLL_S)  # it is written frame by frame

    def standings(self) -> list[Standing]:
        """Where each rank of this node stood when it was last asked."""
        return [standing(rank, self._stack(rank), "answer" in (self._record(rank) or {})) for rank in self._local_ranks()]

    def ends(self) -> list[End]:
        """How each rank of this node ended, as far as anybody knows."""
        codes = (read(self.notes.ends) or {}).get("ends", {})
        return [
            End(rank, self._record(rank), **codes.get(str(rank), {}), swept=rank in self._swept, first=rank in self._lost_first)
            for rank in self._local_ranks()
        ]

    def refusal(self) -> dict | None:
        """The error with which torchrun's side refused to start ranks."""
        return (read(self.notes.ends) or {}).get("error")

    def answers(self) -> list[dict] | None:
        """The answers of all ranks of all nodes in rank order; None when one is missing."""
        records = [self._record(rank) for rank in self._local_ranks()]
        if not records or not all(record and "answer" in record for record in records):
            return None
        return read(self.notes.answers) or [record["answer"] for record in records]

    def _local_ranks(self) -> list[int]:
        if self.job.nodes == 1:
            return list(range(self.job.ranks))
        return sorted(self.ranks)

    def _look_after_ranks(self) -> None:
        self._find_ranks()
        self._hear()
        if not self._lost_first:
            self._lost_first = set(filter(self._is_lost, self.ranks))
            self._lost_since = time.monotonic() if self._lost_first else float("inf")
        if not self._asked and time.monotonic() - self._lost_since > _PEERS_GRACE_S:
            self._sweep()

    def _sweep(self) -> None:
        left = {rank for rank, process in self.ranks.items() if lives(process)}
        if left:
            self.ask_where_they_stand()
            self._swept |= left
            self._kill_ranks()

    def _find_ranks(self) -> None:
        for rank, pid in self.notes.pids().items():
            if rank not in self.ranks:
                with suppress(psutil.NoSuchProcess):
                    self.ranks[rank] = psutil.Process(pid)

    def _is_lost(self, rank: int) -> bool:
        """Whether a rank ended otherwise than it should: with an answer, or saved as it was asked to."""
        if lives(self.ranks[rank]):
            return False
        record = self._record(rank)
        return record is None or ("answer" not in record and record["exit_code"] != INTERRUPTED)

    def _kill_ranks(self) -> None:
        for process in self.ranks.values():
            kill_session(process.pid, ours=process.is_running())

    def _hear(self) -> None:
        log = log_of(self.logs, 0)
        if not log.exists():
            return
        with open(log, "rb") as file:
            file.seek(self._heard)
            new = file.read()
        self._heard += len(new)
        *lines, self._rest = (self._rest + new).split(b"\n")
        for line in lines:
            self.listener.hear(line.decode(errors="replace") + "\n")

    def _stack(self, rank: int) -> str:
        file = self.notes.stack(rank)
        return file.read_text(errors="replace") if file.exists() else ""

    def _record(self, rank: int) -> dict | None:
        return read(self.notes.record(rank))
