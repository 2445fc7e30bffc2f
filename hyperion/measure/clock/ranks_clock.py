"""The clock of work that ranks do together: a sample is the slowest rank's, and all ranks read the same clock."""

import time
from collections.abc import Callable

import torch
import torch.distributed as dist

from hyperion.measure.clock.clocks import device_clock
from hyperion.processes import World

# Enqueuing one sample (inputs restored, a meeting, two events, the collective) takes the host some 150 microseconds.
_HEAD_START_CYCLES = 400_000


class RanksClock:
    """Samples of calls that every rank makes at the same time, for `time_function(…, clock=RanksClock(…))`.

    How often to call is decided from samples and from the time, by each rank for itself; ranks that decided differently
    would wait for each other for ever. So both are agreed: of a sample and of the time the maximum over all ranks counts.

    Args:
        here: this rank among its peers, in a process group that is up.
        prepare: called before each timed call, outside of its time; it restores what the call overwrites.
        step: told before each collective that the clock itself starts.
    """

    def __init__(self, here: World, prepare: Callable[[], object], step: Callable[[str], object]):
        self._clock = device_clock(here.device, _HEAD_START_CYCLES)
        self._prepare, self._step = prepare, step
        self._token = torch.zeros(1, device=here.device.torch_device)
        self._started, self._agreed_s = time.monotonic(), 0.0

    def now(self) -> float:
        """Seconds since the clock was made, as agreed after the last sample."""
        return self._agreed_s

    def sample(self, functions: list[Callable], flush: Callable | None, count: int) -> list[list[float]]:
        """Seconds of `count` calls of each function, in turn: of each call those of the rank that took longest."""
        own = self._clock.sample(functions, self._meet if flush is None else lambda: (flush(), self._meet()), count)
        told = [seconds for series in own for seconds in series] + [time.monotonic() - self._started]
        agreed = torch.tensor(told, dtype=torch.float64, device=self._token.device)
        self._step("agreeing on the samples")
        dist.all_reduce(agreed, dist.ReduceOp.MAX)
        *slowest, self._agreed_s = agreed.tolist()
        return [slowest[start : start + count] for start in range(0, len(slowest), count)]

    def in_a_row(self, function: Callable, count: int) -> None:
        """Calls without a meeting before each would tell how far apart the ranks are."""

    def _meet(self) -> None:
        """A collective of one number ends on all ranks at nearly the same moment: from there they start together."""
        self._prepare()
        self._step("meeting before a timed call")
        dist.all_reduce(self._token)
