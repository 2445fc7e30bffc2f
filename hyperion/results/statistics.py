"""Medians, bootstrap confidence intervals, interleaved A/B ratios, and a randomization test for sets of launches."""

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


@dataclass(frozen=True)
class RandomizationTest:
    """What `randomization_test` returns.

    Args:
        differences: mean of B less mean of A, by value; shape (values,).
        p_values: corrected over all values together, so that the chance of any false alarm is bounded; shape (values,).
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
    values. Whole launches are divided, so that values which are slow together in a launch stay together.

    The chance of any false alarm at p <= 0.05 is at most 5 %, exactly: launches may be normal, heavy-tailed, skewed or
    bimodal. A smaller change cannot be found by luck, which is why `smallest` makes the test sharper where values scatter
    little.

    Args:
        values: logarithms, larger is better; shape (launches, values), the launches of A first. At least one value.
        launches_a: how many of them are of A.
        smallest: relative change (0.03 for 3 %) that a difference must exceed to count.
        divisions: all are used if there are at most so many (252 of five and five), else so many at random.

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
        # Column by column the largest statistic of this value and all that are less significant.
        maxima = np.maximum.accumulate(_correlations(some @ values, lengths, smallest)[:, order], axis=1)
        # Divisions that are equal but for rounding reach it, too.
        reached += (maxima >= observed[order] * (1 - 1e-9)).sum(axis=0)
        largest.append(maxima[:, -1])
    p_values = np.empty(len(order))
    p_values[order] = np.maximum.accumulate((reached / len(contrasts))[::-1])[::-1]
    return RandomizationTest(differences, p_values, np.concatenate(largest))


@functools.lru_cache(maxsize=16)
def side_contrasts(launches_a: int, launches_b: int, divisions: int) -> np.ndarray:
    """Divisions of launches into two sides, as weights that give the mean of B less the mean of A.

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
    contrasts.flags.writeable = False  # it is shared by all callers
    return contrasts


def fenced(values: np.ndarray, launches_a: int) -> np.ndarray:
    """Values with outliers drawn to a fence, so that one launch that stalled does not hide a change.

    The fences are common to both sides, and as far outside of the bulk as the bulk is wide. The bulk is all launches but a
    tenth at each end, though never so few that the smaller side could lie outside. (With ten launches a side of normal
    values the fences are about four standard deviations from the middle.)

    Args:
        values: shape (launches, values), the launches of A first.
        launches_a: how many of them are of A.
    """
    ends = min(launches_a, len(values) - launches_a) // 5
    ordered = np.sort(values, axis=0)
    low, high = ordered[ends], ordered[len(values) - 1 - ends]
    return np.clip(values, 2 * low - high, 2 * high - low)


class Power:
    """The chances of one comparison.

    Args:
        launches_a, launches_b: of each side.
        largest: the largest statistic among all values in each division of the launches, as `randomization_test` returns it
            for as many `divisions`.
        smallest: relative change that a difference must exceed to count.
        significance: largest p-value that confirms.
    """

    def __init__(
        self, launches_a: int, launches_b: int, largest: np.ndarray, *, divisions: int, smallest: float, significance: float
    ):
        self._draws = _draws(launches_a, launches_b, divisions)
        # In the observed division and its mirror image a new change would be compared with itself alone: whatever else
        # changed is more significant, and steps down before it, or less, and does not matter.
        self._others = np.where(np.abs(self._draws[1]) > 1 - 1e-9, 0.0, largest[: len(self._draws[1])])
        self._smallest, self._significance = smallest, significance
        self._chances: dict[tuple[float, float], float] = {}

    def chance(self, deviation: float, change: float) -> float:
        """The chance that a worsening by `change` (0.03 for 3 %) is confirmed, where logarithms scatter by `deviation` from
        launch to launch (standard deviation; rounded to steps of a tenth).

        Of a change as large as the rule's threshold it is a half at most: every other time less than that is seen.
        """
        deviation = math.exp(round(math.log(max(deviation, 1e-6)) / _STEP) * _STEP)
        if (deviation, change) not in self._chances:
            self._chances[deviation, change] = self._simulated(deviation, change)
        return self._chances[deviation, change]

    def detectable(self, deviation: float) -> float | None:
        """The smallest worsening that is confirmed four times out of five; None where not even the loss of 99 % is."""
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
        # In another division the value itself reaches its own statistic if its difference does: the length is the same.
        itself = np.abs(deviation * noise[worse] + shift * side) >= reach
        p_values = np.mean(itself | (self._others >= reach / lengths[worse, None]), axis=1)
        return float(np.count_nonzero(p_values <= self._significance) / len(noise))


def log_deviations(values: np.ndarray, launches_a: int) -> np.ndarray:
    """Standard deviation from launch to launch of one side, pooled over the two sides; 0 with one launch a side.

    Args:
        values: logarithms, shape (launches, values), the launches of A first.
        launches_a: how many of them are of A.
    """
    squares = sum(((side - side.mean(axis=0)) ** 2).sum(axis=0) for side in (values[:launches_a], values[launches_a:]))
    return np.sqrt(squares / max(1, len(values) - 2))


def _correlations(differences: np.ndarray, lengths: np.ndarray, smallest: float) -> np.ndarray:
    """Up to a factor the size of the correlation with the side, 0 for changes that are too small to count."""
    counts = (np.abs(np.expm1(differences)) > smallest) & (lengths > 0)
    return np.divide(np.abs(differences), lengths, out=np.zeros_like(differences), where=counts)


def _estimate(value: float, resampled: np.ndarray, n: int) -> Estimate:
    low, high = np.quantile(resampled, [0.5 - CONFIDENCE / 2, 0.5 + CONFIDENCE / 2])
    # With a handful of samples the percentile interval of a median can miss the median itself by a rounding.
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
    """Of standard normal launches in each division: differences of means, shape (trials, divisions); the same of a value
    that is 0 in A and 1 in B, shape (divisions,); and sums over the launches: squares, products with the side, both of shape
    (trials,), and the square of the side."""
    launches = launches_a + launches_b
    noise = np.random.default_rng(0).standard_normal((POWER_TRIALS, launches))
    noise -= noise.mean(axis=1, keepdims=True)
    side = (np.arange(launches) >= launches_a) - launches_b / launches
    # The divisions are in random order, so that the first ones stand for all.
    contrasts = side_contrasts(launches_a, launches_b, divisions)[:_POWER_DIVISIONS]
    return noise @ contrasts.T, contrasts @ side, (noise**2).sum(axis=1), noise @ side, float(side @ side)
