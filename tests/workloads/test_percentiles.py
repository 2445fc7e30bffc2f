"""Percentiles: coverage of their intervals, how many samples they need, and failed requests."""

import math

import numpy as np
import pytest

from hyperion.errors import HyperionError
from hyperion.workloads.percentiles import percentile, samples_needed


@pytest.mark.parametrize("share, n", [(0.95, 72), (0.99, 368)])
def test_samples_needed_is_the_smallest_number_with_an_upper_end(share, n):
    assert samples_needed(share) == n
    assert share**n <= 0.025 < share ** (n - 1)
    with pytest.raises(HyperionError, match=f"{n - 1} samples give no interval"):
        percentile(range(n - 1), share)
    estimate = percentile(range(n), share)
    assert estimate.ci_high == n - 1


@pytest.mark.parametrize("share, n", [(0.5, 100), (0.95, 200), (0.99, 400)])
def test_intervals_contain_the_true_percentile_in_at_least_95_percent_of_experiments(share, n):
    generator, truth, found = np.random.default_rng(0), -math.log(1 - share), 0
    for _ in range(1000):
        estimate = percentile(generator.exponential(size=n), share)
        found += estimate.ci_low <= truth <= estimate.ci_high
    # Three standard deviations below 950 of 1,000.
    assert found >= 929
    assert found < 1000, "an interval that always contains the truth is too wide"


def test_a_percentile_is_the_smallest_sample_with_the_share_at_or_below_it():
    assert percentile(range(1, 401), 0.99).value == 396 and percentile(range(1, 101), 0.95).value == 95


def test_failed_requests_count_as_infinite():
    seconds, ok = np.full(1000, 0.01), np.arange(1000) >= 20
    assert percentile(np.where(ok, seconds, math.inf), 0.99).value == math.inf
    assert percentile(seconds[ok], 0.99).value == 0.01
    assert percentile(np.where(np.arange(1000) >= 2, seconds, math.inf), 0.99).value == 0.01
