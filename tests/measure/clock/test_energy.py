"""Joules from injected readings: right where they can be told, absent with the reason where not."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hyperion.hardware import Sampler, Telemetry, detect_cpu
from hyperion.hardware.telemetry import interpret_amd, interpret_amdsmi_energy, median_of
from hyperion.measure import Timing, energy_of, time_function
from hyperion.results import metric_named

ENOUGH = Telemetry(power_w=500.0, power_scope="device", samples=20, window_s=2.0, interval_s=0.1)


def timing(telemetry: Telemetry, seconds: float = 0.004) -> Timing:
    samples = seconds * np.linspace(0.98, 1.02, 101)
    return Timing(samples, (seconds,), True, True, "interval", telemetry)


def test_energy_is_power_times_time_with_the_interval_of_the_time():
    energy = energy_of(timing(ENOUGH))
    assert energy.joules.value == pytest.approx(2.0) and energy.joules.n == 101
    assert energy.joules.ci_low < 2.0 < energy.joules.ci_high
    assert (energy.scope, energy.power_w, energy.reason, energy.counter_difference) == ("device", 500.0, "", None)
    assert energy.j_per_tflop(4e12).value == pytest.approx(0.5)
    assert energy.j_per_gb(8e9).value == pytest.approx(0.25)


@given(st.floats(1, 2000), st.floats(1e-6, 10), st.floats(1e6, 1e18))
def test_joules_per_tflop_times_tflops_is_the_power(power_w, seconds, flops):
    energy = energy_of(timing(replace(ENOUGH, power_w=power_w), seconds))
    rate_tflops = flops / seconds / 1e12
    assert energy.j_per_tflop(flops).value * rate_tflops == pytest.approx(power_w, rel=1e-6)


def test_the_counter_says_how_far_off_the_sum_is():
    energy = energy_of(timing(replace(ENOUGH, energy_j=1100.0)))  # 500 W over 2 s are 1000 J
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
    energy = energy_of(timing(telemetry))
    assert energy.joules is None and energy.j_per_tflop(1e12) is None and energy.j_per_gb(1e9) is None
    assert said in energy.reason


def test_the_first_die_of_a_module_reports_the_modules_energy_and_the_second_none():
    first = interpret_amd({"power_w": 480.0, "energy_j": 7.0}, "first")
    readings = [replace(first, energy_j=7.0 + 48 * i) for i in range(11)]
    summary = replace(median_of(readings), window_s=1.0, interval_s=0.1)
    energy = energy_of(timing(summary))
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
    assert energy_of(timing(state)).counter_difference == pytest.approx(state.energy_j / (10 * state.window_s) - 1)


def test_a_real_timing_on_this_cpu_says_why_there_is_none():
    measured = time_function(lambda: sum(range(1000)), detect_cpu(), cold=False, time_limit_s=0.05)
    energy = energy_of(measured)
    assert energy.joules is None and energy.reason


def test_the_metrics_are_registered_with_their_units():
    for name, unit in (("energy_j_per_tflop", "J/TFLOP"), ("energy_j_per_gb", "J/GB")):
        metric = metric_named(name)
        assert (metric.unit, metric.direction, metric.needs_interval) == (unit, "lower", True)
