"""Checks of the measurement itself.

Each check detects an error that leaves the output correct: a clock that stops too early, a cache that was not flushed, a wrong
label, operands that hide mistakes. `hyperion.measure.faults` plants each of these errors and requires that it is detected.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from hyperion.errors import HyperionError
from hyperion.measure.clock.census import count_operations
from hyperion.measure.clock.verify import Verification

# A series drifts if it changes by more than this over its length, and by more than chance explains.
DRIFT_TOLERANCE = 0.05
_DRIFT_Z = 3.29  # two-sided p = 0.001
# Calls in a row may take longer than the samples by this factor plus this time: a launch costs the host some microseconds,
# and other processes on the machine must not make a correct clock fail.
_COVER_FACTOR, _COVER_SLACK_S = 3.0, 2e-4
# One long interruption makes the mean of ten calls many times their median, so a busy machine needs many tries.
_COVER_TRIES, _COVER_BLOCK_S, _COVER_CALLS = 30, 0.02, 10
_COVER_TRIES_IN_HASTE = 5


class HarnessError(HyperionError):
    """Raised when a measurement does not measure what it claims to."""


@dataclass(frozen=True)
class Drift:
    """The drift of a series of samples.

    Args:
        relative: change over the whole series relative to its median, from the slope of a resistant line.
        z: standard normal score of the rank correlation between the samples and their order.
        ends: medians of the first and the last third, in the unit of the samples.
    """

    relative: float
    z: float
    ends: tuple[float, float]

    @property
    def present(self) -> bool:
        """Whether the drift exceeds both the tolerance and chance."""
        return abs(self.relative) > DRIFT_TOLERANCE and abs(self.z) > _DRIFT_Z

    def __str__(self) -> str:
        return f"the samples drifted by {self.relative:+.1%} while they were taken (z = {self.z:+.1f})"


def drift_of(samples) -> Drift:
    """Return the drift of a series: the slope of a resistant line, and Daniels' test for trend.

    Args:
        samples: 1-D, in the order taken. Fewer than 10 samples have no drift.

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
    """Return ranks from 0; equal values share their average rank."""
    _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
    return (np.cumsum(counts) - (counts + 1) / 2)[inverse]


def require_whole_work(
    sample_s: float,
    in_a_row: Callable[[int], float | None],
    again: Callable[[int], float],
    over: Callable[[], bool] = lambda: False,
) -> None:
    """Check that calls in a row, between two synchronisations, take about as long as the clock says.

    They take longer if the clock stops before the work is done (no synchronisation, or work on another stream), and if most
    calls reuse the result of an earlier call.

    Args:
        sample_s: median seconds of one call by the clock.
        in_a_row: makes this number of calls and returns the host's seconds per call, or None if the check does not apply.
        again: times this number of calls again and returns the clock's seconds per call. Load on the machine slows both.
        over: returns whether the time budget is used up.

    Raises:
        HarnessError: calls in a row took more than three times as long in each of thirty blocks (five after the budget).
    """
    calls = max(1, min(_COVER_CALLS, int(_COVER_BLOCK_S / max(sample_s, 1e-9))))
    seen: list[float] = []
    clock_s = [sample_s]
    while len(seen) < (_COVER_TRIES_IN_HASTE if over() else _COVER_TRIES):
        seconds = in_a_row(calls)
        if seconds is None or seconds <= _COVER_FACTOR * sample_s + _COVER_SLACK_S:
            return
        seen.append(seconds)
        # The median, not the maximum: one delayed reading must not excuse a clock that stops early.
        clock_s.append(again(calls))
        sample_s = max(sample_s, float(np.median(clock_s)))
    raise HarnessError(
        f"the clock reports {sample_s * 1e3:.4g} ms per call, but {calls} calls in a row take {min(seen) * 1e3:.4g} ms each "
        f"until the device is idle",
        where="a timed function",
        next_step="synchronise before the clock stops, keep the work on the current stream, and do the work in every call",
    )


def require_flushed(samples: int, flushes: int, read_all: bool = True) -> None:
    """Check that the cache was flushed before every cold sample.

    Args:
        samples: number of cold samples.
        flushes: number of flushes.
        read_all: whether a flush read its whole buffer.

    Raises:
        HarnessError: there are samples without a flush, or the flush did nothing.
    """
    if flushes < samples:
        raise HarnessError(
            f"{samples} cold samples, but the cache was flushed {flushes} times",
            where="a timed function",
            next_step="call `flush` before each sample, or use cold=False and label the samples hot",
        )
    if not read_all:
        raise HarnessError(
            f"{samples} cold samples, but the flush did not read its buffer, so the cache was hot",
            where="a timed function",
            next_step="let `CacheFlush` read its whole buffer, or use cold=False and label the samples hot",
        )


def require_cache_label(label: str | None, cold: bool) -> None:
    """Check the `cache` parameter of a row against the samples.

    Args:
        label: "cold", "hot", or None if the row has no such parameter.
        cold: whether the cache was flushed before each sample.

    Raises:
        HarnessError: the label is wrong.
    """
    taken = "cold" if cold else "hot"
    if label in ("cold", "hot") and label != taken:
        raise HarnessError(
            f"samples with {taken} caches are labelled {label}", where="sample_frame", next_step=f"label them {taken}"
        )


def require_passed(verification: Verification) -> None:
    """Check a verification of the operands, without which the rate is that of another quantity.

    Raises:
        HarnessError: it failed; the message contains its name, error and tolerance.
    """
    if not verification.passed:
        raise HarnessError(
            f"{verification.name}: they are not (error {verification.error:.4g} above {verification.tolerance:.4g})",
            where="the operands of a measurement",
            next_step="draw the operands from the distribution of their label, or correct the label",
        )


def require_product_flops(claimed: int, a_MK: torch.Tensor, b_KN: torch.Tensor) -> None:
    """Check a number of FLOPs against PyTorch's count for this product.

    Args:
        claimed: FLOPs; a multiply-add counts as 2.
        a_MK, b_KN: operands; only their shapes are used.

    Raises:
        HarnessError: the numbers differ.
    """
    meta_a, meta_b = (torch.empty(operand.shape, device="meta") for operand in (a_MK, b_KN))
    counted = count_operations(lambda: torch.mm(meta_a, meta_b)).total_flops
    if counted != claimed:
        raise HarnessError(
            f"{claimed:,} FLOPs are claimed for a product of {tuple(a_MK.shape)} and {tuple(b_KN.shape)} that has {counted:,}",
            where="a matrix product",
            next_step="count 2 x M x N x K: a multiply-add counts as two operations",
        )
