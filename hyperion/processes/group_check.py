"""Check that the collectives of a process group return the right values.

The check has its own module, so that ranks import little and start fast.
"""

import torch
import torch.distributed as dist

from hyperion.processes.this_rank import world


def check_on_rank() -> dict[str, bool | str]:
    """Run an all-reduce, an all-gather and a broadcast on this rank. Every rank must call this.

    Returns:
        A dict with 'right', which is True if every value on this rank is right, and 'backend', the backend of the group.
    """
    here = world()
    mine = torch.full((1000,), here.rank + 1.0, device=here.device.torch_device)
    total, root = mine.clone(), mine.clone()
    parts = [torch.empty_like(mine) for _ in range(here.size)]
    dist.all_reduce(total)
    dist.all_gather(parts, mine)
    dist.broadcast(root, src=0)
    expected = torch.arange(1.0, here.size + 1, device=mine.device)
    right = bool((total == expected.sum()).all()) and bool((root == 1).all())
    right &= all(bool((part == value).all()) for part, value in zip(parts, expected, strict=True))
    return {"right": right, "backend": here.backend}
