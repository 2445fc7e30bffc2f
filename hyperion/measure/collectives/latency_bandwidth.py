"""The two numbers behind a curve of message sizes: what a message costs however small, and the rate of large ones."""

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
    """time = latency + bytes / bandwidth, fitted.

    Args:
        latency_s: seconds of a message without bytes.
        s_per_gb: seconds that another GB (1e9 bytes) takes; its inverse is the bandwidth.
        half_rate_gb: size that takes twice the latency, in GB: there half of the bandwidth is reached. Hockney calls it n_1/2.
            No size where the interval of `s_per_gb` reaches 0: then the times do not grow with it.
        deviation: largest relative distance of a median from the fit; protocols that change with the size make it large.
    """

    latency_s: Estimate
    s_per_gb: Estimate
    half_rate_gb: Estimate
    deviation: float


def fit_latency_bandwidth(gigabytes: Sequence[float], times_s: Sequence[Sequence[float]]) -> LatencyBandwidth:
    """Fit by least squares of *relative* distances: else the largest messages alone would decide, the latency not at all.

    Args:
        gigabytes: of each message size, in units of 1e9 bytes; at least two different ones.
        times_s: samples in seconds of each size.

    Source: Hockney, The communication challenge for MPP, Parallel Computing 20 (1994) 389-398, for the model.
    """
    # Imported where it is used: it takes half a second, which every worker process would pay.
    from scipy.optimize import nnls

    size = np.asarray(gigabytes, dtype=np.float64)

    def fit(medians: np.ndarray) -> np.ndarray:
        # Neither a negative latency nor a negative cost of a byte means anything.
        scaled = nnls(np.column_stack([1 / medians, size / size.max() / medians]), np.ones(len(size)))[0]
        latency_s, s_per_gb = scaled / [1, size.max()]
        return np.array([latency_s, s_per_gb, latency_s / max(s_per_gb, _SMALLEST_S_PER_GB)])

    latency, slope, half_rate = estimates_of_medians(times_s, fit)
    medians = np.array([np.median(samples) for samples in times_s])
    deviation = np.max(np.abs((latency.value + size * slope.value) / medians - 1))
    return LatencyBandwidth(latency, slope, half_rate, float(deviation))


def half_rate_size(sizes: Sequence[float], rates: Sequence[float]) -> float | None:
    """The size at which a curve of rates first reaches half its maximum, interpolated over the size's logarithm.

    None when the smallest size is already there. Hockney calls it n_1/2.
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
    """The message size that reaches a share of a collective's asymptotic bandwidth.

    Args:
        collective: whose.
        share: of the bandwidth that endless messages have.
        bytes: S, as the collective counts it; None where no size can be told.
        reason: why not, or what to know beside the number, else "".
    """

    collective: str
    share: float
    bytes: Estimate | None
    reason: str = ""

    def words(self, element_bytes: int = 2) -> str:
        """What it means for who trains with it.

        Args:
            element_bytes: of a gradient or parameter as it travels; 2 for bf16.
        """
        if self.bytes is None:
            return f"{self.collective}: no size recommended: {self.reason}"
        size, low, high = (_size(value) for value in (self.bytes.value, self.bytes.ci_low, self.bytes.ci_high))
        told = f"{self.collective}: {self.share:.0%} of its bandwidth from {size} on (95 % CI {low} to {high})"
        told += _MEANINGS.get(self.collective, lambda *_: "")(self.bytes.value, element_bytes)
        return f"{told}; {self.reason}" if self.reason else told


def recommended_bucket(
    fit: LatencyBandwidth, collective: str, bus_factor: float, measured_bytes: Sequence[int], share: float = SHARE
) -> BucketSize:
    """The size at which latency takes no more than 1 - `share` of the time: share / (1 - share) x latency x bandwidth.

    Args:
        fit: over the gigabytes that cross a link, bus factor x S.
        collective: its name.
        bus_factor: for the ranks of the fit.
        measured_bytes: the sizes S that were fitted; beyond them the answer is an extrapolation, and says so.
        share: above 0, below 1.

    Raises:
        HyperionError: the share is no share.
    """
    if not 0 < share < 1:
        raise HyperionError(
            f"a share of {share:g} of the bandwidth", where="recommended_bucket", next_step="choose one between 0 and 1"
        )
    crossing = fit.half_rate_gb
    # At the lower end of its interval a byte costs nothing: then no size is the one.
    if fit.s_per_gb.ci_low <= 0:
        return BucketSize(collective, share, None, "the times do not grow with the size by more than they scatter")
    size = crossing.map(lambda gigabytes: share / (1 - share) * gigabytes * 1e9 / bus_factor)
    said = []
    if size.value > max(measured_bytes):
        said.append(f"beyond the largest size measured, {_size(max(measured_bytes))}")
    if fit.deviation > 0.5:
        said.append(f"the measured times lie up to {fit.deviation:.0%} off the fitted line")
    return BucketSize(collective, share, size, "; ".join(said))


def _ddp(size: float, element_bytes: int) -> str:
    buckets = f"; DDP: bucket_cap_mb={max(1, math.ceil(size / MIB))} or more"
    if size <= DDP_DEFAULT_MIB * MIB:
        return f"{buckets} (its default of {DDP_DEFAULT_MIB} MiB is large enough; larger ones start later and overlap less)"
    return f"{buckets} (its default of {DDP_DEFAULT_MIB} MiB leaves bandwidth unused)"


def _fsdp(size: float, element_bytes: int) -> str:
    return f"; FSDP: units of {size / element_bytes / 1e6:.3g} M parameters or more ({element_bytes} bytes each)"


_MEANINGS = {"all_reduce": _ddp, "all_gather": _fsdp, "reduce_scatter": _fsdp}


def _size(size: float) -> str:
    """Bytes in words, powers of two."""
    for unit, factor in (("GiB", GIB), ("MiB", MIB), ("KiB", KIB)):
        if size >= factor:
            return f"{size / factor:.3g} {unit}"
    return f"{size:.0f} B"
