"""What each of two ranks checks: `python -m tests.processes.group_checks`, under torchrun's variables."""

import time

import pytest
import torch
import torch.distributed as dist

from hyperion.processes import group, process_group, world

PATIENCE_S = 1.0


def main() -> None:
    torch.set_num_threads(1)
    # Entered again and again in one process: what an earlier group left in the store leads nobody astray.
    for turn in range(3):
        with process_group(60.0, "gloo") as here:
            total = torch.tensor([here.rank + 1.0])
            dist.all_reduce(total)
            assert total.item() == 3.0
            assert world() == here and (here.size, here.local_rank, here.backend) == (2, here.rank, "gloo")
            if turn == 1 and here.rank == 0:
                time.sleep(0.5)
        assert (world().size, world().backend) == (1, "")
    _wait_no_longer_than_asked(here.rank)
    _leave_a_collective_unfinished(here.rank)


def _wait_no_longer_than_asked(rank: int) -> None:
    """Rank 1 is there, and does not come to the collective."""
    if rank == 0:
        with pytest.raises(RuntimeError, match="(?i)timed out"), process_group(PATIENCE_S, "gloo"):
            dist.all_reduce(torch.ones(1))
        print("patient no longer", flush=True)
    else:
        with process_group(PATIENCE_S, "gloo"):
            time.sleep(3 * PATIENCE_S)


def _leave_a_collective_unfinished(rank: int) -> None:
    """An error on rank 1 while a collective is under way: gloo waits for rank 0 as long as it lives, and must not."""
    group._ABANDON_S = 0.5
    with process_group(600.0, "gloo"):
        if rank == 0:
            time.sleep(600)
        work = dist.all_reduce(torch.ones(1), async_op=True)
        print("raising", flush=True)
        raise ArithmeticError(f"on purpose, with {work} begun")


if __name__ == "__main__":
    main()
