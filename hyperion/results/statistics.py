"""Medians, bootstrap confidence intervals, interleaved A/B ratios, a randomization test for sets of launches and its power."""

import functools
import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

RESAMPLES = 2000
CONFIDENCE = 0.95
DIVISIONS = 10_000
POWER_TRIALS = 1000
WANTED_POWER = 0.8
_POWER_DIVISIONS = 400
_LARGEST = 0.99
_STEP = math.log(1.1)
_CELLS = 4_000_000  # numbers of a test held in memory at once, in each of a few arrays


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
        """Return the estimate of a monotone function of the value, such as rate = work / time."""
        low, high = sorted((function(self.ci_low), function(self.ci_high)))
        return Estimate(function(self.value), low, high, self.n)

    def magnitude(self) -> "Estimate":
        """Return the estimate of the absolute value; an interval that contains zero starts at zero."""
        low, high = sorted((abs(self.ci_low), abs(self.ci_high)))
        return Estimate(abs(self.value), 0.0 if self.ci_low < 0 < self.ci_high else low, high, self.n)


def median_estimate(samples, seed: int = 0) -> Estimate:
    """Return the median and its percentile-bootstrap interval of `samples` (any unit; 1-D, not empty, all finite).

    Source: Efron and Tibshirani, An Introduction to the Bootstrap, 1993, section 13.3.
    """
    values = _finite(samples)
    medians = np.median(values[_resampled(len(values), seed)], axis=1)
    return _estimate(float(np.median(values)), medians, len(values))


def ratio_estimate(times_a, times_b, seed: int = 0) -> Estimate:
    """Return the speed of A over B, median(times_b) / median(times_a), of an interleaved run.

    Samples i of A and B are a pair, measured one after the other. Pairs are resampled together, so that drift cancels.

    Raises:
        ValueError: the series differ in length, so they were not interleaved.
    """
    a, b = _finite(times_a), _finite(times_b)
    if len(a) != len(b):
        raise ValueError(f"{len(a)} samples of A and {len(b)} of B: an interleaved run has as many of each")
    picks = _resampled(len(a), seed)
    ratios = np.median(b[picks], axis=1) / np.median(a[picks], axis=1)
    return _estimate(float(np.median(b) / np.median(a)), ratios, len(a))


def independent_ratio_estimate(times_a, times_b, seed: int = 0) -> Estimate:
    """Return the speed of A over B, median(times_b) / median(times_a), of two series that were not interleaved.

    Each series is resampled separately, so the interval does not include drift between them. A claim of "faster" needs
    `ratio_estimate`.
    """
    a, b = _finite(times_a), _finite(times_b)
    medians_a = np.median(a[_resampled(len(a), seed)], axis=1)
    medians_b = np.median(b[_resampled(len(b), seed + 1)], axis=1)
    return _estimate(float(np.median(b) / np.median(a)), medians_b / medians_a, min(len(a), len(b)))


def estimates_of_medians(series: Sequence, function: Callable[[np.ndarray], Sequence[float]], seed: int = 0) -> list[Estimate]:
    """Return estimates of a function of the medians of several series, such as a fit. Series are resampled separately.

    Args:
        series: one sequence of samples per point; lengths may differ.
        function: takes one median per series and returns the values to estimate.
    """
    series = [_finite(samples) for samples in series]
    values = function(np.array([np.median(samples) for samples in series]))
    drawn = [np.median(s[_resampled(len(s), seed + i)], axis=1) for i, s in enumerate(series)]
    outcomes = np.array([function(medians) for medians in np.transpose(drawn)])
    n = min(len(samples) for samples in series)
    return [_estimate(float(value), outcomes[:, place], n) for place, value in enumerate(values)]


def proportion_estimate(successes: int, n: int) -> Estimate:
    """Return the share of successes with its Wilson score interval (for example, accuracy on n images).

    Source: Wilson, JASA 22 (1927) 209-212.
    """
    # Imported here because the import takes almost a second, which every worker process would pay.
    from scipy import stats

    interval = stats.binomtest(successes, n).proportion_ci(CONFIDENCE, method="wilson")
    share = successes / n
    return Estimate(share, min(interval.low, share), max(interval.high, share), n)


def mean_estimate(samples) -> Estimate:
    """Return the mean of independent repetitions (seeds) with Student's 95 % interval.

    Raises:
        ValueError: fewer than two samples, whose spread is unknown.
    """
    from scipy import stats

    values = _finite(samples)
    if len(values) < 2:
        raise ValueError(f"{len(values)} repetition has no spread: at least two are needed")
    reach = stats.t.ppf((1 + CONFIDENCE) / 2, len(values) - 1) * values.std(ddof=1) / np.sqrt(len(values))
    mean = float(values.mean())
    return Estimate(mean, float(mean - reach), float(mean + reach), len(values))


