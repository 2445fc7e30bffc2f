"""The maximum achievable rate of a format (MAF): a search over shapes, its leaders measured as everything else is."""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from hyperion.errors import HyperionError
from hyperion.hardware import Device
from hyperion.measure.clock.clocks import Clock, device_clock
from hyperion.measure.clock.dtypes import format_of, matmul_precision
from hyperion.measure.clock.timing import MINIMUM_SAMPLES, Timing, cache_flush, time_interleaved
from hyperion.measure.clock.verify import Verification
from hyperion.measure.products.gemm import Gemm
from hyperion.measure.products.operands import Operand, made_up
from hyperion.measure.products.shape_ranking import Shape, ShapeRanking, flops_of, grid
from hyperion.results import Estimate

FINALISTS = 6
# A finalist whose few samples put it further behind than this is not timed again.
_WITHIN = math.log(1.05)
_SHARE_OF_RANKING = 0.6
# Warm-up and samples of a finalist, in calls: less than that is no measurement.
_CALLS_OF_A_FINALIST = MINIMUM_SAMPLES + 12
_TIMING_LIMIT_S = 5.0


@dataclass(frozen=True)
class Finalist:
    """One of the leading shapes, timed with cold caches in turn with the others, and verified.

    Args:
        shape: (M, N, K).
    """

    shape: Shape
    timing: Timing
    verification: Verification

    @property
    def tflops(self) -> Estimate:
        """10¹² FLOP/s: 2·M·N·K over the median time, with its 95 % interval."""
        return self.timing.estimate.map(lambda seconds: flops_of(self.shape) / seconds / 1e12)


