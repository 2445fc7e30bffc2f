"""What a comparison of relaunches would have seen: the chance that its rule confirms a change of a given size.

By simulation of the whole rule, its thresholds included, with normal logarithms of the spread that the relaunches show. The
draws are the same for every spread and change, so that the power rises smoothly and the answer is the same each time.
"""

import functools
from dataclasses import dataclass

import numpy as np

TRIALS = 4000
WANTED = 0.8
_LARGEST = 0.99


@dataclass(frozen=True)
class Rule:
    """When a change is confirmed: Welch's test below `significance`, and more than `smallest_change` and the relative
    range of the relaunches of either side. (Of Holm's correction its first, strictest step: the power is at least this.)
    """

    relaunches_a: int
    relaunches_b: int
    significance: float
    smallest_change: float


def log_deviation(a, b) -> float:
    """Standard deviation of the logarithms of positive values between relaunches, pooled over the two sides."""
    sides = [np.log(np.asarray(side, dtype=np.float64)) for side in (a, b)]
    freedom = sum(len(side) - 1 for side in sides)
    return float(np.sqrt(sum(((side - side.mean()) ** 2).sum() for side in sides) / freedom)) if freedom else 0.0


def power(rule: Rule, deviation: float, change: float) -> float:
    """The chance that a worsening by `change` (0.03 for 3 %) is confirmed, where relaunches scatter by `deviation`.

    Of a change as large as the rule's threshold it is a half at most: every other time less than that is seen.
    """
    return _power(rule, _rounded(deviation), change)


def detectable_change(rule: Rule, deviation: float) -> float | None:
    """The smallest worsening that is confirmed four times out of five; None where not even the loss of 99 % is."""
    return _detectable_change(rule, _rounded(deviation))


def _rounded(deviation: float) -> float:
    # Two digits, upwards in doubt: hundreds of values then share a few simulations.
    return float(f"{max(deviation, 1e-6) * 1.005:.1e}")


@functools.lru_cache(maxsize=4096)
def _power(rule: Rule, deviation: float, change: float) -> float:
    difference, median_difference, error, critical, ranges = _draws(rule)
    shift = np.log1p(-change)
    confirmed = np.abs(deviation * difference + shift) > critical * deviation * error
    spread = _spread(deviation, ranges)
    observed = np.abs(np.expm1(deviation * median_difference + shift))
    worse = deviation * median_difference + shift < 0
    return float(np.mean(confirmed & worse & (observed > np.maximum(rule.smallest_change, spread))))


@functools.lru_cache(maxsize=4096)
def _detectable_change(rule: Rule, deviation: float) -> float | None:
    low, high = rule.smallest_change, _LARGEST
    if _power(rule, deviation, high) < WANTED:
        return None
    while high - low > 1e-4:
        middle = (low + high) / 2
        low, high = (low, middle) if _power(rule, deviation, middle) >= WANTED else (middle, high)
    return high


@functools.lru_cache(maxsize=16)
def _draws(rule: Rule) -> tuple:
    """Of standard normal relaunches: differences of means and medians (B less A), their standard error, the critical value
    of Welch's test, and how far each side's largest and smallest lie from its median."""
    from scipy import stats

    random = np.random.default_rng(0)
    a, b = (random.standard_normal((TRIALS, n)) for n in (rule.relaunches_a, rule.relaunches_b))
    shares = [side.var(axis=1, ddof=1) / side.shape[1] for side in (a, b)]
    error = np.sqrt(sum(shares))
    # Source of the degrees of freedom: Welch, Biometrika 34 (1947) 28-35.
    freedom = sum(shares) ** 2 / sum(share**2 / (side.shape[1] - 1) for share, side in zip(shares, (a, b), strict=True))
    critical = stats.t.isf(rule.significance / 2, freedom)
    medians = [np.median(side, axis=1) for side in (a, b)]
    ranges = [(side.max(axis=1) - m, side.min(axis=1) - m) for side, m in zip((a, b), medians, strict=True)]
    return b.mean(axis=1) - a.mean(axis=1), medians[1] - medians[0], error, critical, ranges


def _spread(deviation: float, ranges: list) -> np.ndarray:
    """The larger relative range of the two sides in each trial."""
    return np.maximum(*(np.exp(deviation * highest) - np.exp(deviation * lowest) for highest, lowest in ranges))
