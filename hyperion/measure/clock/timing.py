"""The one timing core: warm up until flat, flush the cache, sample on the device's own clock, stop when sure.

Every speed in Hyperion goes through `time_interleaved`. On an accelerator each sample is a pair of device events and a
batch of samples costs one synchronisation; on a CPU the same interface reads the monotonic clock. What the device's clock
cannot see, the host's cost of launching a call, `back_to_back` measures.
"""

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import torch

from hyperion.errors import HyperionError
from hyperion.hardware import Device, Sampler, Telemetry
from hyperion.measure.clock import checks
from hyperion.measure.clock.clocks import Clock, WallClock, device_clock
from hyperion.results import Estimate, median_estimate

MINIMUM_SAMPLES = 30
# Fewer say nothing about their scatter.
LEAST_SAMPLES = 3
RELATIVE_INTERVAL = 0.01
_WARM_WINDOW_S = 0.03
_WARM_TOLERANCE = 0.02
_BATCH_S = 0.1
# A budget is shared: warm-up gets this part of it, each of its windows that part.
_WARM_SHARE, _WINDOW_SHARE = 0.25, 0.05


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
    def drift(self) -> checks.Drift:
        """How the samples changed while they were taken: a clock that falls, a device that heats up."""
        return checks.drift_of(self.samples_s)

    @property
    def unsteady(self) -> str:
        """Why these samples are not of one steady state, or "": they drifted, or the warm-up ended before it was flat."""
        told = [] if self.warm else ["the warm-up's windows still differed when its time was up"]
        return "; ".join(told + [str(drift) for drift in [self.drift] if drift.present])

    @property
    def estimate(self) -> Estimate:
        """Median seconds with its 95 % bootstrap interval. Resampling takes samples for exchangeable; of samples that drift
        the interval reaches from the first third's median to the last third's."""
        estimate, drift = median_estimate(self.samples_s), self.drift
        if not drift.present:
            return estimate
        ends = (estimate.ci_low, estimate.ci_high, *drift.ends)
        return Estimate(estimate.value, min(ends), max(ends), estimate.n)

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
    budget_s: float | None = None,
    clock: Clock | None = None,
) -> Timing:
    """Time one function; see `time_interleaved`."""
    return time_interleaved(
        [function],
        device,
        cold=cold,
        minimum_samples=minimum_samples,
        time_limit_s=time_limit_s,
        back_to_back=back_to_back,
        budget_s=budget_s,
        clock=clock,
    )[0]


