"""Timing: warm-up, samples and intervals; the plain loop beside the clock; energy from injected readings."""

import itertools
import math
import time
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hyperion.errors import HyperionError
from hyperion.hardware import Sampler, Telemetry, detect, detect_cpu
from hyperion.hardware.telemetry import interpret_amd, interpret_amdsmi_energy, median_of
from hyperion.measure import Timing, energy_of, time_function, time_interleaved
from hyperion.measure.clock import timing
from hyperion.measure.clock.clocks import device_clock
from hyperion.measure.clock.timing import _relative_half_width, _warm_up, compare_with_plain_loop
from hyperion.results import metric_named
from tests.hardware.machines import facts, gpu

CPU = detect_cpu()
ENOUGH = Telemetry(power_w=500.0, power_scope="device", samples=20, window_s=2.0, interval_s=0.1)


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
    rounds = len(timings[0].samples_s)
    # Four rounds in one direction and four in the other, so that both functions are equally often the first.
    assert sampled == list("".join(["ab"] * 4 + ["ba"] * 4) * rounds)[: 2 * rounds]


class ScriptedClock:
    """A clock whose functions return their own seconds. It flushes before the first function of a round only."""

    now_s = 0.0

    def now(self):
        return self.now_s

    def in_a_row(self, function, count):
        return None

    def sample(self, functions, flush, count):
        rounds = []
        for _ in range(count):
            if flush is not None:
                flush()
            rounds.append([function() for function in functions])
        self.now_s += sum(map(sum, rounds))
        return [list(series) for series in zip(*rounds, strict=True)]


def test_sampling_ends_when_the_intervals_of_all_functions_are_narrow(cpu):
    def stopped(*functions):
        timings = time_interleaved(functions, cpu, cold=False, time_limit_s=1.0, clock=ScriptedClock())
        return {timing.stopped for timing in timings}

    restless = itertools.cycle([0.001, 0.002]).__next__
    assert stopped(lambda: 0.001, lambda: 0.002) == {"interval"}
    assert stopped(lambda: 0.001, restless) == stopped(restless, lambda: 0.001) == {"time limit"}


def test_a_series_with_a_minimum_span_shows_a_later_change_and_keeps_some_hundred_samples(cpu):
    def timing_of(**options):
        calls = itertools.count()
        # The time of a call doubles after 200 calls, as when a GPU lowers its clock. Warm-up makes 91 calls.
        return time_function(lambda: 0.001 if next(calls) < 200 else 0.002, cpu, cold=False, clock=ScriptedClock(), **options)

    short, long = timing_of(), timing_of(minimum_span_s=3.0)
    assert short.estimate.value == 0.001 and long.estimate.value == 0.002
    assert len(short.samples_s) < 110 and 300 <= len(long.samples_s) < 600 and 0.001 in long.samples_s
    assert len(timing_of(minimum_span_s=0.05).samples_s) in range(50, 110), "a short series is kept whole"
    assert len(timing_of(minimum_span_s=3.0, minimum_samples=1000).samples_s) >= 1000


def test_the_samples_kept_of_a_long_series_are_of_its_whole_span(cpu):
    calls = itertools.count()
    long = time_function(
        lambda: 0.001 if next(calls) < 1000 else 0.002, cpu, cold=False, clock=ScriptedClock(), minimum_span_s=3.0
    )
    assert 0.4 < np.mean(long.samples_s == 0.002) < 0.6


@pytest.mark.parametrize("budget_s", [0.40, 0.42, 0.44, 0.46, 0.48, 0.50])
def test_a_budget_includes_the_warm_up(cpu, budget_s):
    clock, restless = ScriptedClock(), itertools.cycle([0.029, 0.031]).__next__
    time_function(restless, cpu, cold=False, budget_s=budget_s, clock=clock)
    assert clock.now_s <= budget_s + 0.005


