"""Statistics against published or computable values."""

import math

import numpy as np
import pytest

from hyperion.results import (
    Estimate,
    estimates_of_medians,
    independent_ratio_estimate,
    mean_estimate,
    median_estimate,
    nearest_rank,
    proportion_estimate,
    ratio_estimate,
)
from hyperion.results.randomization import fenced, log_deviations, randomization_test, side_contrasts
from hyperion.results.statistics import _medians, launches_estimate


def coverage(truth, estimates):
    return np.mean([e.ci_low <= truth <= e.ci_high for e in estimates])


@pytest.mark.parametrize("n", [1, 2, 3, 30, 31])
def test_medians_of_resamples_have_the_bits_of_numpys(n):
    values = np.random.default_rng(n).normal(0, 1, (200, n)).round(2)
    expected = np.median(values, axis=1)
    np.testing.assert_array_equal(_medians(values), expected)


@pytest.mark.slow
def test_the_bootstrap_interval_covers_the_median_95_times_in_100():
    random = np.random.default_rng(1)
    # The median of a log-normal is exp(0) = 1: skewed, as times are.
    estimates = [median_estimate(random.lognormal(0, 0.3, 40), seed=i) for i in range(400)]
    assert 0.92 <= coverage(1.0, estimates) <= 0.985


@pytest.mark.slow
@pytest.mark.parametrize("n", [6, 9, 20])
def test_the_interval_of_few_samples_covers_the_median_as_often_as_it_says(n):
    generator = np.random.default_rng(1)
    found = [median_estimate(generator.lognormal(0, 1, n)) for _ in range(1000)]
    assert np.mean([one.ci_low <= 1 <= one.ci_high for one in found]) >= 0.935  # 0.95 less two standard errors
    few = median_estimate([3.0, 1.0, 2.0])
    assert (few.value, few.ci_low, few.ci_high) == (2.0, 1.0, 3.0)


@pytest.mark.parametrize(
    ("samples", "share", "expected"),
    [
        (range(1, 101), 0.5, 50),
        (range(1, 101), 0.95, 95),
        (range(1, 101), 0.99, 99),
        (range(1, 101), 0.07, 7),
        (range(1, 101), 1.0, 100),
        (range(100, 0, -1), 0.95, 95),
        (range(1, 21), 0.95, 19),
        ([3.0], 0.99, 3),
        ([1.0] * 98 + [math.inf] * 2, 0.98, 1),
        ([1.0] * 98 + [math.inf] * 2, 0.99, math.inf),
    ],
)
def test_a_nearest_rank_is_the_smallest_sample_with_the_share_at_or_below_it(samples, share, expected):
    assert nearest_rank(samples, share) == expected


def test_a_nearest_rank_of_nan_is_nan():
    assert math.isnan(nearest_rank([1.0, 2.0, math.nan], 0.5))


def test_the_ratio_interval_covers_the_ratio_and_cancels_shared_drift():
    random = np.random.default_rng(2)
    estimates, widths_unpaired = [], []
    for seed in range(300):
        drift = np.exp(np.linspace(0, 0.5, 40))
        a = drift * random.lognormal(0, 0.02, 40)
        b = 1.1 * drift * random.lognormal(0, 0.02, 40)
        estimates.append(ratio_estimate(a, b, seed=seed))
        widths_unpaired.append(ratio_estimate(a, random.permutation(b), seed=seed))
    assert coverage(1.1, estimates) >= 0.9
    assert np.median([e.value for e in estimates]) == pytest.approx(1.1, rel=0.01)
    assert np.median([e.ci_high - e.ci_low for e in estimates]) < 0.6 * np.median([e.ci_high - e.ci_low for e in widths_unpaired])


def test_a_ratio_of_unpaired_series_is_refused():
    with pytest.raises(ValueError, match="3 samples of A and 2 of B"):
        ratio_estimate([1, 2, 3], [1, 2])


def test_nothing_is_estimated_from_nothing_or_from_nan():
    for bad in ([], [1.0, np.nan], [np.inf]):
        with pytest.raises(ValueError, match="needs finite samples"):
            median_estimate(bad)


def test_estimates_are_reproducible_and_contain_their_value():
    samples = np.random.default_rng(3).exponential(1, 7)
    assert median_estimate(samples, seed=5) == median_estimate(samples, seed=5)
    for estimate in (median_estimate(samples), median_estimate([2.0])):
        assert estimate.ci_low <= estimate.value <= estimate.ci_high


