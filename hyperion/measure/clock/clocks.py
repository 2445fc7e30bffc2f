"""Clocks that measure the time of functions, on one rank or on all ranks of a process group.

Times are measured with device events on a GPU, and with the host's monotonic clock on a CPU.
"""

import functools
import itertools
import time
from collections.abc import Callable, Iterator
from typing import Protocol

import torch
import torch.distributed as dist

from hyperion.hardware import Device
from hyperion.processes import World

# Number of cycles that the GPU spins per sample. Meanwhile, the host enqueues the sample: it restores the inputs, and launches an
# all-reduce, two events and the collective. This takes the host about 150 microseconds.
_RANKS_HEAD_START_CYCLES = 400_000


class Clock(Protocol):
    """Interface of clocks. A clock measures the time of functions, and the elapsed time for time limits."""

    def sample(self, functions: list[Callable], flush: Callable | None, count: int) -> list[list[float]]:
        """Call each function `count` times, alternating between the functions. Return the seconds of each call, per function.

        Args:
            functions: functions without arguments.
            flush: function that runs before each call. Its time is not included. None means that nothing runs before a call.
            count: number of calls of each function.
        """
        ...

    def in_a_row(self, function: Callable, count: int) -> float | None:
        """Time `count` calls in a row on the host's clock, between two synchronisations. Return the seconds per call.

        Return None if this time is not comparable with the samples of this clock.
        """
        ...

    def now(self) -> float:
        """Return the seconds since an arbitrary fixed time."""
        ...


# Number of cycles that the GPU spins per sample. Meanwhile, the host enqueues the sample: the flush, two events and the call.
# This takes the host about 30 microseconds.
_HEAD_START_CYCLES = 80_000
# The highest clock frequency of current GPUs is about 2 GHz. At a lower frequency, the GPU spins longer.
_CYCLES_PER_S = 2e9
# A batch of at least this many calls consists of short calls, and the host can enqueue all of them while the GPU spins.
_CALLS_OF_A_FULL_QUEUE = 30


_MOST_CALLS = 1000


class _EventClock:
    """The clock of a GPU. It records one event before and one event after each call, and synchronises once per batch.

    At the start of a batch, the device spins until the host has filled the queue, so that the device does not wait for a launch
    between the two events of a sample. Some calls, such as an eager training step, take longer on the host than on the device.
    The device then waits for the host during the call. This wait is part of the time of the call, so it is included.

    If a batch consists of few long calls, the host cannot fill the queue in time. Such a batch starts with one extra call that is
    not timed. Without this extra call, the first timed training step was slower than an identical second step.

    With several functions, the host could get ahead during a function that takes long on the device, and the time of the next
    function would not include its wait for the host. So if the calls are long, or if the host needs longer for one of them than
    the device spins, each sample is a batch of its own, with an extra call of the same function, as in a loop.

    Args:
        device: the GPU.
        head_start_cycles: number of cycles per call that the GPU spins at the start of a batch.
        separate: whether samples are separated in this way. Ranks whose functions meet in collectives must not do this, because
            they could decide differently.
    """

    now = staticmethod(time.monotonic)

    def __init__(self, device: Device, head_start_cycles: int, separate: bool = True):
        self.device, self.head_start_cycles = torch.device(device.torch_device), head_start_cycles
        self._separate = separate

    def stamp(self) -> torch.cuda.Event:
        """Record an event on the current stream of the device, and return the event."""
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def seconds(self, start: torch.cuda.Event, end: torch.cuda.Event) -> float:
        """Return the seconds between two events. The device must have reached both events."""
        return start.elapsed_time(end) / 1e3

    def in_a_row(self, function: Callable, count: int) -> float:
        return _mean_of_calls(function, count, functools.partial(torch.cuda.synchronize, self.device))

    def sample(self, functions: list[Callable], flush: Callable | None, count: int) -> list[list[float]]:
        with torch.cuda.device(self.device):
            if (
                self._separate
                and len(functions) > 1
                and (self._few(functions, count) or any(map(self._outlasts_the_spin, functions)))
            ):
                return in_turn(functions, count, lambda function: self._batch([function], flush, 1)[0][0])
            return self._batch(functions, flush, count)

    def _batch(self, functions: list[Callable], flush: Callable | None, count: int) -> list[list[float]]:
        pairs: list[list[tuple]] = [[] for _ in functions]
        # A kernel that spins for this many cycles. It occupies the stream without using memory, so it does not change the cache.
        torch.cuda._sleep(self.head_start_cycles * count * len(functions))
        if self._few(functions, count):
            if flush is not None:
                flush()
            # Call the last function, because it also precedes the first function in the timed batch.
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

    def _few(self, functions: list[Callable], count: int) -> bool:
        return count * len(functions) < _CALLS_OF_A_FULL_QUEUE

    def _outlasts_the_spin(self, function: Callable) -> bool:
        """Call the function once, and return whether the host needs longer for the call than the device spins for it."""
        torch.cuda.synchronize()
        start = time.perf_counter_ns()
        function()
        return (time.perf_counter_ns() - start) / 1e9 > self.head_start_cycles / _CYCLES_PER_S


