"""Does a collective run beside a computation, or do the two take turns? Each alone, then both at once."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist

from hyperion.hardware import Device
from hyperion.measure.clock.ranks_clock import RanksClock
from hyperion.measure.clock.timing import MINIMUM_SAMPLES, Timing, time_function, time_interleaved
from hyperion.measure.clock.verify import Verification
from hyperion.measure.collectives.collectives import COLLECTIVES, Buffers
from hyperion.measure.products.gemm import Gemm
from hyperion.processes import RollCall, World, wait_for_peers
from hyperion.results import Estimate
from hyperion.results.statistics import estimates_of_medians

# A product of this many rows and columns, over and over, is the computation unless another is given.
_PRODUCT = {"cpu": 256, "cuda": 4096, "rocm": 4096}
_MOST_PRODUCTS = 1000


@dataclass(frozen=True)
class Overlap:
    """An all-reduce and a computation, alone and at once; of each call the slowest rank's seconds.

    Args:
        bytes: S of the all-reduce.
        dtype: its format.
        ranks: how many took part.
        compute, collective, both: timings, sampled in turn.
        verification: the all-reduce's values after the last call at once.
    """

    bytes: int
    dtype: str
    ranks: int
    compute: Timing
    collective: Timing
    both: Timing
    verification: Verification

    @property
    def share(self) -> Estimate:
        """(compute + collective - both) / the shorter of the two: 1 when the shorter one is hidden wholly behind the other,
        0 when they take turns, below 0 when they disturb each other by more than they save."""
        return self._estimate(lambda compute, collective, both: (compute + collective - both) / min(compute, collective))

    @property
    def exposed_share(self) -> Estimate:
        """(both - compute) / collective: what of the collective a training step still waits for."""
        return self._estimate(lambda compute, collective, both: (both - compute) / collective)

    def _estimate(self, function: Callable[[float, float, float], float]) -> Estimate:
        series = [timing.samples_s for timing in (self.compute, self.collective, self.both)]
        return estimates_of_medians(series, lambda medians: [function(*medians)])[0]

    def __str__(self) -> str:
        compute, collective, both = (
            f"{timing.estimate.value * 1e3:.4g} ms" for timing in (self.compute, self.collective, self.both)
        )
        share = self.share
        return (
            f"all_reduce of {self.bytes:,} bytes, {self.dtype}, {self.ranks} ranks: {collective} alone; computing: {compute} "
            f"alone, {both} beside it; overlapped {share.value:.0%} of the shorter one "
            f"(95 % CI {share.ci_low:.0%} to {share.ci_high:.0%})"
        )


def measure_overlap(
    size_bytes: int,
    dtype: str,
    here: World,
    roll: RollCall,
    *,
    compute: Callable[[], object] | None = None,
    minimum_samples: int = MINIMUM_SAMPLES,
    time_limit_s: float = 1.0,
) -> Overlap:
    """Time an all-reduce beside a computation. All ranks call it with the same arguments.

    At once means: the all-reduce is started with async_op (on a GPU it then has a stream of its own), the computation is
    launched, and both are waited for. On a CPU the all-reduce runs in gloo's threads, which need cores too.

    Args:
        size_bytes: S; rounded up to whole elements for every rank.
        dtype: of the all-reduce, one of `collectives.DTYPES`.
        roll: told of every collective that is started.
        compute: one piece of computing on this rank's device; None for as many matrix products as last about as long as
            the all-reduce.

    Raises:
        WrongValueError: on the rank whose sum is wrong afterwards.
        HyperionError: a single rank.
    """
    buffers = Buffers(COLLECTIVES["all_reduce"], size_bytes, dtype, here, roll)
    clock = RanksClock(here, buffers.prepare, roll.step)
    compute = compute or _products(here.device, _seconds(buffers.call, here, clock), clock, here)

    def at_once() -> None:
        roll.step(f"{buffers.described}, beside a computation")
        work = dist.all_reduce(buffers.output, async_op=True)
        compute()
        wait_for_peers(work)

    timings = time_interleaved(
        [compute, buffers.call, at_once],
        here.device,
        cold=False,
        minimum_samples=minimum_samples,
        time_limit_s=time_limit_s,
        clock=clock,
    )
    # `at_once` came last in its round: the output is what it left.
    return Overlap(buffers.bytes, dtype, here.size, *timings, buffers.require_exact("after it ran beside a computation"))


def _products(device: Device, lasting_s: float, clock: RanksClock, here: World) -> Callable[[], object]:
    """Matrix products that last about so long, the same number on every rank: their times are agreed."""
    size = _PRODUCT[device.kind]
    dtype = "fp32" if device.kind == "cpu" else "bf16"
    product = Gemm(size, size, size, dtype, device)
    count = max(1, min(_MOST_PRODUCTS, round(lasting_s / _seconds(product, here, clock))))

    def compute() -> torch.Tensor:
        for _ in range(count):
            product()
        return product.c_MN

    return compute


def _seconds(function: Callable[[], object], here: World, clock: RanksClock) -> float:
    """A quick median, agreed by all ranks."""
    timing = time_function(function, here.device, cold=False, minimum_samples=10, time_limit_s=0.1, clock=clock)
    return timing.estimate.value
