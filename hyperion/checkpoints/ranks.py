"""What one rank does for all, and faults of one rank that all ranks learn of: nobody waits for a rank that gave up.

On one process, without torch.distributed, everything here is a plain call.
"""

from collections.abc import Callable
from typing import TypeVar

import torch.distributed as dist

from hyperion.checkpoints.states import CheckpointError
from hyperion.errors import HyperionError

T = TypeVar("T")


def rank_and_size() -> tuple[int, int]:
    """This rank and the number of ranks; 0 of 1 without a process group."""
    return (dist.get_rank(), dist.get_world_size()) if dist.is_available() and dist.is_initialized() else (0, 1)


def gathered(value: T) -> list[T]:
    """The values of all ranks in rank order, on every rank. All ranks call it."""
    _, size = rank_and_size()
    if size == 1:
        return [value]
    values = [value] * size
    dist.all_gather_object(values, value)
    return values


def agreed(work: Callable[[], T]) -> T:
    """Do this rank's own work, then learn how it went everywhere. All ranks call it.

    Args:
        work: holds no collective, so that an error within it leaves no other rank waiting.

    Raises:
        Exception: what `work` raised, on one process.
        CheckpointError: on many ranks, the same one on all: the first failing rank's, with the ranks named unless all
            failed alike.
    """
    result, fault = None, None
    try:
        result = work()
    except Exception as error:
        if rank_and_size()[1] == 1:
            raise
        fault = error
    told = gathered(None if fault is None else _told(fault))
    if any(told):
        raise _one_error(told) from fault
    return result


def on_rank_0(work: Callable[[], T]) -> T:
    """Let rank 0 do the work; every rank gets its result (picklable), or its error as a CheckpointError. All ranks
    call it.
    """
    rank, size = rank_and_size()
    if size == 1:
        return work()
    outcome, fault = None, None
    if rank == 0:
        try:
            outcome = (work(), None)
        except Exception as error:
            fault = error
            outcome = (None, _told(error))
    box = [outcome]
    dist.broadcast_object_list(box, src=0)
    result, told = box[0]
    if told is not None:
        raise _everywhere(told) from fault
    return result


def _told(error: Exception) -> dict[str, str | None]:
    """An error's parts as they travel between ranks; exceptions themselves do not always survive pickling."""
    if isinstance(error, HyperionError):
        return error.as_dict()
    return {"what": f"{type(error).__name__}: {error}", "where": None, "next_step": "read that rank's traceback"}


def _one_error(told: list[dict | None]) -> CheckpointError:
    """The first failing rank's error in words that name the ranks."""
    failed = [rank for rank, fault in enumerate(told) if fault is not None]
    first = told[failed[0]]
    if len(failed) == len(told) and all(fault == first for fault in told):
        return _everywhere(first)
    alike = [rank for rank in failed if told[rank]["what"] == first["what"]]
    named = f"rank {alike[0]}" if len(alike) == 1 else f"ranks {', '.join(map(str, alike))}"
    return _everywhere(first | {"what": f"{named} of {len(told)}: {first['what']}"})


def _everywhere(told: dict) -> CheckpointError:
    error = CheckpointError(**told)
    error.on_all_ranks = True
    return error
