"""Which rank is to blame: the first to fail of its own accord, in words that a reader can act on.

When one rank fails its peers fail with it: they lose their connection, or are ended. None of them is blamed.
"""

import re
import signal
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from hyperion.processes.job import INTERRUPTED, KILLED_REMEDY, Job, JobError
from hyperion.processes.output import last_lines

_FRAMES = 8
_WATCHDOG = "collective operation timeout"
_FRAME = re.compile(r'  File "(?P<file>.+)", line (?P<line>\d+) in (?P<function>.+)')
_WAITING = ("torch/distributed/", "torch\\distributed\\")
_BEGINNING = ("<frozen ", "/runpy.py", "/hyperion/processes/rank_worker.py", "/contextlib.py")


class RankError(JobError):
    """A rank that failed, with the ranks that only failed because of it left out.

    Attributes:
        rank: its number; None when no single rank is to blame (all of them stood still).
        signal: "SIGKILL" and the like when it was killed by a signal, else "".
        exit_code: 75 when the ranks were asked to end and saved.
    """

    def __init__(self, what: str, *, rank: int | None = None, signal: str = "", **others):
        super().__init__(what, **others)
        self.rank, self.signal = rank, signal


@dataclass(frozen=True)
class End:
    """How a rank ended.

    Args:
        record: what the rank itself wrote down (see rank_worker), None when it had no time to.
        code: its exit code, the negative number of a signal; None when torchrun did not say.
        time: when torchrun noticed, in whole seconds since 1970.
        swept: it was killed by its launcher, because another rank was gone.
        first: it was among the first that the launcher saw gone.
    """

    rank: int
    record: dict | None = None
    code: int | None = None
    time: float = float("inf")
    swept: bool = False
    first: bool = False

    @property
    def answered(self) -> bool:
        """Whether its entry returned and the rank left in order."""
        return self.record is not None and "answer" in self.record

    @property
    def raised(self) -> bool:
        """Whether it wrote down what it raised."""
        return self.record is not None and "answer" not in self.record


def first_failure(ends: list[End]) -> End | None:
    """The rank to blame: None when no rank failed, or none by itself."""
    failed = [end for end in ends if not end.answered and not end.swept and (end.raised or end.code is not None)]
    return min(failed, key=_blame, default=None)


def _blame(end: End) -> tuple[int, bool, float]:
    """Sorts the more likely cause first, then the earlier one."""
    if end.raised:
        consequence = 3 if end.record["lost_peer"] else 2 if end.record["exit_code"] == INTERRUPTED else 1
        return consequence, False, end.record["time"]
    if end.code == -signal.SIGTERM:  # torchrun ends the others with it
        return 4, not end.first, end.time
    # NCCL's watchdog aborts a rank that waited in vain: a cause only if nothing else happened before or at that second.
    aborted = end.code == -signal.SIGABRT or end.code >= 0
    return (1, False, end.time + 1) if aborted else (0, not end.first, end.time)


def waited(end: End, log: str) -> bool:
    """Whether the rank failed because a collective ran past the group's timeout: gloo raises, NCCL's watchdog aborts."""
    if end.raised:
        return end.record["timed_out"]
    return end.code == -signal.SIGABRT and _WATCHDOG in log


def rank_error(job: Job, end: End, log: str, place: str) -> RankError:
    """The failing rank's own account: its HyperionError, its traceback, or its signal and the end of its log.

    Args:
        log: all that this rank printed.
        place: where to look, for the reader.
    """
    named = f"rank {end.rank} of {job.ranks}"
    if end.raised and (error := end.record["error"]):
        where = f"{error['where']} ({named})" if error["where"] else named
        return RankError(
            error["what"], rank=end.rank, where=where, next_step=error["next_step"], exit_code=end.record["exit_code"]
        )
    if end.raised:
        remedy = "read the traceback above"
        if end.record["lost_peer"]:
            remedy = "another rank ended or did not come, and left no word: look into the logs of all ranks and nodes"
        what = f"{named} raised {end.record['raised']}\n{end.record['traceback'].rstrip()}"
        return RankError(what, rank=end.rank, where=place, next_step=remedy)
    name, cause, remedy = "", f"failed with exit code {end.code}", "read the end of its log, above"
    if end.code == 0:
        cause = "ended without an answer"
    if end.code < 0:
        name = signal.Signals(-end.code).name
        cause = f"was killed by {name}"
        remedy = KILLED_REMEDY if name == "SIGKILL" else remedy
    return RankError(
        f"{named} {cause} in {job.entry}\n{last_lines(log)}".rstrip(), rank=end.rank, signal=name, where=place, next_step=remedy
    )


@dataclass(frozen=True)
class Standing:
    """Where a rank stood when it was asked. frames: innermost first, "function (file.py:12)"; none when it did not
    answer."""

    rank: int
    frames: tuple[str, ...]
    waiting: bool
    answered: bool

    def __str__(self) -> str:
        if self.answered:
            return f"rank {self.rank} had finished"
        if not self.frames:
            return f"rank {self.rank} did not say where it stood: it had ended, was stopped, or had not begun"
        what = "waited for other ranks in" if self.waiting else "was in"
        return f"rank {self.rank} {what} " + "\n  called from ".join(self.frames[:_FRAMES])


def standing(rank: int, stack: str, answered: bool) -> Standing:
    """Read faulthandler's dump of a rank; the main thread is its last block."""
    frames = [
        (match["file"], f"{match['function']} ({Path(match['file']).name}:{match['line']})")
        for match in _main_thread(stack)
        if not any(mark in match["file"] for mark in _BEGINNING)
    ]
    waiting = any(mark in file for file, _ in frames for mark in _WAITING)
    return Standing(rank, tuple(text for _, text in frames), waiting, answered)


def _main_thread(stack: str) -> Iterator[re.Match]:
    block = stack.rpartition("most recent call first")[2]
    return filter(None, map(_FRAME.match, block.splitlines()))


def late_rank(standings: list[Standing]) -> int | None:
    """The rank that the others wait for, when it is one: all but it were seen to wait, or it alone had finished."""
    late = [standing.rank for standing in standings if not standing.waiting]
    return late[0] if len(late) == 1 < len(standings) else None


def timeout_error(job: Job, standings: list[Standing], place: str) -> RankError:
    """The job ran past its timeout: where every rank stood."""
    return RankError(
        f"{job.entry} on {job.ranks} ranks ran past its timeout of {job.timeout_s:g} s and was ended\n{_told(standings)}",
        rank=late_rank(standings),
        where=place,
        next_step="look above for the rank that did not get on, or allow more time",
    )


def waited_in_vain(job: Job, error: RankError, standings: list[Standing]) -> RankError:
    """A collective ran past the group's timeout: the rank that raised is not the one to blame, but the one that is late.

    Args:
        error: of the rank that waited.
        standings: where every rank stood then.
    """
    standings = [replace(one, waiting=True) if one.rank == error.rank else one for one in standings]
    late = late_rank(standings)
    first = "" if late is None else f"rank {late} of {job.ranks} did not come, and rank {error.rank} waited in vain\n"
    others = [one for one in standings if one.rank != error.rank]
    return RankError(
        f"{first}{error.what.rstrip()}\n{_told(others)}",
        rank=error.rank if late is None else late,
        where=error.where,
        next_step="look above for the rank that did not get on",
    )


def _told(standings: list[Standing]) -> str:
    return "\n".join(map(str, standings))
