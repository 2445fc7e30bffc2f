"""The recommended size is where arithmetic says, its interval holds the true one, and what is not known is not stated."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hyperion.errors import HyperionError
from hyperion.measure.collectives.latency_bandwidth import fit_latency_bandwidth, recommended_bucket

SIZES = [8 * 4**power for power in range(15)]


def fitted(latency_s: float, gb_per_s: float, factor: float = 1.0, noise: float = 0.0):
    random = np.random.default_rng(0)
    crossing = [factor * size / 1e9 for size in SIZES]
    times = [(latency_s + gb / gb_per_s) * random.lognormal(0, noise, 30) for gb in crossing]
    return fit_latency_bandwidth(crossing, times)


@pytest.mark.slow
@settings(max_examples=15, deadline=None)
@given(st.floats(1e-6, 1e-3), st.floats(1.0, 500.0), st.floats(0.5, 1.75), st.floats(0.1, 0.99))
def test_the_size_has_the_share_that_was_asked_for(latency, rate, factor, share):
    bucket = recommended_bucket(fitted(latency, rate, factor), "all_reduce", factor, SIZES, share)
    crossing = factor * bucket.bytes.value / 1e9
    assert crossing / (latency + crossing / rate) == pytest.approx(share * rate, rel=1e-4)


def test_the_interval_holds_the_true_size():
    bucket = recommended_bucket(fitted(20e-6, 300, noise=0.05), "all_reduce", 1.0, SIZES)
    assert bucket.bytes.ci_low < 9 * 20e-6 * 300e9 < bucket.bytes.ci_high < 2 * bucket.bytes.ci_low


@pytest.mark.parametrize(
    ("latency", "collective", "words"),
    [
        (5e-6, "all_reduce", "DDP: bucket_cap_mb=13 or more (by the fit, its default of 25 MiB is enough"),
        (20e-6, "all_reduce", "DDP: bucket_cap_mb=52 or more (by the fit, its default of 25 MiB leaves bandwidth unused)"),
        (20e-6, "all_gather", "FSDP: units of 27 M parameters or more (2 bytes each)"),
        (20e-6, "broadcast", "90% of its bandwidth from 51.5 MiB on (95 % CI 51.5 MiB to 51.5 MiB)"),
    ],
)
def test_it_says_what_it_means_for_training(latency, collective, words):
    assert words in recommended_bucket(fitted(latency, 300), collective, 1.0, SIZES).words()


def test_beyond_what_was_measured_it_says_so():
    text = recommended_bucket(fitted(5e-3, 300), "all_reduce", 1.0, SIZES).words()
    assert "beyond the largest size measured, 2 GiB" in text


def test_within_what_was_measured_there_is_no_warning():
    assert recommended_bucket(fitted(20e-6, 300), "all_reduce", 1.0, SIZES).reason == ""


def test_times_that_bend_are_said_to():
    crossing = [size / 1e9 for size in SIZES]
    times = [[(2e-5 + gb / 100) * (3 if 5 < place < 9 else 1)] * 30 for place, gb in enumerate(crossing)]
    assert "off the fitted line" in recommended_bucket(fit_latency_bandwidth(crossing, times), "reduce", 1.0, SIZES).words()


def test_times_that_do_not_grow_have_no_size():
    fit = fit_latency_bandwidth([1e-9, 2e-9, 3e-9], [[3e-5] * 5, [2e-5] * 5, [1e-5] * 5])
    bucket = recommended_bucket(fit, "all_reduce", 1.0, [1, 2, 3])
    assert bucket.bytes is None and "no size recommended: the times do not grow" in bucket.words()


def test_times_that_may_not_grow_have_no_size():
    fit = fitted(5e-6, 300)
    slope = fit.s_per_gb
    scattered = dataclasses.replace(fit, s_per_gb=dataclasses.replace(slope, ci_low=0.0))
    assert recommended_bucket(scattered, "all_reduce", 1.0, SIZES).bytes is None and slope.value > 0


@pytest.mark.parametrize("share", [0, 1, 90])
def test_a_share_is_between_0_and_1(share):
    with pytest.raises(HyperionError, match="share"):
        recommended_bucket(fitted(1e-5, 10), "all_reduce", 1.0, SIZES, share)
