"""Search for the shape with the highest rate of a matrix product (GEMM) in a number format.

This rate is called the maximum achievable FLOPS (MAF). The search first ranks shapes with few samples per shape. It then measures
the finalists, which are the best shapes of the ranking. In this module, "product" always means a matrix product.

The rate changes smoothly with the inner size K, but it jumps with the outer sizes M and N, because the output tiles either fill
the last wave of compute units or leave most of the units idle. Therefore the first pass samples every M and N at two values of K.
The next passes sample shapes near the leaders, which are the shapes with the highest rates so far: shapes with another K, with
neighbouring M and N, and with M and N swapped. If there is time left, all other shapes are sampled.
"""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from hyperion.errors import HyperionError
from hyperion.hardware import Device
from hyperion.measure.clock.clocks import Clock, device_clock
from hyperion.measure.clock.timing import MINIMUM_SAMPLES, CacheFlush, Timing, time_interleaved
from hyperion.measure.clock.verify import Verification, format_of, matmul_precision
from hyperion.measure.products.gemm import Gemm, Operand, made_up
from hyperion.results import Estimate

FINALISTS = 6
# A finalist may be at most 1.05 times slower than the best shape. Rates are compared as logarithms.
_WITHIN = math.log(1.05)
# Share of the time limit for ranking the shapes. The rest is for timing the finalists.
_SHARE_OF_RANKING = 0.6
# Minimum number of calls of a finalist, for its warm-up and its samples.
_CALLS_OF_A_FINALIST = MINIMUM_SAMPLES + 12
_TIMING_LIMIT_S = 5.0
Shape = tuple[int, int, int]

# Number of shapes whose neighbours are sampled next.
_LEADERS = 12
# Maximum number of samples per block, and maximum expected duration of a block in seconds. After each block, the time is checked.
_SAMPLES_IN_TURN = 32
_BLOCK_S = 0.25
# Number of consecutive samples that share one estimate of the drift. With fewer samples, drift could not be distinguished from
# differences between shapes.
_MOMENT = 16
_FIT_ROUNDS = 10
_CLIMBS = 8
# Refinements, as (number of leaders, samples per leader). The fewer leaders there are, the less their rates differ, so they need
# more samples.
_REFINEMENTS = ((64, 4), (24, 8), (12, 16))
# Share of the ranking's time for sampling all shapes. The rest is for sampling the leaders again.
_SHARE_OF_SEARCH = 0.7


@dataclass(frozen=True)
class Finalist:
    """One of the shapes with the highest rates in a search. The finalists are timed alternately, with cold caches.

    Args:
        shape: (M, N, K).
        timing: the samples in seconds.
        verification: check of the output.
    """

    shape: Shape
    timing: Timing
    verification: Verification

    @property
    def tflops(self) -> Estimate:
        """Rate in 10¹² FLOP/s (2·M·N·K / median time) with its 95 % interval."""
        return self.timing.estimate.map(lambda seconds: flops_of(self.shape) / seconds / 1e12)


@dataclass(frozen=True)
class GemmSearch:
    """The result of a search.

    Args:
        dtype: full name of the number format, such as "fp8_e4m3fn".
        backend: name of the BLAS library.
        data: name of the distribution of the operands.
        finalists: the finalists, fastest first. Their rates are compared within each round of samples, so the order of their
            medians can differ if the clock frequency changed between rounds.
        ranking: pairs of shape and rate in 10¹² FLOP/s for every sampled shape, best first. These rates come from few samples,
            and are used only to choose the finalists.
        shapes: number of shapes in the grid.
        elapsed_s: duration of the whole search in seconds.
        stopped: "all shapes seen", or the reason why some shapes were not sampled.
    """

    dtype: str
    backend: str
    data: str
    finalists: tuple[Finalist, ...]
    ranking: tuple[tuple[Shape, float], ...]
    shapes: int
    elapsed_s: float
    stopped: str

    @property
    def seen(self) -> int:
        """Number of sampled shapes."""
        return len(self.ranking)

    @property
    def best(self) -> Finalist:
        """The fastest finalist with a correct output.

        Raises:
            HyperionError: no finalist has a correct output.
        """
        right = [finalist for finalist in self.finalists if finalist.verification.passed]
        if not right:
            errors = ", ".join(f"{finalist.shape}: {finalist.verification.error:.3g}" for finalist in self.finalists)
            raise HyperionError(
                f"No finalist in {self.dtype} passes the check of its output (errors: {errors}).",
                where=self.backend,
                next_step="Run hyperion doctor. Either the library computes wrong results, or the tolerance is too small.",
            )
        return right[0]

    def __str__(self) -> str:
        best = self.best
        m, n, k = best.shape
        return (
            f"{self.dtype}: {best.tflops} TFLOPS at {m}x{n}x{k} (MxNxK) by {self.backend}; {self.seen} of {self.shapes} "
            f"shapes seen in {self.elapsed_s:.1f} s ({self.stopped})"
        )


