"""Measure the time of functions.

`time_interleaved` measures all times in Hyperion. It calls the functions until their times are stable (warm-up), flushes the
cache before each sample, and takes samples until the confidence interval of the median is narrow enough.

On a GPU, each sample is the time between two device events, and a batch of samples needs one synchronisation. On a CPU, each
sample is read from the monotonic clock. Device events do not measure the time that the host needs to launch a call. To include
this time, use the argument `back_to_back`.

The functions whose names start with `require_` check the measurement itself. Each of them detects an error that does not change
the output of the timed function, such as a clock that stops too early. `hyperion.measure.planted_faults` plants each of these
errors and checks that it is detected.
"""

import functools
import math
import resource
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch

from hyperion.errors import HyperionError
from hyperion.hardware import Device, Sampler, Telemetry
from hyperion.measure.clock.clocks import Clock, WallClock, device_clock
from hyperion.results import Estimate
from hyperion.results.series import Drift, drift_of, series_estimate

MINIMUM_SAMPLES = 30
# With fewer samples, the variation of the times is unknown.
LEAST_SAMPLES = 3
RELATIVE_INTERVAL = 0.01
# A series with a minimum span keeps at least this many of its samples and at most twice as many, at equal distances.
_KEPT_SAMPLES = 300
_WARM_WINDOW_S = 0.03
_WARM_TOLERANCE = 0.02
_BATCH_S = 0.1
# Shares of `budget_s` for the whole warm-up and for each window of the warm-up.
_WARM_SHARE, _WINDOW_SHARE = 0.25, 0.05
# Tolerance of `require_whole_work`. Calls in a row may take up to the first value times the sampled time, plus the second value
# in seconds. Even with a correct clock, they can take longer than the sampled time, because the host needs some microseconds per
# launch, and because other processes may slow down the calls.
_COVER_FACTOR, _COVER_SLACK_S = 3.0, 2e-4
# Number of tries, and seconds and maximum number of calls per try. One long interruption can make the mean of ten calls many
# times as large as their median, so a busy machine needs many tries.
_COVER_TRIES, _COVER_BLOCK_S, _COVER_CALLS = 30, 0.02, 10
_COVER_TRIES_IN_HASTE = 5
# If the scheduler did not interrupt at least this many readings of the clock, the interrupted readings are ignored. The second
# value applies if the time budget is used up. It is more than half of the number of tries in this case.
_DECISIVE_READINGS, _DECISIVE_READINGS_IN_HASTE = 5, 3


class HarnessError(HyperionError):
    """Raised when a check finds that a measurement is wrong, for example because the clock stopped too early."""


@dataclass(frozen=True)
class Timing:
    """The raw samples of one function, with the conditions under which they were taken.

    Args:
        samples_s: seconds per call, in the order in which the samples were taken. If calls were timed in blocks, each sample is
            the mean over a block.
        warmup_s: median of each window of the warm-up, in seconds.
        warm: whether the times were stable at the end of the warm-up. False if the warm-up reached its time limit.
        cold: whether the last-level cache was flushed before each sample.
        stopped: the reason why sampling ended. "interval" means that the 95 % confidence interval was within 1 % of the median
            if all samples are independent. The other value is "time limit".
        telemetry: median clock frequency, median power and throttle state of the device during sampling.
    """

    samples_s: np.ndarray
    warmup_s: tuple[float, ...]
    warm: bool
    cold: bool
    stopped: str
    telemetry: Telemetry = field(repr=False)

    @property
    def drift(self) -> Drift:
        """Drift of the samples, for example because the device heats up and lowers its clock frequency."""
        return drift_of(self.samples_s)

    @property
    def unsteady(self) -> str:
        """Reason why the device was not in a steady state, or "" if it was.

        The reasons are that the samples drift, or that the warm-up reached its time limit.
        """
        reasons = [] if self.warm else ["the warm-up's windows still differed when its time was up"]
        return "; ".join(reasons + [str(drift) for drift in [self.drift] if drift.present])

    @property
    def estimate(self) -> Estimate:
        """Median time of a call in seconds with its 95 % interval (see `hyperion.results.series.series_estimate`)."""
        return series_estimate(self.samples_s)

    def per_call(self, calls: int) -> "Timing":
        """Return a copy with all times divided by `calls`. Use it if each sample is the time of `calls` calls in a row."""
        return replace(self, samples_s=self.samples_s / calls, warmup_s=tuple(seconds / calls for seconds in self.warmup_s))


