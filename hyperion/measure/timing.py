"""The one timing core: warm up until flat, flush the cache, sample on the device's own clock, stop when sure.

Every speed in Hyperion goes through `time_interleaved`. On an accelerator each sample is a pair of device events and a
batch of samples costs one synchronisation; on a CPU the same interface reads the monotonic clock. What the device's clock
cannot see, the host's cost of launching a call, `back_to_back` measures.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import torch

from hyperion.errors import HyperionError
from hyperion.hardware import Device, Sampler, Telemetry
from hyperion.results import Estimate, median_estimate

MINIMUM_SAMPLES = 30
RELATIVE_INTERVAL = 0.01
_WARM_WINDOW_S = 0.03
_WARM_TOLERANCE = 0.02
_BATCH_S = 0.1


@dataclass(frozen=True)
class Timing:
    """Raw samples of one function and how they were taken.

    Args:
        samples_s: seconds of each timed call (of one call on average, where calls were timed in blocks), in the order taken.
        warmup_s: medians of the warm-up windows, in seconds.
        warm: whether the warm-up ended because the windows' medians had become flat, rather than at its time limit.
        cold: whether the last-level cache was flushed before each sample.
        stopped: why sampling ended: "interval" (95 % CI within 1 % of the median) or "time limit".
        telemetry: median clock and power, and throttle state, over the samples.
    """

    samples_s: np.ndarray
    warmup_s: tuple[float, ...]
    warm: bool
    cold: bool
    stopped: str
    telemetry: Telemetry = field(repr=False)

    @property
    def estimate(self) -> Estimate:
        """Median seconds with its 95 % bootstrap interval."""
        return median_estimate(self.samples_s)

    @property
    def p5_s(self) -> float:
        """Seconds below which 5 % of the samples lie."""
        return float(np.quantile(self.samples_s, 0.05))

    @property
    def p95_s(self) -> float:
        """Seconds below which 95 % of the samples lie."""
        return float(np.quantile(self.samples_s, 0.95))


def time_function(
    function: Callable[[], object],
    device: Device,
    *,
    cold: bool = True,
    minimum_samples: int = MINIMUM_SAMPLES,
    time_limit_s: float = 5.0,
    back_to_back: int = 0,
    clock: "Clock | None" = None,
) -> Timing:
    """Time one function; see `time_interleaved`."""
    return time_interleaved(
        [function], device, cold=cold, minimum_samples=minimum_samples, time_limit_s=time_limit_s,
        back_to_back=back_to_back, clock=clock,
    )[0]  # fmt: skip


def time_interleaved(
    functions: list[Callable[[], object]],
    device: Device,
    *,
    cold: bool = True,
    minimum_samples: int = MINIMUM_SAMPLES,
    time_limit_s: float = 5.0,
    back_to_back: int = 0,
    clock: "Clock | None" = None,
) -> list[Timing]:
    """Time functions in turn (A B A B …), so that a drift of clock or temperature meets all of them alike.

    Sampling goes on until the 95 % interval of every median lies within 1 %, or until `time_limit_s` has gone by; at
    least `minimum_samples` of each are taken in any case.

    Args:
        functions: each enqueues or does one unit of work and rewrites its output.
        cold: flush the last-level cache before each sample.
        time_limit_s: seconds after which sampling stops once the minimum is reached; warm-up takes at most half as long.
        back_to_back: 0 times each call by itself on the device's clock, which leaves out what the host needs to launch
            it. Above 0, a sample is the mean of that many calls in a row, from synchronisation to synchronisation on the
            host's clock: what a loop around the function sees, the device's waits for launches included.
        clock: takes the samples instead of the device's own clock; `RanksClock` does for work that ranks do together.

    Raises:
        HyperionError: `back_to_back` calls were to start with a cold cache each.
    """
    if back_to_back and cold:
        raise HyperionError(
            "calls in a row find the cache as the call before left it", where="time_interleaved", next_step="cold=False"
        )
    clock = clock or (_WallClock(device, back_to_back) if back_to_back else device_clock(device))
    flush = _cache_flush(device) if cold else None
    warmups = [_warm_up(clock, function, time_limit_s / 2) for function in functions]
    samples: list[list[float]] = [[] for _ in functions]
    started, stopped = clock.now(), ""
    with Sampler(device) as sampler:
        batch = 1
        while not stopped:
            batch_started = clock.now()
            for series, new in zip(samples, clock.sample(functions, flush, batch), strict=True):
                series.extend(new)
            per_round = max((clock.now() - batch_started) / batch, 1e-9)
            enough = len(samples[0]) >= minimum_samples
            if enough and all(_relative_half_width(series) <= RELATIVE_INTERVAL for series in samples):
                stopped = "interval"
            elif enough and clock.now() - started > time_limit_s:
                stopped = "time limit"
            batch = max(1, min(minimum_samples, int(_BATCH_S / per_round)))
    telemetry = sampler.telemetry
    return [
        Timing(np.array(series), tuple(windows), warm, cold, stopped, telemetry)
        for series, (windows, warm) in zip(samples, warmups, strict=True)
    ]


class Clock(Protocol):
    """What takes samples, and tells the time by which sampling ends."""

    def sample(self, functions: list[Callable], flush: Callable | None, count: int) -> list[list[float]]:
        """Seconds of `count` calls of each function, in turn; `flush` goes before each, outside of its time."""

    def now(self) -> float:
        """Seconds since some moment."""


# Enqueuing one sample (flush, two events, the call) takes the host some 30 microseconds; the device waits that long first.
_HEAD_START_CYCLES = 80_000


class _EventClock:
    """Device events around each call, one synchronisation for the whole batch.

    A batch begins with the device spinning until the host has filled the queue, so that no gap in which the device waits
    for a launch falls between the two events of a sample. (A call that itself keeps the host busy for longer than the
    device, an eager training step say, is timed with those waits: they are part of it.)
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

    def sample(self, functions, flush, count: int) -> list[list[float]]:
        pairs: list[list[tuple]] = [[] for _ in functions]
        with torch.cuda.device(self.device):
            torch.cuda._sleep(self.head_start_cycles * count * len(functions))
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


