"""Power of a comparison of launches: the chance that its rule confirms a change of a given size.

By simulation of the rule itself, with normal logarithms of the spread that the launches show, next to the other values as
they were measured. The draws are the same for every spread and change, so that the power rises smoothly and the answer is
the same each time.
"""

import functools
import math

import numpy as np

from hyperion.results.statistics import side_contrasts

TRIALS = 1000
WANTED = 0.8
_DIVISIONS = 400
_LARGEST = 0.99
_STEP = math.log(1.1)


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
        if self.chance(deviation, high) < WANTED:
            return None
        while high > 1.02 * low:
            middle = math.sqrt(low * high)
            low, high = (low, middle) if self.chance(deviation, middle) >= WANTED else (middle, high)
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


@functools.lru_cache(maxsize=16)
def _draws(launches_a: int, launches_b: int, divisions: int) -> tuple:
    """Of standard normal launches in each division: differences of means, shape (trials, divisions); the same of a value
    that is 0 in A and 1 in B, shape (divisions,); and sums over the launches: squares, products with the side, both of shape
    (trials,), and the square of the side."""
    launches = launches_a + launches_b
    noise = np.random.default_rng(0).standard_normal((TRIALS, launches))
    noise -= noise.mean(axis=1, keepdims=True)
    side = (np.arange(launches) >= launches_a) - launches_b / launches
    # The divisions are in random order, so that the first ones stand for all.
    contrasts = side_contrasts(launches_a, launches_b, divisions)[:_DIVISIONS]
    return noise @ contrasts.T, contrasts @ side, (noise**2).sum(axis=1), noise @ side, float(side @ side)
