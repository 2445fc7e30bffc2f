"""The fit finds the line that made the data, small messages included, and the half-rate size lies where arithmetic says."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hyperion.measure import fit_latency_bandwidth, half_rate_size

SIZES = np.array([64 * 8.0**power for power in range(9)])


@pytest.mark.slow
@settings(max_examples=15, deadline=None)
@given(st.floats(1e-6, 1e-3), st.floats(0.1, 1000.0))
def test_latency_and_bandwidth_are_recovered(latency, gb_per_s):
    times = latency + SIZES / 1e9 / gb_per_s
    fit = fit_latency_bandwidth(SIZES / 1e9, [[t, t, t] for t in times])
    assert fit.latency_s.value == pytest.approx(latency, rel=1e-6)
    assert 1 / fit.s_per_gb.value == pytest.approx(gb_per_s, rel=1e-6)
    assert fit.deviation < 1e-6


def test_noise_is_in_the_interval_and_a_bend_in_the_deviation():
    random = np.random.default_rng(0)
    times = 20e-6 + SIZES / 300e9
    fit = fit_latency_bandwidth(SIZES / 1e9, [t * random.lognormal(0, 0.05, 40) for t in times])
    assert fit.latency_s.ci_low <= 20e-6 <= fit.latency_s.ci_high
    slope = 1 / 300
    assert fit.s_per_gb.ci_low <= slope <= fit.s_per_gb.ci_high
    assert fit.deviation < 0.1
    bent = times * np.where(np.arange(9) == 4, 2, 1)
    assert fit_latency_bandwidth(SIZES / 1e9, [[t] * 30 for t in bent]).deviation > 0.3


def test_times_that_do_not_grow_have_no_slope():
    fit = fit_latency_bandwidth([1e-9, 2e-9, 3e-9], [[3e-5] * 5, [2e-5] * 5, [1e-5] * 5])
    assert fit.s_per_gb.value == 0 and fit.latency_s.value > 0


def test_half_rate_lies_at_latency_times_bandwidth():
    rates = SIZES / (20e-6 + SIZES / 300e9) / 1e9
    assert half_rate_size(SIZES, rates) == pytest.approx(20e-6 * 300e9, rel=0.25)  # between sizes 8 times apart
    assert half_rate_size([10, 20], [1.0, 4.0]) == pytest.approx(10 * 2 ** (1 / 3))
    assert half_rate_size([10, 20, 40], [3.0, 4.0, 5.0]) is None
