"""Find the root-cause rank of a failed job and explain its failure.

When one rank fails, the other ranks fail too: they lose their connection to it, or the launcher ends them. The functions in
this module find the first failure. They use the exit codes, the results and errors that the ranks wrote to files, and the
stacks of the ranks.
"""

import re
import signal
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from hyperion.processes.job import INTERRUPTED, KILLED_REMEDY, Job, JobError, last_lines

_FRAMES = 8
# Part of the message that NCCL's watchdog logs when it aborts a process.
_WATCHDOG = "collective operation timeout"
_FRAME = re.compile(r'  File "(?P<file>.+)", line (?P<line>\d+) in (?P<function>.+)')
# A rank is waiting for other ranks if its stack contains a file with one of these paths. On a GPU, the host waits for the
# collective of its device in torch/cuda.
WAITING_FILES = ("/torch/distributed/", "/torch/cuda/")
# Files from which every rank calls the function of the job. Their frames are omitted.
_CALLERS = ("<frozen ", "/runpy.py", "/hyperion/processes/worker.py", "/contextlib.py")


class RankError(JobError):
    """Raised when a job on ranks fails. It describes the first rank that failed, and not the failures caused by it.

    Attributes:
        rank: number of the rank; None if no single rank is the cause, for example if all ranks hang.
        signal: name of the signal that killed the rank, such as "SIGKILL"; "" if no signal killed it.
        exit_code: exit code of a command that fails with this error; 75 if the ranks received SIGTERM and saved their state.
    """

    def __init__(
        self,
        what: str,
        *,
        rank: int | None = None,
        signal: str = "",
        where: object = None,
        next_step: str | None = None,
        exit_code: int = 2,
    ):
        super().__init__(what, where=where, next_step=next_step, exit_code=exit_code)
        self.rank, self.signal = rank, signal


@dataclass(frozen=True)
class RankExit:
    """Exit of a rank: the result or error that it wrote, and its exit code.

    Args:
        rank: number of the rank.
        record: result or error that the rank wrote to its file (see worker.py); None if the rank wrote nothing.
        code: exit code, or the negative number of the signal; None if torchrun reported no exit code.
        time: time at which torchrun noticed the exit, in whole seconds since 1970.
        killed_by_launcher: True if the launcher killed the rank because another rank had failed.
        failed_first: True if the rank had failed when the launcher first saw a failed rank.
    """

    rank: int
    record: dict | None = None
    code: int | None = None
    time: float = float("inf")
    killed_by_launcher: bool = False
    failed_first: bool = False

    @property
    def succeeded(self) -> bool:
        """True if the function of the job returned and the rank left the process group."""
        return self.record is not None and "answer" in self.record

    @property
    def error(self) -> dict | None:
        """Record of the error that the rank raised; None if the rank raised no error or could not write it."""
        return None if self.succeeded else self.record


def first_failure(exits: list[RankExit]) -> RankExit | None:
    """Return the exit of the root-cause rank, or None if no rank failed or the launcher killed all ranks that failed."""
    failed = [end for end in exits if not end.succeeded and not end.killed_by_launcher and (end.error or end.code is not None)]
    return min(failed, key=_cause_order, default=None)


def _cause_order(end: RankExit) -> tuple[int, bool, float]:
    """Return a sort key that puts the most likely root-cause rank first. Equally likely causes are ordered by time."""
    if end.error:
        # From the most to the least likely cause: 0 signal, 1 exception or abort, 2 saved its state after SIGTERM, 3 lost its
        # peers, 4 ended by torchrun.
        likelihood = 3 if end.error["lost_peer"] else 2 if end.error["exit_code"] == INTERRUPTED else 1
        return likelihood, False, end.error["time"]
    code = end.code or 0
    if code == -signal.SIGTERM:  # ended by torchrun, which sends SIGTERM to the other ranks after a failure
        return 4, not end.failed_first, end.time
    # NCCL's watchdog aborts a rank whose collective timed out. The abort is the root cause only if no other failure happened
    # earlier or in the same second.
    aborted = code == -signal.SIGABRT or code >= 0
    return (1, False, end.time + 1) if aborted else (0, not end.failed_first, end.time)


def collective_timed_out(end: RankExit, log: str) -> bool:
    """Return True if the rank failed because a collective exceeded the group's timeout.

    In this case, gloo raises an error, and NCCL's watchdog aborts the process and writes a message to the log.
    """
    if end.error:
        return end.error["timed_out"]
    return end.code == -signal.SIGABRT and _WATCHDOG in log


