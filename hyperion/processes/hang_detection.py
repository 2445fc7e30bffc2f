"""Hang detection: each rank counts its collectives. When no rank makes progress, report the ranks that are behind.

A collective waits for every rank. If one rank does not join, the other ranks wait and do not know which rank is missing.
Therefore a thread on every rank writes to the job's store how many collectives the rank has entered.
"""

import json
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass

import torch.distributed as dist
from torch.distributed import Store  # pyright: ignore[reportPrivateImportUsage] - documented, but not in __all__

from hyperion.processes.group import job_store
from hyperion.processes.rank_errors import WAITING_FILES
from hyperion.processes.this_rank import World, world

EXIT_CODE = 1
_POLL_S = 0.25
# _STACKS_S: seconds that a rank waits for all ranks to publish their stacks. _EXIT_S: seconds that the other ranks then wait for
# a rank that is behind to exit. That rank must exit first, because launchers report the first rank that exits.
_STACKS_S, _EXIT_S = 2.0, 5.0
_FRAMES = 4
# If a frame of the main thread contains one of these strings, the rank is waiting for other ranks.
_WAITING = (*WAITING_FILES, "in wait_for_peers\n")
# Number of collectives that a finished rank reports. It is so large that a finished rank is never behind.
_FINISHED = 2**62
# Number of `roll_call` blocks so far. It is part of the prefix in the store, so that a block does not see the progress of an
# earlier one.
_blocks = 0


@dataclass(frozen=True)
class RankProgress:
    """Progress of a rank.

    Args:
        steps: number of collectives that the rank has entered.
        operation: name of the last of these collectives.
        frames: stack of the rank's main thread, outermost frame first. Empty until a hang is suspected, or if the rank does not
            respond.
    """

    steps: int = 0
    operation: str = "nothing yet"
    frames: tuple[str, ...] = ()

    @property
    def waiting(self) -> bool:
        """True if the main thread of the rank is waiting for other ranks."""
        return any(mark in frame for frame in self.frames for mark in _WAITING)

    @property
    def reached(self) -> str:
        """Description of the rank's progress, with the number and the name of the last collective that it has entered."""
        if self.steps == _FINISHED:
            return "the end of the work"
        return f"collective {self.steps} ({self.operation})" if self.steps else "none"


@dataclass
class RollCall:
    """Counter of the collectives of this rank. Call `step` before each collective; the cost is one addition."""

    steps: int = 0
    operation: str = "nothing yet"

    def step(self, operation: str) -> None:
        """Count the collective that this rank enters next.

        Args:
            operation: name of the collective, for the hang report.
        """
        self.steps, self.operation = self.steps + 1, operation


def wait_for_peers(call: Callable[[], object]) -> None:
    """Call a function that waits for other ranks, and make the wait visible in the Python stack.

    Use it for functions such as torch's `Work.wait` or a blocking function of MPI. They are written in C or C++ and have no frame
    in the Python stack. The frame of `wait_for_peers` shows that the rank is waiting.
    """
    call()


@contextmanager
def roll_call(timeout_s: float) -> Iterator[RollCall]:
    """Context manager that detects hanging collectives in its block. Every rank must enter the block.

    If no rank makes progress for `timeout_s` seconds, a report names the ranks that are behind, and the job ends. A rank is
    behind if it has entered fewer collectives than other ranks. If all ranks have entered the same number, a rank that does not
    respond is behind. It does not respond if it is stopped, or if C++ code holds the interpreter's lock. If all ranks respond, a
    rank whose main thread does not wait while other ranks wait is behind. The rank that is behind prints the report and exits
    with `EXIT_CODE`. The other ranks exit after it.
    """
    global _blocks
    _blocks += 1
    counter, here, done = RollCall(), world(), threading.Event()
    if here.size == 1:
        yield counter
        return
    # Open a second connection, because the group's connection may be blocked in the collective that hangs.
    store = job_store(f"hang_detection/{_blocks}")
    watch = threading.Thread(
        target=_watch, args=(counter, here, store, timeout_s, done), name="hyperion-hang-detection", daemon=True
    )
    watch.start()
    try:
        yield counter
        counter.steps = _FINISHED
    except BaseException as error:
        counter.operation += f", after which it raised {type(error).__name__}"
        raise
    finally:
        done.set()
        watch.join()