class _WallClock:
    """The monotonic clock around `calls` calls in a row, the device idle at both ends; a sample is their mean."""

    now = staticmethod(time.monotonic)

    def __init__(self, device: Device, calls: int):
        self.calls = calls
        self.synchronize = (lambda: None) if device.kind == "cpu" else _synchronizer(device)

    def sample(self, functions, flush, count: int) -> list[list[float]]:
        samples: list[list[float]] = [[] for _ in functions]
        for _ in range(count):
            for function, series in zip(functions, samples, strict=True):
                self.synchronize()
                start = time.perf_counter_ns()
                for _ in range(self.calls):
                    function()
                self.synchronize()
                series.append((time.perf_counter_ns() - start) / 1e9 / self.calls)
        return samples


def _synchronizer(device: Device) -> Callable[[], object]:
    return lambda: torch.cuda.synchronize(device.torch_device)


def device_clock(device: Device, head_start_cycles: int = _HEAD_START_CYCLES) -> _EventClock | _HostClock:
    """The clock of a device: `sample(functions, flush, count)` gives seconds of `count` calls of each, in turn, and
    `seconds(start, end)` those between two of its `stamp()`s.

    Args:
        head_start_cycles: how long a GPU spins for each call of a batch, so that its queue fills up first.
    """
    return _HostClock() if device.kind == "cpu" else _EventClock(device, head_start_cycles)


def _cache_flush(device: Device) -> Callable[[], object]:
    # Twice the last-level cache, read and not written: lines left dirty would be written back inside the timed region.
    count = max(2 * (device.last_level_cache_bytes or 0), 1 << 24) // 4
    buffer = torch.ones(count, dtype=torch.float32, device=device.torch_device)
    total = torch.empty((), dtype=torch.float32, device=device.torch_device)
    return lambda: torch.sum(buffer, dim=0, out=total)


def _warm_up(clock, function, limit_s: float) -> tuple[list[float], bool]:
    """Run windows of calls until the last three windows' medians agree within 2 %; (medians in s, whether they came to agree)."""
    medians: list[float] = []
    clock.sample([function], None, 1)  # the first call compiles, loads and allocates: it says nothing about the second
    deadline = clock.now() + limit_s
    count = 1
    while True:
        started = clock.now()
        medians.append(float(np.median(clock.sample([function], None, count)[0])))
        count = max(1, min(1000, int(_WARM_WINDOW_S * count / max(clock.now() - started, 1e-6))))
        last = medians[-3:]
        if len(last) == 3 and max(last) - min(last) <= _WARM_TOLERANCE * min(last):
            return medians, True
        if clock.now() > deadline:
            return medians, False


def _relative_half_width(samples: list[float]) -> float:
    """Half the 95 % interval of the median by order statistics, relative: cheap enough to ask after every batch.

    Source: Conover, Practical Nonparametric Statistics, 3rd edition, section 3.2.
    """
    ordered = np.sort(samples)
    n = len(ordered)
    reach = 1.96 * np.sqrt(n) / 2
    low, high = ordered[max(0, int(n / 2 - reach))], ordered[min(n - 1, int(np.ceil(n / 2 + reach)))]
    return float((high - low) / 2 / np.median(ordered))