def _directions() -> Iterator[bool]:
    """Yield for each round of a host clock whether its order is reversed: four rounds forwards (A B), then four backwards (B A).

    Without the change of direction, one of two equal functions takes 20 to 60 ns longer than the other one, depending on its
    place in the round. If every other round were reversed, half of the calls would follow a call of the same function and find
    other contents of the caches than the rest.
    """
    return itertools.cycle((False,) * 4 + (True,) * 4)


class _HostClock:
    """The clock of a CPU. It reads the monotonic clock before and after each call, because a CPU call is synchronous."""

    stamp = staticmethod(time.perf_counter_ns)
    now = staticmethod(time.monotonic)

    def __init__(self, reverses: bool = True):
        self._backwards = _directions() if reverses else None

    def seconds(self, start: int, end: int) -> float:
        """Return the seconds between two readings of the clock."""
        return (end - start) / 1e9

    def in_a_row(self, function: Callable, count: int) -> float:
        return _mean_of_calls(function, count, lambda: None)

    def sample(self, functions: list[Callable], flush: Callable | None, count: int) -> list[list[float]]:
        def one(function) -> float:
            if flush is not None:
                flush()
            start = self.stamp()
            function()
            return self.seconds(start, self.stamp())

        return in_turn(functions, count, one, self._backwards)


class BlockClock:
    """A clock for CPU functions that run on different thread pools. It calls each function in a row (A A A … B B B …).

    After a parallel region, the idle threads of libgomp, which PyTorch uses, keep their cores busy: they spin for up to 300,000
    rounds, which is about 14 ms if a round takes 140 cycles at 3 GHz. A function with other threads that is called meanwhile
    competes with them. So before each function is timed, its own calls, which are not timed, fill `settle_s` seconds.

    Args:
        settle_s: seconds of calls that are not timed.
    """

    now = staticmethod(time.monotonic)

    def __init__(self, settle_s: float = 0.02):
        self.settle_s, self._clock = settle_s, _HostClock()

    def sample(self, functions: list[Callable], flush: Callable | None, count: int) -> list[list[float]]:
        return [self._block(function, flush, count) for function in functions]

    def in_a_row(self, function: Callable, count: int) -> float:
        return self._clock.in_a_row(function, count)

    def _block(self, function: Callable, flush: Callable | None, count: int) -> list[float]:
        until_s = self.now() + self.settle_s
        while self.now() < until_s:
            function()
        return self._clock.sample([function], flush, count)[0]


class WallClock:
    """A host clock that times blocks of calls. Each sample is the mean time of a call in a block of `calls` calls in a row.

    The device is synchronised before and after each block.
    """

    now = staticmethod(time.monotonic)

    def __init__(self, device: Device, calls: int):
        self.calls, self._backwards = calls, _directions()
        on_cpu = device.kind == "cpu"
        self.synchronize = (lambda: None) if on_cpu else functools.partial(torch.cuda.synchronize, device.torch_device)

    def sample(self, functions: list[Callable], flush: Callable | None, count: int) -> list[list[float]]:
        def one(function) -> float:
            return _mean_of_calls(function, self.calls, self.synchronize)

        return in_turn(functions, count, one, self._backwards)

    def in_a_row(self, function: Callable, count: int) -> None:
        """Return None, because the samples themselves are times of calls in a row."""