def rank_error(job: Job, end: RankExit, log: str, where: str) -> RankError:
    """Return the error of a failed rank.

    Its message is that of the HyperionError that the rank raised. For any other exception, it contains the traceback. If there
    was no exception, it contains the signal or exit code and the end of the log.

    Args:
        job: the job that failed.
        end: how the failed rank ended.
        log: everything that this rank printed.
        where: value for the field `where` of the error.
    """
    name = f"rank {end.rank} of {job.ranks}"
    if end.error and (error := end.error["error"]):
        place = f"{error['where']} ({name})" if error["where"] else name
        return RankError(
            error["what"], rank=end.rank, where=place, next_step=error["next_step"], exit_code=end.error["exit_code"]
        )
    if end.error:
        remedy = "read the traceback above"
        if end.error["lost_peer"]:
            remedy = "another rank exited or never joined, and logged no error: see the logs of all ranks and nodes"
        what = f"{name} raised {end.error['raised']}\n{end.error['traceback'].rstrip()}"
        return RankError(what, rank=end.rank, where=where, next_step=remedy)
    code, killer, remedy = end.code or 0, "", "read the end of its log above"
    cause = f"failed with exit code {code}" if code else "ended without an answer"
    if code < 0:
        killer = signal.Signals(-code).name
        cause = f"was killed by {killer}"
        remedy = KILLED_REMEDY if killer == "SIGKILL" else remedy
    what = f"{name} {cause} in {job.entry}\n{last_lines(log)}".rstrip()
    return RankError(what, rank=end.rank, signal=killer, where=where, next_step=remedy)


@dataclass(frozen=True)
class RankStack:
    """The stack of a rank at the time when the rank received SIGUSR1.

    Args:
        rank: number of the rank.
        frames: frames of the main thread, innermost first, as "function (file.py:12)"; empty if the rank wrote no stack.
        waiting: True if the rank was waiting for other ranks.
        finished: True if the function of the job had returned on this rank.
    """

    rank: int
    frames: tuple[str, ...]
    waiting: bool
    finished: bool

    def __str__(self) -> str:
        if self.finished:
            return f"rank {self.rank} had finished"
        if not self.frames:
            return f"rank {self.rank} wrote no stack: it had exited, was stopped, or had not started"
        what = "was waiting for other ranks in" if self.waiting else "was in"
        return f"rank {self.rank} {what} " + "\n  called from ".join(self.frames[:_FRAMES])


def read_stack(rank: int, stack: str, finished: bool) -> RankStack:
    """Parse the stack that faulthandler wrote on a rank. The last block is the stack of the main thread.

    Args:
        rank: number of the rank.
        stack: text that faulthandler wrote.
        finished: True if the function of the job had returned on this rank.
    """
    frames = [
        (match["file"], f"{match['function']} ({Path(match['file']).name}:{match['line']})")
        for match in _main_thread(stack)
        if not any(mark in match["file"] for mark in _CALLERS)
    ]
    waiting = any(mark in file for file, _ in frames for mark in WAITING_FILES)
    return RankStack(rank, tuple(text for _, text in frames), waiting, finished)


def _main_thread(stack: str) -> Iterator[re.Match]:
    block = stack.rpartition("most recent call first")[2]
    return filter(None, map(_FRAME.match, block.splitlines()))


def missing_rank(stacks: list[RankStack]) -> int | None:
    """Return the rank that is not waiting for other ranks, or None if there is not exactly one such rank."""
    missing = [stack.rank for stack in stacks if not stack.waiting]
    return missing[0] if len(missing) == 1 < len(stacks) else None


def job_timeout_error(job: Job, stacks: list[RankStack], where: str) -> RankError:
    """Return the error for a job that exceeded its timeout. The message contains the stack of every rank."""
    return RankError(
        f"{job.entry} on {job.ranks} ranks exceeded its timeout of {job.timeout_s:g} s and was ended\n{_lines(stacks)}",
        rank=missing_rank(stacks),
        where=where,
        next_step="find the rank above that made no progress, or raise the timeout",
    )


def collective_timeout_error(job: Job, error: RankError, stacks: list[RankStack]) -> RankError:
    """Return the error for a collective that exceeded the timeout of the process group.

    If exactly one rank did not join the collective, the message names this rank.

    Args:
        job: the job that failed.
        error: error of the rank whose collective timed out.
        stacks: stack of every rank at the time of the timeout.
    """
    # Treat the rank whose collective timed out as waiting. It wrote an error and no waiting stack, but it did join the
    # collective.
    stacks = [replace(stack, waiting=True) if stack.rank == error.rank else stack for stack in stacks]
    missing = missing_rank(stacks)
    first = (
        ""
        if missing is None
        else f"rank {missing} of {job.ranks} did not join the collective in which rank {error.rank} timed out\n"
    )
    others = [stack for stack in stacks if stack.rank != error.rank]
    return RankError(
        f"{first}{error.what.rstrip()}\n{_lines(others)}",
        rank=error.rank if missing is None else missing,
        where=error.where,
        next_step="find the rank above that made no progress",
    )


def _lines(stacks: list[RankStack]) -> str:
    return "\n".join(map(str, stacks))