def test_mapping_a_time_to_a_rate_swaps_the_ends():
    rate = median_estimate([1.0, 2.0, 4.0]).map(lambda time: 8 / time)
    assert (rate.value, rate.ci_low, rate.ci_high) == (4.0, 2.0, 8.0)


def test_a_magnitude_has_no_sign_and_its_interval_starts_at_zero_where_the_sign_is_open():
    assert Estimate(-2.0, -3.0, -1.0, 9).magnitude() == Estimate(2.0, 1.0, 3.0, 9)
    assert Estimate(-1.0, -3.0, 2.0, 9).magnitude() == Estimate(1.0, 0.0, 3.0, 9)


def test_wilson_interval_against_its_formula():
    # Newcombe, Statistics in Medicine 17 (1998) 857-872, Table I: 81/263: 0.2553 to 0.3662; 0/20: 0 to 0.1611.
    first, second = proportion_estimate(81, 263), proportion_estimate(0, 20)
    assert (first.ci_low, first.ci_high) == pytest.approx((0.2553, 0.3662), abs=5e-5)
    assert (second.ci_low, second.ci_high) == pytest.approx((0.0, 0.1611), abs=5e-5)


def test_a_mean_of_few_against_students_table():
    found = mean_estimate([1.0, 2.0, 3.0])
    reach = 4.302653 / 3**0.5  # t of 2 degrees of freedom at 97.5 %, times the standard deviation 1
    assert (found.value, found.n) == (2.0, 3)
    assert (found.ci_low, found.ci_high) == pytest.approx((2 - reach, 2 + reach))
    with pytest.raises(ValueError, match="no spread"):
        mean_estimate([1.0])


def test_each_of_two_sets_takes_a_degree_of_freedom_from_their_deviation():
    assert log_deviations(np.array([[0.0], [2.0], [5.0], [7.0]]), 2) == pytest.approx([math.sqrt(2)])


def test_a_randomization_test_against_all_divisions_by_hand():
    # Two launches a side: 6 divisions, 3 but for the sign. Of the first value only the observed one separates 0, 0 from 1, 1;
    # the second one is separated by another division, so that alone it has p = 1.
    values = np.array([[0.0, 0.0], [0.0, 1.0], [1.0, 0.0], [1.0, 1.0]])
    found = randomization_test(values, 2, 0.03)
    assert found.differences == pytest.approx([1.0, 0.0])
    assert found.largest[0] == pytest.approx(1.0) and len(found.largest) == 6
    # In 4 of 6 divisions one of the two values reaches the first one's statistic.
    assert found.p_values == pytest.approx([4 / 6, 1.0])
    assert randomization_test(values[:, :1], 2, 0.03).p_values == pytest.approx([2 / 6])
    assert randomization_test(values[:, :1], 2, 2.0).p_values == pytest.approx([1.0])  # e - 1 is less than 200 %


def test_a_value_that_differs_for_certain_is_found_and_a_constant_is_not():
    values = np.repeat([[0.0, 0.0], [0.1, 0.0]], 5, axis=0)
    assert randomization_test(values, 5, 0.03).p_values == pytest.approx([2 / 252, 1.0])


def test_what_changed_more_is_left_out_of_the_comparison_of_what_changed_less():
    random = np.random.default_rng(10)
    values = 0.02 * random.standard_normal((10, 30))
    values[5:, :20] += 0.05
    found = randomization_test(values, 5, 0.03)
    differences = side_contrasts(5, 5, 10_000) @ (values - values.mean(axis=0))
    statistics = np.abs(differences) / np.linalg.norm(values - values.mean(axis=0), axis=0)
    statistics[np.abs(np.expm1(differences)) <= 0.03] = 0
    expected, least = np.empty(30), 0.0
    for place in np.argsort(-statistics[0], kind="stable"):
        weaker = statistics[:, statistics[0] <= statistics[0, place]]
        least = expected[place] = max(least, np.mean(weaker.max(axis=1) >= statistics[0, place] - 1e-12))
    assert found.p_values == pytest.approx(expected)
    in_one_step = np.array([np.mean(found.largest >= t - 1e-12) for t in statistics[0]])
    assert (found.p_values <= in_one_step + 1e-12).all()
    assert sum((found.p_values <= 0.05) & (in_one_step > 0.05)) == 3  # which one step would not have found


