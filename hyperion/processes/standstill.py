"""Who did not come: ranks count their steps, and when all of them stand still the one that is behind is named.

A collective waits for every rank. When one does not come the others wait too, and nothing says for whom: each knows only
that it waits. So a thread of every rank tells the job's store how many collectives its rank has entered.
"""

import os
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta

import torch.distributed as dist

from hyperion.processes.group import World, world

EXIT_CODE = 1
_POLL_S = 0.25
# The rank that is behind leaves first, so that launchers name it as the one that failed; this long its peers wait for that.
_GRACE_S = 3.0
_STACK_FRAMES = 4
_FINISHED = 2**62
_held = 0


@dataclass
class RollCall:
    """Where this rank stands. `step` is called before each collective: it costs an addition."""

    steps: int = 0
    doing: str = "nothing yet"

    def step(self, doing: str) -> None:
        """Say that this rank now enters a collective, and which."""
        self.steps, self.doing = self.steps + 1, doing


@contextmanager
def roll_call(timeout_s: float) -> Iterator[RollCall]:
    """Watch over the collectives of the block. If no rank gets on for `timeout_s`, name those behind and end the job.

    The rank that is behind prints where it stands and leaves with `EXIT_CODE`. If it cannot even do that (it is stopped,
    or holds the interpreter), its peers name it and leave. Every rank of the group enters the block.
    """
    global _held
    _held += 1
    roll, here, over = RollCall(), world(), threading.Event()
    if here.size == 1:
        yield roll
        return
    watch = threading.Thread(
        target=_watch, args=(roll, here, _own_store(_held), timeout_s, over), name="roll call", daemon=True
    )
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
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
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
        store.set(str(here.rank), f"{roll.steps} {roll.doing}")
        if finished:
            return
        stand = [_stand_of(store, rank) for rank in range(here.size)]
        if stand != seen:
            seen, since = stand, time.monotonic()
        elif time.monotonic() - since > timeout_s:
            _end(here, stand, time.monotonic() - since, over)
            return
        over.wait(_POLL_S)


def _stand_of(store: dist.Store, rank: int) -> tuple[int, str]:
    if not store.check([str(rank)]):
        return 0, "nothing yet"
    steps, _, doing = store.get(str(rank)).decode().partition(" ")
    return int(steps), doing


def behind(stand: list[tuple[int, str]]) -> list[int]:
    """Ranks that have entered fewer collectives than others; none when all are as far.

    Args:
        stand: (collectives entered, what the last one was) by rank.
    """
    least, most = (choose(steps for steps, _ in stand) for choose in (min, max))
    return [rank for rank, (steps, _) in enumerate(stand) if steps == least < most]


def _end(here: World, stand: list[tuple[int, str]], stood_s: float, over: threading.Event) -> None:
    """Name who is behind, from the rank itself if it can, and leave. The main thread may be anywhere: it is not asked."""
    late = behind(stand)
    if here.rank not in late and over.wait(_GRACE_S):
        return  # it got on after all
    speaker = here.rank in late or here.rank == min(rank for rank in range(here.size) if rank not in late)
    if speaker:
        print(told(stand, stood_s), file=sys.stderr)
    if here.rank in late:
        frames = traceback.format_stack(sys._current_frames()[threading.main_thread().ident])
        print(f"rank {here.rank} stands at:\n{''.join(frames[-_STACK_FRAMES:])}", file=sys.stderr)
    sys.stderr.flush()
    sys.stdout.flush()
    os._exit(EXIT_CODE)


def told(stand: list[tuple[int, str]], stood_s: float) -> str:
    """The account of a standstill: who did not arrive where."""
    late = behind(stand)
    if not late:
        return (
            f"no rank got on for {stood_s:.0f} s, and none is behind: all of them entered collective {stand[0][0]} "
            f"({stand[0][1]}), and it does not end. The connection between the ranks is at fault, not a rank"
        )
    waiting = [rank for rank in range(len(stand)) if rank not in late]
    steps, doing = max(stand[rank] for rank in waiting)
    where = "the end of the work" if steps == _FINISHED else f"collective {steps} ({doing})"
    lines = [f"no rank got on for {stood_s:.0f} s"]
    lines += [f"rank {rank} did not arrive: the last it entered was {_last(*stand[rank])}" for rank in late]
    lines += [f"{_named(waiting)} arrived at {where}"]
    return "\n".join(lines)


def _last(steps: int, doing: str) -> str:
    return f"collective {steps} ({doing})" if steps else "none"


def _named(ranks: list[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