@dataclass(frozen=True)
class RandomizationTest:
    """The outcome of `randomization_test`.

    Args:
        differences: mean of B minus mean of A, by value; shape (values,).
        p_values: corrected over all values, so that the probability of any false alarm is bounded; shape (values,).
        largest: the largest statistic among all values in each division of the launches, the observed one first; shape
            (divisions,).
    """

    differences: np.ndarray
    p_values: np.ndarray
    largest: np.ndarray


def randomization_test(values: np.ndarray, launches_a: int, smallest: float, divisions: int = DIVISIONS) -> RandomizationTest:
    """Test which of many values differ between two sets of launches, whatever their distribution and correlation.

    If the code is the same, every division of the launches into an A and a B of these sizes is equally likely. The statistic
    of a value is its correlation with the side, and 0 where the sides differ by `smallest` or less. The p-value is the share
    of divisions in which the largest statistic is at least the observed one, by Westfall and Young's step-down over the
    values. Whole launches are divided, because values within a launch are correlated.

    The probability of any false alarm at p <= 0.05 is at most 5 %, exactly, also for heavy-tailed, skewed or bimodal launches.
    `smallest` makes the test more powerful for values with a small spread: it excludes changes that are too small to count.

    Args:
        values: logarithms, larger is better; shape (launches, values), the launches of A first. At least one value.
        launches_a: number of launches of A.
        smallest: relative change (0.03 for 3 %) that a difference must exceed to count.
        divisions: number of divisions: all if there are no more (252 of five and five), else this many at random.

    Source: Westfall and Young, Resampling-Based Multiple Testing, 1993, algorithm 2.8; Phipson and Smyth, Statistical
    Applications in Genetics and Molecular Biology 9 (2010) article 39, for counting the observed division.
    """
    values = np.asarray(values, dtype=np.float64)
    values = values - values.mean(axis=0)
    contrasts = side_contrasts(launches_a, len(values) - launches_a, divisions)
    lengths = np.sqrt((values**2).sum(axis=0))
    differences = contrasts[0] @ values
    observed = _correlations(differences[None], lengths, smallest)[0]
    order = np.argsort(observed)
    reached, largest = np.zeros(len(order)), []
    for some in np.array_split(contrasts, math.ceil(contrasts.shape[0] * len(order) / _CELLS)):
        # By column: the largest statistic of this value and all less significant ones.
        maxima = np.maximum.accumulate(_correlations(some @ values, lengths, smallest)[:, order], axis=1)
        # The factor counts divisions that are equal except for rounding.
        reached += (maxima >= observed[order] * (1 - 1e-9)).sum(axis=0)
        largest.append(maxima[:, -1])
    p_values = np.empty(len(order))
    p_values[order] = np.maximum.accumulate((reached / len(contrasts))[::-1])[::-1]
    return RandomizationTest(differences, p_values, np.concatenate(largest))


@functools.lru_cache(maxsize=16)
def side_contrasts(launches_a: int, launches_b: int, divisions: int) -> np.ndarray:
    """Return divisions of launches into two sides, as weights that give the mean of B minus the mean of A.

    Returns:
        Shape (divisions, launches); the first one is the observed division (A first), the others are in random order.
    """
    launches, random = launches_a + launches_b, np.random.default_rng(0)
    if math.comb(launches, launches_a) <= divisions:
        of_a = np.array(list(itertools.combinations(range(launches), launches_a)))
        of_a[1:] = random.permutation(of_a[1:])
    else:
        of_a = np.argsort(random.random((divisions, launches)), axis=1)[:, :launches_a]
        of_a[0] = range(launches_a)
    contrasts = np.full((len(of_a), launches), 1 / launches_b)
    np.put_along_axis(contrasts, of_a, -1 / launches_a, axis=1)
    contrasts.flags.writeable = False  # the cached array is shared by all callers
    return contrasts


def fenced(values: np.ndarray, launches_a: int) -> np.ndarray:
    """Return values with outliers clipped to fences, so that one stalled launch does not hide a change.

    The fences are common to both sides. Their distance from the bulk is the width of the bulk. The bulk is all launches except a
    tenth at each end, or fewer, so that the smaller side is never wholly outside. (For ten launches per side with normal values,
    the fences are about four standard deviations from the middle.)

    Args:
        values: shape (launches, values), the launches of A first.
        launches_a: number of launches of A.
    """
    ends = min(launches_a, len(values) - launches_a) // 5
    ordered = np.sort(values, axis=0)
    low, high = ordered[ends], ordered[len(values) - 1 - ends]
    return np.clip(values, 2 * low - high, 2 * high - low)