def time_interleaved(
    functions: list[Callable[[], object]],
    device: Device,
    *,
    cold: bool = True,
    minimum_samples: int = MINIMUM_SAMPLES,
    time_limit_s: float = 5.0,
    back_to_back: int = 0,
    budget_s: float | None = None,
    clock: Clock | None = None,
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
        budget_s: seconds for warm-up, checks and samples together, instead of `time_limit_s`: sampling ends when they are over,
            also before `minimum_samples`, but not before 3 samples. Whoever sets it has called each function before.
        clock: takes the samples instead of the device's own clock; `RanksClock` does for work that ranks do together.

    Raises:
        HyperionError: an argument is outside of its range, or `back_to_back` calls were to start with a cold cache each.
        HarnessError: calls in a row take much longer than the clock says, or cold samples were taken without a flush.
    """
    require_sampling(minimum_samples, back_to_back, time_limit_s=time_limit_s, budget_s=budget_s)
    if not functions:
        raise HyperionError("no function to time", where="time_interleaved", next_step="pass at least one function")
    if back_to_back and cold:
        raise HyperionError(
            "calls in a row find the cache as the call before left it", where="time_interleaved", next_step="cold=False"
        )
    clock = clock or (WallClock(device, back_to_back) if back_to_back else device_clock(device))
    flush = cache_flush(device) if cold else None
    began, share = clock.now(), budget_s and budget_s / len(functions)
    warmups = [
        _warm_up(clock, function, time_limit_s / 2)
        if budget_s is None
        else _warm_up(clock, function, _WARM_SHARE * share, min(_WARM_WINDOW_S, _WINDOW_SHARE * share), called=True)
        for function in functions
    ]

    def over(seconds: float = 0.0) -> bool:
        return budget_s is not None and clock.now() + seconds - began > budget_s

    for function, (windows, _) in zip(functions, warmups, strict=True):
        checks.require_whole_work(
            windows[-1], functools.partial(clock.in_a_row, function), functools.partial(_call_s, clock, function), over
        )
    samples: list[list[float]] = [[] for _ in functions]
    started, stopped = clock.now(), ""
    with Sampler(device) as sampler:
        batch = 1
        while not stopped:
            batch_started = clock.now()
            for series, new in zip(samples, clock.sample(functions, flush, batch), strict=True):
                series.extend(new)
            per_round = max((clock.now() - batch_started) / batch, 1e-9)
            taken = len(samples[0])
            enough = taken >= minimum_samples
            if enough and all(_relative_half_width(series) <= RELATIVE_INTERVAL for series in samples):
                stopped = "interval"
            elif budget_s is None:
                stopped = "time limit" if enough and clock.now() - started > time_limit_s else ""
            elif taken >= LEAST_SAMPLES and over(per_round):
                stopped = "time limit"
            fitting = minimum_samples if budget_s is None else int((budget_s - clock.now() + began) / per_round)
            batch = max(1, min(minimum_samples, int(_BATCH_S / per_round), fitting))
    telemetry = sampler.telemetry
    if flush is not None:
        checks.require_flushed(len(samples[0]) * len(functions), flush.calls, flush.read_all)
    return [
        Timing(np.array(series), tuple(windows), warm, cold, stopped, telemetry)
        for series, (windows, warm) in zip(samples, warmups, strict=True)
    ]


def _call_s(clock: Clock, function: Callable, count: int) -> float:
    return float(np.median(clock.sample([function], None, count)[0]))


def require_sampling(minimum_samples: int, back_to_back: int = 0, **limits_s: float | None) -> None:
    """Check the arguments that say how much to sample.

    Args:
        limits_s: seconds by the name of the argument; None stands for no limit.

    Raises:
        HyperionError: one is outside of its range.
    """
    for name, value, least in (("minimum_samples", minimum_samples, LEAST_SAMPLES), ("back_to_back", back_to_back, 0)):
        if not isinstance(value, int | np.integer) or isinstance(value, bool) or value < least:
            raise HyperionError(f"{name} is {value!r}", where=f"{name}=", next_step=f"pass a whole number of at least {least}")
    for name, value in limits_s.items():
        number = isinstance(value, int | float | np.number) and not isinstance(value, bool)
        if value is not None and not (number and math.isfinite(value) and value > 0):
            raise HyperionError(f"{name} is {value!r}", where=f"{name}=", next_step="pass a finite number of seconds above 0")


class CacheFlush:
    """Reads twice the last-level cache, so that what it held is gone, and can show that it did.

    It reads and does not write: lines left dirty would be written back inside the timed region.

    Args:
        elements: float32 numbers to read; None takes twice the device's last-level cache, 16 MiB at least.

    Attributes:
        calls: how often it was called.
        bytes: read by a call.
    """

    def __init__(self, device: Device, elements: int | None = None):
        count = elements or max(2 * (device.last_level_cache_bytes or 0), 1 << 24) // 4
        self._buffer = torch.ones(count, dtype=torch.float32, device=device.torch_device)
        self._total = torch.zeros((), dtype=torch.float32, device=device.torch_device)
        self.calls, self.bytes = 0, self._buffer.nbytes

    def __call__(self) -> None:
        self.calls += 1
        torch.sum(self._buffer, dim=0, out=self._total)

    @property
    def read_all(self) -> bool:
        """Whether a call since this was made read every element: the sum of so many ones is their number."""
        return math.isclose(self._total.item(), self._buffer.numel(), rel_tol=1e-3)


def cache_flush(device: Device) -> CacheFlush:
    """What flushes the last-level cache of a device."""
    return CacheFlush(device)


def _warm_up(clock, function, limit_s: float, window_s: float = _WARM_WINDOW_S, called: bool = False) -> tuple[list[float], bool]:
    """Run windows of calls until the last three windows' medians agree within 2 %; (medians in s, whether they came to agree).

    Args:
        called: the function has been called before.
    """
    medians: list[float] = []
    if not called:
        clock.sample([function], None, 1)  # the first call compiles, loads and allocates: it says nothing about the second
    deadline = clock.now() + limit_s
    count = 1
    while True:
        started = clock.now()
        medians.append(_call_s(clock, function, count))
        count = max(1, min(1000, int(window_s * count / max(clock.now() - started, 1e-6))))
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
