"""The timing core's promises: how many samples, warm-up apart, functions interleaved, the cache flushed. No speed is asserted."""

import time

import numpy as np
import pytest

from hyperion.errors import HyperionError
from hyperion.hardware import detect_cpu
from hyperion.measure import time_function, time_interleaved
from hyperion.measure.clock.timing import _relative_half_width, _warm_up


@pytest.fixture(scope="module")
def cpu():
    return detect_cpu()


def test_takes_at_least_the_minimum_and_says_why_it_stopped(cpu):
    timing = time_function(lambda: None, cpu, cold=False, minimum_samples=30, time_limit_s=0.05)
    assert len(timing.samples_s) >= 30
    assert timing.stopped in ("interval", "time limit")
    assert timing.estimate.ci_low <= timing.estimate.value <= timing.estimate.ci_high


def test_the_slow_first_call_is_in_no_sample(cpu):
    calls = []

    def work():
        calls.append(None)
        time.sleep(0.2 if len(calls) == 1 else 0.001)

    timing = time_function(work, cpu, cold=False, minimum_samples=5, time_limit_s=0.1)
    assert len(calls) > len(timing.samples_s) + 1
    assert timing.samples_s.max() < 0.2


def test_functions_alternate(cpu):
    order = []
    timings = time_interleaved(
        [lambda: order.append("a"), lambda: order.append("b")], cpu, cold=False, minimum_samples=30, time_limit_s=0.05
    )
    sampled = order[-2 * len(timings[0].samples_s) :]
    assert len(timings[0].samples_s) == len(timings[1].samples_s)
    assert sampled == ["a", "b"] * len(timings[0].samples_s)


def test_blocks_of_calls_in_a_row_give_the_mean_call_and_alternate(cpu):
    order = []

    def slow():
        order.append("slow")
        time.sleep(0.002)

    started = time.perf_counter()
    slow_timing, _ = time_interleaved(
        [slow, lambda: order.append("quick")], cpu, cold=False, minimum_samples=20, time_limit_s=0.02, back_to_back=3
    )
    elapsed = time.perf_counter() - started
    sampled = order[-6 * len(slow_timing.samples_s) :]
    assert sampled == (["slow"] * 3 + ["quick"] * 3) * len(slow_timing.samples_s)
    assert slow_timing.samples_s.min() >= 0.002  # a sleep never ends early: the mean of three is one call, not the block
    assert 3 * slow_timing.samples_s.sum() <= elapsed


def test_calls_in_a_row_cannot_each_find_a_cold_cache(cpu):
    with pytest.raises(HyperionError, match="cannot start with a cold cache"):
        time_function(lambda: None, cpu, back_to_back=3)


def test_an_error_in_the_function_reaches_the_caller(cpu):
    with pytest.raises(ZeroDivisionError):
        time_function(lambda: 1 / 0, cpu, cold=False)


def test_warm_up_goes_on_until_the_windows_agree():
    class FallingClock:
        """Calls become faster for twelve windows, then stay as they are."""

        now = staticmethod(time.monotonic)

        def __init__(self):
            self.windows = 0

        def sample(self, functions, flush, count):
            self.windows += 1
            return [[1e-3 * max(1.0, 2.0 - self.windows / 12)] * count]

    medians, flat = _warm_up(FallingClock(), lambda: None, limit_s=60)
    assert flat and len(medians) > 10
    assert medians[-1] == pytest.approx(1e-3)


def test_warm_up_that_never_settles_ends_at_its_limit_and_says_so():
    class RestlessClock:
        now = staticmethod(time.monotonic)

        def __init__(self):
            self.windows = 0

        def sample(self, functions, flush, count):
            self.windows += 1
            return [[1.0 + self.windows % 2] * count]

    assert _warm_up(RestlessClock(), lambda: None, limit_s=0.05)[1] is False


def test_half_width_covers_the_true_median_as_often_as_it_says():
    generator = np.random.default_rng(1)
    wide = [_relative_half_width(generator.normal(1.0, 0.1, 30)) for _ in range(200)]
    narrow = [_relative_half_width(generator.normal(1.0, 0.1, 3000)) for _ in range(200)]
    # Ten times the spread for a hundredth of the samples, and 1.96 * 1.2533 * sigma / sqrt(n) for a normal median.
    assert np.mean(wide) == pytest.approx(10 * np.mean(narrow), rel=0.25)
    assert np.mean(narrow) == pytest.approx(1.96 * 1.2533 * 0.1 / np.sqrt(3000), rel=0.15)
