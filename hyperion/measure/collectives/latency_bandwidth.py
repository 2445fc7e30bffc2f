"""Fit the latency and the bandwidth of messages, and derive the message size that reaches a given share of the bandwidth.

This message size helps to choose the bucket size of DDP and the unit size of FSDP.
"""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from hyperion.errors import HyperionError
from hyperion.measure.fits import fit_nonnegative
from hyperion.results import Estimate, estimates_of_medians
from hyperion.units import GIB, KIB, MIB

_SMALLEST_S_PER_GB = 1e-12


@dataclass(frozen=True)
class LatencyBandwidth:
    """The result of fitting time = latency + bytes / bandwidth to measured times.

    Args:
        latency_s: time of a message of size 0 in seconds.
        s_per_gb: seconds per GB (1e9 bytes), the inverse of the bandwidth.
        half_rate_gb: message size in GB at which half of the bandwidth is reached (n_1/2 in Hockney's paper). A message of this
            size takes twice the latency. If the interval of `s_per_gb` contains 0, the value is meaningless, because the times
            may not grow with the size.
        deviation: largest relative difference between a median time and the fit. It is large if the library changes its protocol
            with the message size.
    """

    latency_s: Estimate
    s_per_gb: Estimate
    half_rate_gb: Estimate
    deviation: float


def fit_latency_bandwidth(gigabytes: Sequence[float], times_s: Sequence[Sequence[float]]) -> LatencyBandwidth:
    """Fit latency and bandwidth by least squares on the relative errors.

    Args:
        gigabytes: message sizes in GB (1e9 bytes). At least two of them must be different.
        times_s: for each message size, the samples in seconds.

    Source of the model: Hockney, The communication challenge for MPP, Parallel Computing 20 (1994) 389-398.
    """
    size = np.asarray(gigabytes, dtype=np.float64)
    columns = np.column_stack([np.ones(len(size)), size])

    def fit(medians: np.ndarray) -> list[float]:
        latency_s, s_per_gb = fit_nonnegative(columns, medians)
        return [latency_s, s_per_gb, latency_s / max(s_per_gb, _SMALLEST_S_PER_GB)]

    latency, slope, half_rate = estimates_of_medians(times_s, fit)
    medians = np.array([np.median(samples) for samples in times_s])
    deviation = np.max(np.abs((latency.value + size * slope.value) / medians - 1))
    return LatencyBandwidth(latency, slope, half_rate, float(deviation))


def half_rate_size(sizes: Sequence[float], rates: Sequence[float]) -> float | None:
    """Return the smallest size at which the rate is half of the maximum rate (n_1/2 in Hockney's paper).

    Between two sizes, the rate is interpolated over the logarithm of the size. Return None if the rate of the smallest size is
    already at least half of the maximum.

    Args:
        sizes: message sizes.
        rates: for each message size, the measured rate.
    """
    ordered = sorted(zip(sizes, rates, strict=True))
    half = max(rates) / 2
    for (size_a, rate_a), (size_b, rate_b) in itertools.pairwise(ordered):
        if rate_a < half <= rate_b:
            share = (half - rate_a) / (rate_b - rate_a)
            return float(size_a * (size_b / size_a) ** share)
    return None


def share_of_best(size: float, sizes: Sequence[float], rates: Sequence[float]) -> float:
    """Return the measured rate at a size as a share of the highest measured rate, without a fit.

    Between two measured sizes, the rate is interpolated over the logarithm of the size. Outside the measured range, the rate of
    the nearest measured size is used.

    Args:
        size: message size.
        sizes, rates: for each measured message size, the measured rate.
    """
    ordered = sorted(zip(sizes, rates, strict=True))
    logarithms = [math.log(measured) for measured, _ in ordered]
    return float(np.interp(math.log(size), logarithms, [rate for _, rate in ordered])) / max(rates)


SHARE = 0.9
# Reason why no size can be derived from a fit.
FLAT = "the times do not grow with the size by more than they scatter"
# Default value of bucket_cap_mb in torch.nn.parallel.DistributedDataParallel.
DDP_DEFAULT_MIB = 25


