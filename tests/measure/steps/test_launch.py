"""Launches are counted, a CPU has no graphs, and the smallest worthwhile size is where planted times meet."""

import dataclasses
import time

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hyperion.hardware import detect_cpu
from hyperion.measure import RepeatedCalls, measure_cache_sweep, measure_launch, worthwhile_size
from hyperion.measure.steps.operator_cost import _crossing, _EnqueueClock, _verify_counts
from hyperion.results import Row, RowError

SIZES = [2**k for k in range(10, 24, 2)]


@pytest.fixture(scope="module")
def cost():
    return measure_launch(detect_cpu(), time_limit_s=0.05)


@pytest.fixture(scope="module")
def point():
    return measure_cache_sweep("copy", detect_cpu(), sizes=[4096], time_limit_s=0.02)[0]


def test_a_cpu_has_a_dispatcher_and_no_graphs(cost):
    assert cost.eager.estimate.value > 0 and len(cost.eager.samples_s) >= 30
    assert (cost.graph, cost.graph_kernels, cost.asynchronous) == (None, 0, False)
    assert cost.graph_reason == "unavailable: a CPU has no graphs"
    assert (cost.verification.name, cost.verification.error) == ("calls counted", 0.0)


def test_the_cost_is_a_row(cost):
    eager = cost.eager.estimate
    columns = {
        "n": eager.n,
        "ci_low": eager.ci_low,
        "ci_high": eager.ci_high,
        "check": cost.verification.name,
        "check_error": cost.verification.error,
        "check_tolerance": cost.verification.tolerance,
    }
    row = Row(notebook="n", experiment="launch", variant="eager", metric="launch_time_s", value=eager.value, **columns)
    row.validate()
    with pytest.raises(RowError, match="lacks its check"):
        dataclasses.replace(row, check="").validate()


def test_a_call_that_does_not_do_its_work_is_caught():
    counter = torch.zeros(1, dtype=torch.int64)
    calls = []

    def every_other():
        calls.append(None)
        counter.add_(len(calls) % 2)

    verification = _verify_counts(counter, every_other, RepeatedCalls(every_other, detect_cpu(), calls=3))
    assert not verification.passed and verification.error == pytest.approx(0.5)


def test_a_sample_of_the_enqueue_clock_is_the_mean_of_its_calls():
    calls = []

    def work():
        calls.append(None)
        time.sleep(0.001)

    started = time.perf_counter()
    [samples] = _EnqueueClock(detect_cpu(), 5).sample([work], None, 2)
    elapsed = time.perf_counter() - started
    assert len(calls) == 10 and len(samples) == 2
    assert min(samples) >= 0.001 and 5 * sum(samples) <= elapsed


def planted(timing, seconds: float):
    """A timing of 40 samples within 1 % around a known median."""
    return dataclasses.replace(timing, samples_s=seconds * np.linspace(0.995, 1.005, 41))


def copies(point, times) -> list:
    return [
        dataclasses.replace(point, bytes=size, captured=True, timing=planted(point.timing, seconds))
        for size, seconds in zip(SIZES, times, strict=True)
    ]


def test_on_a_gpu_it_is_where_the_device_works_as_long_as_the_launch_takes(cost, point):
    launched = dataclasses.replace(cost, asynchronous=True, eager=planted(cost.eager, 4e-6))
    times = [size / 1e12 + 1e-6 for size in SIZES]  # 1 TB/s after a microsecond: 3 MB in the launch's 4 microseconds
    found = worthwhile_size(launched, copies(point, times))
    assert found.bytes.value == pytest.approx(3e6, rel=0.1)  # straight lines on logarithmic scales between factors of 4
    assert found.bytes.ci_low <= found.bytes.value <= found.bytes.ci_high and found.reason == ""
    assert found.bytes.ci_high / found.bytes.ci_low < 1.1


def test_on_a_cpu_it_is_where_the_call_is_twice_the_dispatch(cost, point):
    dispatched = dataclasses.replace(cost, eager=planted(cost.eager, 1e-6))
    times = [1e-6 + size / 16e9 for size in SIZES]  # 16 GB/s: 16 KB in the microsecond that is added to the dispatch
    assert worthwhile_size(dispatched, copies(point, times)).bytes.value == pytest.approx(16e3, rel=0.05)


@pytest.mark.parametrize(("launch_s", "reason"), [(1.0, "no longer than"), (1e-9, "works longer than")])
def test_outside_of_the_measured_sizes_there_is_a_reason_and_no_number(cost, point, launch_s, reason):
    launched = dataclasses.replace(cost, asynchronous=True, eager=planted(cost.eager, launch_s))
    found = worthwhile_size(launched, copies(point, [size / 1e12 for size in SIZES]))
    assert found.bytes is None and reason in found.reason


def test_long_copies_are_not_captured_and_hide_their_launches(cost, point):
    launched = dataclasses.replace(cost, asynchronous=True, eager=planted(cost.eager, 4e-6))
    measured = copies(point, [size / 1e12 + 1e-6 for size in SIZES])
    measured[-1] = dataclasses.replace(measured[-1], captured=False, long=True)
    assert worthwhile_size(launched, measured).bytes.value == pytest.approx(3e6, rel=0.1)


def test_copies_whose_times_hold_launches_are_refused(cost, point):
    launched = dataclasses.replace(cost, asynchronous=True)
    assert "hold their launches" in worthwhile_size(launched, [point, point]).reason


def test_the_last_crossing_counts():
    assert 4 < _crossing(2.0, np.array([1.0, 3.0, 1.5, 4.0]), [1, 2, 4, 8]) < 8


@given(st.lists(st.floats(1e-7, 1e-2), min_size=2, max_size=12), st.floats(1e-8, 1e-1))
def test_a_crossing_lies_within_the_measured_sizes(times, target):
    sizes = [2**k for k in range(len(times))]
    assert sizes[0] <= _crossing(target, np.array(times), sizes) <= sizes[-1] * (1 + 1e-12)