@dataclass(frozen=True)
class GemmSearch:
    """What a search found.

    Args:
        dtype: the format's name; fp8 is named in full.
        backend: the library that multiplied.
        data: what the operands held.
        finalists: fastest first, by their rates within each round of samples; where the clock swung, a median of one may
            lie above that of a faster one.
        ranking: TFLOPS of every shape that was seen, from few samples each, best first: good for finding leaders, and
            no measurement.
        shapes: how many shapes the grid has; `seen` of them were tried.
        elapsed_s: what the search took, its operands' making and the finalists' timing included.
        stopped: "all shapes seen", or why not all of them.
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
        """How many shapes were tried."""
        return len(self.ranking)

    @property
    def best(self) -> Finalist:
        """The fastest finalist whose output is right.

        Raises:
            HyperionError: no finalist's is.
        """
        right = [finalist for finalist in self.finalists if finalist.verification.passed]
        if not right:
            errors = ", ".join(f"{finalist.shape}: {finalist.verification.error:.3g}" for finalist in self.finalists)
            raise HyperionError(
                f"No leading {self.dtype} product passes its check ({errors}).",
                where=self.backend,
                next_step="Run hyperion doctor: this library multiplies wrongly, or its tolerance does not fit it.",
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
    """Products of any shape of a grid from one pair of operands: views of buffers that are made once.

    Args:
        largest: the largest size of M, N and K.
    """

    def __init__(self, largest: int, dtype: str, device: Device, seed: int = 0, data: str = "normal"):
        self.format, self.device, self.data = format_of(dtype, device), device, data
        generator = torch.Generator(device.torch_device).manual_seed(seed)
        self.a, self.b = (made_up(data, (largest**2,), self.format, device, generator) for _ in range(2))
        self.c = torch.empty(largest**2, dtype=self.format.output, device=device.torch_device)

    def product(self, shape: Shape) -> Gemm:
        """C[M,N] = A[M,K]·B[K,N] on the beginnings of the buffers; products of other shapes overwrite its output."""
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
    """The fastest product among all M, N and K that are multiples of `step` up to `largest` (by default 512 shapes).

    Shapes are ranked by few samples with cold caches, taken in turn so that a drift of the clock meets all of them, coarse to
    fine (`ShapeRanking`); the leaders are then timed in turn like every reported number (n ≥ 30, 95 % interval), and
    verified. Products that could not be timed well within the limit are not tried.

    Args:
        dtype: a name of `FORMATS`, or 'fp8'.
        time_limit_s: of the whole search; at least one shape is measured, whatever it takes.
        exhaustive: see every shape, whatever time it takes; the limit is then that of the finalists.

    Raises:
        HyperionError: the device does not multiply this format (with the reason), or the grid is empty.
        RefusedProduct: the library refuses one of the shapes.
    """
    supported, reason = device.supports(dtype)
    if not supported:
        raise HyperionError(
            f"unsupported: {reason}", where=f"{dtype} on {device.name}", next_step="Ask device.supports(dtype) first."
        )
    if not 0 < step <= largest:
        raise HyperionError(
            f"No multiple of {step} lies between 1 and {largest}.", where="search_gemm", next_step="Choose step <= largest."
        )
    started = time.monotonic()
    every = grid(largest, step)
    operands = SharedOperands(largest, dtype, device, seed, data)
    least = operands.product(every[0])
    # The first check of a process loads what checks need, which takes seconds: not when the finalists have used up the time.
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
    """Given shapes, timed in turn with cold caches and verified: the winner of one search beside that of another, say.

    Args:
        shapes: (M, N, K) of each; the result is in their order.

    Raises:
        HyperionError: the device has no such format.
        RefusedProduct: the library refuses one of the shapes.
    """
    operands = SharedOperands(max(max(shape) for shape in shapes), dtype, device, seed, data)
    products = [operands.product(shape) for shape in shapes]
    with matmul_precision(operands.format):
        for product in products:
            product.first_call()
        return _measured(shapes, products, device, time_limit_s)


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
    """The search itself, over whatever products are given: the ranking (shape, TFLOPS) and the finalists, fastest first.

    Args:
        product: makes the product of a shape, which can be called and verified.
        clock: takes the samples instead of the device's own.
    """
    clock = clock or device_clock(device)
    started, products = clock.now(), _Products(product, clock, cache_flush(device))
    rest_s = (1 - _SHARE_OF_RANKING) * time_limit_s
    ranking = ShapeRanking(
        largest,
        step,
        products.sample,
        clock.now,
        seed=seed,
        deadline=math.inf if exhaustive else started + _SHARE_OF_RANKING * time_limit_s,
        # Two finalists at least must fit.
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
    """Products by shape, made when they are first asked for, and sampled in turn with cold caches."""

    def __init__(self, product: Callable[[Shape], Gemm], clock: Clock, flush: Callable[[], object]):
        self.product, self.clock, self.flush = product, clock, flush
        self.made: dict[Shape, Gemm] = {}
        self._samples, self._around_s = 0, 0.0

    @property
    def overhead_s(self) -> float:
        """What a sample takes beside the product itself, the flush above all."""
        return self._around_s / max(1, self._samples)

    def sample(self, shapes: list[Shape]) -> list[float]:
        """Seconds of one call of each."""
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
    # At least one product is measured, whatever it takes: a ranking may have left no time.
    timings = time_interleaved(products, device, time_limit_s=max(time_limit_s, 1e-3), clock=clock)
    # They share an output: each multiplies once more for its check.
    return [Finalist(s, t, product.verify()) for s, t, product in zip(shapes, timings, products, strict=True)]


def fastest_first(finalists: list[Finalist]) -> list[int]:
    """Places of finalists in the order of their rates, each compared with the others of its round: they met the same clock."""
    log_rates = np.array([np.log(flops_of(finalist.shape) / finalist.timing.samples_s) for finalist in finalists])
    return np.argsort(-np.median(log_rates - log_rates.mean(axis=0), axis=1), kind="stable").tolist()


def _finalists(ranking: ShapeRanking, left_s: float, overhead_s: float) -> tuple[list[Shape], float]:
    """The leaders that lie near the first and that there is time for, one in any case; and the time limit of their timing."""
    rates = ranking.log_rates()
    leaders = ranking.leaders(FINALISTS)
    chosen: list[Shape] = []
    least_s = 0.0
    for shape in leaders:
        calls_s = _CALLS_OF_A_FINALIST * (flops_of(shape) / math.exp(rates[shape]) + overhead_s)
        if not chosen or (rates[leaders[0]] - rates[shape] <= _WITHIN and least_s + calls_s <= left_s):
            chosen, least_s = [*chosen, shape], least_s + calls_s
    # Sampling ends at its limit, or later with the least number of samples; each warm-up may take half of the limit before.
    count = len(chosen)
    return chosen, min(_TIMING_LIMIT_S, left_s / (1 + count / 2), max(0.0, 2 * (left_s - least_s) / count))
