"""Search the maximum achievable rate of a format (MAF): rank shapes by few samples, then measure the leaders.

The rate is smooth in the inner size K, but jumps in the outer sizes M and N, because output tiles fill the last wave of compute
units or leave most of them idle. Therefore the coarse pass samples every M and N at two K. The next passes follow the leaders:
along K, to neighbouring M and N, and to swapped M and N. If there is time, all other shapes follow.
"""

import math
import time
from collections.abc import Callable
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
# Shapes that rank further behind the leader than this (natural logarithm) are not finalists.
_WITHIN = math.log(1.05)
_SHARE_OF_RANKING = 0.6
# Least number of calls for warm-up and samples of a finalist.
_CALLS_OF_A_FINALIST = MINIMUM_SAMPLES + 12
_TIMING_LIMIT_S = 5.0
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


@dataclass(frozen=True)
class Finalist:
    """A leading shape, timed with cold caches in turn with the others, and verified.

    Args:
        shape: (M, N, K).
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
        dtype: full name of the format, such as "fp8_e4m3fn".
        backend: the BLAS library.
        data: distribution of the operands.
        finalists: fastest first, compared within each round of samples. If the clock changed, the order of the medians can
            differ.
        ranking: 10¹² FLOP/s of every sampled shape, best first. These rates come from few samples and only serve to find the
            leaders.
        shapes: number of shapes of the grid; `seen` of them were sampled.
        elapsed_s: seconds of the whole search.
        stopped: "all shapes seen", or why not all were.
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
                f"No leading {self.dtype} product passes its check ({errors}).",
                where=self.backend,
                next_step="Run hyperion doctor: the library computes wrong results, or the tolerance is too small.",
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
    """Products of any shape of a grid, with operands that are views of the same buffers.

    Args:
        largest: largest size of M, N and K.
    """

    def __init__(self, largest: int, dtype: str, device: Device, seed: int = 0, data: str = "normal"):
        self.format, self.device, self.data = format_of(dtype, device), device, data
        generator = torch.Generator(device.torch_device).manual_seed(seed)
        self.a, self.b = (made_up(data, (largest**2,), self.format, device, generator) for _ in range(2))
        self.c = torch.empty(largest**2, dtype=self.format.output, device=device.torch_device)

    def product(self, shape: Shape) -> Gemm:
        """Return C[M,N] = A[M,K]·B[K,N] on the first elements of the buffers; all products share the output buffer."""
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
) -> GemmSearch:
    """Find the fastest product among all M, N and K that are multiples of `step` up to `largest` (by default 512 shapes).

    Shapes are ranked by few samples with cold caches, in turn, so that a drift of the clock affects all of them alike, from
    coarse to fine (`ShapeRanking`). The leaders are then timed in turn (n ≥ 30, 95 % interval) and verified. Products too slow
    to be timed within the limit are skipped.

    Args:
        dtype: a name of `FORMATS`, or 'fp8'.
        time_limit_s: seconds of the whole search; at least one shape is always measured.
        largest, step: the grid of shapes.
        data: distribution of the operands.
        exhaustive: sample every shape without a time limit; `time_limit_s` then applies to the finalists.

    Raises:
        HyperionError: the device does not support the format, or the grid is empty.
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
    started = time.monotonic()
    every = grid(largest, step)
    operands = SharedOperands(largest, dtype, device, seed, data)
    least = operands.product(every[0])
    # The first verification in a process takes seconds to load libraries, so do it before the time-limited part.
    least.verify()
    with matmul_precision(operands.format):
        ranking, finalists = search_shapes(
            operands.product, device, largest, step, max(0.0, started + time_limit_s - time.monotonic()), seed, exhaustive
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


def time_shapes(
    shapes: list[Shape], dtype: str, device: Device, *, time_limit_s: float = _TIMING_LIMIT_S, seed: int = 0, data: str = "normal"
) -> list[Finalist]:
    """Time given shapes in turn with cold caches and verify them, for example to compare the winners of two searches.

    Args:
        shapes: (M, N, K) of each; the result has the same order.

    Raises:
        HyperionError: the device does not support the format.
        RefusedProduct: the library does not support one of the shapes.
    """
    operands = SharedOperands(max(max(shape) for shape in shapes), dtype, device, seed, data)
    products = [operands.product(shape) for shape in shapes]
    with matmul_precision(operands.format):
        for product in products:
            product.first_call()
        return _measured(shapes, products, device, time_limit_s)


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


def search_shapes(
    product: Callable[[Shape], Gemm],
    device: Device,
    largest: int,
    step: int,
    time_limit_s: float,
    seed: int = 0,
    exhaustive: bool = False,
    clock: Clock | None = None,
) -> tuple[tuple[tuple[Shape, float], ...], tuple[Finalist, ...]]:
    """Search over given products; return the ranking (shape, 10¹² FLOP/s) and the finalists, fastest first.

    Args:
        product: shape -> product.
        clock: takes the samples instead of the device's clock.
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
    finalists = _measured(chosen, [products.made[shape] for shape in chosen], device, limit_s, clock)
    rates = ranking.log_rates()
    ordered = sorted(((shape, math.exp(rate) / 1e12) for shape, rate in rates.items()), key=lambda pair: -pair[1])
    return tuple(ordered), tuple(finalists[place] for place in fastest_first(finalists))


class _Products:
    """Products by shape, created on first use, and sampled in turn with cold caches."""

    def __init__(self, product: Callable[[Shape], Gemm], clock: Clock, flush: Callable[[], object]):
        self.product, self.clock, self.flush = product, clock, flush
        self.made: dict[Shape, Gemm] = {}
        self._samples, self._around_s = 0, 0.0

    @property
    def overhead_s(self) -> float:
        """Seconds of a sample without the product itself, mainly the cache flush."""
        return self._around_s / max(1, self._samples)

    def sample(self, shapes: list[Shape]) -> list[float]:
        """Return the seconds of one call of each shape."""
        for shape in shapes:
            if shape not in self.made:
                self.made[shape] = self.product(shape)
                self.made[shape].first_call()
        started = self.clock.now()
        seconds = [series[0] for series in self.clock.sample([self.made[shape] for shape in shapes], self.flush, 1)]
        self._samples, self._around_s = (self._samples + len(shapes), self._around_s + self.clock.now() - started - sum(seconds))
        return seconds


def _measured(
    shapes: list[Shape], products: list[Gemm], device: Device, time_limit_s: float, clock: Clock | None = None
) -> list[Finalist]:
    # The ranking may have used up the time, but a limit must be positive.
    timings = time_interleaved(products, device, time_limit_s=max(time_limit_s, 1e-3), clock=clock)
    # The products share an output, so each multiplies again for its verification.
    return [Finalist(s, t, product.verify()) for s, t, product in zip(shapes, timings, products, strict=True)]


def fastest_first(finalists: list[Finalist]) -> list[int]:
    """Return the indices of the finalists by rate, compared within each round, in which the clock is the same."""
    log_rates = np.array([np.log(flops_of(finalist.shape) / finalist.timing.samples_s) for finalist in finalists])
    return np.argsort(-np.median(log_rates - log_rates.mean(axis=0), axis=1), kind="stable").tolist()


def _finalists(ranking: ShapeRanking, left_s: float, overhead_s: float) -> tuple[list[Shape], float]:
    """Return the leaders near the best shape that fit into the time (at least one), and the time limit of their timing."""
    rates = ranking.log_rates()
    leaders = ranking.leaders(FINALISTS)
    chosen: list[Shape] = []
    least_s = 0.0
    for shape in leaders:
        calls_s = _CALLS_OF_A_FINALIST * (flops_of(shape) / math.exp(rates[shape]) + overhead_s)
        if not chosen or (rates[leaders[0]] - rates[shape] <= _WITHIN and least_s + calls_s <= left_s):
            chosen, least_s = [*chosen, shape], least_s + calls_s
    # Each warm-up can take half of the limit. Sampling ends at the limit, or later at the least number of samples.
    count = len(chosen)
    return chosen, min(_TIMING_LIMIT_S, left_s / (1 + count / 2), max(0.0, 2 * (left_s - least_s) / count))
