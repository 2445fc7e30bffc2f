"""Rank the shapes of matrix products by rate from few samples each: coarse to fine, in turn, with the drift removed.

The rate is smooth in the inner size K, but jumps in the outer sizes M and N, because output tiles fill the last wave of compute
units or leave most of them idle. Therefore the coarse pass samples every M and N at two K. The next passes follow the leaders:
along K, to neighbouring M and N, and to swapped M and N. If there is time, all other shapes follow.
"""

import math
from collections.abc import Callable

import numpy as np

Shape = tuple[int, int, int]

_LEADERS = 12
_SAMPLES_IN_TURN = 32
_BLOCK_S = 0.25
# This many samples in a row share one value of the drift; with fewer, drift and shapes could not be separated.
_MOMENT = 16
_FIT_ROUNDS = 10
_CLIMBS = 8
# Refinements (leaders, samples of each): fewer leaders differ less, so they need more samples.
_REFINEMENTS = ((64, 4), (24, 8), (12, 16))
_SHARE_OF_SEARCH = 0.7


def flops_of(shape: Shape) -> int:
    """Return 2·M·N·K."""
    return 2 * math.prod(shape)


def grid(largest: int, step: int) -> list[Shape]:
    """Return all (M, N, K) of multiples of `step` up to `largest`, smallest products first."""
    sizes = range(step, largest + 1, step)
    return sorted(((m, n, k) for m in sizes for n in sizes for k in sizes), key=lambda shape: (flops_of(shape), shape))