@pytest.mark.parametrize("span_s", [-0.1, 5.1, math.nan])
def test_a_minimum_span_must_fit_into_the_time_limit(cpu, span_s):
    with pytest.raises(HyperionError, match=r"minimum_span_s is .* not between 0 and the time limit, 5\.0 s"):
        time_function(lambda: None, cpu, minimum_span_s=span_s)


def test_each_function_of_a_round_needs_its_own_flush(cpu):
    assert time_interleaved([lambda: 0.001], cpu, clock=ScriptedClock())
    with pytest.raises(timing.HarnessError, match=r"\d+ samples are labelled cold, but the cache was flushed \d+ times"):
        time_interleaved([lambda: 0.001, lambda: 0.001], cpu, clock=ScriptedClock())


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
    rounds, (slow_block, quick_block) = len(slow_timing.samples_s), (["slow"] * 3, ["quick"] * 3)
    eight_rounds = (slow_block + quick_block) * 4 + (quick_block + slow_block) * 4
    assert sampled == (eight_rounds * rounds)[: 6 * rounds]
    assert slow_timing.samples_s.min() >= 0.002  # a sleep never ends early: the mean of three is one call, not the block
    assert 3 * slow_timing.samples_s.sum() <= elapsed


def test_the_warm_up_too_is_that_of_one_call():
    timing = Timing(np.array([2.0, 4.0]), (6.0, 4.0), True, False, "interval", Telemetry()).per_call(2)
    assert timing.samples_s.tolist() == [1.0, 2.0] and timing.warmup_s == (3.0, 2.0)


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


def test_two_windows_that_agree_before_the_calls_become_faster_do_not_end_the_warm_up():
    # One call fills a window. The calls become faster after two windows, as when a program is compiled in the background.
    seconds = [0.002, 0.002, 0.001, 0.001, 0.001]
    assert _warm_up(ScriptedClock(), iter(seconds).__next__, limit_s=60, window_s=1e-6, called=True) == (seconds, True)


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


def test_both_call_as_often_in_turn_and_the_first_round_is_no_sample():
    order = []
    ours, plain = compare_with_plain_loop(lambda: order.append("a"), CPU, calls=3, rounds=4, plain=lambda: order.append("b"))
    assert order == (["a"] * 3 + ["b"] * 3) * 5
    assert len(ours.samples_s) == len(plain.samples_s) == 4 and not ours.cold


@pytest.mark.parametrize("index", [0, 1])
def test_the_plain_loop_waits_for_the_device_that_is_measured(monkeypatch, index):
    waited = []
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device=None: waited.append(device))
    monkeypatch.setattr(timing, "device_clock", lambda device: device_clock(CPU))
    machine = facts(gpus=(gpu("H200"), gpu("H200")))
    compare_with_plain_loop(lambda: None, detect(machine, index), calls=2, rounds=1)
    assert waited == [f"cuda:{index}"] * 4


def timing_at(telemetry: Telemetry, seconds: float = 0.004) -> Timing:
    samples = seconds * np.linspace(0.98, 1.02, 101)
    return Timing(samples, (seconds,), True, True, "interval", telemetry)


def test_energy_is_power_times_time_with_the_interval_of_the_time():
    energy = energy_of(timing_at(ENOUGH))
    assert energy.joules.value == pytest.approx(2.0) and energy.joules.n == 101
    assert energy.joules.ci_low < 2.0 < energy.joules.ci_high
    assert (energy.scope, energy.power_w, energy.reason, energy.counter_difference) == ("device", 500.0, "", None)
    assert energy.j_per_tflop(4e12).value == pytest.approx(0.5)
    assert energy.j_per_gb(8e9).value == pytest.approx(0.25)


@pytest.mark.slow
@given(st.floats(1, 2000), st.floats(1e-6, 10), st.floats(1e6, 1e18))
def test_joules_per_tflop_times_tflops_is_the_power(power_w, seconds, flops):
    energy = energy_of(timing_at(replace(ENOUGH, power_w=power_w), seconds))
    rate_tflops = flops / seconds / 1e12
    assert energy.j_per_tflop(flops).value * rate_tflops == pytest.approx(power_w, rel=1e-6)


