"""Statistics: medians with bootstrap confidence intervals, A/B ratios, and a randomization test with its power.

The randomization test compares two sets of launches. A launch is one process that measures one version of the code. All launches
of a set measure the same version.
"""

import functools
import itertools
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
DIVISIONS = 10_000
POWER_TRIALS = 1000
WANTED_POWER = 0.8
# The power is simulated with a subset of the divisions, because its cost is trials x divisions for each spread and change.
_POWER_DIVISIONS = 400
# A worsening of 100 % has no logarithm, so the search for a detectable change ends at 99 %.
_LARGEST = 0.99
# Spreads are rounded in steps of 10 %, so that values with similar spreads share one simulation.
_STEP = math.log(1.1)
_NORMAL_HALF_WIDTH = 1.96  # standard deviations in half of a 95 % interval of a normal distribution
_CELLS = 100_000  # maximum number of elements of the arrays in a test, so that the few arrays fit into the cache of a core


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


@dataclass(frozen=True)
class RandomizationTest:
    """The outcome of `randomization_test`.

    Args:
        differences: mean of B minus mean of A for each value; shape (values,).
        p_values: p-values corrected for the number of values, so that the probability of any false alarm is bounded; shape
            (values,).
        largest: for each division of the launches, the largest statistic over all values; shape (divisions,). The observed
            division comes first.
    """

    differences: np.ndarray
    p_values: np.ndarray
    largest: np.ndarray


def randomization_test(values: np.ndarray, launches_a: int, smallest: float, divisions: int = DIVISIONS) -> RandomizationTest:
    """Test which of many values differ between two sets of launches, whatever their distribution and correlation.

    If A and B are the same code, every division of the launches into two sets of these sizes is equally likely. The statistic
    of a value is the absolute correlation between the value and membership in B. It is 0 if the means of the two sets differ by
    `smallest` or less. The p-value is the share of divisions in which the largest statistic is at least as large as the observed
    statistic. It is corrected with the step-down procedure of Westfall and Young. The test divides whole launches, because values
    within a launch are correlated.

    The probability of any false alarm at p <= 0.05 is at most 5 %. This bound is exact, even for heavy-tailed, skewed or bimodal
    distributions. `smallest` makes the test more powerful for values with a small spread, because it excludes changes that are
    too small to be relevant.

    Args:
        values: logarithms of the values, where larger is better; shape (launches, values). The launches of A come first. There
            must be at least one value.
        launches_a: number of launches of A.
        smallest: relative change (0.03 for 3 %) that a difference must exceed.
        divisions: maximum number of divisions. If there are at most this many possible divisions (252 for five and five
            launches), all are used. Otherwise, this number of divisions is drawn at random.

    Source: Westfall and Young, Resampling-Based Multiple Testing, 1993, algorithm 2.8; Phipson and Smyth, Statistical
    Applications in Genetics and Molecular Biology 9 (2010) article 39, for counting the observed division.
    """
    values = np.asarray(values, dtype=np.float64)
    # The weights of a contrast add up to 0, so centring does not change the differences of means. A correlation needs the norm of
    # centred values.
    values = values - values.mean(axis=0)
    contrasts = side_contrasts(launches_a, len(values) - launches_a, divisions)
    lengths = np.sqrt((values**2).sum(axis=0))
    # Row 0 is the observed division.
    differences = contrasts[0] @ values
    observed = _correlations(differences[:, None], lengths, smallest)[:, 0]
    # Step-down procedure: a value competes only with itself and with values that are less significant.
    order = np.argsort(observed)
    reached, largest = np.zeros(len(order)), []
    ordered, ordered_lengths, thresholds = values[:, order], lengths[order], observed[order] * (1 - 1e-9)
    # Blocks of divisions limit the memory, because all divisions of all values at once could take gigabytes.
    for some in np.array_split(contrasts, math.ceil(contrasts.shape[0] * len(order) / _CELLS)):
        statistics = _correlations(ordered.T @ some.T, ordered_lengths, smallest)
        # Each row then contains the largest statistic over its value and all less significant values.
        maxima = np.maximum.accumulate(statistics, axis=0, out=statistics)
        # The thresholds are slightly lowered, to count divisions whose statistic equals the observed one except for rounding.
        reached += (maxima >= thresholds[:, None]).sum(axis=1)
        largest.append(maxima[-1].copy())
    p_values = np.empty(len(order))
    # A less significant value must not get a smaller p-value than a more significant one (monotonicity of the step-down
    # procedure).
    p_values[order] = np.maximum.accumulate((reached / len(contrasts))[::-1])[::-1]
    return RandomizationTest(differences, p_values, np.concatenate(largest))