class SharedOperands:
    """Operand and output buffers for products of any shape in a grid. All products use views of the same three buffers.

    Args:
        largest: largest value of M, N and K.
    """

    def __init__(self, largest: int, dtype: str, device: Device, seed: int = 0, data: str = "normal"):
        self.format, self.device, self.data = format_of(dtype, device), device, data
        generator = torch.Generator(device.torch_device).manual_seed(seed)
        self.a, self.b = (made_up(data, (largest**2,), self.format, device, generator) for _ in range(2))
        # Every shape uses the first elements of the buffers, so the whole grid needs only the memory of its largest product.
        self.c = torch.empty(largest**2, dtype=self.format.output, device=device.torch_device)

    def product(self, shape: Shape) -> Gemm:
        """Return the product C[M,N] = A[M,K]·B[K,N] of the first elements of the buffers."""
        m, n, k = shape
        a = Operand(self.a.values[: m * k].view(m, k), self.a.scale)
        b = Operand(self.b.values[: n * k].view(n, k), self.b.scale)
        return Gemm.holding(a, b.transposed, self.c[: m * n].view(m, n), self.format, self.device, self.data)


def search_gemm(
    dtype: str,
    device: Device,
    *,
    time_limit_s: float = 30.0,
    largest: int = 8192,
    step: int = 1024,
    seed: int = 0,
    data: str = "normal",
    exhaustive: bool = False,
    also: Sequence[Shape] = (),
) -> GemmSearch:
    """Find the fastest matrix product among all M, N and K that are multiples of `step` up to `largest` (by default 512 shapes).

    `ShapeRanking` first ranks the shapes with few samples and cold caches. The shapes are sampled alternately, so that drift in
    the clock frequency affects all of them alike. The best shapes are then timed alternately with at least 30 samples each, and
    their outputs are verified. Products that are too slow to be timed within the limit are skipped.

    Args:
        dtype: a key of `FORMATS`, or 'fp8' for the fp8 format of the device.
        time_limit_s: duration of the whole search in seconds. At least one shape is always measured.
        largest: largest value of M, N and K.
        step: distance between neighbouring values of M, N and K.
        seed: seed of the operands and of the order of the samples.
        data: distribution of the operands, a key of `DISTRIBUTIONS`.
        exhaustive: if True, sample every shape without a time limit. `time_limit_s` then applies only to the finalists.
        also: shapes that become finalists even if their rates are low, for example the fastest shape of an earlier measurement.
            Their timings alternate with those of the other finalists. Their sizes must not exceed `largest`.

    Raises:
        HyperionError: the device does not support the format, the grid is empty, or a shape of `also` is too large.
        RefusedProduct: the library does not support one of the shapes.
    """
    supported, reason = device.supports(dtype)
    if not supported:
        raise HyperionError(
            f"unsupported: {reason}", where=f"{dtype} on {device.name}", next_step="Call device.supports(dtype) first."
        )
    if not 0 < step <= largest:
        raise HyperionError(
            f"No multiple of {step} is between 1 and {largest}.", where="search_gemm", next_step="Choose step <= largest."
        )
    if also and max(map(max, also)) > largest:
        raise HyperionError(
            f"A size of {list(also)} exceeds {largest}.", where="search_gemm", next_step="Choose a larger `largest`."
        )
    started = time.monotonic()
    every = grid(largest, step)
    operands = SharedOperands(largest, dtype, device, seed, data)
    least = operands.product(every[0])
    # The first verification in a process takes seconds, because it loads libraries. Do it before the search.
    least.verify()
    with matmul_precision(operands.format):
        ranking, finalists = search_shapes(
            operands.product, device, largest, step, max(0.0, started + time_limit_s - time.monotonic()), seed, exhaustive, also
        )
    return GemmSearch(
        dtype=least.format.name,
        backend=least.backend,
        data=data,
        finalists=finalists,
        ranking=ranking,
        shapes=len(every),
        elapsed_s=time.monotonic() - started,
        stopped="all shapes seen" if len(ranking) == len(every) else f"limit of {time_limit_s:g} s",
    )


def flops_of(shape: Shape) -> int:
    """Return the number of FLOPs of a shape, 2·M·N·K."""
    return 2 * math.prod(shape)


def grid(largest: int, step: int) -> list[Shape]:
    """Return all shapes (M, N, K) whose sizes are multiples of `step` up to `largest`. Shapes with fewer FLOPs come first."""
    sizes = range(step, largest + 1, step)
    return sorted(((m, n, k) for m in sizes for n in sizes for k in sizes), key=lambda shape: (flops_of(shape), shape))


