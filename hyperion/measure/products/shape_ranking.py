"""Which of many shapes multiplies fastest, from few samples of each: coarse to fine, in turn, drift divided out.

A rate that is smooth in the inner size K jumps in the outer sizes M and N: tiles of the output fill the last wave of the
device's units or leave most of them idle. So the coarse pass sees every M and N at two K, and the fine ones follow the leaders:
along K, to the next M and N, and to the swapped layout. A device that is quick enough sees all shapes after that.
"""

import math
from collections.abc import Callable

import numpy as np

Shape = tuple[int, int, int]

_LEADERS = 12
_SAMPLES_IN_TURN = 32
_BLOCK_S = 0.25
# Samples this near to each other met the same clock and temperature; fewer could not tell a moment from a shape.
_MOMENT = 16
_FIT_ROUNDS = 10
_CLIMBS = 8
# Of the leaders that are sampled again, how many and how often: the fewer there are, the nearer they lie together.
_REFINEMENTS = ((64, 4), (24, 8), (12, 16))
_SHARE_OF_SEARCH = 0.7


def flops_of(shape: Shape) -> int:
    """2·M·N·K."""
    return 2 * math.prod(shape)


def grid(largest: int, step: int) -> list[Shape]:
    """All (M, N, K) whose sizes are multiples of `step` up to `largest`, the smallest products first."""
    sizes = range(step, largest + 1, step)
    return sorted(((m, n, k) for m in sizes for n in sizes for k in sizes), key=lambda shape: (flops_of(shape), shape))


class ShapeRanking:
    """Ranks the shapes of a grid by rate, as far as time allows.

    Args:
        largest, step: the grid, see `grid`.
        sample: seconds of one call of each of some shapes, in turn.
        now: seconds since some moment, on the clock of the deadline.
        deadline: moment at which ranking ends; infinite for an exhaustive one.
        affordable_s: a product that takes longer than this is not tried: there would be no time to measure it well.
        seed: of the order in which shapes take turns.
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
        """Coarse pass, climb, the rest of the grid, then the leaders again and again."""
        search_until = self.started + _SHARE_OF_SEARCH * (self.deadline - self.started)
        # The least of all shapes says how quick the device is, and so which shapes are worth trying.
        self._visit(self.shapes[:1], 2, search_until)
        self._visit(self._coarse(), 2, search_until)
        for _ in range(_CLIMBS):
            leaders = self.leaders(_LEADERS)
            new = self._unseen(shape for leader in leaders for shape in self._neighbours(leader))
            if not new or not self._visit(new + leaders, 2, search_until):
                break
        # In a mixed order, so that what is left out when time is up is no corner of the grid.
        rest = self._unseen(self.shapes)
        self.random.shuffle(rest)
        self._visit(rest, 2, search_until)
        for place, (count, rounds) in enumerate(_REFINEMENTS):
            stages_left = len(_REFINEMENTS) - place
            until = self.deadline if stages_left == 1 else self.now() + (self.deadline - self.now()) / stages_left
            self._visit(self.leaders(count), rounds, until)

    def leaders(self, count: int) -> list[Shape]:
        """The shapes of the highest rates, best first."""
        rates = self.log_rates()
        return sorted(rates, key=lambda shape: (-rates[shape], shape))[:count]

    def log_rates(self) -> dict[Shape, float]:
        """Natural logarithm of the rate (FLOP/s) of each shape that was seen, at the clock of the middle of the ranking."""
        effects = shape_effects(np.array(self._places), np.array(self._log_rates), _MOMENT)
        return {self.shapes[place]: float(effect) for place, effect in effects.items()}

    def _coarse(self) -> list[Shape]:
        sizes = sorted({shape[0] for shape in self.shapes})
        inner = {sizes[(len(sizes) - 1) // 2], sizes[-1]}
        return [shape for shape in self.shapes if shape[2] in inner]

    def _neighbours(self, shape: Shape) -> list[Shape]:
        m, n, k = shape
        beside = [(m + dm, n + dn, k) for dm in (-self.step, 0, self.step) for dn in (-self.step, 0, self.step)]
        along = [other for other in self.shapes if other[:2] == (m, n)]
        return [other for other in (*along, *beside, (n, m, k)) if other in self.number]

    def _unseen(self, shapes) -> list[Shape]:
        seen = self.seen
        return [shape for shape in dict.fromkeys(shapes) if shape not in seen]

    def _visit(self, shapes: list[Shape], rounds: int, until: float) -> bool:
        """Sample shapes in turn, in another order each round; False when time was up before the end."""
        for round_ in range(rounds):
            # Small products first while it is not known which ones the time allows.
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
        """As many shapes as go between two looks at the time, and those that are left.

        A shape that takes too long ends a block: the rates of smaller ones, once known, may show that it does not. At the
        head of a block it is left out.
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
    """What belongs to each shape in values that also change with time: value = shape + moment, fitted by medians.

    Args:
        places: number of the shape of each sample, in the order taken.
        values: the samples (logarithms, so that a clock that falls by 5 % takes the same from each).
        moment: so many samples in a row share one value of the drift, which is 0 in the median.

    Returns:
        The shape's part, by its number.

    Source: Tukey, Exploratory Data Analysis, 1977, chapter 11 (median polish).
    """
    moments = np.arange(len(values)) // moment
    found, shape_of = np.unique(places, return_inverse=True)
    drift, effects = np.zeros(len(values)), np.zeros(len(found))
    for _ in range(_FIT_ROUNDS if len(values) else 0):
        effects = _high_medians(values - drift, shape_of)
        by_moment = _high_medians(values - effects[shape_of], moments)
        drift = (by_moment - np.median(by_moment))[moments]
    return dict(zip(found.tolist(), effects.tolist(), strict=True))


def _high_medians(values: np.ndarray, groups: np.ndarray) -> np.ndarray:
    """The median of each group, of two middle values the higher one: whatever disturbs a sample makes it slow.

    Args:
        groups: the group of each value, numbered from 0 without gaps.
    """
    ordered = values[np.lexsort((values, groups))]
    counts = np.bincount(groups)
    return ordered[np.cumsum(counts) - counts + counts // 2]
