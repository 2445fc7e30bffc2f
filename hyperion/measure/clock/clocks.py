"""Clocks that sample the time of functions: device events on a GPU, the monotonic clock on the host; one rank or several."""

import functools
import time
from collections.abc import Callable
from typing import Protocol

import torch
import torch.distributed as dist

from hyperion.hardware import Device
from hyperion.processes import World

# Enqueuing one sample (restoring inputs, an all-reduce, two events, the collective) takes the host about 150 microseconds.
_RANKS_HEAD_START_CYCLES = 400_000


class Clock(Protocol):
    """Takes samples, and measures the time for time limits."""

    def sample(self, functions: list[Callable], flush: Callable | None, count: int) -> list[list[float]]:
        """Return the seconds of `count` calls of each function, in turn; `flush` runs before each call and is not timed."""
        ...

    def in_a_row(self, function: Callable, count: int) -> float | None:
        """Return the host's seconds per call of `count` calls in a row between two synchronisations; None if these cannot be
        compared with the samples."""
        ...

    def now(self) -> float:
        """Return seconds since an arbitrary time."""
        ...


# Enqueuing one sample (flush, two events, the call) takes the host about 30 microseconds; the device spins that long first.
_HEAD_START_CYCLES = 80_000
# Batches of at least this many calls consist of short calls, for which the head start suffices.
_CALLS_OF_A_FULL_QUEUE = 30


_MOST_CALLS = 1000


class _EventClock:
    """Device events around each call, and one synchronisation per batch.

    The device spins at the start of a batch until the host has filled the queue, so that the device does not wait for a launch
    between the two events of a sample. A call that keeps the host busy longer than the device, such as an eager training step,
    is timed with these waits, because they are part of it. A batch of few long calls starts with a call that is not timed,
    because the host cannot fill the queue in time: without it, the first of two equal training steps was slower.
    """

    now = staticmethod(time.monotonic)

    def __init__(self, device: Device, head_start_cycles: int):
        self.device, self.head_start_cycles = torch.device(device.torch_device), head_start_cycles

    def stamp(self) -> torch.cuda.Event:
        """Record an event at the current position of the device's stream."""
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def seconds(self, start: torch.cuda.Event, end: torch.cuda.Event) -> float:
        """Return the seconds between two stamps; the device must have passed both."""
        return start.elapsed_time(end) / 1e3

    def in_a_row(self, function, count: int) -> float:
        return _mean_of_calls(function, count, functools.partial(torch.cuda.synchronize, self.device))

    def sample(self, functions, flush, count: int) -> list[list[float]]:
        pairs: list[list[tuple]] = [[] for _ in functions]
        with torch.cuda.device(self.device):
            torch.cuda._sleep(self.head_start_cycles * count * len(functions))
            if count * len(functions) < _CALLS_OF_A_FULL_QUEUE:
                if flush is not None:
                    flush()
                functions[-1]()
            for _ in range(count):
                for function, series in zip(functions, pairs, strict=True):
                    if flush is not None:
                        flush()
                    start = self.stamp()
                    function()
                    series.append((start, self.stamp()))
            torch.cuda.synchronize()
        return [[self.seconds(*pair) for pair in series] for series in pairs]


class _HostClock:
    """The monotonic clock around each call; on a CPU a call has done its work when it returns."""

    stamp = staticmethod(time.perf_counter_ns)
    now = staticmethod(time.monotonic)

    def seconds(self, start: int, end: int) -> float:
        """Return the seconds between two stamps."""
        return (end - start) / 1e9

    def in_a_row(self, function, count: int) -> float:
        return _mean_of_calls(function, count, lambda: None)

    def sample(self, functions, flush, count: int) -> list[list[float]]:
        def one(function) -> float:
            if flush is not None:
                flush()
            start = self.stamp()
            function()
            return self.seconds(start, self.stamp())

        return in_turn(functions, count, one)


class WallClock:
    """The monotonic clock around `calls` calls in a row, with synchronisation at both ends; a sample is their mean."""

    now = staticmethod(time.monotonic)

    def __init__(self, device: Device, calls: int):
        self.calls = calls
        on_cpu = device.kind == "cpu"
        self.synchronize = (lambda: None) if on_cpu else functools.partial(torch.cuda.synchronize, device.torch_device)

    def sample(self, functions, flush, count: int) -> list[list[float]]:
        return in_turn(functions, count, lambda function: _mean_of_calls(function, self.calls, self.synchronize))

    def in_a_row(self, function, count: int) -> None:
        """Return None: the samples themselves are calls in a row."""


def in_turn(functions: list[Callable], count: int, sample: Callable[[Callable], float]) -> list[list[float]]:
    """Return `count` samples of each function, taken in turn (A B A B …)."""
    rounds = [[sample(function) for function in functions] for _ in range(count)]
    return [[taken[place] for taken in rounds] for place in range(len(functions))]


def _mean_of_calls(function: Callable, calls: int, synchronize: Callable) -> float:
    """Return the host's seconds per call of several calls in a row between two synchronisations."""
    synchronize()
    start = time.perf_counter_ns()
    for _ in range(calls):
        function()
    synchronize()
    return (time.perf_counter_ns() - start) / 1e9 / calls


def device_clock(device: Device, head_start_cycles: int = _HEAD_START_CYCLES) -> _EventClock | _HostClock:
    """Return the clock of a device, see `Clock`. It also has `stamp()`, and `seconds(start, end)` between two stamps.

    Args:
        head_start_cycles: cycles that a GPU spins for each call of a batch, while the host fills its queue.
    """
    return _HostClock() if device.kind == "cpu" else _EventClock(device, head_start_cycles)


def calls_that_fill(seconds: float, call_s: float) -> int:
    """Return how many calls of `call_s` seconds fill `seconds`: at least 1, at most 1000."""
    return max(1, min(_MOST_CALLS, int(seconds / max(call_s, 1e-9))))


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
        self._clock = device_clock(here.device, _RANKS_HEAD_START_CYCLES)
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
