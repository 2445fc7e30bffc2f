"""The number of ranks an experiment runs on, and the memory they have free."""

import psutil
import torch
import torch.distributed as dist

from hyperion.chapter.context import Context, Options
from hyperion.errors import HyperionError
from hyperion.processes import World


class RankOptions(Options):
    """Options of an experiment on several ranks.

    Args:
        ranks: largest number of ranks; fewer where the machine has fewer devices.
        cpu_ranks: ranks that share the CPU of a machine without accelerators.
    """

    ranks: int = 8
    cpu_ranks: int = 2


def devices_here(context: Context, cpu_ranks: int = 2) -> int:
    """Return the number of accelerators of this machine, or `cpu_ranks` if it has none."""
    return cpu_ranks if context.device.kind == "cpu" else torch.cuda.device_count()


def ranks_of(context: Context, options: RankOptions | None = None, batch_size: int | None = None) -> int:
    """Return the number of ranks of the experiment: all devices, at most `options.ranks`.

    Args:
        options: None for the defaults.
        batch_size: examples of one step over all ranks together.

    Raises:
        HyperionError: `batch_size` is not divisible by the number of ranks.
    """
    options = options or RankOptions()
    ranks = min(devices_here(context, options.cpu_ranks), options.ranks)
    if batch_size is not None and batch_size % ranks:
        raise HyperionError(
            f"{ranks} ranks do not divide a batch of {batch_size}",
            where=f"{context.notebook}.{context.experiment}",
            next_step=f"set batch_size to a multiple of {ranks}, or ranks to a divisor of {batch_size}, in the profile",
        )
    return ranks


def least_free_bytes(here: World) -> int:
    """Return the least memory in bytes that any rank has free: of its GPU, or its share of the host's.

    A collective, so that all ranks get the same answer and skip the same work. A rank that ran out of memory alone would
    leave the others waiting.
    """
    if here.device.kind == "cpu":
        free = psutil.virtual_memory().available // here.size
    else:
        free = torch.cuda.mem_get_info(here.device.torch_device)[0]
    least = torch.tensor([free], dtype=torch.int64, device=here.device.torch_device)
    dist.all_reduce(least, dist.ReduceOp.MIN)
    return int(least)
