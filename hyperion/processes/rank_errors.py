"""Find the root-cause rank of a failed job and explain its failure.

When one rank fails, the others fail with it: they lose their connection, or the launcher ends them. The functions here find
the first failure from the exit codes, the records that ranks wrote, and their stacks.
"""

import re
import signal
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from hyperion.processes.job import INTERRUPTED, KILLED_REMEDY, Job, JobError, last_lines

_FRAMES = 8
_WATCHDOG = "collective operation timeout"
_FRAME = re.compile(r'  File "(?P<file>.+)", line (?P<line>\d+) in (?P<function>.+)')
# Files of a rank that waits for other ranks, and files through which every rank's entry is called.
_WAITING = ("torch/distributed/", "torch\\distributed\\")
_CALLERS = ("<frozen ", "/runpy.py", "/hyperion/processes/worker.py", "/contextlib.py")


class RankError(JobError):
    """The first rank to fail; failures caused by it are omitted.

    Attributes:
        rank: number of the rank; None when no single rank is the cause, for example in a hang of all ranks.
        signal: name of the signal that killed it, such as "SIGKILL"; "" if none did.
        exit_code: 75 when the ranks received SIGTERM and saved their state.
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
    """How a rank ended.

    Args:
        record: what the rank wrote about its result or error (see worker.py); None if it wrote nothing.
        code: exit code, or the negative number of a signal; None if torchrun reported none.
        time: when torchrun noticed the exit, in whole seconds since 1970.
        killed_by_launcher: the launcher killed it because another rank had failed.
        failed_first: the launcher saw it among the first ranks that were gone.
    """

    rank: int
    record: dict | None = None
    code: int | None = None
    time: float = float("inf")
    killed_by_launcher: bool = False
    failed_first: bool = False

    @property
    def succeeded(self) -> bool:
        """True if the entry returned and the rank left the group."""
        return self.record is not None and "answer" in self.record

    @property
    def error(self) -> dict | None:
        """The record of the error that the rank raised; None if it raised none or could not write it."""
        return None if self.succeeded else self.record


def first_failure(exits: list[RankExit]) -> RankExit | None:
    """Return the exit of the root-cause rank; None if no rank failed, or all were killed by the launcher."""
    failed = [end for end in exits if not end.succeeded and not end.killed_by_launcher and (end.error or end.code is not None)]
    return min(failed, key=_cause_order, default=None)


def _cause_order(end: RankExit) -> tuple[int, bool, float]:
    """Sort key: the more likely cause first, then the earlier one."""
    if end.error:
        likelihood = 3 if end.error["lost_peer"] else 2 if end.error["exit_code"] == INTERRUPTED else 1
        return likelihood, False, end.error["time"]
    code = end.code or 0
    if code == -signal.SIGTERM:  # torchrun ends the other ranks with SIGTERM
        return 4, not end.failed_first, end.time
    # NCCL's watchdog aborts a rank whose collective timed out. The abort is the cause only if no other failure happened
    # before it or in the same second.
    aborted = code == -signal.SIGABRT or code >= 0
    return (1, False, end.time + 1) if aborted else (0, not end.failed_first, end.time)


def collective_timed_out(end: RankExit, log: str) -> bool:
    """Return True if the rank failed because a collective exceeded the group's timeout.

    Gloo raises an error then; NCCL's watchdog aborts the process and writes to the log.
    """
    if end.error:
        return end.error["timed_out"]
    return end.code == -signal.SIGABRT and _WATCHDOG in log


def rank_error(job: Job, end: RankExit, log: str, where: str) -> RankError:
    """Return the error of the failed rank: its HyperionError, its traceback, or its signal and the end of its log.

    Args:
        log: everything that this rank printed.
        where: the error's `where`.
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
    code, killer, remedy = end.code or 0, "", "read the end of its log, above"
    cause = f"failed with exit code {code}" if code else "ended without an answer"
    if code < 0:
        killer = signal.Signals(-code).name
        cause = f"was killed by {killer}"
        remedy = KILLED_REMEDY if killer == "SIGKILL" else remedy
    what = f"{name} {cause} in {job.entry}\n{last_lines(log)}".rstrip()
    return RankError(what, rank=end.rank, signal=killer, where=where, next_step=remedy)


@dataclass(frozen=True)
class RankStack:
    """Where a rank was when it received SIGUSR1.

    Args:
        frames: of its main thread, innermost first, as "function (file.py:12)"; empty if it wrote none.
        waiting: it was waiting for other ranks.
        finished: its entry had returned.
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
    """Parse faulthandler's dump of a rank. Its last block is the main thread."""
    frames = [
        (match["file"], f"{match['function']} ({Path(match['file']).name}:{match['line']})")
        for match in _main_thread(stack)
        if not any(mark in match["file"] for mark in _CALLERS)
    ]
    waiting = any(mark in file for file, _ in frames for mark in _WAITING)
    return RankStack(rank, tuple(text for _, text in frames), waiting, finished)


def _main_thread(stack: str) -> Iterator[re.Match]:
    block = stack.rpartition("most recent call first")[2]
    return filter(None, map(_FRAME.match, block.splitlines()))


def missing_rank(stacks: list[RankStack]) -> int | None:
    """Return the one rank that does not wait while all others wait for it; None if there is no such rank."""
    missing = [stack.rank for stack in stacks if not stack.waiting]
    return missing[0] if len(missing) == 1 < len(stacks) else None


def job_timeout_error(job: Job, stacks: list[RankStack], where: str) -> RankError:
    """Return the error of a job that exceeded its timeout, with the stack of every rank."""
    return RankError(
        f"{job.entry} on {job.ranks} ranks exceeded its timeout of {job.timeout_s:g} s and was ended\n{_lines(stacks)}",
        rank=missing_rank(stacks),
        where=where,
        next_step="find the rank above that made no progress, or raise the timeout",
    )


def collective_timeout_error(job: Job, error: RankError, stacks: list[RankStack]) -> RankError:
    """Return the error of a collective that exceeded the group's timeout. It names the missing rank, if there is one.

    Args:
        error: of the rank whose collective timed out.
        stacks: of every rank at that time.
    """
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
