"""Work of one rank on behalf of all, and errors of one rank raised on all ranks, so that no rank waits for a failed one.

In a single process, without torch.distributed, these functions are plain calls.
"""

from collections.abc import Callable
from typing import TypeVar, cast

import torch.distributed as dist

from hyperion.checkpoints.states import CheckpointError
from hyperion.errors import HyperionError

T = TypeVar("T")
# The arguments of a HyperionError, which travel between ranks; exceptions themselves do not always survive pickling.
Fault = dict[str, str | None]


def rank_and_size() -> tuple[int, int]:
    """Return this rank and the number of ranks; (0, 1) without a process group."""
    return (dist.get_rank(), dist.get_world_size()) if dist.is_available() and dist.is_initialized() else (0, 1)


def gathered(value: T) -> list[T]:
    """Return the values of all ranks in rank order, on every rank. All ranks call it."""
    _, size = rank_and_size()
    if size == 1:
        return [value]
    values = [value] * size
    dist.all_gather_object(values, value)
    return values


def agreed(work: Callable[[], T]) -> T:
    """Run `work` on this rank, then exchange errors with all ranks. All ranks call it.

    Args:
        work: contains no collective, so that an error inside does not leave other ranks waiting.

    Raises:
        Exception: in a single process, the exception of `work`.
        CheckpointError: on many ranks, the same on all: the error of the first failing rank. It names the failing ranks
            unless all failed with the same error.
    """
    result, error = None, None
    try:
        result = work()
    except Exception as raised:
        if rank_and_size()[1] == 1:
            raise
        error = raised
    faults = gathered(None if error is None else _fault(error))
    if any(faults):
        raise _first_fault(faults) from error
    return cast(T, result)


def on_rank_0(work: Callable[[], T]) -> T:
    """Run `work` on rank 0 and return its result (picklable) on every rank. All ranks call it.

    Raises:
        Exception: in a single process, the exception of `work`.
        CheckpointError: on many ranks, the error of rank 0, on all ranks.
    """
    rank, size = rank_and_size()
    if size == 1:
        return work()
    outcome: tuple[T | None, Fault | None] = None, None
    error = None
    if rank == 0:
        try:
            outcome = work(), None
        except Exception as raised:
            error = raised
            outcome = None, _fault(raised)
    box = [outcome]
    dist.broadcast_object_list(box, src=0)
    result, fault = box[0]
    if fault is not None:
        raise _error_on_all(fault) from error
    return cast(T, result)


def _fault(error: Exception) -> Fault:
    if isinstance(error, HyperionError):
        return error.as_dict()
    return {"what": f"{type(error).__name__}: {error}", "where": None, "next_step": "read that rank's traceback"}


def _first_fault(faults: list[Fault | None]) -> CheckpointError:
    """Return the error of the first failing rank, with the failing ranks named."""
    failed = {rank: fault for rank, fault in enumerate(faults) if fault is not None}
    first = next(iter(failed.values()))
    if len(failed) == len(faults) and all(fault == first for fault in failed.values()):
        return _error_on_all(first)
    same = [rank for rank, fault in failed.items() if fault["what"] == first["what"]]
    ranks = f"rank {same[0]}" if len(same) == 1 else f"ranks {', '.join(map(str, same))}"
    return _error_on_all(first | {"what": f"{ranks} of {len(faults)}: {first['what']}"})


def _error_on_all(fault: Fault) -> CheckpointError:
    error = CheckpointError(str(fault["what"]), where=fault["where"], next_step=fault["next_step"])
    error.on_all_ranks = True
    return error