@functools.lru_cache(maxsize=16)
def side_contrasts(launches_a: int, launches_b: int, divisions: int) -> np.ndarray:
    """Return divisions of the launches into two sets A and B, as weights that give the mean of B minus the mean of A.

    Returns:
        Array of shape (divisions, launches). The first division is the observed one, with the launches of A first. The other
        divisions are in random order.
    """
    launches, random = launches_a + launches_b, np.random.default_rng(0)
    # If there are few divisions, use all of them, so that the p-values are exact. `combinations` yields the observed division
    # (0, 1, …) first.
    if math.comb(launches, launches_a) <= divisions:
        of_a = np.array(list(itertools.combinations(range(launches), launches_a)))
        # `_draws` uses the first divisions as a sample, so their order must be random.
        of_a[1:] = random.permutation(of_a[1:])
    else:
        # Sorting random numbers gives a random permutation. Its first launches form set A.
        of_a = np.argsort(random.random((divisions, launches)), axis=1)[:, :launches_a]
        # The observed division counts as one of the random divisions. Otherwise, a p-value could be 0, and the bound would not
        # hold.
        of_a[0] = range(launches_a)
    contrasts = np.full((len(of_a), launches), 1 / launches_b)
    np.put_along_axis(contrasts, of_a, -1 / launches_a, axis=1)
    contrasts.flags.writeable = False  # the cached array is shared by all callers
    return contrasts


def fenced(values: np.ndarray, launches_a: int) -> np.ndarray:
    """Return the values with outliers clipped to two bounds, so that one stalled launch does not hide a change.

    The bounds are the same for both sets. They are computed from the central range of all launches, which excludes about a tenth
    of the launches at each end, or fewer if otherwise all launches of the smaller set could be excluded. Each bound is one width
    of this range beyond its end. For ten launches per set with normally distributed values, the bounds are about four standard
    deviations from the middle.

    Args:
        values: the values; shape (launches, values). The launches of A come first.
        launches_a: number of launches of A.
    """
    # With fewer than five launches in the smaller set, no launch is excluded, and clipping changes nothing.
    ends = min(launches_a, len(values) - launches_a) // 5
    ordered = np.sort(values, axis=0)
    low, high = ordered[ends], ordered[len(values) - 1 - ends]
    return np.clip(values, 2 * low - high, 2 * high - low)


class Power:
    """The power of a comparison of launches: the probability that the comparison confirms a change of a given size.

    The simulation applies the same rule as the comparison. It draws the logarithms of the changed value from a normal
    distribution with the measured spread, and takes all other values as measured. The random draws are the same for every spread
    and every change, so that the power increases smoothly with the change, and the result is reproducible.

    Args:
        launches_a, launches_b: number of launches of each set.
        largest: for each division of the launches, the largest statistic over all values, as `randomization_test` returns it for
            the same `divisions`.
        divisions: maximum number of divisions of the test.
        smallest: relative change that a difference must exceed.
        significance: a change is confirmed if its p-value is at most this number.
    """

    def __init__(
        self, launches_a: int, launches_b: int, largest: np.ndarray, *, divisions: int, smallest: float, significance: float
    ):
        self._draws = _draws(launches_a, launches_b, divisions)
        # In the observed division and its mirror image, a new change is compared only with itself: the step-down procedure has
        # removed all more significant values, and less significant values do not matter.
        self._others = np.where(np.abs(self._draws[1]) > 1 - 1e-9, 0.0, largest[: len(self._draws[1])])
        self._sorted_others = np.sort(self._others)
        self._smallest, self._significance = smallest, significance
        self._chances: dict[tuple[float, float], float] = {}

    def chance(self, deviation: float, change: float) -> float:
        """Return the probability that a worsening by `change` (0.03 for 3 %) is confirmed.

        For a change equal to the threshold, the probability is at most one half, because half of the estimates are below the
        threshold.

        Args:
            deviation: standard deviation of the logarithms between launches. It is rounded to steps of 10 %.
            change: relative worsening.
        """
        # The lower bound replaces a spread of 0, which has no logarithm.
        deviation = math.exp(round(math.log(max(deviation, 1e-6)) / _STEP) * _STEP)
        if (deviation, change) not in self._chances:
            self._chances[deviation, change] = self._simulated(deviation, change)
        return self._chances[deviation, change]

    def detectable(self, deviation: float) -> float | None:
        """Return the smallest worsening that is confirmed with a probability of 80 %, or None if even 99 % is too small."""
        low, high = self._smallest, _LARGEST
        if self.chance(deviation, high) < WANTED_POWER:
            return None
        # Bisect the logarithm to a relative error of 2 %. The power increases with the change.
        while high > 1.02 * low:
            middle = math.sqrt(low * high)
            low, high = (low, middle) if self.chance(deviation, middle) >= WANTED_POWER else (middle, high)
        return high

    def _simulated(self, deviation: float, change: float) -> float:
        noise, side, squares, products, side_square = self._draws
        shift = math.log1p(-change)
        # The squared norm of (deviation · noise + shift · side) is expanded, so that no array over the launches is needed.
        lengths = np.sqrt(deviation**2 * squares + 2 * deviation * shift * products + shift**2 * side_square)
        # Column 0 is the observed division.
        observed = deviation * noise[:, 0] + shift * side[0]
        # Only trials whose estimate exceeds the threshold can be confirmed.
        worse = np.flatnonzero(-np.expm1(observed) > self._smallest)
        reach = np.abs(observed[worse]) * (1 - 1e-9)
        # The other values alone rule out most trials that are not confirmed, and a sorted array counts them fast.
        reached_by_others = len(side) - np.searchsorted(self._sorted_others, reach / lengths[worse])
        left = reached_by_others / len(side) <= self._significance
        worse, reach = worse[left], reach[left, None]
        # The norm of a value is the same in all divisions, so comparing differences is equivalent to comparing statistics.
        # Computed in place, because this function is called for each step of each bisection.
        differences = noise[worse]
        differences *= deviation
        differences += shift * side
        reached = np.abs(differences, out=differences) >= reach
        reached |= self._others >= reach / lengths[worse, None]
        p_values = np.count_nonzero(reached, axis=1) / len(side)
        return float(np.count_nonzero(p_values <= self._significance) / len(noise))