def test_the_counter_says_how_far_off_the_sum_is():
    energy = energy_of(timing_at(replace(ENOUGH, energy_j=1100.0)))  # 500 W over 2 s are 1000 J
    assert energy.counter_difference == pytest.approx(0.1)


@pytest.mark.parametrize(
    ("telemetry", "said"),
    [
        (replace(ENOUGH, power_w=None, unreadable={"power_w": "needs rights"}), "needs rights"),
        (interpret_amd({"power_w": 300.0, "energy_j": 9.0}, "second"), "second die"),
        (replace(ENOUGH, samples=2), "2 readings of power, 3 are needed"),
        (replace(ENOUGH, window_s=0.29), "0.29 s, 0.3 s are needed"),
        (Telemetry(power_w=500.0, samples=5), "over 0 s"),
    ],
)
def test_what_cannot_be_told_is_none_with_its_reason_and_never_zero(telemetry, said):
    energy = energy_of(timing_at(telemetry))
    assert energy.joules is None and energy.j_per_tflop(1e12) is None and energy.j_per_gb(1e9) is None
    assert said in energy.reason


def test_the_first_die_of_a_module_reports_the_modules_energy_and_the_second_none():
    first = interpret_amd({"power_w": 480.0, "energy_j": 7.0}, "first")
    readings = [replace(first, energy_j=7.0 + 48 * i) for i in range(11)]
    summary = replace(median_of(readings), window_s=1.0, interval_s=0.1)
    energy = energy_of(timing_at(summary))
    assert energy.scope == "module" and energy.counter_difference == pytest.approx(0.0)
    assert interpret_amd({"power_w": 0, "energy_j": 7.0}, "second").energy_j is None


def test_a_counter_that_was_reset_or_is_missing_counts_nothing():
    def between(*joules):
        return median_of([Telemetry(energy_j=value) for value in joules]).energy_j

    assert between(5.0, 9.0, 12.0) == 7.0
    assert between(5.0, 1.0) is between(None, 4.0) is between(4.0) is None


@pytest.mark.parametrize(
    ("count", "joules"),
    [
        ({"energy_accumulator": 2_000_000, "counter_resolution": 15.3}, 30.6),
        ({"power": 1_000_000, "counter_resolution": 15.3}, 15.3),  # ROCm 5's name
        ({"energy_accumulator": "N/A", "counter_resolution": 15.3}, None),
        ({"energy_accumulator": 0, "counter_resolution": 15.3}, None),
        ({}, None),
    ],
)
def test_amdsmis_counter_in_joules(count, joules):
    assert interpret_amdsmi_energy(count) == (None if joules is None else pytest.approx(joules))


def test_the_sampler_tells_the_time_between_its_readings():
    readings = iter(range(10**9))
    with Sampler(detect_cpu(), interval_s=0.01, reader=lambda: Telemetry(power_w=10.0, energy_j=1.0 + next(readings))) as sampler:
        while len(sampler._readings) < 6:
            pass
    state = sampler.telemetry
    assert state.interval_s == 0.01 and state.window_s >= 0.05 and state.energy_j == state.samples - 1
    assert energy_of(timing_at(state)).counter_difference == pytest.approx(state.energy_j / (10 * state.window_s) - 1)


def test_a_real_timing_on_this_cpu_says_why_there_is_none():
    measured = time_function(lambda: sum(range(1000)), detect_cpu(), cold=False, time_limit_s=0.05)
    energy = energy_of(measured)
    assert energy.joules is None and energy.reason


def test_the_metrics_are_registered_with_their_units():
    for name, unit in (("energy_j_per_tflop", "J/TFLOP"), ("energy_j_per_gb", "J/GB")):
        metric = metric_named(name)
        assert (metric.unit, metric.direction, metric.needs_interval) == (unit, "lower", True)