def test_divisions_are_all_or_a_sample_and_the_observed_one_is_first():
    everything = side_contrasts(5, 5, 10_000)
    assert everything.shape == (252, 10) and len({row.tobytes() for row in everything}) == 252
    sampled = side_contrasts(12, 10, 1000)
    assert sampled.shape == (1000, 22)
    for contrasts, launches_a in ((everything, 5), (sampled, 12)):
        assert (contrasts[0, :launches_a] < 0).all() and (contrasts[0, launches_a:] > 0).all()
        assert np.allclose(contrasts.sum(axis=1), 0) and ((contrasts < 0).sum(axis=1) == launches_a).all()


def test_fences_hold_one_stalled_launch_and_leave_two_sides_as_they_are():
    random = np.random.default_rng(5)
    values = 0.01 * random.standard_normal((10, 1))
    stalled = values.copy()
    stalled[3] += 1.0
    assert fenced(stalled, 5)[3] < 0.15 and np.array_equal(np.delete(fenced(stalled, 5), 3), np.delete(stalled, 3))
    for launches_a, launches_b in ((5, 5), (5, 6), (5, 40)):  # however different the sides, neither is an outlier
        sides = 0.01 * random.standard_normal((launches_a + launches_b, 1))
        sides[launches_a:] += 1.0
        assert np.allclose(fenced(sides, launches_a), sides, atol=0.05)
    assert np.array_equal(fenced(np.array([[0.0], [5.0]]), 1), [[0.0], [5.0]])


def test_a_ratio_of_independent_series_covers_the_true_one_and_takes_other_lengths():
    random, hits = np.random.default_rng(7), 0
    for seed in range(100):
        slow, fast = random.normal(2.0, 0.05, 40), random.normal(1.0, 0.03, 60)
        found = independent_ratio_estimate(fast, slow, seed)
        hits += found.ci_low <= 2.0 <= found.ci_high
    assert hits >= 88 and found.n == 40


def test_series_that_are_not_pairs_are_resampled_at_different_positions():
    samples = np.random.default_rng(6).lognormal(0, 0.1, 40)
    found = independent_ratio_estimate(samples, samples)
    assert found.ci_low < 0.99 and found.ci_high > 1.01  # at the same positions, each ratio would be exactly 1


def test_the_series_of_a_function_of_medians_are_resampled_at_different_positions():
    samples = np.random.default_rng(6).lognormal(0, 0.1, 40)
    (found,) = estimates_of_medians([samples, samples], lambda medians: [medians[1] / medians[0]])
    assert found.ci_low < 0.99 and found.ci_high > 1.01


@pytest.mark.slow
def test_a_fit_through_medians_covers_the_true_line():
    random, x = np.random.default_rng(3), np.array([1.0, 2.0, 5.0])
    least_squares = np.linalg.pinv(np.vander(x, 2))  # np.polyfit would solve the same system 120,000 times
    fits = [
        estimates_of_medians(
            [random.normal(3 + 2 * at, 0.1, 30 + place) for place, at in enumerate(x)],
            lambda medians: least_squares @ medians,
            seed=trial,
        )
        for trial in range(60)
    ]
    slopes, intercepts = zip(*fits, strict=True)
    assert coverage(2.0, slopes) >= 0.85 and coverage(3.0, intercepts) >= 0.85
    assert {fit.n for fit in slopes} == {30}


def test_the_interval_over_launches_covers_their_median_and_one_launch_has_its_own_interval():
    assert launches_estimate([1.0], [(1.0, 1.2)]) == Estimate(1.0, 1.0, 1.2, 1)
    random = np.random.default_rng(7)
    for launches in (5, 6, 7, 8):
        trials = [10 + random.standard_normal(launches) for _ in range(400)]
        estimates = [launches_estimate(trial, [(value, value) for value in trial]) for trial in trials]
        # Five launches: the range contains the median with 93.75 %. Less than 91 % of 400 trials has a probability below 2 %.
        assert coverage(10, estimates) >= 0.91, launches


def test_the_error_within_a_launch_is_added_to_the_value_of_this_launch_only():
    found = launches_estimate([0.0, 100.0], [(None, None), (80.0, 120.0)])
    assert found.ci_low == 0.0 and found.ci_high > 100.0