def _watch(counter: RollCall, here: World, store: Store, timeout_s: float, done: threading.Event) -> None:
    try:
        _follow(counter, here, store, timeout_s, done)
    except (dist.DistStoreError, dist.DistNetworkError) as error:
        # The server of the store runs in the launcher. If the store is gone, the job is ending, and another process reports the
        # reason.
        print(f"rank {here.rank}: hang detection ends, the job's store does not respond: {error}", file=sys.stderr)


def _follow(counter: RollCall, here: World, store: Store, timeout_s: float, done: threading.Event) -> None:
    """Write the progress of this rank to the store, and read the progress of all ranks.

    Return when `done` is set. If no rank makes progress for `timeout_s` seconds, print the hang report and end the process.
    """
    last_steps, since = None, time.monotonic()
    while True:
        # Read the flag before publishing the progress, so that the final progress is always published, even after an exception.
        finished = done.is_set()
        _publish(store, here, RankProgress(counter.steps, counter.operation))
        if finished:
            return
        ranks = _read(store, here)
        if _steps(ranks) != last_steps:
            last_steps, since = _steps(ranks), time.monotonic()
        elif time.monotonic() - since > timeout_s:
            _publish(store, here, RankProgress(counter.steps, counter.operation, _main_frames()))
            # Wait for the stacks of the other ranks, then check again, because a slow collective may have finished meanwhile.
            done.wait(_STACKS_S)
            ranks = _read(store, here)
            if _steps(ranks) == last_steps:
                _exit(here, ranks, time.monotonic() - since, done)
        done.wait(_POLL_S)


def _publish(store: Store, here: World, progress: RankProgress) -> None:
    store.set(str(here.rank), json.dumps(asdict(progress)))


def _read(store: Store, here: World) -> list[RankProgress]:
    ranks = []
    for rank in map(str, range(here.size)):
        values = json.loads(store.get(rank)) if store.check([rank]) else asdict(RankProgress())
        ranks.append(RankProgress(values["steps"], values["operation"], tuple(values["frames"])))
    return ranks


def _steps(ranks: list[RankProgress]) -> list[int]:
    return [progress.steps for progress in ranks]


def _main_frames() -> tuple[str, ...]:
    main = threading.main_thread().ident
    return tuple(traceback.format_stack(next(top for thread, top in sys._current_frames().items() if thread == main)))


def ranks_behind(ranks: list[RankProgress]) -> list[int]:
    """Return the ranks that are behind, as defined in `roll_call`. The list is empty if no rank differs from the others.

    Args:
        ranks: progress of each rank, in rank order.
    """
    most = max(_steps(ranks))
    for differs in (lambda one: one.steps < most, lambda one: not one.frames, lambda one: not one.waiting):
        behind = [rank for rank, one in enumerate(ranks) if differs(one)]
        if behind and len(behind) < len(ranks):
            # If several ranks are behind, return only those with the fewest collectives, because the others wait for them.
            least = min(ranks[rank].steps for rank in behind)
            return [rank for rank in behind if ranks[rank].steps == least]
    return []


def _exit(here: World, ranks: list[RankProgress], hung_s: float, done: threading.Event) -> None:
    """Print the hang report and end the process. If possible, a rank that is behind exits first.

    The main thread may hang, so this thread ends the process without waiting for it.
    """
    behind = ranks_behind(ranks)
    first = min(behind or range(here.size))
    if here.rank not in behind and here.rank != first and done.wait(_EXIT_S):
        return  # the main thread has continued, because its collective failed or the other rank made progress
    print(hang_report(ranks, hung_s), file=sys.stderr)
    sys.stderr.flush()
    sys.stdout.flush()
    os._exit(EXIT_CODE)


def hang_report(ranks: list[RankProgress], hung_s: float) -> str:
    """Format the hang report: the missing ranks, the collective that they missed, and their stacks.

    If no rank is missing, the report contains the stacks of all ranks.
    """
    behind = ranks_behind(ranks)
    lines = [f"no rank made progress for {hung_s:.0f} s"]
    if not behind:
        lines += [
            "all ranks entered the same collective, which does not finish: suspect the connection between the ranks, not one rank"
        ]
    lines += [f"rank {rank} is missing: the last collective that it entered was {ranks[rank].reached}" for rank in behind]
    lines += [f"rank {rank} reached {one.reached}" for rank, one in enumerate(ranks) if rank not in behind]
    for rank in behind or range(len(ranks)):
        frames = "".join(ranks[rank].frames[-_FRAMES:]).rstrip()
        lines += [f"stack of rank {rank}:", frames or "  none: it is stopped, or C++ code holds the interpreter's lock"]
    return "\n".join(lines)
