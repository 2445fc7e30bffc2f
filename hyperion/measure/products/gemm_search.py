"""Search the maximum achievable rate of a format (MAF): rank shapes by few samples, then measure the leaders."""

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
# Shapes that rank further behind the leader than this (natural logarithm) are not finalists.
_WITHIN = math.log(1.05)
_SHARE_OF_RANKING = 0.6
# Least number of calls for warm-up and samples of a finalist.
_CALLS_OF_A_FINALIST = MINIMUM_SAMPLES + 12
_TIMING_LIMIT_S = 5.0


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
    started, products = clock.now(), _Products(product, clock, cache_flush(device))
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
