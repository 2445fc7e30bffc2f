"""Percentiles of latencies, with distribution-free confidence intervals.

The two ends of the interval are elements of the sorted samples. The number of samples below the true percentile has a binomial
distribution. This is true for every distribution of the latencies, if the latencies are independent. On a GPU, whose clock
changes in steps, the latencies of calls in a row are alike, and the interval can be several times too narrow. A bootstrap cannot
give such an interval for the 99th percentile of few samples, because it never draws a value above the largest sample.

Source: Conover, Practical Nonparametric Statistics, 3rd edition, section 3.2.
"""

import math
from collections.abc import Sequence

import numpy as np

from hyperion.errors import HyperionError
from hyperion.results import Estimate, nearest_rank

CONFIDENCE = 0.95
LATENCIES = {0.5: "latency_p50_s", 0.95: "latency_p95_s", 0.99: "latency_p99_s"}  # metric of each percentile


def samples_needed(share: float) -> int:
    """Return the smallest number of samples for which a percentile has a confidence interval.

    With fewer samples, the largest sample is below the true percentile with a probability of more than 2.5 %, so no sample can be
    the upper end of the interval. 72 samples are needed for the 95th percentile, and 368 for the 99th.

    Args:
        share: the percentile as a share, such as 0.99.
    """
    tail = (1 - CONFIDENCE) / 2
    return math.ceil(math.log(tail) / math.log(max(share, 1 - share)))


def percentile(samples: Sequence[float] | np.ndarray, share: float) -> Estimate:
    """Return a percentile by the nearest-rank method, with its 95 % confidence interval.

    Args:
        samples: latencies of all requests. The latency of a request that failed or timed out is infinite, because its caller
            never got the answer. Otherwise, a server that refuses every slow request would have excellent percentiles.
        share: the percentile as a share, such as 0.99.

    Raises:
        HyperionError: there are fewer samples than `samples_needed(share)`.
    """
    from scipy import stats  # slow to import

    n, needed = len(samples), samples_needed(share)
    if n < needed:
        raise HyperionError(
            f"{n} samples give no interval of the percentile {100 * share:g}",
            where="percentile",
            next_step=f"take {needed} samples",
        )
    value = nearest_rank(samples, share)
    interval = stats.quantile_test(samples, p=share).confidence_interval(CONFIDENCE)
    return Estimate(value, min(value, float(interval.low)), max(value, float(interval.high)), n)
