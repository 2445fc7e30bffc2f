"""Is the measurement itself sound? Checks that every measurement runs before its number is believed.

Each refuses a way to be wrong that leaves the output right: a clock that stops too early, a cache that was not flushed, a
label that does not fit, operands that hide mistakes. `planted_faults` plants each of these and sees that it is caught.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from hyperion.errors import HyperionError
from hyperion.measure.clock.census import count_operations
from hyperion.measure.clock.verify import Verification

# A series drifts when it changes by more than this over its length, and by more than chance would have it.
DRIFT_TOLERANCE = 0.05
_DRIFT_Z = 3.29  # two-sided p = 0.001
# Calls in a row may take longer than their samples said by this factor and this time: a launch costs the host some
# microseconds, and what else runs on a machine must not make a sound clock look wrong.
_COVER_FACTOR, _COVER_SLACK_S = 3.0, 2e-4
# One long interruption in ten calls makes their mean many times their median; on a busy machine few blocks are without.
_COVER_TRIES, _COVER_BLOCK_S, _COVER_CALLS = 30, 0.02, 10
_COVER_TRIES_IN_HASTE = 5


class HarnessError(HyperionError):
    """A measurement that does not measure what its name says."""


@dataclass(frozen=True)
class Drift:
    """How samples changed while they were taken.

    Args:
        relative: change over the whole series as a share of its median: the slope of a resistant line.
        z: standard normal score of the rank correlation between samples and their order.
        ends: medians of the first and of the last third, in the samples' unit.
    """

    relative: float
    z: float
    ends: tuple[float, float]

    @property
    def present(self) -> bool:
        """Whether it is larger than the tolerance and than chance."""
        return abs(self.relative) > DRIFT_TOLERANCE and abs(self.z) > _DRIFT_Z

    def __str__(self) -> str:
        return f"the samples drifted by {self.relative:+.1%} while they were taken (z = {self.z:+.1f})"


def drift_of(samples) -> Drift:
    """Slope of a series over its order, and Daniels' test for trend.

    Args:
        samples: 1-D, in the order taken; fewer than 10 tell nothing, and have no drift.

    Source: Tukey, Exploratory Data Analysis, 1977, chapter 10, for the line through the medians of the outer thirds;
    Daniels, Journal of the Royal Statistical Society B 12 (1950) 171-181, for the test.
    """
    values = np.asarray(samples, dtype=np.float64)
    n, third = len(values), len(values) // 3
    if n < 10:
        return Drift(0.0, 0.0, (float("nan"), float("nan")))
    first, last = float(np.median(values[:third])), float(np.median(values[-third:]))
    slope = (last - first) / (n - third)
    correlation = np.corrcoef(_ranks(values), np.arange(n))[0, 1] if np.ptp(values) else 0.0
    return Drift(slope * n / float(np.median(values)), float(correlation * np.sqrt(n - 1)), (first, last))


def _ranks(values: np.ndarray) -> np.ndarray:
    """Ranks from 0, those of equal values averaged."""
    _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
    return (np.cumsum(counts) - (counts + 1) / 2)[inverse]


def require_whole_work(
    sample_s: float,
    in_a_row: Callable[[int], float | None],
    again: Callable[[int], float],
    over: Callable[[], bool] = lambda: False,
) -> None:
    """Do calls in a row, from an idle device to an idle device, take about as long as the clock says one call takes?

    They do not where the clock stops before the work is done (no synchronisation, another stream), and where most calls
    find their work done already.

    Args:
        sample_s: the clock's seconds of one call, a median.
        in_a_row: takes a number of calls, makes them, and returns the host's seconds of each; None where that says nothing.
        again: takes a number of calls and returns the clock's seconds of one, timed anew: what else runs on the machine by
            now slows both.
        over: whether the time for this is up.

    Raises:
        HarnessError: they took more than three times as long, in each of thirty blocks; in five, once the time is up.
    """
    calls = max(1, min(_COVER_CALLS, int(_COVER_BLOCK_S / max(sample_s, 1e-9))))
    seen: list[float] = []
    clock_s = [sample_s]
    while len(seen) < (_COVER_TRIES_IN_HASTE if over() else _COVER_TRIES):
        seconds = in_a_row(calls)
        if seconds is None or seconds <= _COVER_FACTOR * sample_s + _COVER_SLACK_S:
            return
        seen.append(seconds)
        # The median, not the largest: one reading that another process delayed must not excuse a clock that stops early.
        clock_s.append(again(calls))
        sample_s = max(sample_s, float(np.median(clock_s)))
    raise HarnessError(
        f"the clock says {sample_s * 1e3:.4g} ms a call, but {calls} calls in a row take {min(seen) * 1e3:.4g} ms each until "
        f"the device is idle",
        where="a timed function",
        next_step="wait for the device before the clock stops, keep the work on the current stream, and do it in every call",
    )


def require_flushed(samples: int, flushes: int, read_all: bool = True) -> None:
    """Was the cache flushed before every sample that is called cold?

    Args:
        read_all: whether a flush read all that it has to read.

    Raises:
        HarnessError: there are samples without a flush, or the flush did nothing.
    """
    if flushes < samples:
        raise HarnessError(
            f"{samples} cold samples, but the cache was flushed {flushes} times",
            where="a timed function",
            next_step="call `flush` before each sample, or time with cold=False and say hot",
        )
    if not read_all:
        raise HarnessError(
            f"{samples} cold samples, but the flush did not read its buffer: the cache was as the call before left it",
            where="a timed function",
            next_step="let `CacheFlush` read all of its buffer, or time with cold=False and say hot",
        )


def require_cache_label(label: str | None, cold: bool) -> None:
    """Does a row's `cache` parameter say how its samples were taken?

    Args:
        label: "cold", "hot", or None where the row says nothing of it.

    Raises:
        HarnessError: it says the other.
    """
    taken = "cold" if cold else "hot"
    if label in ("cold", "hot") and label != taken:
        raise HarnessError(
            f"samples with {taken} caches are labelled {label}", where="sample_frame", next_step="label them as they were taken"
        )


def require_passed(verification: Verification) -> None:
    """Hold a measurement to a verification whose failure makes its rate another quantity, whatever the output.

    Raises:
        HarnessError: it failed; the message has its name, error and tolerance.
    """
    if not verification.passed:
        raise HarnessError(
            f"{verification.name}: they are not (error {verification.error:.4g} above {verification.tolerance:.4g})",
            where="the operands of a measurement",
            next_step="draw them from the distribution that their label names, or give them the label of what they hold",
        )


def require_product_flops(claimed: int, a_MK: torch.Tensor, b_KN: torch.Tensor) -> None:
    """Is the number of FLOPs that a rate is made of the one that PyTorch counts for this product?

    Args:
        claimed: FLOPs, a multiply-add being 2.
        a_MK, b_KN: operands; only their shapes are used.

    Raises:
        HarnessError: it is another.
    """
    meta_a, meta_b = (torch.empty(operand.shape, device="meta") for operand in (a_MK, b_KN))
    counted = count_operations(lambda: torch.mm(meta_a, meta_b)).total_flops
    if counted != claimed:
        raise HarnessError(
            f"{claimed:,} FLOPs are claimed of a product of {tuple(a_MK.shape)} and {tuple(b_KN.shape)} that has {counted:,}",
            where="a matrix product",
            next_step="count 2 x M x N x K: a multiply-add is two operations",
        )