class Power:
    """The power of a comparison of launches: the probability that its rule confirms a change of a given size.

    It is simulated with the rule itself. The logarithms of a changed value are normal, with the measured spread; the other values
    are as measured. The random draws are the same for every spread and change, so the power increases smoothly with the change
    and the result is reproducible.

    Args:
        launches_a, launches_b: number of launches of each side.
        largest: the largest statistic among all values in each division of the launches, as `randomization_test` returns it
            for as many `divisions`.
        smallest: relative change that a difference must exceed to count.
        significance: largest p-value that confirms.
    """

    def __init__(
        self, launches_a: int, launches_b: int, largest: np.ndarray, *, divisions: int, smallest: float, significance: float
    ):
        self._draws = _draws(launches_a, launches_b, divisions)
        # In the observed division and its mirror image, a new change is compared only with itself: the step-down has removed all
        # more significant values, and less significant ones do not matter.
        self._others = np.where(np.abs(self._draws[1]) > 1 - 1e-9, 0.0, largest[: len(self._draws[1])])
        self._smallest, self._significance = smallest, significance
        self._chances: dict[tuple[float, float], float] = {}

    def chance(self, deviation: float, change: float) -> float:
        """Return the probability that a worsening by `change` (0.03 for 3 %) is confirmed.

        It is at most one half for a change equal to the threshold, because half of the time the estimate is below it.

        Args:
            deviation: standard deviation of the logarithms between launches; rounded to steps of 10 %.
        """
        deviation = math.exp(round(math.log(max(deviation, 1e-6)) / _STEP) * _STEP)
        if (deviation, change) not in self._chances:
            self._chances[deviation, change] = self._simulated(deviation, change)
        return self._chances[deviation, change]

    def detectable(self, deviation: float) -> float | None:
        """Return the smallest worsening that is confirmed with a probability of 80 %; None if not even one of 99 % is."""
        low, high = self._smallest, _LARGEST
        if self.chance(deviation, high) < WANTED_POWER:
            return None
        while high > 1.02 * low:
            middle = math.sqrt(low * high)
            low, high = (low, middle) if self.chance(deviation, middle) >= WANTED_POWER else (middle, high)
        return high

    def _simulated(self, deviation: float, change: float) -> float:
        noise, side, squares, products, side_square = self._draws
        shift = math.log1p(-change)
        lengths = np.sqrt(deviation**2 * squares + 2 * deviation * shift * products + shift**2 * side_square)
        observed = deviation * noise[:, 0] + shift * side[0]
        worse = np.flatnonzero(-np.expm1(observed) > self._smallest)
        reach = np.abs(observed[worse, None]) * (1 - 1e-9)
        # Lengths are the same in all divisions, so the value reaches its own statistic if its difference does.
        itself = np.abs(deviation * noise[worse] + shift * side) >= reach
        p_values = np.mean(itself | (self._others >= reach / lengths[worse, None]), axis=1)
        return float(np.count_nonzero(p_values <= self._significance) / len(noise))


def log_deviations(values: np.ndarray, launches_a: int) -> np.ndarray:
    """Return the standard deviation between launches of one side, pooled over the sides; 0 with one launch per side.

    Args:
        values: logarithms, shape (launches, values), the launches of A first.
        launches_a: number of launches of A.
    """
    squares = sum(((side - side.mean(axis=0)) ** 2).sum(axis=0) for side in (values[:launches_a], values[launches_a:]))
    return np.sqrt(squares / max(1, len(values) - 2))


def _correlations(differences: np.ndarray, lengths: np.ndarray, smallest: float) -> np.ndarray:
    """Return, up to a factor, the absolute correlation with the side; 0 for changes that are too small to count."""
    counts = (np.abs(np.expm1(differences)) > smallest) & (lengths > 0)
    return np.divide(np.abs(differences), lengths, out=np.zeros_like(differences), where=counts)


def _estimate(value: float, resampled: np.ndarray, n: int) -> Estimate:
    low, high = np.quantile(resampled, [0.5 - CONFIDENCE / 2, 0.5 + CONFIDENCE / 2])
    # With few samples, rounding can put the median just outside its percentile interval.
    return Estimate(value, min(float(low), value), max(float(high), value), n)


def _resampled(n: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, n, (RESAMPLES, n))


def _finite(samples) -> np.ndarray:
    values = np.asarray(samples, dtype=np.float64).ravel()
    if len(values) == 0 or not np.isfinite(values).all():
        raise ValueError(f"{len(values)} samples, {int(np.isfinite(values).sum())} of them finite: nothing to estimate from")
    return values


@functools.lru_cache(maxsize=16)
def _draws(launches_a: int, launches_b: int, divisions: int) -> tuple:
    """Return statistics of standard normal launches.

    The differences of means in each division, shape (trials, divisions); the same for a value that is 0 in A and 1 in B, shape
    (divisions,); and sums over the launches: squares and products with the side, both of shape (trials,), and the squared side.
    """
    launches = launches_a + launches_b
    noise = np.random.default_rng(0).standard_normal((POWER_TRIALS, launches))
    noise -= noise.mean(axis=1, keepdims=True)
    side = (np.arange(launches) >= launches_a) - launches_b / launches
    # The divisions are in random order, so the first ones are a random sample.
    contrasts = side_contrasts(launches_a, launches_b, divisions)[:_POWER_DIVISIONS]
    return noise @ contrasts.T, contrasts @ side, (noise**2).sum(axis=1), noise @ side, float(side @ side)
