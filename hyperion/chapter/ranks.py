"""How many ranks an experiment runs on: what the profile says, as far as this machine has devices; and their memory."""

import psutil
import torch
import torch.distributed as dist

from hyperion.chapter.context import Context
from hyperion.errors import HyperionError
from hyperion.processes import World


def devices_here(context: Context) -> int:
    """Accelerators of this machine; on a CPU as many ranks as the profile's `cpu_ranks` says, 2 unless it does."""
    if context.device.kind == "cpu":
        return context.sizes.get("cpu_ranks", 2)
    return torch.cuda.device_count()


def ranks_of(context: Context) -> int:
    """Ranks of the experiment: all devices, at most the profile's `ranks`.

    Raises:
        HyperionError: the ranks do not divide the profile's batch.
    """
    ranks = min(devices_here(context), context.sizes.get("ranks", 8))
    batch = context.sizes.get("batch_size")
    if batch is not None and batch % ranks:
        raise HyperionError(
            f"{ranks} ranks do not divide a batch of {batch}",
            where=f"{context.notebook}.{context.experiment}",
            next_step=f"set batch_size to a multiple of {ranks}, or ranks to a divisor of {batch}, in the profile",
        )
    return ranks


def least_free_bytes(here: World) -> int:
    """Memory that every rank has free: of its GPU, or its share of the host's. A collective; the same on all, so that all
    skip the same: one that ran out of memory alone would leave the others waiting."""
    if here.device.kind == "cpu":
        free = psutil.virtual_memory().available // here.size
    else:
        free = torch.cuda.mem_get_info(here.device.torch_device)[0]
    least = torch.tensor([free], dtype=torch.int64, device=here.device.torch_device)
    dist.all_reduce(least, dist.ReduceOp.MIN)
    return int(least)
