"""Medians, bootstrap confidence intervals and interleaved A/B ratios: the only statistics a row may carry."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

RESAMPLES = 2000
CONFIDENCE = 0.95


@dataclass(frozen=True)
class Estimate:
    """A point estimate with its 95 % confidence interval and the number of samples behind it."""

    value: float
    ci_low: float
    ci_high: float
    n: int

    def __str__(self) -> str:
        return f"{self.value:.5g} [{self.ci_low:.5g}, {self.ci_high:.5g}] n={self.n}"

    def map(self, function) -> "Estimate":
        """The estimate of a monotone function of the value (say, rate = work / time): ends swap where it falls."""
        low, high = sorted((function(self.ci_low), function(self.ci_high)))
        return Estimate(function(self.value), low, high, self.n)

    def magnitude(self) -> "Estimate":
        """The estimate without its sign; an interval around zero starts there."""
        low, high = sorted((abs(self.ci_low), abs(self.ci_high)))
        return Estimate(abs(self.value), 0.0 if self.ci_low < 0 < self.ci_high else low, high, self.n)


def median_estimate(samples, seed: int = 0) -> Estimate:
    """Median and percentile-bootstrap interval of `samples` (any unit; 1-D, at least one finite value).

    Source: Efron and Tibshirani, An Introduction to the Bootstrap, 1993, section 13.3.
    """
    values = _finite(samples)
    medians = np.median(values[_resampled(len(values), seed)], axis=1)
    return _estimate(float(np.median(values)), medians, len(values))


def ratio_estimate(times_a, times_b, seed: int = 0) -> Estimate:
    """Speed of A over B, median(times_b) / median(times_a), from an interleaved run: sample i of A stands beside sample i of B.

    The pairs are resampled together, so that drift which hits both sides of a pair cancels.

    Raises:
        ValueError: the two series differ in length, so they were not interleaved.
    """
    a, b = _finite(times_a), _finite(times_b)
    if len(a) != len(b):
        raise ValueError(f"{len(a)} samples of A beside {len(b)} of B: an interleaved run has as many of each")
    picks = _resampled(len(a), seed)
    ratios = np.median(b[picks], axis=1) / np.median(a[picks], axis=1)
    return _estimate(float(np.median(b) / np.median(a)), ratios, len(a))


def independent_ratio_estimate(times_a, times_b, seed: int = 0) -> Estimate:
    """Speed of A over B, median(times_b) / median(times_a), of two series that were not interleaved.

    Each is resampled by itself, so the interval holds no drift between the two: a claim of "faster" needs `ratio_estimate`.
    """
    a, b = _finite(times_a), _finite(times_b)
    medians_a = np.median(a[_resampled(len(a), seed)], axis=1)
    medians_b = np.median(b[_resampled(len(b), seed + 1)], axis=1)
    return _estimate(float(np.median(b) / np.median(a)), medians_b / medians_a, min(len(a), len(b)))


def estimates_of_medians(series: Sequence, function: Callable[[np.ndarray], Sequence[float]], seed: int = 0) -> list[Estimate]:
    """Estimates of what `function` makes of the medians of several series (a fit through them, say), each resampled by itself.

    Args:
        series: one sequence of samples a point; they may differ in length.
        function: takes the medians, one a series, and returns the values to estimate.
    """
    series = [_finite(samples) for samples in series]
    values = function(np.array([np.median(samples) for samples in series]))
    drawn = [np.median(s[_resampled(len(s), seed + i)], axis=1) for i, s in enumerate(series)]
    outcomes = np.array([function(medians) for medians in np.transpose(drawn)])
    n = min(len(samples) for samples in series)
    return [_estimate(float(value), outcomes[:, place], n) for place, value in enumerate(values)]


def proportion_estimate(successes: int, n: int) -> Estimate:
    """A share of successes with its Wilson score interval (accuracy on n images).

    Source: Wilson, JASA 22 (1927) 209-212.
    """
    # Imported where it is used: it takes almost a second, which every worker process of every chapter would pay.
    from scipy import stats

    interval = stats.binomtest(successes, n).proportion_ci(CONFIDENCE, method="wilson")
    share = successes / n
    return Estimate(share, min(interval.low, share), max(interval.high, share), n)


def mean_estimate(samples) -> Estimate:
    """Mean of a few independent repetitions (seeds) with Student's 95 % interval.

    Raises:
        ValueError: fewer than two, of which nobody can say how they scatter.
    """
    from scipy import stats

    values = _finite(samples)
    if len(values) < 2:
        raise ValueError(f"{len(values)} repetition has no spread: give at least two")
    reach = stats.t.ppf((1 + CONFIDENCE) / 2, len(values) - 1) * values.std(ddof=1) / np.sqrt(len(values))
    mean = float(values.mean())
    return Estimate(mean, float(mean - reach), float(mean + reach), len(values))


def holm(p_values: list[float]) -> list[float]:
    """Holm's step-down correction: p-values that bound the chance of any false alarm among all of them.

    Source: Holm, Scandinavian Journal of Statistics 6 (1979) 65-70.
    """
    corrected, running = [0.0] * len(p_values), 0.0
    for position, index in enumerate(np.argsort(p_values)):
        running = max(running, min(1.0, (len(p_values) - position) * p_values[index]))
        corrected[index] = running
    return corrected


def welch_p_value(a, b) -> float:
    """Two-sided p-value of Welch's t-test on the logarithms: are two sets of relaunches of one positive metric the same?

    Values that do not vary at all (a seeded loss) differ for certain or not at all.
    """
    from scipy import stats

    log_a, log_b = np.log(_finite(a)), np.log(_finite(b))
    if np.ptp(log_a) == 0 and np.ptp(log_b) == 0:
        return 1.0 if log_a[0] == log_b[0] else 0.0
    return float(stats.ttest_ind(log_a, log_b, equal_var=False).pvalue)


def _estimate(value: float, resampled: np.ndarray, n: int) -> Estimate:
    low, high = np.quantile(resampled, [0.5 - CONFIDENCE / 2, 0.5 + CONFIDENCE / 2])
    # With a handful of samples the percentile interval of a median can miss the median itself by a rounding.
    return Estimate(value, min(float(low), value), max(float(high), value), n)


def _resampled(n: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, n, (RESAMPLES, n))


def _finite(samples) -> np.ndarray:
    values = np.asarray(samples, dtype=np.float64).ravel()
    if len(values) == 0 or not np.isfinite(values).all():
        raise ValueError(
            f"{len(values)} samples, {int(np.isfinite(values).sum())} of them finite: nothing to estimate from"
        )
    return values
