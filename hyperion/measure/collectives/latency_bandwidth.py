"""The two numbers behind a curve of message sizes: what a message costs however small, and the rate of large ones."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from hyperion.results import Estimate, estimates_of_medians

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
