"""Fit latency and bandwidth of messages, and derive the bucket size that uses a given share of the bandwidth."""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from hyperion.errors import HyperionError
from hyperion.results import Estimate, estimates_of_medians
from hyperion.units import GIB, KIB, MIB

_SMALLEST_S_PER_GB = 1e-12


@dataclass(frozen=True)
class LatencyBandwidth:
    """The fit of time = latency + bytes / bandwidth.

    Args:
        latency_s: seconds of a message of size 0.
        s_per_gb: seconds per GB (1e9 bytes), the inverse of the bandwidth.
        half_rate_gb: size in GB that reaches half of the bandwidth (n_1/2 in Hockney's paper): its time is twice the latency.
            Meaningless if the interval of `s_per_gb` reaches 0, because the times then do not grow with the size.
        deviation: largest relative distance of a median from the fit; large if the protocol changes with the size.
    """

    latency_s: Estimate
    s_per_gb: Estimate
    half_rate_gb: Estimate
    deviation: float


def fit_latency_bandwidth(gigabytes: Sequence[float], times_s: Sequence[Sequence[float]]) -> LatencyBandwidth:
    """Fit latency and bandwidth by least squares of the *relative* errors.

    With absolute errors, the largest messages would decide the fit and the latency would be arbitrary.

    Args:
        gigabytes: message sizes in units of 1e9 bytes; at least two different ones.
        times_s: samples in seconds for each size.

    Source: Hockney, The communication challenge for MPP, Parallel Computing 20 (1994) 389-398, for the model.
    """
    # Imported here because it takes half a second in every worker process.
    from scipy.optimize import nnls

    size = np.asarray(gigabytes, dtype=np.float64)

    def fit(medians: np.ndarray) -> list[float]:
        # Non-negative least squares: a negative latency or cost per byte has no meaning.
        scaled = nnls(np.column_stack([1 / medians, size / size.max() / medians]), np.ones(len(size)))[0]
        latency_s, s_per_gb = scaled / [1, size.max()]
        return [latency_s, s_per_gb, latency_s / max(s_per_gb, _SMALLEST_S_PER_GB)]

    latency, slope, half_rate = estimates_of_medians(times_s, fit)
    medians = np.array([np.median(samples) for samples in times_s])
    deviation = np.max(np.abs((latency.value + size * slope.value) / medians - 1))
    return LatencyBandwidth(latency, slope, half_rate, float(deviation))


def half_rate_size(sizes: Sequence[float], rates: Sequence[float]) -> float | None:
    """Return the size at which the rate first reaches half of its maximum (n_1/2 in Hockney's paper).

    Interpolates over the logarithm of the size. Returns None if the smallest size already reaches it.
    """
    ordered = sorted(zip(sizes, rates, strict=True))
    half = max(rates) / 2
    for (size_a, rate_a), (size_b, rate_b) in itertools.pairwise(ordered):
        if rate_a < half <= rate_b:
            share = (half - rate_a) / (rate_b - rate_a)
            return float(size_a * (size_b / size_a) ** share)
    return None


SHARE = 0.9
# torch.nn.parallel.DistributedDataParallel's own, in MiB.
DDP_DEFAULT_MIB = 25


@dataclass(frozen=True)
class BucketSize:
    """The message size that reaches a share of the asymptotic bandwidth of a collective.

    Args:
        collective: name of the collective.
        share: share of the asymptotic bandwidth.
        bytes: S as the collective counts it; None if no size can be derived.
        reason: why there is no size, or a warning about it, else "".
    """

    collective: str
    share: float
    bytes: Estimate | None
    reason: str = ""

    def words(self, element_bytes: int = 2) -> str:
        """Describe the size and what it means for DDP or FSDP.

        Args:
            element_bytes: bytes of a transferred gradient or parameter; 2 for bf16.
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
    """Return the size at which latency takes 1 - `share` of the time: share / (1 - share) x latency x bandwidth.

    Args:
        fit: fit over the gigabytes that cross a link, bus factor x S.
        collective: name of the collective.
        bus_factor: bus factor for the ranks of the fit.
        measured_bytes: the fitted sizes S. A result outside of them is an extrapolation, and its `reason` says so.
        share: between 0 and 1, exclusive.

    Raises:
        HyperionError: the share is out of range.
    """
    if not 0 < share < 1:
        raise HyperionError(
            f"the share of the bandwidth is {share:g}", where="recommended_bucket", next_step="pass a share between 0 and 1"
        )
    crossing = fit.half_rate_gb
    # If a byte may cost nothing, no size is the right one.
    if fit.s_per_gb.ci_low <= 0:
        return BucketSize(collective, share, None, "the times do not grow with the size by more than they scatter")
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
        return f"{buckets} (its default of {DDP_DEFAULT_MIB} MiB is large enough; larger ones start later and overlap less)"
    return f"{buckets} (its default of {DDP_DEFAULT_MIB} MiB leaves bandwidth unused)"


def _fsdp(size: float, element_bytes: int) -> str:
    return f"; FSDP: units of {size / element_bytes / 1e6:.3g} M parameters or more ({element_bytes} bytes each)"


_MEANINGS = {"all_reduce": _ddp, "all_gather": _fsdp, "reduce_scatter": _fsdp}


def _size(size: float) -> str:
    """Format bytes in binary units."""
    for unit, factor in (("GiB", GIB), ("MiB", MIB), ("KiB", KIB)):
        if size >= factor:
            return f"{size / factor:.3g} {unit}"
    return f"{size:.0f} B"