def in_turn(
    functions: list[Callable], count: int, sample: Callable[[Callable], float], backwards: Iterator[bool] | None = None
) -> list[list[float]]:
    """Take `count` samples of each function alternately (A B A B …), and return the samples of each function.

    Args:
        functions: the functions.
        count: number of samples of each function.
        sample: function that takes one sample of a function.
        backwards: for each round, whether its order is reversed. None reverses no round. A single function takes none from it.
    """
    taken: list[list[float]] = [[] for _ in functions]
    for _ in range(count):
        places = range(len(functions))
        reverse = backwards is not None and len(functions) > 1 and next(backwards)
        for place in reversed(places) if reverse else places:
            taken[place].append(sample(functions[place]))
    return taken


def _mean_of_calls(function: Callable, calls: int, synchronize: Callable) -> float:
    """Time several calls in a row on the host's clock, between two synchronisations. Return the seconds per call."""
    synchronize()
    start = time.perf_counter_ns()
    for _ in range(calls):
        function()
    synchronize()
    return (time.perf_counter_ns() - start) / 1e9 / calls


def device_clock(device: Device, head_start_cycles: int = _HEAD_START_CYCLES, separate: bool = True) -> _EventClock | _HostClock:
    """Return the clock of a device; see `Clock`.

    The clock has two additional methods: `stamp()` records the current time, and `seconds(start, end)` returns the seconds
    between two stamps.

    Args:
        head_start_cycles: number of cycles per call that a GPU spins at the start of a batch, while the host fills the queue.
        separate: on a GPU, whether functions that take long are sampled separately, and on a CPU, whether the order of the
            functions is reversed in some rounds. False on ranks that meet in collectives: the last function then runs last, so
            that its result can be checked.
    """
    return _HostClock(separate) if device.kind == "cpu" else _EventClock(device, head_start_cycles, separate)


def calls_that_fill(seconds: float, call_s: float) -> int:
    """Return how many calls of `call_s` seconds fit into `seconds` seconds, clamped to the range from 1 to 1000."""
    return max(1, min(_MOST_CALLS, int(seconds / max(call_s, 1e-9))))


class RanksClock:
    """A clock for functions that all ranks call at the same time. Use it as `time_function(…, clock=RanksClock(…))`.

    The samples and the elapsed time determine how often a function is called. If the ranks disagreed, they would hang in a
    collective. Therefore all ranks use the maximum over all ranks, both for each sample and for the elapsed time.

    Args:
        here: description of this rank. The process group must be initialised.
        prepare: function that restores the data that the timed call overwrites. It runs before each timed call, and its time is
            not included.
        step: function that takes the description of a collective. The clock calls it before each collective that the clock itself
            starts.
    """

    def __init__(self, here: World, prepare: Callable[[], object], step: Callable[[str], object]):
        self._clock = device_clock(here.device, _RANKS_HEAD_START_CYCLES, separate=False)
        self._prepare, self._step = prepare, step
        self._token = torch.zeros(1, device=here.device.torch_device)
        self._started, self._agreed_s = time.monotonic(), 0.0

    def now(self) -> float:
        """Return the seconds from the construction of the clock to the last sample. The value is the same on all ranks."""
        return self._agreed_s

    def sample(self, functions: list[Callable], flush: Callable | None, count: int) -> list[list[float]]:
        """Call each function `count` times, alternating between them. Return for each call the seconds of the slowest rank."""
        own = self._clock.sample(functions, self._meet if flush is None else lambda: (flush(), self._meet()), count)
        # The elapsed time is sent together with the samples, so that all ranks agree on whether the time limit is reached.
        local = [seconds for series in own for seconds in series] + [time.monotonic() - self._started]
        agreed = torch.tensor(local, dtype=torch.float64, device=self._token.device)
        self._step("agreeing on the samples")
        dist.all_reduce(agreed, dist.ReduceOp.MAX)
        *slowest, self._agreed_s = agreed.tolist()
        return [slowest[start : start + count] for start in range(0, len(slowest), count)]

    def in_a_row(self, function: Callable, count: int) -> None:
        """Return None. Ranks do not synchronise between calls in a row, so the time would include the skew between ranks."""

    def _meet(self) -> None:
        """Call `prepare`, and run a small all-reduce so that all ranks start the timed call at nearly the same time."""
        self._prepare()
        self._step("meeting before a timed call")
        dist.all_reduce(self._token)
