"""When losses are read, and what the ranks tell each other at that moment: one small all_reduce, beside a wait that
reading the losses costs anyway.
"""

import time

import torch
import torch.distributed as dist

from hyperion.checkpoints import rank_and_size
from hyperion.hardware import Device

SYNC_STEPS = 20
SYNC_S = 5.0


class Pulse:
    """Says after how many steps the losses are read, and lets the ranks agree then.

    On a CPU that is every step. On one accelerator it is every SYNC_STEPS steps, since reading waits for the device; on
    many it is fewer where SYNC_STEPS of the slowest rank would take longer than SYNC_S, so that a request to stop that
    reached one rank is known to all within about SYNC_S (or one step, where that is longer).
    """

    def __init__(self, device: Device):
        self.device = device
        self.ranks = rank_and_size()[1]
        self.steps = SYNC_STEPS if device.kind != "cpu" and self.ranks == 1 else 1
        self.start()

    def start(self) -> None:
        """Steps begin, after an evaluation or a checkpoint."""
        self._since = time.perf_counter()

    def agree(self, stop: bool, fault: bool, steps: int) -> tuple[bool, bool]:
        """Whether any rank was asked to stop, and whether any met a fault. All ranks call it after the same step.

        Args:
            steps: taken since the last call.
        """
        now = time.perf_counter()
        step_s, self._since = (now - self._since) / max(steps, 1), now
        if self.ranks == 1:
            return stop, fault
        told = torch.tensor([stop, fault, step_s], dtype=torch.float64, device=self.device.torch_device)
        dist.all_reduce(told, op=dist.ReduceOp.MAX)
        any_stop, any_fault, slowest_s = told.tolist()
        if self.device.kind != "cpu":
            self.steps = max(1, min(SYNC_STEPS, int(SYNC_S / slowest_s)))
        return bool(any_stop), bool(any_fault)