def log_deviations(values: np.ndarray, launches_a: int) -> np.ndarray:
    """Return the standard deviation between launches of the same set, pooled over both sets. 0 with one launch per set.

    Args:
        values: logarithms of the values; shape (launches, values). The launches of A come first.
        launches_a: number of launches of A.
    """
    squares = sum(((side - side.mean(axis=0)) ** 2).sum(axis=0) for side in (values[:launches_a], values[launches_a:]))
    # Each of the two means takes one degree of freedom.
    return np.sqrt(squares / max(1, len(values) - 2))


def _correlations(differences: np.ndarray, lengths: np.ndarray, smallest: float) -> np.ndarray:
    """Return the absolute correlation of each value with membership in set B, up to a constant factor.

    It is 0 for values that change by `smallest` or less.

    Args:
        differences: difference of the means of both sets; shape (values, divisions).
        lengths: Euclidean norm of each value over the launches; shape (values).
        smallest: see `randomization_test`.
    """
    # Tests |exp(d) - 1| <= smallest without computing the exponentials of millions of elements.
    lower = math.log1p(-smallest) if smallest < 1 else -math.inf
    too_small = (differences <= math.log1p(smallest)) & (differences >= lower)
    # A value that is equal in all launches has norm 0. Its correlation is set to 0 instead of NaN.
    inverse = np.divide(1.0, lengths, out=np.zeros_like(lengths), where=lengths > 0)
    correlations = np.abs(differences)
    # Computed in place, so that the test needs only a few arrays of _CELLS elements.
    correlations *= inverse[:, None]
    correlations[too_small] = 0.0
    return correlations


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


@functools.lru_cache(maxsize=16)
def _draws(launches_a: int, launches_b: int, divisions: int) -> tuple:
    """Return statistics of simulated launches with standard normal values.

    Returns:
        A tuple of five statistics. The first two are differences of means in each division: those of the simulated values, of
        shape (trials, divisions), and those of membership in B, of shape (divisions,). The other three are sums over the
        launches: of the squared values and of the products of value and membership, both of shape (trials,), and of the squared
        membership, a float.
    """
    launches = launches_a + launches_b
    noise = np.random.default_rng(0).standard_normal((POWER_TRIALS, launches))
    # Centre the values for the same reason as in `randomization_test`.
    noise -= noise.mean(axis=1, keepdims=True)
    # Membership in B (0 or 1) minus its mean, so that the sum is 0.
    side = (np.arange(launches) >= launches_a) - launches_b / launches
    # The divisions are in random order, so the first ones are a random sample.
    contrasts = side_contrasts(launches_a, launches_b, divisions)[:_POWER_DIVISIONS]
    return noise @ contrasts.T, contrasts @ side, (noise**2).sum(axis=1), noise @ side, float(side @ side)