class ShapeRanking:
    """A ranking of the shapes of a grid by their rates. Shapes are sampled until a deadline.

    Args:
        largest, step: arguments of `grid`.
        sample: function that calls the product of each given shape once and returns the seconds of each call.
        now: function that returns the current time in seconds.
        deadline: time at which the ranking ends, on the clock of `now`. Infinite for an exhaustive ranking.
        affordable_s: largest expected time of a product in seconds. Slower products are skipped, because there would be no time
            to measure them.
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
        """Sample a part of the grid, then the shapes near the leaders, then all other shapes, then the leaders again."""
        search_until = self.started + _SHARE_OF_SEARCH * (self.deadline - self.started)
        # The smallest shape gives a first rate, from which the times of all other shapes are estimated.
        self._visit(self.shapes[:1], 2, search_until)
        self._visit(self._coarse(), 2, search_until)
        for _ in range(_CLIMBS):
            leaders = self.leaders(_LEADERS)
            new = self._unseen(shape for leader in leaders for shape in self._neighbours(leader))
            if not new or not self._visit(new + leaders, 2, search_until):
                break
        # The order is random, so that the shapes that are not reached before the deadline are spread over the grid.
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
        """Return the natural logarithm of the rate in FLOP/s of each sampled shape.

        The drift of the clock frequency during the search is estimated and removed.
        """
        effects = shape_effects(np.array(self._places), np.array(self._log_rates), _MOMENT)
        return {self.shapes[place]: float(effect) for place, effect in effects.items()}

    def _coarse(self) -> list[Shape]:
        sizes = sorted({shape[0] for shape in self.shapes})
        # The middle and the largest K.
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
        """Sample each shape once per round, in a new random order in each round.

        Args:
            shapes: the shapes to sample.
            rounds: number of rounds.
            until: time at which sampling ends, on the clock of `now`.

        Returns:
            False if the sampling ended because of `until`, else True.
        """
        for round_ in range(rounds):
            # Start with small products, because the rate and therefore the times of large products are still unknown.
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
                    # Logarithms, because a change of the clock frequency multiplies all rates by the same factor.
                    self._log_rates.append(math.log(rate))
        return True

    def _affordable(self, shape: Shape) -> bool:
        return flops_of(shape) <= self.affordable_s * self.best_rate or not self._places

    def _block(self, shapes: list[Shape]) -> tuple[list[Shape], list[Shape]]:
        """Split the shapes into a block and the rest. The block is sampled before the time is checked again.

        The block ends before the first shape whose product would take too long. The samples of the block may raise the best rate,
        which makes the estimated time of this shape shorter. If the first shape would take too long, it is dropped.

        Returns:
            (shapes of the block, remaining shapes).
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
    """Estimate the logarithm of the rate of each shape, without the effect of drift of the clock frequency.

    Each value is modelled as the effect of its shape plus the drift. The model is fitted by median polish. The effect of a shape
    is the logarithm of its rate without drift.

    Args:
        places: for each sample, the number of its shape, in the order in which the samples were taken.
        values: logarithms of the sampled rates. Drift adds the same amount to the values of all shapes.
        moment: number of consecutive samples that share one value of the drift. The median of the drift is 0.

    Returns:
        A dict that maps the number of a shape to the effect of the shape.

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
    """Return the median of each group. If a group has two middle values, return the higher one.

    The higher value is the better estimate, because disturbances only lower the rate.

    Args:
        groups: for each value, the number of its group. The numbers start at 0 and have no gaps.
    """
    # lexsort uses its last key first: it sorts by group, then by value within the group.
    ordered = values[np.lexsort((values, groups))]
    counts = np.bincount(groups)
    # Start of each group plus half of its size. For an even size, this is the higher of the two middle values.
    return ordered[np.cumsum(counts) - counts + counts // 2]


def search_shapes(
    product: Callable[[Shape], Gemm],
    device: Device,
    largest: int,
    step: int,
    time_limit_s: float,
    seed: int = 0,
    exhaustive: bool = False,
    also: Sequence[Shape] = (),
    clock: Clock | None = None,
) -> tuple[tuple[tuple[Shape, float], ...], tuple[Finalist, ...]]:
    """Search the grid for the fastest products; see `search_gemm`.

    Args:
        product: function that returns the product of a shape.
        clock: clock that takes the samples. None means the clock of the device.

    Returns:
        The ranking as pairs of shape and rate in 10¹² FLOP/s, best first, and the finalists, fastest first.
    """
    clock = clock or device_clock(device)
    started, products = clock.now(), _Products(product, clock, CacheFlush(device))
    rest_s = (1 - _SHARE_OF_RANKING) * time_limit_s
    ranking = ShapeRanking(
        largest,
        step,
        products.sample,
        clock.now,
        seed=seed,
        deadline=math.inf if exhaustive else started + _SHARE_OF_RANKING * time_limit_s,
        # At least two finalists must fit into the time.
        affordable_s=math.inf if exhaustive else rest_s / (2 * _CALLS_OF_A_FINALIST),
    )
    ranking.run()
    left_s = time_limit_s if exhaustive else max(rest_s, started + time_limit_s - clock.now())
    chosen, limit_s = _finalists(ranking, left_s, products.overhead_s)
    chosen += [shape for shape in dict.fromkeys(also) if shape not in chosen]
    finalists = _measured(chosen, [products.made_once(shape) for shape in chosen], device, limit_s, clock)
    rates = ranking.log_rates()
    ordered = sorted(((shape, math.exp(rate) / 1e12) for shape, rate in rates.items()), key=lambda pair: -pair[1])
    return tuple(ordered), tuple(finalists[place] for place in fastest_first(finalists))


class _Products:
    """The matrix products for all shapes of a search. A product is created when it is first needed."""

    def __init__(self, product: Callable[[Shape], Gemm], clock: Clock, flush: Callable[[], object]):
        self.product, self.clock, self.flush = product, clock, flush
        self.products: dict[Shape, Gemm] = {}
        self._samples, self._around_s = 0, 0.0

    @property
    def overhead_s(self) -> float:
        """Mean overhead of a sample in seconds, in addition to the time of the product. Most of it is the cache flush."""
        return self._around_s / max(1, self._samples)

    def made_once(self, shape: Shape) -> Gemm:
        """Return the product of a shape. If it does not exist yet, create it and make its first call."""
        if shape not in self.products:
            self.products[shape] = self.product(shape)
            self.products[shape].first_call()
        return self.products[shape]

    def sample(self, shapes: list[Shape]) -> list[float]:
        """Call the product of each shape once with cold caches, one shape after the other. Return the seconds of each call."""
        # First calls load or tune kernels, so they are made before the timed calls.
        for shape in shapes:
            self.made_once(shape)
        started = self.clock.now()
        seconds = [series[0] for series in self.clock.sample([self.products[shape] for shape in shapes], self.flush, 1)]
        self._samples, self._around_s = (self._samples + len(shapes), self._around_s + self.clock.now() - started - sum(seconds))
        return seconds


def _measured(
    shapes: list[Shape], products: list[Gemm], device: Device, time_limit_s: float, clock: Clock | None = None
) -> list[Finalist]:
    # `time_interleaved` needs a positive limit, even if the ranking has used up the time.
    timings = time_interleaved(products, device, time_limit_s=max(time_limit_s, 1e-3), clock=clock)
    # All products share one output buffer, so each product is computed again before its output is verified.
    return [Finalist(s, t, product.verify()) for s, t, product in zip(shapes, timings, products, strict=True)]


def fastest_first(finalists: list[Finalist]) -> list[int]:
    """Return the indices of the finalists, fastest first.

    The rates are compared within each round of samples, because the clock frequency hardly changes within a round.
    """
    log_rates = np.array([np.log(flops_of(finalist.shape) / finalist.timing.samples_s) for finalist in finalists])
    return np.argsort(-np.median(log_rates - log_rates.mean(axis=0), axis=1), kind="stable").tolist()


def _finalists(ranking: ShapeRanking, left_s: float, overhead_s: float) -> tuple[list[Shape], float]:
    """Choose as many of the best shapes as finalists as can be timed in the remaining time, but at least one.

    Args:
        left_s: remaining seconds.
        overhead_s: overhead of a sample in seconds, in addition to the time of the product.

    Returns:
        The shapes of the finalists, and the time limit for timing them in seconds.
    """
    rates = ranking.log_rates()
    leaders = ranking.leaders(FINALISTS)
    chosen: list[Shape] = []
    least_s = 0.0
    for shape in leaders:
        calls_s = _CALLS_OF_A_FINALIST * (flops_of(shape) / math.exp(rates[shape]) + overhead_s)
        if not chosen or (rates[leaders[0]] - rates[shape] <= _WITHIN and least_s + calls_s <= left_s):
            chosen, least_s = [*chosen, shape], least_s + calls_s
    # Each warm-up can take half of the limit. Sampling ends at the limit, or later if the minimum number of samples takes longer.
    count = len(chosen)
    return chosen, min(_TIMING_LIMIT_S, left_s / (1 + count / 2), max(0.0, 2 * (left_s - least_s) / count))
