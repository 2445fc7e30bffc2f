"""Detect hangs: each rank counts its collectives; when no rank makes progress, report the ranks that are behind.

A collective waits for every rank. If one rank does not join, the others wait too, and none of them knows which is missing. So
a thread of every rank publishes in the job's store how many collectives its rank has entered.
"""

import json
import os
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass

import torch.distributed as dist
from torch.distributed import Store  # pyright: ignore[reportPrivateImportUsage] - documented, but not in __all__

from hyperion.processes.group import World, job_store, world

EXIT_CODE = 1
_POLL_S = 0.25
# Ranks wait this long for the others' stacks. Then ranks that are not behind wait this long for the one that is to exit
# first: launchers name the first rank that exits.
_STACKS_S, _EXIT_S = 2.0, 5.0
_FRAMES = 4
# A main thread in one of these waits for other ranks.
_WAITING = ("/torch/distributed/", "/torch/cuda/", "in wait_for_peers\n")
_FINISHED = 2**62
_blocks = 0


@dataclass(frozen=True)
class RankProgress:
    """How far a rank is.

    Args:
        steps: number of collectives that it has entered.
        operation: the last of them.
        frames: stack of its main thread, outermost frame first; empty until a hang is suspected, or if the rank does not
            respond.
    """

    steps: int = 0
    operation: str = "nothing yet"
    frames: tuple[str, ...] = ()

    @property
    def waiting(self) -> bool:
        """True if the main thread waits for other ranks."""
        return any(mark in frame for frame in self.frames for mark in _WAITING)

    @property
    def reached(self) -> str:
        """Name of the last collective that the rank entered."""
        if self.steps == _FINISHED:
            return "the end of the work"
        return f"collective {self.steps} ({self.operation})" if self.steps else "none"


@dataclass
class RollCall:
    """Counter of this rank's collectives. Call `step` before each collective; it costs one addition."""

    steps: int = 0
    operation: str = "nothing yet"

    def step(self, operation: str) -> None:
        """Count a collective that this rank now enters."""
        self.steps, self.operation = self.steps + 1, operation


def wait_for_peers(work: dist.Work) -> None:
    """Wait for an asynchronous collective. The name of this function is in the stack of a rank that waits here.

    torch's own `Work.wait` is C++ and leaves no frame in Python's stack.
    """
    work.wait()


@contextmanager
def roll_call(timeout_s: float) -> Iterator[RollCall]:
    """Watch the collectives of the block. If no rank makes progress for `timeout_s`, report those behind and end the job.

    A rank is behind if it has entered fewer collectives than others. If all have entered the same number, it is the rank that
    does not respond (stopped, or C++ code holds the interpreter's lock). If all respond, it is the rank whose main thread does
    not wait while others do. The rank behind prints the report and exits with `EXIT_CODE`; the others exit after it. Every
    rank enters the block.
    """
    global _blocks
    _blocks += 1
    counter, here, done = RollCall(), world(), threading.Event()
    if here.size == 1:
        yield counter
        return
    # A connection of its own: the group's connection may block in the collective that hangs.
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
        # The launcher serves the store. If it is gone the job is ending, and another process reports why.
        print(f"rank {here.rank}: hang detection ends, the job's store does not respond: {error}", file=sys.stderr)


def _follow(counter: RollCall, here: World, store: Store, timeout_s: float, done: threading.Event) -> None:
    """Publish this rank's progress and read the others', until the block is done or no rank makes progress."""
    last_steps, since = None, time.monotonic()
    while True:
        finished = done.is_set()
        _publish(store, here, RankProgress(counter.steps, counter.operation))
        if finished:
            return
        ranks = _read(store, here)
        if _steps(ranks) != last_steps:
            last_steps, since = _steps(ranks), time.monotonic()
        elif time.monotonic() - since > timeout_s:
            _publish(store, here, RankProgress(counter.steps, counter.operation, _main_frames()))
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
    """Return the ranks that the others wait for, by the rules of `roll_call`; empty if no rank differs from the others.

    Args:
        ranks: progress by rank.
    """
    most = max(_steps(ranks))
    for differs in (lambda one: one.steps < most, lambda one: not one.frames, lambda one: not one.waiting):
        behind = [rank for rank, one in enumerate(ranks) if differs(one)]
        if behind and len(behind) < len(ranks):
            # Of several, only those furthest behind: the others wait for them.
            least = min(ranks[rank].steps for rank in behind)
            return [rank for rank in behind if ranks[rank].steps == least]
    return []


def _exit(here: World, ranks: list[RankProgress], hung_s: float, done: threading.Event) -> None:
    """Print the report and end the process, the rank behind first if it can. The main thread may hang, so it is not asked."""
    behind = ranks_behind(ranks)
    first = min(behind or range(here.size))
    if here.rank not in behind and here.rank != first and done.wait(_EXIT_S):
        return  # the main thread continued: it lost its peer, or the peer made progress after all
    print(hang_report(ranks, hung_s), file=sys.stderr)
    sys.stderr.flush()
    sys.stdout.flush()
    os._exit(EXIT_CODE)


def hang_report(ranks: list[RankProgress], hung_s: float) -> str:
    """Format the hang report: missing ranks, the collective they missed, and their stacks (all ranks' if none is missing)."""
    behind = ranks_behind(ranks)
    lines = [f"no rank made progress for {hung_s:.0f} s"]
    if not behind:
        lines += ["all ranks entered the same collective and it does not end: suspect their connection, no single rank"]
    lines += [f"rank {rank} is missing: the last it entered was {ranks[rank].reached}" for rank in behind]
    lines += [f"rank {rank} reached {one.reached}" for rank, one in enumerate(ranks) if rank not in behind]
    for rank in behind or range(len(ranks)):
        frames = "".join(ranks[rank].frames[-_FRAMES:]).rstrip()
        lines += [f"stack of rank {rank}:", frames or "  none: it is stopped, or C++ code holds the interpreter's lock"]
    return "\n".join(lines)