def time_function(
    function: Callable[[], object],
    device: Device,
    *,
    cold: bool = True,
    minimum_samples: int = MINIMUM_SAMPLES,
    minimum_span_s: float = 0.0,
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
        minimum_span_s=minimum_span_s,
        time_limit_s=time_limit_s,
        back_to_back=back_to_back,
        budget_s=budget_s,
        clock=clock,
    )[0]


def time_interleaved(
    functions: Sequence[Callable[[], object]],
    device: Device,
    *,
    cold: bool = True,
    minimum_samples: int = MINIMUM_SAMPLES,
    minimum_span_s: float = 0.0,
    time_limit_s: float = 5.0,
    back_to_back: int = 0,
    budget_s: float | None = None,
    clock: Clock | None = None,
) -> list[Timing]:
    """Time functions alternately (A B A B …), so that drift in clock frequency or temperature affects all of them alike.

    On a host clock, the order of the functions is reversed after every four rounds, because the place in a round matters.

    Sampling stops when the 95 % confidence interval of each median is within 1 % of the median, or when the time limit is
    reached, but not before there are `minimum_samples` samples of each function.

    Args:
        functions: functions without arguments. Each one does or enqueues one unit of work and writes its output in every call.
        device: the device that does the work.
        cold: if True, flush the last-level cache before each sample.
        minimum_samples: minimum number of samples of each function, at least 3.
        minimum_span_s: sampling lasts at least this many seconds. Without a minimum span, 30 samples of a fast function take a
            few milliseconds. On a GPU at its power limit, whose clock frequency changes, they would show the frequency of one
            moment. If a series with a minimum span has 600 samples or more, only 300 to 600 of them are kept.
        time_limit_s: time limit for sampling in seconds. The warm-up of each function takes at most half as long.
        back_to_back: if 0, each sample is the time of one call on the device's clock, without launch overhead. If above 0, each
            sample is the mean time of this many calls in a row, measured on the host's clock between two synchronisations. This
            time includes the launch overhead.
        budget_s: total seconds for warm-up, checks and samples. If given, it replaces `time_limit_s`. Sampling then stops at the
            budget, even if there are fewer than `minimum_samples` samples, but not before there are 3 samples. The caller must
            already have called each function once. None means no budget.
        clock: clock that takes the samples, such as `RanksClock` for collectives. None means the clock of the device.

    Returns:
        The timing of each function, in the order of `functions`.

    Raises:
        HyperionError: an argument is out of range, or both `back_to_back` and `cold` are set.
        HarnessError: calls in a row take much longer than the clock reports, or cold samples were taken without a cache flush.
    """
    require_sampling(minimum_samples, back_to_back, time_limit_s=time_limit_s, budget_s=budget_s)
    longest_s = time_limit_s if budget_s is None else budget_s
    if not 0 <= minimum_span_s <= longest_s:
        raise HyperionError(
            f"minimum_span_s is {minimum_span_s!r}, which is not between 0 and the time limit, {longest_s} s",
            where="minimum_span_s=",
            next_step="pass a smaller number of seconds, or a longer time limit",
        )
    if not functions:
        raise HyperionError("no function to time", where="time_interleaved", next_step="pass at least one function")
    if back_to_back and cold:
        raise HyperionError(
            "back_to_back calls cannot start with a cold cache", where="time_interleaved", next_step="pass cold=False"
        )
    functions = list(functions)
    clock = clock or (WallClock(device, back_to_back) if back_to_back else device_clock(device))
    flush = CacheFlush(device) if cold else None
    began = clock.now()
    if budget_s is None:
        warmups = [_warm_up(clock, function, time_limit_s / 2) for function in functions]
    else:
        share_s = budget_s / len(functions)
        window_s = min(_WARM_WINDOW_S, _WINDOW_SHARE * share_s)
        warmups = [_warm_up(clock, function, _WARM_SHARE * share_s, window_s, called=True) for function in functions]

    def over(seconds: float = 0.0) -> bool:
        return budget_s is not None and clock.now() + seconds - began > budget_s

    def require_whole(function: Callable[[], object], sample_s: float) -> None:
        require_whole_work(
            sample_s, functools.partial(clock.in_a_row, function), lambda count: clock.sample([function], None, count)[0], over
        )

    for function, (windows, _) in zip(functions, warmups, strict=True):
        require_whole(function, windows[-1])
    samples: list[list[float]] = [[] for _ in functions]
    started, stopped = clock.now(), ""
    with Sampler(device) as sampler:
        # The first batch is one round, because the duration of a round with flushes is not known yet.
        batch = 1
        while not stopped:
            batch_started = clock.now()
            for series, new in zip(samples, clock.sample(functions, flush, batch), strict=True):
                series.extend(new)
            # This time includes flushes and launches, so it shows how many rounds fit into the remaining time.
            per_round = max((clock.now() - batch_started) / batch, 1e-9)
            taken = len(samples[0])
            enough = taken >= minimum_samples and clock.now() - started >= minimum_span_s
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
        require_flushed(len(samples[0]) * len(functions), flush.calls, flush.read_all)
    for function, (windows, _), series in zip(functions, warmups, samples, strict=True):
        # If the scheduler interrupted the calls of the last warm-up window, the time of this window was too long, and the check
        # before the sampling was too weak. Repeat the check with the median of the samples.
        if _COVER_FACTOR * float(np.median(series)) < windows[-1]:
            require_whole(function, float(np.median(series)))
    apart = max(1, len(samples[0]) // max(_KEPT_SAMPLES, minimum_samples)) if minimum_span_s else 1
    return [
        Timing(np.array(series[::apart]), tuple(windows), warm, cold, stopped, telemetry)
        for series, (windows, warm) in zip(samples, warmups, strict=True)
    ]


def _call_s(clock: Clock, function: Callable, count: int) -> float:
    return float(np.median(clock.sample([function], None, count)[0]))


def _interruptions() -> int:
    """Return how often the scheduler has taken a CPU away from this process."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_nivcsw


def require_sampling(minimum_samples: int, back_to_back: int = 0, **limits_s: float | None) -> None:
    """Check the arguments that determine how many samples are taken.

    Args:
        minimum_samples: minimum number of samples.
        back_to_back: number of calls per sample, or 0.
        limits_s: time limits in seconds, by argument name. None means no limit.

    Raises:
        HyperionError: an argument is out of range.
    """
    for name, value, least in (("minimum_samples", minimum_samples, LEAST_SAMPLES), ("back_to_back", back_to_back, 0)):
        if not isinstance(value, int | np.integer) or isinstance(value, bool) or value < least:
            raise HyperionError(
                f"{name} is {value!r}, which is not a whole number of at least {least}",
                where=f"{name}=",
                next_step=f"pass a whole number of at least {least}",
            )
    for name, value in limits_s.items():
        number = isinstance(value, int | float | np.number) and not isinstance(value, bool)
        if value is not None and not (number and math.isfinite(value) and value > 0):
            raise HyperionError(
                f"{name} is {value!r}, which is not a finite number above 0",
                where=f"{name}=",
                next_step="pass a finite number of seconds above 0",
            )


class CacheFlush:
    """Callable that flushes the last-level cache: it reads a buffer that is twice as large as the cache.

    The buffer is only read. If it were written, the cache would have to write the modified lines back to memory later, possibly
    during the timed call, which would make this call slower.

    Args:
        elements: number of float32 elements to read. None means a buffer of twice the size of the last-level cache, but at least
            16 MiB.

    Attributes:
        calls: number of calls so far.
        bytes: number of bytes that one call reads.
    """

    def __init__(self, device: Device, elements: int | None = None):
        count = elements or max(2 * (device.last_level_cache_bytes or 0), 1 << 24) // 4
        self._buffer = torch.ones(count, dtype=torch.float32, device=device.torch_device)
        # Preallocated for the sum, so that a flush allocates nothing.
        self._total = torch.zeros((), dtype=torch.float32, device=device.torch_device)
        self.calls, self.bytes = 0, self._buffer.nbytes

    def __call__(self) -> None:
        self.calls += 1
        torch.sum(self._buffer, dim=0, out=self._total)

    @property
    def read_all(self) -> bool:
        """Whether the last call read every element.

        The buffer contains only ones, so their sum must be the number of elements.
        """
        # A tolerance is needed because a float32 sum of millions of ones is not exact.
        return math.isclose(self._total.item(), self._buffer.numel(), rel_tol=1e-3)


def _warm_up(clock, function, limit_s: float, window_s: float = _WARM_WINDOW_S, called: bool = False) -> tuple[list[float], bool]:
    """Call the function until its times are stable, or until the time limit is reached.

    The calls are divided into windows of about `window_s` seconds. The times are stable when the medians of three windows in a
    row agree within 2 %.

    Args:
        called: whether the function has been called before. If not, the first call is not part of a window.

    Returns:
        The median of each window in seconds, and whether the last three medians agree.
    """
    medians: list[float] = []
    if not called:
        clock.sample([function], None, 1)  # the first call is slower than later calls, because it compiles, loads and allocates
    deadline = clock.now() + limit_s
    count = 1
    while True:
        started = clock.now()
        medians.append(_call_s(clock, function, count))
        # Number of calls that fill a window at the speed of the last window.
        count = max(1, min(1000, int(window_s * count / max(clock.now() - started, 1e-6))))
        last = medians[-3:]
        if len(last) == 3 and max(last) - min(last) <= _WARM_TOLERANCE * min(last):
            return medians, True
        if clock.now() > deadline:
            return medians, False


def _relative_half_width(samples: list[float]) -> float:
    """Return half the width of the 95 % interval of the median of independent samples, divided by the median.

    The interval is computed from order statistics, which is fast enough to do after every batch.

    Source: Conover, Practical Nonparametric Statistics, 3rd edition, section 3.2.
    """
    ordered = np.sort(samples)
    n = len(ordered)
    # The number of samples below the median is binomial, with standard deviation √n / 2.
    reach = 1.96 * np.sqrt(n) / 2
    low, high = ordered[max(0, int(n / 2 - reach))], ordered[min(n - 1, int(np.ceil(n / 2 + reach)))]
    return float((high - low) / 2 / np.median(ordered))


def compare_with_plain_loop(
    function: Callable[[], object],
    device: Device,
    calls: int = 10,
    rounds: int = MINIMUM_SAMPLES,
    plain: Callable[[], object] | None = None,
) -> tuple[Timing, Timing]:
    """Time a function with Hyperion's clock and with a plain loop on the host's clock.

    The plain loop synchronises, reads the clock, makes `calls` calls, synchronises, and reads the clock again. Both measurements
    use hot caches. They alternate, and each round gives one sample of each.

    Args:
        calls: number of calls per round.
        rounds: number of rounds, and thus of samples.
        plain: function for the plain loop. None means `function`.

    Returns:
        The timing of one call with Hyperion's clock, whose samples are medians over a round, and the timing of one call with the
        plain loop, whose samples are means over a round.
    """
    clock, plain_clock = device_clock(device), WallClock(device, calls)
    ours, theirs = [], []
    with Sampler(device) as sampler:
        for _ in range(rounds + 1):
            ours.append(float(np.median(clock.sample([function], None, calls)[0])))
            theirs.append(plain_clock.sample([plain or function], None, 1)[0][0])
    # The first round is the warm-up.
    first, second = (
        Timing(np.array(series[1:]), tuple(series[:1]), True, False, "rounds", sampler.telemetry) for series in (ours, theirs)
    )
    return first, second


def require_whole_work(
    sample_s: float,
    in_a_row: Callable[[int], float | None],
    again: Callable[[int], Sequence[float]],
    over: Callable[[], bool] = lambda: False,
) -> None:
    """Check that calls in a row between two synchronisations take about as long as the clock reports.

    Calls in a row take longer if the clock stops before the work is done (because it does not synchronise, or because the work
    runs on another stream), or if most calls reuse the result of an earlier call.

    Args:
        sample_s: median seconds of one call according to the clock.
        in_a_row: function that makes a given number of calls in a row and returns the host's seconds per call. It returns None if
            this check does not apply to the clock.
        again: function that times a given number of calls with the clock and returns the seconds of each call. The check calls it
            after each slow block, because other load on the machine slows down both measurements.
        over: function that returns True if the time budget is used up.

    Raises:
        HarnessError: in each of thirty blocks (five if the time budget is used up), calls in a row took more than three times as
            long as the clock reports.

    A reading of the clock is the median of its samples. A mean would hide an error in which most calls reuse an earlier result.

    The scheduler can interrupt a reading. If it interrupts nearly all readings, it also interrupts nearly all blocks of calls in
    a row. The time of such a block is a mean, so at the end it is compared with the mean of the samples of interrupted readings.
    If several readings were not interrupted, some blocks were not interrupted either. Interrupted readings are then ignored.
    """
    calls = max(1, min(_COVER_CALLS, int(_COVER_BLOCK_S / max(sample_s, 1e-9))))
    seen: list[float] = []
    clear_s, interrupted_s = [sample_s], []

    def enough(seconds: float) -> bool:
        return seconds <= _COVER_FACTOR * sample_s + _COVER_SLACK_S

    while len(seen) < (_COVER_TRIES_IN_HASTE if over() else _COVER_TRIES):
        seconds = in_a_row(calls)
        if seconds is None or enough(seconds):
            return
        seen.append(seconds)
        before = _interruptions()
        samples = again(calls)
        if _interruptions() > before:
            interrupted_s.append(float(np.mean(samples)))
        else:
            clear_s.append(float(np.median(samples)))
            # Use the median of the readings. With the maximum, one delayed reading could hide that the clock stops too early.
            sample_s = max(sample_s, float(np.median(clear_s)))
    decisive = _DECISIVE_READINGS_IN_HASTE if len(seen) < _COVER_TRIES else _DECISIVE_READINGS
    if len(seen) - len(interrupted_s) < decisive:
        sample_s = max(sample_s, float(np.median(interrupted_s)))
        if enough(min(seen)):
            return
    raise HarnessError(
        f"the clock reports {sample_s * 1e3:.4g} ms per call, but {calls} calls in a row take {min(seen) * 1e3:.4g} ms each "
        "if the host waits until the device is idle",
        where="a timed function",
        next_step="synchronise before the clock stops, run all work on the current stream, and do the work in every call",
    )


def require_flushed(samples: int, flushes: int, read_all: bool = True) -> None:
    """Check that the cache was flushed before every cold sample.

    Args:
        samples: number of samples that are labelled cold.
        flushes: number of cache flushes.
        read_all: whether the last flush read its whole buffer.

    Raises:
        HarnessError: there are fewer flushes than samples, or the flush did not read its buffer.
    """
    if flushes < samples:
        raise HarnessError(
            f"{samples} samples are labelled cold, but the cache was flushed {flushes} times",
            where="a timed function",
            next_step="call `flush` before each sample, or use cold=False and label the samples hot",
        )
    if not read_all:
        raise HarnessError(
            f"{samples} samples are labelled cold, but the flush did not read its buffer, so the cache was hot",
            where="a timed function",
            next_step="let `CacheFlush` read its whole buffer, or use cold=False and label the samples hot",
        )


def require_cache_label(label: str | None, cold: bool) -> None:
    """Check that the param `cache` of a row (`hyperion.results.Row`) agrees with the state of the caches during sampling.

    Args:
        label: value of the param, "cold" or "hot". None if the row has no param `cache`.
        cold: whether the cache was flushed before each sample.

    Raises:
        HarnessError: the label and the samples do not agree.
    """
    taken = "cold" if cold else "hot"
    if label in ("cold", "hot") and label != taken:
        raise HarnessError(
            f"samples with {taken} caches are labelled {label}", where="sample_frame", next_step=f"label the samples {taken}"
        )
