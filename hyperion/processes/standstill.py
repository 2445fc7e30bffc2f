"""Who did not come: ranks count their steps, and when all of them stand still the one that is behind is named.

A collective waits for every rank. When one does not come the others wait too, and nothing says for whom: each knows only
that it waits. So a thread of every rank tells the job's store how many collectives its rank has entered.
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
from datetime import timedelta

import torch.distributed as dist

from hyperion.processes.group import World, meeting_place, world

EXIT_CODE = 1
_POLL_S = 0.25
# So long ranks wait for what the others say, and then for the rank that is behind to leave first: launchers name that one.
_ANSWER_S, _LEAVE_S = 2.0, 5.0
_FRAMES = 4
# A main thread in one of these waits for others.
_WAITING = ("/torch/distributed/", "/torch/cuda/", "in wait_for_peers\n")
_FINISHED = 2**62
_held = 0


@dataclass(frozen=True)
class Standing:
    """Where a rank stands: collectives it has entered, what the last of them was, and, once all stand still, the frames of
    its main thread, outermost first; no frames while it has not said."""

    steps: int = 0
    doing: str = "nothing yet"
    frames: tuple[str, ...] = ()

    @property
    def waiting(self) -> bool:
        """Whether its main thread waits for other ranks."""
        return any(mark in frame for frame in self.frames for mark in _WAITING)

    @property
    def reached(self) -> str:
        """The last collective that it entered, in words."""
        if self.steps == _FINISHED:
            return "the end of the work"
        return f"collective {self.steps} ({self.doing})" if self.steps else "none"


@dataclass
class RollCall:
    """Where this rank stands. `step` is called before each collective: it costs an addition."""

    steps: int = 0
    doing: str = "nothing yet"

    def step(self, doing: str) -> None:
        """Say that this rank now enters a collective, and which."""
        self.steps, self.doing = self.steps + 1, doing


def wait_for_peers(work: dist.Work) -> None:
    """Wait for an operation that was begun together with others. A rank that stands here waits: its frames say so, where
    those of torch's own `wait` leave no trace in Python."""
    work.wait()


@contextmanager
def roll_call(timeout_s: float) -> Iterator[RollCall]:
    """Watch over the collectives of the block. If no rank gets on for `timeout_s`, name those behind and end the job.

    Behind is a rank that has entered fewer collectives than others; if all entered as many, one that does not even answer
    (it is stopped, or holds the interpreter); if all answer, one whose main thread is elsewhere while others wait. It prints
    where it stands and leaves with `EXIT_CODE`; the others name it, too, and leave after it. Every rank enters the block.
    """
    global _held
    _held += 1
    roll, here, over = RollCall(), world(), threading.Event()
    if here.size == 1:
        yield roll
        return
    watch = threading.Thread(target=_watch, args=(roll, here, _own_store(_held), timeout_s, over), name="roll call", daemon=True)
    watch.start()
    try:
        yield roll
        roll.steps = _FINISHED
    except BaseException as error:
        roll.doing += f", after which it raised {type(error).__name__}"
        raise
    finally:
        over.set()
        watch.join()


def _own_store(call: int) -> dist.Store:
    """A connection of its own to the job's store: the group's may be taken by whatever the rank waits for."""
    address, port = meeting_place(os.environ)
    store = dist.TCPStore(address, port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=30))
    return dist.PrefixStore(f"hyperion/roll_call/{os.environ.get('TORCHELASTIC_RESTART_COUNT', 0)}/{call}", store)


def _watch(roll: RollCall, here: World, store: dist.Store, timeout_s: float, over: threading.Event) -> None:
    try:
        _follow(roll, here, store, timeout_s, over)
    except (dist.DistStoreError, dist.DistNetworkError) as error:
        # The launcher keeps the store: without it the job is at its end, and somebody else says why.
        print(f"rank {here.rank}: the roll call ends, the job's store does not answer: {error}", file=sys.stderr)


def _follow(roll: RollCall, here: World, store: dist.Store, timeout_s: float, over: threading.Event) -> None:
    """Publish where this rank stands and read where the others do, until all is over or all stand still."""
    seen, since = None, time.monotonic()
    while True:
        finished = over.is_set()
        _publish(store, here, Standing(roll.steps, roll.doing))
        if finished:
            return
        stand = _read(store, here)
        if _steps(stand) != seen:
            seen, since = _steps(stand), time.monotonic()
        elif time.monotonic() - since > timeout_s:
            _publish(store, here, Standing(roll.steps, roll.doing, _main_frames()))
            over.wait(_ANSWER_S)
            stand = _read(store, here)
            if _steps(stand) == seen:
                _leave(here, stand, time.monotonic() - since, over)
        over.wait(_POLL_S)


def _publish(store: dist.Store, here: World, standing: Standing) -> None:
    store.set(str(here.rank), json.dumps(asdict(standing)))


def _read(store: dist.Store, here: World) -> list[Standing]:
    ranks = [str(rank) for rank in range(here.size)]
    told = [json.loads(store.get(rank)) if store.check([rank]) else {} for rank in ranks]
    return [Standing(**one | {"frames": tuple(one.get("frames", ()))}) for one in told]


def _steps(stand: list[Standing]) -> list[int]:
    return [one.steps for one in stand]


def _main_frames() -> tuple[str, ...]:
    return tuple(traceback.format_stack(sys._current_frames()[threading.main_thread().ident]))


def behind(stand: list[Standing]) -> list[int]:
    """The ranks that the others wait for, by `roll_call`'s rules; none when nothing sets a rank apart.

    Args:
        stand: by rank.
    """
    most = max(_steps(stand))
    for apart in (lambda one: one.steps < most, lambda one: not one.frames, lambda one: not one.waiting):
        late = [rank for rank, one in enumerate(stand) if apart(one)]
        if late and len(late) < len(stand):
            # Of several that are behind, those that are furthest behind: the others wait for them.
            least = min(stand[rank].steps for rank in late)
            return [rank for rank in late if stand[rank].steps == least]
    return []


def _leave(here: World, stand: list[Standing], stood_s: float, over: threading.Event) -> None:
    """Name who is behind, and leave: that rank first, if it can. The main thread may be anywhere: it is not asked."""
    late = behind(stand)
    speakers = late or range(here.size)
    if here.rank not in late and here.rank != min(speakers) and over.wait(_LEAVE_S):
        return  # the main thread got away: it found its peer gone, or the peer got on after all
    print(told(stand, stood_s), file=sys.stderr)
    sys.stderr.flush()
    sys.stdout.flush()
    os._exit(EXIT_CODE)


def told(stand: list[Standing], stood_s: float) -> str:
    """The account of a standstill: who did not arrive where, and where everybody stands."""
    late = behind(stand)
    lines = [f"no rank got on for {stood_s:.0f} s"]
    if not late:
        lines += ["all ranks entered the same collective, and it does not end: their connection is at fault, not one of them"]
    lines += [f"rank {rank} did not arrive: the last it entered was {stand[rank].reached}" for rank in late]
    lines += [f"rank {rank} arrived at {one.reached}" for rank, one in enumerate(stand) if rank not in late]
    for rank in late or range(len(stand)):
        frames = "".join(stand[rank].frames[-_FRAMES:]).rstrip() or "  it does not say: it is stopped, or holds the interpreter"
        lines += [f"rank {rank} stands at:", frames]
    return "\n".join(lines)
