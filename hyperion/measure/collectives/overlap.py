"""Measure the overlap of a collective and a computation: each alone, then both at the same time."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import cast

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

# The default computation repeats a product of this many rows and columns.
_PRODUCT = {"cpu": 256, "cuda": 4096, "rocm": 4096}
_MOST_PRODUCTS = 1000


@dataclass(frozen=True)
class Overlap:
    """The times of an all-reduce and a computation, alone and overlapped; each sample is that of the slowest rank.

    Args:
        bytes: S of the all-reduce.
        dtype: dtype of the all-reduce.
        ranks: number of ranks.
        compute, collective, both: timings, sampled in turn.
        verification: check of the output after the last overlapped call.
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
        """(compute + collective - both) / the shorter of the two: 1 if the shorter one is fully hidden, 0 if they run one after
        the other, below 0 if they slow each other down by more than they save."""
        return self._estimate(lambda compute, collective, both: (compute + collective - both) / min(compute, collective))

    @property
    def exposed_share(self) -> Estimate:
        """(both - compute) / collective: the share of the collective that a training step waits for."""
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
            f"alone, {both} together; overlapped {share.value:.0%} of the shorter one "
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
    """Time an all-reduce that overlaps with a computation. All ranks must call this with the same arguments.

    The overlapped call starts the all-reduce with async_op (on a GPU it runs on a separate stream), launches the computation,
    and waits for both. On a CPU the all-reduce runs in gloo's threads, which also need cores.

    Args:
        size_bytes: S; rounded up to whole elements for every rank.
        dtype: dtype of the all-reduce, one of `collectives.DTYPES`.
        here: this rank.
        roll: receives the name of every collective before it starts, for hang reports.
        compute: a computation on this rank's device; None means matrix products that take about as long as the all-reduce.
        minimum_samples, time_limit_s: as in `time_interleaved`.

    Raises:
        WrongValueError: the sum on this rank is wrong afterwards.
        HyperionError: there is only one rank.
    """
    buffers = Buffers(COLLECTIVES["all_reduce"], size_bytes, dtype, here, roll)
    clock = RanksClock(here, buffers.prepare, roll.step)
    compute = compute or _products(here.device, _seconds(buffers.call, here, clock), clock, here)

    def at_once() -> None:
        roll.step(f"{buffers.described}, overlapped with a computation")
        work = cast(dist.Work, dist.all_reduce(buffers.output, async_op=True))  # None is for ranks outside of the group
        compute()
        wait_for_peers(work)

    alone, collective, both = time_interleaved(
        [compute, buffers.call, at_once],
        here.device,
        cold=False,
        minimum_samples=minimum_samples,
        time_limit_s=time_limit_s,
        clock=clock,
    )
    # The overlapped call is the last of each round, so the output is its result.
    verification = buffers.require_exact("after it overlapped with a computation")
    return Overlap(buffers.bytes, dtype, here.size, alone, collective, both, verification)


def _products(device: Device, lasting_s: float, clock: RanksClock, here: World) -> Callable[[], object]:
    """Return matrix products that take about `lasting_s`; their number is the same on all ranks because the times are."""
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
    """Return a quick median in seconds; the same on all ranks."""
    timing = time_function(function, here.device, cold=False, minimum_samples=10, time_limit_s=0.1, clock=clock)
    return timing.estimate.value
