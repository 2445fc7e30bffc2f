"""Estimates with 95 % confidence intervals: medians by the bootstrap, A/B ratios, proportions, and values over launches."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

# With 2,000 resamples, about 50 medians lie beyond each end of a 95 % interval.
RESAMPLES = 2000
CONFIDENCE = 0.95
# With fewer samples, the bootstrap interval of a median is too narrow: with 3 samples, it contains the median with 76 %.
LEAST_FOR_THE_BOOTSTRAP = 30
# With fewer samples, even their range contains the median with less than 95 %.
LEAST_FOR_AN_INTERVAL = 6
# With fewer launches, their variation is unknown: with four, the true median lies outside their range in one of eight cases.
LEAST_LAUNCHES = 5
_NORMAL_HALF_WIDTH = 1.96  # standard deviations in half of a 95 % interval of a normal distribution


@dataclass(frozen=True)
class Estimate:
    """A point estimate with its 95 % confidence interval.

    Args:
        value: the point estimate.
        ci_low, ci_high: ends of the interval.
        n: number of samples from which the value was computed.
    """

    value: float
    ci_low: float
    ci_high: float
    n: int

    def __str__(self) -> str:
        return f"{self.value:.5g} [{self.ci_low:.5g}, {self.ci_high:.5g}] n={self.n}"

    def map(self, function: Callable[[float], float]) -> "Estimate":
        """Return the estimate of `function(value)` for a monotone function, such as rate = work / time."""
        # A decreasing function, such as rate = work / time, swaps the ends of the interval.
        low, high = sorted((function(self.ci_low), function(self.ci_high)))
        return Estimate(function(self.value), low, high, self.n)

    @property
    def columns(self) -> dict[str, float]:
        """The columns of a row with this value: number of samples, and ends of the interval."""
        return {"n": self.n, "ci_low": self.ci_low, "ci_high": self.ci_high}

    def magnitude(self) -> "Estimate":
        """Return the estimate of the absolute value. If the interval contains zero, the new interval starts at zero."""
        low, high = sorted((abs(self.ci_low), abs(self.ci_high)))
        return Estimate(abs(self.value), 0.0 if self.ci_low < 0 < self.ci_high else low, high, self.n)


def median_estimate(samples: ArrayLike, seed: int = 0) -> Estimate:
    """Return the median of `samples` and its 95 % interval.

    The interval is that of the percentile bootstrap. With fewer than 30 samples, it is extended so that it contains the interval
    between two order statistics (two of the sorted samples), which is valid for any distribution of independent samples. With
    fewer than six samples, even the range of the samples contains the median with less than 95 %. For samples that were taken
    one after the other, use `hyperion.results.series.series_estimate`.

    Args:
        samples: 1-D sequence of finite numbers in any unit, not empty.
        seed: seed of the resampling.
    """
    estimate, values = bootstrap_median(samples, seed), _finite(samples)
    if len(values) >= LEAST_FOR_THE_BOOTSTRAP:
        return estimate
    low, high = order_interval(values, CONFIDENCE)
    return Estimate(estimate.value, min(low, estimate.ci_low), max(high, estimate.ci_high), estimate.n)


def bootstrap_median(samples: ArrayLike, seed: int = 0) -> Estimate:
    """Return the median of `samples` and its percentile-bootstrap interval. Arguments are those of `median_estimate`.

    Source: Efron and Tibshirani, An Introduction to the Bootstrap, 1993, section 13.3.
    """
    values = _finite(samples)
    # Shape (RESAMPLES, n): one row is one resample with replacement.
    medians = _medians(values[_resampled(len(values), seed)])
    return _estimate(float(np.median(values)), medians, len(values))


def order_interval(samples: np.ndarray, confidence: float) -> tuple[float, float]:
    """Return a confidence interval of the median, given by two of the sorted samples.

    The interval makes no assumption about the distribution of the samples. It extends from the i-th smallest to the i-th largest
    sample, where i is the largest number for which the interval contains the median with probability `confidence` or more. If
    even i = 1 does not reach this probability, the smallest and the largest sample are returned.

    Source: Conover, Practical Nonparametric Statistics, 3rd edition, section 3.2.
    """
    ordered, n = np.sort(samples), len(samples)
    # The number of samples below the median is binomial with p = 1/2. `outside` is the probability of both tails,
    # 2·Σ C(n, j) / 2^n over j <= place.
    outside, place = 2.0 ** (1 - n), 0
    while place + 1 < n // 2 and outside + math.comb(n, place + 1) * 2.0 ** (1 - n) <= 1 - confidence:
        place += 1
        outside += math.comb(n, place) * 2.0 ** (1 - n)
    return float(ordered[place]), float(ordered[n - 1 - place])


def nearest_rank(samples: ArrayLike, share: float) -> float:
    """Return a percentile by the nearest-rank method.

    The result is the smallest sample v for which at least the given share of the samples are less than or equal to v. It is never
    interpolated, so samples may be infinite, such as the latency of a failed request. If a sample is NaN, the result is NaN.

    Args:
        samples: 1-D sequence of numbers in any unit, not empty.
        share: the percentile as a share, such as 0.99.
    """
    values = np.sort(np.asarray(samples, dtype=np.float64))
    # Rounded, because share · n may lie just above a whole number, such as 0.07 · 100. np.quantile(method="inverted_cdf") would
    # then return the next sample.
    rank = max(1, math.ceil(round(share * len(values), 9)))
    return math.nan if np.isnan(values[-1]) else float(values[rank - 1])  # NaN is sorted to the end


def ratio_estimate(times_a: ArrayLike, times_b: ArrayLike, seed: int = 0) -> Estimate:
    """Return the speed-up of A over B, median(times_b) / median(times_a), for samples that were taken alternately.

    Sample i of A and sample i of B are a pair, because they were measured one after the other. The bootstrap resamples whole
    pairs, so that drift cancels.

    Raises:
        ValueError: the two series have different lengths, so they were not interleaved.
    """
    a, b = _finite(times_a), _finite(times_b)
    if len(a) != len(b):
        raise ValueError(f"{len(a)} samples of A and {len(b)} of B: an interleaved run has the same number of both")
    picks = _resampled(len(a), seed)
    ratios = _medians(b[picks]) / _medians(a[picks])
    return _estimate(float(np.median(b) / np.median(a)), ratios, len(a))


def independent_ratio_estimate(times_a: ArrayLike, times_b: ArrayLike, seed: int = 0) -> Estimate:
    """Return the speed-up of A over B, median(times_b) / median(times_a), for two series that were not interleaved.

    The bootstrap resamples each series separately, so the interval does not include drift between the two series. To claim that
    one variant is faster, use interleaved samples and `ratio_estimate`.
    """
    a, b = _finite(times_a), _finite(times_b)
    medians_a = _medians(a[_resampled(len(a), seed)])
    # B needs another seed. With the same seed, both series would be resampled at the same positions, as if they were pairs.
    medians_b = _medians(b[_resampled(len(b), seed + 1)])
    return _estimate(float(np.median(b) / np.median(a)), medians_b / medians_a, min(len(a), len(b)))


def estimates_of_medians(series: Sequence, function: Callable[[np.ndarray], Sequence[float]], seed: int = 0) -> list[Estimate]:
    """Return estimates of values that a function computes from the medians of several series, such as a fit.

    The bootstrap resamples each series separately.

    Args:
        series: one sequence of samples per series. The lengths may differ.
        function: takes one median per series and returns the values to estimate.
        seed: seed of the resampling.
    """
    series = [_finite(samples) for samples in series]
    # The point estimate uses the medians of all samples. The resamples only give its interval.
    values = function(np.array([np.median(samples) for samples in series]))
    drawn = [_medians(s[_resampled(len(s), seed + i)]) for i, s in enumerate(series)]
    outcomes = np.array([function(medians) for medians in np.transpose(drawn)])
    n = min(len(samples) for samples in series)
    return [_estimate(float(value), outcomes[:, place], n) for place, value in enumerate(values)]


def proportion_estimate(successes: int, n: int) -> Estimate:
    """Return the share of successes, such as the accuracy on n images, with its Wilson score interval.

    Source: Wilson, JASA 22 (1927) 209-212.
    """
    # scipy is imported here because the import takes almost a second, which would slow down every worker process.
    from scipy import stats

    interval = stats.binomtest(successes, n).proportion_ci(CONFIDENCE, method="wilson")
    share = successes / n
    # At 0 or n successes, one end of the Wilson interval equals the share, but rounding may move it to the wrong side.
    return Estimate(share, min(interval.low, share), max(interval.high, share), n)


def launches_estimate(values: Sequence[float], intervals: Sequence[tuple[float | None, float | None]], seed: int = 0) -> Estimate:
    """Return the median over launches, with a 95 % interval that includes the variation between and within launches.

    The bootstrap is nested: it resamples the launches, and then adds a normally distributed error to the value of each drawn
    launch. The standard deviation of this error is computed from the interval within the launch. If all values and intervals are
    positive, such as times, the error is added to the logarithm of the value, so that the result is positive too. For a single
    launch, the result has the interval within this launch. With five to 29 launches, the interval is extended so that it contains
    the interval between two order statistics of the launches.

    With five launches of one machine, the interval contains the true median in at least 90 % of cases. With two launches it does
    in about half of the cases. It also does so less often if several machines differ more than the launches on one of them do.

    Args:
        values: the value of each launch.
        intervals: the 95 % interval within each launch. (None, None) if a launch has no interval; no error is then added to its
            value.
        seed: seed of the resampling.

    Source: Davison and Hinkley, Bootstrap Methods and their Application, 1997, section 3.8.
    """
    launches = _finite(values)
    ends = np.array([(value, value) if None in ends else ends for value, ends in zip(launches, intervals, strict=True)], float)
    if len(launches) == 1:
        return Estimate(float(launches[0]), float(ends[0, 0]), float(ends[0, 1]), 1)
    positive = bool((launches > 0).all() and (ends > 0).all())
    drawn_from, ends = (np.log(launches), np.log(ends)) if positive else (launches, ends)
    deviations = (ends[:, 1] - ends[:, 0]) / 2 / _NORMAL_HALF_WIDTH
    picks = _resampled(len(launches), seed)
    # The errors within launches need random numbers that are independent of the choice of launches.
    drawn = drawn_from[picks] + np.random.default_rng(seed + 1).standard_normal(picks.shape) * deviations[picks]
    medians = _medians(np.exp(drawn) if positive else drawn)
    estimate = _estimate(float(np.median(launches)), medians, len(launches))
    if not LEAST_LAUNCHES <= len(launches) < LEAST_FOR_THE_BOOTSTRAP:
        return estimate
    low, high = order_interval(launches, CONFIDENCE)
    return Estimate(estimate.value, min(low, estimate.ci_low), max(high, estimate.ci_high), estimate.n)


def mean_estimate(samples: ArrayLike) -> Estimate:
    """Return the mean of independent repetitions, such as training runs with several seeds, with Student's 95 % interval.

    Raises:
        ValueError: there are fewer than two samples, so that their spread is unknown.
    """
    from scipy import stats

    values = _finite(samples)
    if len(values) < 2:
        raise ValueError(f"{len(values)} repetition has no spread: at least two are needed")
    # Half-width of the interval: t(0.975, n - 1) · s / sqrt(n).
    reach = stats.t.ppf((1 + CONFIDENCE) / 2, len(values) - 1) * values.std(ddof=1) / np.sqrt(len(values))
    mean = float(values.mean())
    return Estimate(mean, float(mean - reach), float(mean + reach), len(values))


def _estimate(value: float, resampled: np.ndarray, n: int) -> Estimate:
    low, high = np.quantile(resampled, [0.5 - CONFIDENCE / 2, 0.5 + CONFIDENCE / 2])
    # With few samples, rounding can place the median just outside its percentile interval.
    return Estimate(value, min(float(low), value), max(float(high), value), n)


def _resampled(n: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, n, (RESAMPLES, n))


def _medians(resamples: np.ndarray) -> np.ndarray:
    """Return the median of each row, and reorder the rows. All values must be numbers.

    The results have the bits of `np.median`, which takes three times as long: it also searches for NaN, and copies the array.
    """
    middle = resamples.shape[1] // 2
    resamples.partition(middle, axis=1)
    upper = resamples[:, middle]
    return upper.copy() if resamples.shape[1] % 2 else (resamples[:, :middle].max(axis=1) + upper) / 2


def _finite(samples: ArrayLike) -> np.ndarray:
    values = np.asarray(samples, dtype=np.float64).ravel()
    if len(values) == 0 or not np.isfinite(values).all():
        raise ValueError(f"an estimate needs finite samples: {int(np.isfinite(values).sum())} of {len(values)} are finite")
    return values
