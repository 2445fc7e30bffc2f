"""Ranks that wait for each other without a collective: through the job's store, so that no device works while they wait."""

import os
import time
from datetime import timedelta

import torch.distributed as dist

from hyperion.errors import HyperionError
from hyperion.processes.group import meeting_place

_POLL_S = 0.002
_PATIENCE_S = 600.0


class Meetings:
    """Named meetings of ranks of this job, which torchrun's variables say where to find. Each name serves once.

    NCCL's barrier is a kernel that spins on every GPU until all ranks are there; whoever waits in it disturbs those that
    measure. Here a rank that waits sleeps.
    """

    def __init__(self):
        address, port = meeting_place(os.environ)
        store = dist.TCPStore(address, port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=30))
        self._store = dist.PrefixStore(f"hyperion/meetings/{os.environ.get('TORCHELASTIC_RESTART_COUNT', 0)}", store)

    def arrive(self, name: str) -> None:
        """Say that this rank is there, and do not wait."""
        self._store.add(name, 1)

    def complete(self, name: str, ranks: int) -> bool:
        """Whether so many ranks are there."""
        return self._store.add(name, 0) >= ranks

    def meet(self, name: str, ranks: int) -> None:
        """Arrive, and wait for the others.

        Raises:
            HyperionError: they did not come within ten minutes.
        """
        self.arrive(name)
        deadline = time.monotonic() + _PATIENCE_S
        while not self.complete(name, ranks):
            if time.monotonic() > deadline:
                there = self._store.add(name, 0)
                raise HyperionError(
                    f"{there} of {ranks} ranks came to {name!r} within {_PATIENCE_S:g} s",
                    where="Meetings.meet",
                    next_step="look at the logs of the other ranks",
                )
            time.sleep(_POLL_S)