@dataclass(frozen=True)
class BucketSize:
    """The smallest message size that reaches a given share of the asymptotic bandwidth of a collective.

    Args:
        collective: name of the collective.
        share: share of the asymptotic bandwidth.
        bytes: message size S in bytes (see `Collective.size`). None if it cannot be derived.
        reason: reason why `bytes` is None, or a warning about the size. "" if there is neither.
    """

    collective: str
    share: float
    bytes: Estimate | None
    reason: str = ""

    def words(self, element_bytes: int = 2) -> str:
        """Return a sentence with the recommended message size and the corresponding settings of DDP or FSDP.

        Args:
            element_bytes: bytes per transferred element of a gradient or parameter, for example 2 for bf16.
        """
        if self.bytes is None:
            return f"{self.collective}: no size recommended: {self.reason}"
        size, low, high = (_size(value) for value in (self.bytes.value, self.bytes.ci_low, self.bytes.ci_high))
        text = f"{self.collective}: {self.share:.0%} of its bandwidth from {size} on (95 % CI {low} to {high})"
        text += _MEANINGS.get(self.collective, lambda *_: "")(self.bytes.value, element_bytes)
        return f"{text}; {self.reason}" if self.reason else text


def recommended_bucket(
    fit: LatencyBandwidth, collective: str, bus_factor: float, measured_bytes: Sequence[int], share: float = SHARE
) -> BucketSize:
    """Return the message size at which a collective reaches a given share of its bandwidth.

    At this size, the latency is 1 - `share` of the total time. The number of bytes that cross a link is then
    share / (1 - share) x latency x bandwidth.

    Args:
        fit: result of `fit_latency_bandwidth` for this collective. The message sizes of the fit must be the amounts of data that
            cross a link in GB, which are bus factor x S / 1e9.
        collective: name of the collective.
        bus_factor: bus factor of the collective for the number of ranks of the fit.
        measured_bytes: the measured message sizes S in bytes. If the result is larger than all measured sizes, it is an
            extrapolation, and its `reason` contains a warning.
        share: share of the bandwidth, above 0 and below 1.

    Raises:
        HyperionError: the share is out of range.
    """
    if not 0 < share < 1:
        raise HyperionError(
            f"the share of the bandwidth is {share:g}, but must be between 0 and 1",
            where="recommended_bucket",
            next_step="pass a share between 0 and 1",
        )
    crossing = fit.half_rate_gb
    # If the time per byte may be 0, every size reaches the bandwidth, so no size can be derived.
    if fit.s_per_gb.ci_low <= 0:
        return BucketSize(collective, share, None, FLAT)
    # This solves share = (bytes / bandwidth) / (latency + bytes / bandwidth) for bytes. n_1/2 is latency times bandwidth.
    size = crossing.map(lambda gigabytes: share / (1 - share) * gigabytes * 1e9 / bus_factor)
    warnings = []
    if size.value > max(measured_bytes):
        warnings.append(f"beyond the largest size measured, {_size(max(measured_bytes))}")
    if fit.deviation > 0.5:
        warnings.append(f"the measured times lie up to {fit.deviation:.0%} off the fitted line")
    return BucketSize(collective, share, size, "; ".join(warnings))


def _ddp(size: float, element_bytes: int) -> str:
    buckets = f"; DDP: bucket_cap_mb={max(1, math.ceil(size / MIB))} or more"
    if size <= DDP_DEFAULT_MIB * MIB:
        return (
            f"{buckets} (by the fit, its default of {DDP_DEFAULT_MIB} MiB is enough; larger buckets start later and overlap less)"
        )
    return f"{buckets} (by the fit, its default of {DDP_DEFAULT_MIB} MiB leaves bandwidth unused)"


def _fsdp(size: float, element_bytes: int) -> str:
    return f"; FSDP: units of {size / element_bytes / 1e6:.3g} M parameters or more ({element_bytes} bytes each)"


_MEANINGS = {"all_reduce": _ddp, "all_gather": _fsdp, "reduce_scatter": _fsdp}


def _size(size: float) -> str:
    """Format a size in bytes in binary units."""
    for unit, factor in (("GiB", GIB), ("MiB", MIB), ("KiB", KIB)):
        if size >= factor:
            return f"{size / factor:.3g} {unit}"
    return f"{size:.0f} B"
