"""Series of samples: how often drift is found with and without any, and how often intervals contain the median."""

import numpy as np
import pytest
from scipy import stats

from hyperion.results.series import LEAST_FOR_DRIFT, correlation_time, drift_of, series_estimate, with_neighbours
from hyperion.results.statistics import median_estimate


def test_steady_series_are_not_called_drifting_and_slopes_are():
    random = np.random.default_rng(0)
    steady = [drift_of(random.lognormal(0, 0.1, 100)) for _ in range(500)]
    assert sum(drift.present for drift in steady) <= 3  # 1 in 1000 by chance, and larger than 5 % besides
    series = [random.lognormal(0, 0.02, 100) * np.linspace(1, 1.1, 100) for _ in range(100)]
    rising, falling = [drift_of(one) for one in series], [drift_of(one[::-1]) for one in series]
    assert all(drift.present for drift in rising + falling)
    assert np.mean([drift.relative for drift in rising]) == pytest.approx(0.1 / 1.05, rel=0.1)


@pytest.mark.parametrize("series", [[1.0] * 50, [1.0, 2.0, 3.0], [1.0, 2.0] * 30])
def test_series_without_a_trend_have_none(series):
    assert not drift_of(series).present


def test_a_significant_slope_below_the_tolerance_is_no_drift():
    drift = drift_of(np.linspace(1, 1.03, 1000))
    assert abs(drift.z) > 10 and not drift.present


def test_the_shortest_series_that_is_tested_can_show_a_drift():
    assert drift_of(np.linspace(1, 1.3, LEAST_FOR_DRIFT)).present
    assert not drift_of(np.linspace(1, 1.3, LEAST_FOR_DRIFT - 1)).present
    random = np.random.default_rng(1)
    alarms = sum(abs(drift_of(random.lognormal(0, 0.1, LEAST_FOR_DRIFT)).z) > 3.29 for _ in range(4000))
    # 1 in 1,000 by chance. More than 16 of 4,000 would have a probability of 2e-6.
    assert alarms <= 16


@pytest.mark.parametrize("n", [10, 14, 40, 300])
def test_z_has_the_p_value_of_the_rank_correlation(n):
    random = np.random.default_rng(n)
    for slope in (0.0, 0.5, 1.0, 2.0):
        series = 10 + random.standard_normal(n) + slope * np.linspace(-1, 1, n)
        correlation = stats.spearmanr(series, np.arange(n))
        expected = np.copysign(stats.norm.isf(correlation.pvalue / 2), correlation.statistic)
        # Wallace gives an error of at most 1.5 % of z.
        assert drift_of(series).z == pytest.approx(expected, rel=0.015, abs=0.01)


def _series(random: np.random.Generator, n: int, rho: float) -> np.ndarray:
    """An autoregressive series with variance 1, whose neighbours have the correlation rho."""
    values = random.standard_normal(n)
    for place in range(1, n):
        values[place] = rho * values[place - 1] + np.sqrt(1 - rho**2) * values[place]
    return 100 + values


@pytest.mark.parametrize("rho", [0.0, 0.5, 0.8])
def test_the_correlation_time_of_an_autoregressive_series(rho):
    # The ranks of normal samples have the correlation 6/π·asin(ρ/2), which is lower than ρ by 2 % at most.
    lags = 6 / np.pi * np.arcsin(rho ** np.arange(1, 200) / 2)
    assert correlation_time(_series(np.random.default_rng(3), 20_000, rho)) == pytest.approx(1 + 2 * lags.sum(), rel=0.1)


@pytest.mark.parametrize("series", [[1.0], [1.0, 2.0], [3.0] * 50, [1.0, 2.0] * 30])
def test_short_constant_and_alternating_series_have_no_correlation_time(series):
    assert correlation_time(series) == 1.0
    estimate = median_estimate(series)
    assert with_neighbours(estimate, np.array(series)) == estimate


@pytest.mark.slow
@pytest.mark.parametrize(
    ("rho", "n", "least"), [(0.0, 30, 0.93), (0.5, 30, 0.85), (0.7, 30, 0.80), (0.5, 200, 0.90), (0.7, 200, 0.88)]
)
def test_intervals_of_samples_that_are_like_their_neighbours_contain_the_median(rho, n, least):
    random = np.random.default_rng(5)
    trials = [_series(random, n, rho) for _ in range(300)]
    estimates = [series_estimate(trial) for trial in trials]
    assert np.mean([estimate.ci_low <= 100 <= estimate.ci_high for estimate in estimates]) >= least
    for estimate, trial in zip(estimates, trials, strict=True):
        plain = median_estimate(trial)
        assert min(trial) <= estimate.ci_low <= plain.ci_low and plain.ci_high <= estimate.ci_high <= max(trial)
