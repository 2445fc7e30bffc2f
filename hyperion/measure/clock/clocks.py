"""Clocks: what takes the samples of a function, on the device's own time or on the host's."""

import functools
import time
from collections.abc import Callable
from typing import Protocol

import torch

from hyperion.hardware import Device


class Clock(Protocol):
    """What takes samples, and tells the time by which sampling ends."""

    def sample(self, functions: list[Callable], flush: Callable | None, count: int) -> list[list[float]]:
        """Seconds of `count` calls of each function, in turn; `flush` goes before each, outside of its time."""

    def in_a_row(self, function: Callable, count: int) -> float | None:
        """Seconds of a call on the host's clock, of `count` calls in a row from an idle device to an idle device; None where
        that says nothing of the samples."""

    def now(self) -> float:
        """Seconds since some moment."""


# Enqueuing one sample (flush, two events, the call) takes the host some 30 microseconds; the device waits that long first.
_HEAD_START_CYCLES = 80_000
# So many calls in one batch are short ones, for which the head start suffices.
_CALLS_OF_A_FULL_QUEUE = 30


class _EventClock:
    """Device events around each call, one synchronisation for the whole batch.

    A batch begins with the device spinning until the host has filled the queue, so that no gap in which the device waits
    for a launch falls between the two events of a sample. (A call that itself keeps the host busy for longer than the
    device, an eager training step say, is timed with those waits: they are part of it.) Few long calls, which the host
    needs longer to enqueue than it has, follow one that is not timed: the first of them meets the queue that the others
    meet. Without it the first of two equal training steps came out slower than the second.
    """

    now = staticmethod(time.monotonic)

    def __init__(self, device: Device, head_start_cycles: int):
        self.device, self.head_start_cycles = torch.device(device.torch_device), head_start_cycles

    def stamp(self) -> torch.cuda.Event:
        """This moment in the device's queue of work."""
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def seconds(self, start: torch.cuda.Event, end: torch.cuda.Event) -> float:
        """From one stamp to a later one, once the device has passed both."""
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
    """The monotonic clock around each call: on a CPU a call has done its work when it returns."""

    stamp = staticmethod(time.perf_counter_ns)
    now = staticmethod(time.monotonic)

    def seconds(self, start: int, end: int) -> float:
        """From one stamp to a later one."""
        return (end - start) / 1e9

    def in_a_row(self, function, count: int) -> float:
        return _mean_of_calls(function, count, lambda: None)

    def sample(self, functions, flush, count: int) -> list[list[float]]:
        samples: list[list[float]] = [[] for _ in functions]
        for _ in range(count):
            for function, series in zip(functions, samples, strict=True):
                if flush is not None:
                    flush()
                start = self.stamp()
                function()
                series.append(self.seconds(start, self.stamp()))
        return samples


class WallClock:
    """The monotonic clock around `calls` calls in a row, the device idle at both ends; a sample is their mean."""

    now = staticmethod(time.monotonic)

    def __init__(self, device: Device, calls: int):
        self.calls = calls
        on_cpu = device.kind == "cpu"
        self.synchronize = (lambda: None) if on_cpu else functools.partial(torch.cuda.synchronize, device.torch_device)

    def sample(self, functions, flush, count: int) -> list[list[float]]:
        samples: list[list[float]] = [[] for _ in functions]
        for _ in range(count):
            for function, series in zip(functions, samples, strict=True):
                series.append(_mean_of_calls(function, self.calls, self.synchronize))
        return samples

    def in_a_row(self, function, count: int) -> None:
        """Its samples are that already."""


def _mean_of_calls(function: Callable, calls: int, synchronize: Callable) -> float:
    """Seconds of a call on the host's clock, of several in a row from synchronisation to synchronisation."""
    synchronize()
    start = time.perf_counter_ns()
    for _ in range(calls):
        function()
    synchronize()
    return (time.perf_counter_ns() - start) / 1e9 / calls


def device_clock(device: Device, head_start_cycles: int = _HEAD_START_CYCLES) -> _EventClock | _HostClock:
    """The clock of a device: `sample(functions, flush, count)` gives seconds of `count` calls of each, in turn, and
    `seconds(start, end)` those between two of its `stamp()`s.

    Args:
        head_start_cycles: how long a GPU spins for each call of a batch, so that its queue fills up first.
    """
    return _HostClock() if device.kind == "cpu" else _EventClock(device, head_start_cycles)