class ShapeRanking:
    """Ranks the shapes of a grid by rate until a deadline.

    Args:
        largest, step: the grid, see `grid`.
        sample: shapes -> seconds of one call of each, in turn.
        now: current time in seconds on the clock of the deadline.
        deadline: time at which the ranking ends; infinite for an exhaustive ranking.
        affordable_s: longer products are skipped, because there would be no time to measure them.
        seed: seed of the order of the shapes.
    """

    def __init__(
        self,
        largest: int,
        step: int,
        sample: Callable[[list[Shape]], list[float]],
        now: Callable[[], float],
        deadline: float = math.inf,
        affordable_s: float = math.inf,
        seed: int = 0,
    ):
        self.step, self.sample, self.now, self.affordable_s = step, sample, now, affordable_s
        self.shapes = grid(largest, step)
        self.number = {shape: place for place, shape in enumerate(self.shapes)}
        self.random = np.random.default_rng(seed)
        self.started, self.deadline = now(), deadline
        self.best_rate = 0.0
        self._places: list[int] = []
        self._log_rates: list[float] = []

    @property
    def seen(self) -> set[Shape]:
        """The shapes that were sampled."""
        return {self.shapes[place] for place in set(self._places)}

    def run(self) -> None:
        """Run the coarse pass, follow the leaders, sample the rest of the grid, then refine the leaders."""
        search_until = self.started + _SHARE_OF_SEARCH * (self.deadline - self.started)
        # The smallest shape gives a first rate, from which affordable shapes are derived.
        self._visit(self.shapes[:1], 2, search_until)
        self._visit(self._coarse(), 2, search_until)
        for _ in range(_CLIMBS):
            leaders = self.leaders(_LEADERS)
            new = self._unseen(shape for leader in leaders for shape in self._neighbours(leader))
            if not new or not self._visit(new + leaders, 2, search_until):
                break
        # In random order, so that shapes skipped at the deadline are spread over the grid.
        rest = self._unseen(self.shapes)
        self.random.shuffle(rest)
        self._visit(rest, 2, search_until)
        for place, (count, rounds) in enumerate(_REFINEMENTS):
            stages_left = len(_REFINEMENTS) - place
            until = self.deadline if stages_left == 1 else self.now() + (self.deadline - self.now()) / stages_left
            self._visit(self.leaders(count), rounds, until)

    def leaders(self, count: int) -> list[Shape]:
        """Return the shapes with the highest rates, best first."""
        rates = self.log_rates()
        return sorted(rates, key=lambda shape: (-rates[shape], shape))[:count]

    def log_rates(self) -> dict[Shape, float]:
        """Return the natural logarithm of the rate (FLOP/s) of each sampled shape, with the drift removed."""
        effects = shape_effects(np.array(self._places), np.array(self._log_rates), _MOMENT)
        return {self.shapes[place]: float(effect) for place, effect in effects.items()}

    def _coarse(self) -> list[Shape]:
        sizes = sorted({shape[0] for shape in self.shapes})
        inner = {sizes[(len(sizes) - 1) // 2], sizes[-1]}
        return [shape for shape in self.shapes if shape[2] in inner]

    def _neighbours(self, shape: Shape) -> list[Shape]:
        m, n, k = shape
        adjacent = [(m + dm, n + dn, k) for dm in (-self.step, 0, self.step) for dn in (-self.step, 0, self.step)]
        along = [other for other in self.shapes if other[:2] == (m, n)]
        return [other for other in (*along, *adjacent, (n, m, k)) if other in self.number]

    def _unseen(self, shapes) -> list[Shape]:
        seen = self.seen
        return [shape for shape in dict.fromkeys(shapes) if shape not in seen]

    def _visit(self, shapes: list[Shape], rounds: int, until: float) -> bool:
        """Sample shapes in turn, in a new order each round; return False if time ran out."""
        for round_ in range(rounds):
            # Start with small products while the rate, and so the affordable size, is unknown.
            first = round_ == 0 and not self.seen.issuperset(shapes)
            left = sorted(shapes, key=flops_of) if first else [shapes[p] for p in self.random.permutation(len(shapes))]
            while left:
                if self._places and self.now() >= until:
                    return False
                block, left = self._block(left)
                for shape, seconds in zip(block, self.sample(block) if block else (), strict=True):
                    rate = flops_of(shape) / seconds
                    self.best_rate = max(self.best_rate, rate)
                    self._places.append(self.number[shape])
                    self._log_rates.append(math.log(rate))
        return True

    def _affordable(self, shape: Shape) -> bool:
        return flops_of(shape) <= self.affordable_s * self.best_rate or not self._places

    def _block(self, shapes: list[Shape]) -> tuple[list[Shape], list[Shape]]:
        """Split off the shapes to sample before the next check of the time; return them and the rest.

        A shape that is not affordable ends the block, because the samples of the block may raise the best rate. At the start of
        a block it is skipped.
        """
        if not self._affordable(shapes[0]):
            return [], shapes[1:]
        count = flops = 0
        while count < min(len(shapes), _SAMPLES_IN_TURN) and self._affordable(shapes[count]):
            flops, count = flops + flops_of(shapes[count]), count + 1
            if flops >= _BLOCK_S * self.best_rate:
                break
        return shapes[:count], shapes[count:]


def shape_effects(places: np.ndarray, values: np.ndarray, moment: int) -> dict[int, float]:
    """Separate the effects of shapes from the drift: fit value = shape + moment by medians.

    Args:
        places: number of the shape of each sample, in the order taken.
        values: samples as logarithms, so that a change of the clock has the same effect on all shapes.
        moment: number of samples in a row that share one value of the drift; the median of the drift is 0.

    Returns:
        The effect of each shape by its number.

    Source: Tukey, Exploratory Data Analysis, 1977, chapter 11 (median polish).
    """
    moments = np.arange(len(values)) // moment
    numbers, shape_of = np.unique(places, return_inverse=True)
    drift, effects = np.zeros(len(values)), np.zeros(len(numbers))
    for _ in range(_FIT_ROUNDS if len(values) else 0):
        effects = _high_medians(values - drift, shape_of)
        by_moment = _high_medians(values - effects[shape_of], moments)
        drift = (by_moment - np.median(by_moment))[moments]
    return dict(zip(numbers.tolist(), effects.tolist(), strict=True))


def _high_medians(values: np.ndarray, groups: np.ndarray) -> np.ndarray:
    """Return the median of each group; of two middle values the higher one, because disturbances only lower the rate.

    Args:
        groups: the group of each value, numbered from 0 without gaps.
    """
    ordered = values[np.lexsort((values, groups))]
    counts = np.bincount(groups)
    return ordered[np.cumsum(counts) - counts + counts // 2]
