"""The clock for work of several ranks: a sample is the time of the slowest rank, and all ranks see the same times."""

import time
from collections.abc import Callable

import torch
import torch.distributed as dist

from hyperion.measure.clock.clocks import device_clock
from hyperion.processes import World

# Enqueuing one sample (restoring inputs, an all-reduce, two events, the collective) takes the host about 150 microseconds.
_HEAD_START_CYCLES = 400_000


class RanksClock:
    """Samples calls that all ranks make at the same time, for `time_function(…, clock=RanksClock(…))`.

    Each rank decides from the samples and the elapsed time how often to call. If ranks decided differently, they would hang in
    a collective. Therefore all ranks use the maximum over all ranks, of each sample and of the elapsed time.

    Args:
        here: this rank, in an initialised process group.
        prepare: called before each timed call, not timed; restores what the call overwrites.
        step: called with a description before each collective that the clock itself starts.
    """

    def __init__(self, here: World, prepare: Callable[[], object], step: Callable[[str], object]):
        self._clock = device_clock(here.device, _HEAD_START_CYCLES)
        self._prepare, self._step = prepare, step
        self._token = torch.zeros(1, device=here.device.torch_device)
        self._started, self._agreed_s = time.monotonic(), 0.0

    def now(self) -> float:
        """Return the seconds since construction at the last sample; the same on all ranks."""
        return self._agreed_s

    def sample(self, functions: list[Callable], flush: Callable | None, count: int) -> list[list[float]]:
        """Return the seconds of `count` calls of each function, in turn: for each call the time of the slowest rank."""
        own = self._clock.sample(functions, self._meet if flush is None else lambda: (flush(), self._meet()), count)
        local = [seconds for series in own for seconds in series] + [time.monotonic() - self._started]
        agreed = torch.tensor(local, dtype=torch.float64, device=self._token.device)
        self._step("agreeing on the samples")
        dist.all_reduce(agreed, dist.ReduceOp.MAX)
        *slowest, self._agreed_s = agreed.tolist()
        return [slowest[start : start + count] for start in range(0, len(slowest), count)]

    def in_a_row(self, function: Callable, count: int) -> None:
        """Return None: without synchronisation before each call, the time would contain the skew between ranks."""

    def _meet(self) -> None:
        """All-reduce one number, so that all ranks start the timed call at nearly the same time."""
        self._prepare()
        self._step("meeting before a timed call")
        dist.all_reduce(self._token)
