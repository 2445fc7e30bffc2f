"""The checks of each of two ranks: `python -m tests.processes.group_checks env://`, with torchrun's variables set."""

import sys
import time

import pytest
import torch
import torch.distributed as dist

from hyperion.processes import group, process_group, world

TIMEOUT_S = 1.0
INIT_METHOD = sys.argv[1]


def main() -> None:
    torch.set_num_threads(1)
    # One process enters several groups in turn: keys of an earlier one in the store do no harm.
    for turn in range(3):
        with process_group(60.0, "gloo", INIT_METHOD) as here:
            total = torch.tensor([here.rank + 1.0])
            dist.all_reduce(total)
            assert total.item() == 3.0
            assert world() == here and (here.size, here.local_rank, here.backend) == (2, here.rank, "gloo")
            if turn == 1 and here.rank == 0:
                time.sleep(0.5)
        assert (world().size, world().backend) == (1, "")
    _time_out(here.rank)
    _leave_a_collective_unfinished(here.rank)


def _time_out(rank: int) -> None:
    """Rank 1 joins the group but not the collective."""
    if rank == 0:
        with pytest.raises(RuntimeError, match="(?i)timed out"), process_group(TIMEOUT_S, "gloo", INIT_METHOD):
            dist.all_reduce(torch.ones(1))
        print("timed out", flush=True)
    else:
        with process_group(TIMEOUT_S, "gloo", INIT_METHOD):
            time.sleep(3 * TIMEOUT_S)


def _leave_a_collective_unfinished(rank: int) -> None:
    """Rank 1 raises during a collective. Gloo would wait for rank 0 as long as it lives; the process must end."""
    group._ABANDON_S = 0.5
    with process_group(600.0, "gloo", INIT_METHOD):
        if rank == 0:
            time.sleep(600)
        work = dist.all_reduce(torch.ones(1), async_op=True)
        print("raising", flush=True)
        raise ArithmeticError(f"on purpose, with {work} begun")


if __name__ == "__main__":
    main()
