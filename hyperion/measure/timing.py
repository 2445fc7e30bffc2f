"""The one timing core: warm up until flat, flush the cache, sample on the device's own clock, stop when sure.

Every speed in Hyperion goes through `time_interleaved`. On an accelerator each sample is a pair of device events and a
batch of samples costs one synchronisation; on a CPU the same interface reads the monotonic clock. What the device's clock
cannot see, the host's cost of launching a call, `back_to_back` measures.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import torch

from hyperion.errors import HyperionError
from hyperion.hardware import Device, Sampler, Telemetry
from hyperion.measure import checks
from hyperion.measure.clocks import Clock, WallClock, device_clock
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
    clock: Clock | None = None,
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
        clock: takes the samples instead of the device's own clock; `RanksClock` does for work that ranks do together.

    Raises:
        HyperionError: `back_to_back` calls were to start with a cold cache each.
        HarnessError: calls in a row take much longer than the clock says, or cold samples were taken without a flush.
    """
    if back_to_back and cold:
        raise HyperionError(
            "calls in a row find the cache as the call before left it", where="time_interleaved", next_step="cold=False"
        )
    clock = clock or (WallClock(device, back_to_back) if back_to_back else device_clock(device))
    flush = _Counted(cache_flush(device)) if cold else None
    warmups = [_warm_up(clock, function, time_limit_s / 2) for function in functions]
    for function, (windows, _) in zip(functions, warmups, strict=True):
        checks.require_whole_work(
            windows[-1], functools.partial(clock.in_a_row, function), functools.partial(_call_s, clock, function)
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
            enough = len(samples[0]) >= minimum_samples
            if enough and all(_relative_half_width(series) <= RELATIVE_INTERVAL for series in samples):
                stopped = "interval"
            elif enough and clock.now() - started > time_limit_s:
                stopped = "time limit"
            batch = max(1, min(minimum_samples, int(_BATCH_S / per_round)))
    telemetry = sampler.telemetry
    if flush is not None:
        checks.require_flushed(len(samples[0]) * len(functions), flush.calls)
    return [
        Timing(np.array(series), tuple(windows), warm, cold, stopped, telemetry)
        for series, (windows, warm) in zip(samples, warmups, strict=True)
    ]


def _call_s(clock: Clock, function: Callable, count: int) -> float:
    return float(np.median(clock.sample([function], None, count)[0]))


class _Counted:
    """A function that counts its calls."""

    def __init__(self, function: Callable[[], object]):
        self.function, self.calls = function, 0

    def __call__(self) -> None:
        self.calls += 1
        self.function()


def cache_flush(device: Device) -> Callable[[], object]:
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
        medians.append(_call_s(clock, function, count))
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
