"""Broken clocks for planted faults: a scripted clock, two that do not synchronise, and two that do not flush the cache."""

import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np

from hyperion.hardware import Device
from hyperion.measure.clock.clocks import WallClock, device_clock
from hyperion.measure.clock.timing import CacheFlush


class Scripted:
    """A clock whose samples follow a script (call number -> seconds), with the noise of an idle machine."""

    def __init__(self, script: Callable[[int], float]):
        self._script, self._calls, self._now_s = script, 0, 0.0
        self._random = np.random.default_rng(0)

    def now(self) -> float:
        return self._now_s

    def in_a_row(self, function, count: int) -> None:
        """Return None: nothing runs."""

    def sample(self, functions, flush, count: int) -> list[list[float]]:
        series = [[self._next() for _ in range(count)] for _ in functions]
        self._now_s += sum(map(sum, series))
        return series

    def _next(self) -> float:
        self._calls += 1
        return self._script(self._calls) * self._random.normal(1, 0.003)


class Queue:
    """A device whose calls return before the work is done, and a stopwatch.

    Args:
        waits: whether the stopwatch waits for the device before it stops.
    """

    # Well above the launch overhead on a busy machine, which is about 0.1 ms.
    work_s = 2e-3
    now = staticmethod(time.monotonic)

    def __init__(self, waits: bool):
        self._waits, self._worker = waits, ThreadPoolExecutor(1)
        self._last: Future = self._worker.submit(int)

    def launch(self) -> None:
        """Submit one unit of work and return."""
        self._last = self._worker.submit(time.sleep, self.work_s)

    def wait(self) -> None:
        """Wait until all submitted work is done."""
        self._last.result()

    def sample(self, functions, flush, count: int) -> list[list[float]]:
        return [[self.one(function) for _ in range(count)] for function in functions]

    def in_a_row(self, function, count: int) -> float:
        self.wait()
        started = time.perf_counter()
        for _ in range(count):
            function()
        self.wait()
        return (time.perf_counter() - started) / count

    def one(self, function) -> float:
        """Return the seconds of a call by the stopwatch."""
        started = time.perf_counter()
        function()
        if self._waits:
            self.wait()
        return time.perf_counter() - started


class Block(WallClock):
    """The host's clock around a block of calls on an asynchronous device.

    Args:
        waits: whether it synchronises at the end of a block; it always does at the start.
    """

    def __init__(self, device: Device, calls: int, queue: Queue, waits: bool):
        super().__init__(device, calls)
        self.synchronize, self._queue, self._waits = self._synchronize, queue, waits
        self._synchronized = 0

    def _synchronize(self) -> None:
        at_the_end = self._synchronized % 2 == 1
        self._synchronized += 1
        if self._waits or not at_the_end:
            self._queue.wait()

    def in_a_row(self, function, count: int) -> float:
        return self._queue.in_a_row(function, count)


class Unread:
    """The device's clock with a flush that only counts its calls and reads nothing."""

    def __init__(self, device: Device):
        self._clock = device_clock(device)
        self.now, self.in_a_row = self._clock.now, self._clock.in_a_row

    def sample(self, functions, flush: CacheFlush | None, count: int) -> list[list[float]]:
        def count_only() -> None:
            if flush is not None:
                flush.calls += 1

        return self._clock.sample(functions, None if flush is None else count_only, count)


class Unflushed:
    """The device's clock without cache flushes."""

    def __init__(self, device: Device):
        self._clock = device_clock(device)
        self.now, self.in_a_row = self._clock.now, self._clock.in_a_row

    def sample(self, functions, flush, count: int) -> list[list[float]]:
        return self._clock.sample(functions, None, count)
