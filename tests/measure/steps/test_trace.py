"""A step's phases are those of the timed steps, and add up to it; what runs outside of every phase is caught."""

import itertools
import json
import time
from pathlib import Path

import numpy as np
import pytest

from hyperion.errors import HyperionError
from hyperion.hardware import detect_cpu
from hyperion.measure import time_step
from hyperion.measure.clock import clocks
from hyperion.measure.steps import trace

PHASES = ("forward", "backward", "optimizer")
QUICK = {"minimum_samples": 10, "time_limit_s": 0.05}


@pytest.fixture(scope="module")
def cpu():
    return detect_cpu()


@pytest.fixture
def spend(monkeypatch):
    """A function that lets milliseconds pass on the clock of the CPU, which stands still otherwise.

    The real clock also counts when other processes take the core between two phases.
    """
    elapsed = [0]
    monkeypatch.setattr(clocks._HostClock, "stamp", staticmethod(lambda: elapsed[0]))
    monkeypatch.setattr(clocks._HostClock, "now", staticmethod(lambda: elapsed[0] / 1e9))

    def spend(milliseconds: float) -> None:
        elapsed[0] += round(milliseconds * 1e6)

    return spend


def step_of(spend, *milliseconds, outside_ms=0.0):
    """A step that spends its time in phases, and some of it in none."""

    def step(phase):
        for name, duration in zip(PHASES, milliseconds, strict=True):
            with phase(name):
                spend(duration)
        spend(outside_ms)

    return step


def test_phases_of_a_real_step_last_no_longer_than_the_step(cpu):
    timing = time_step(step_of(lambda milliseconds: time.sleep(milliseconds / 1e3), 2, 4, 1), cpu, **QUICK)
    # A sleep lasts at least as long as it was asked to.
    for phase, least in zip(timing.phases.values(), (2e-3, 4e-3, 1e-3), strict=True):
        assert phase.samples_s.min() >= least
    assert np.all(sum(phase.samples_s for phase in timing.phases.values()) <= timing.whole.samples_s)


def test_phases_have_a_sample_for_each_step_and_add_up(cpu, spend):
    timing = time_step(step_of(spend, 2, 4, 1), cpu, **QUICK)
    assert list(timing.phases) == list(PHASES)
    assert {len(phase.samples_s) for phase in timing.phases.values()} == {len(timing.whole.samples_s)}
    assert timing.verification.name == "forward + backward + optimizer = step" and timing.verification.passed
    assert [set(phase.samples_s) for phase in timing.phases.values()] == [{2e-3}, {4e-3}, {1e-3}]
    assert timing.phases["forward"].warm == timing.whole.warm and not timing.whole.cold


def test_time_outside_of_every_phase_fails_the_check(cpu, spend):
    timing = time_step(step_of(spend, 2, 2, 1, outside_ms=3), cpu, **QUICK)
    assert not timing.verification.passed and timing.verification.error == pytest.approx(3 / 8)


def test_the_slow_first_step_is_in_no_sample(cpu, spend):
    steps = []

    def step(phase):
        steps.append(None)
        with phase("forward"):
            spend(200 if len(steps) == 1 else 1)

    assert set(time_step(step, cpu, **QUICK).phases["forward"].samples_s) == {1e-3}


def test_phases_belong_to_the_sampled_steps_when_the_clock_is_checked_after_them(cpu, spend, monkeypatch):
    def check(sample_s, in_a_row, again, over):
        in_a_row(1)
        again(2)

    monkeypatch.setattr("hyperion.measure.clock.timing.require_whole_work", check)
    # The check runs after the samples if the last window of the warm-up was slow. With this factor it always was.
    monkeypatch.setattr("hyperion.measure.clock.timing._COVER_FACTOR", 0)
    numbers = itertools.count()

    def step(phase):
        with phase("forward"):
            spend(2 if next(numbers) % 2 else 6)

    timing = time_step(step, cpu, **QUICK)
    assert np.array_equal(timing.phases["forward"].samples_s, timing.whole.samples_s)
    assert set(timing.whole.samples_s) == {2e-3, 6e-3}


def test_a_call_that_the_clock_does_not_time_is_in_no_phase(cpu, spend, monkeypatch):
    sample, numbers = clocks._HostClock.sample, itertools.count()

    def after_one_call(clock, functions, flush, count):
        functions[0]()  # as the clock of a GPU does before a small batch
        return sample(clock, functions, flush, count)

    monkeypatch.setattr(clocks._HostClock, "sample", after_one_call)

    stamps = trace._Stamps(cpu)

    def step():
        stamps.steps.append({})
        with stamps.phase("forward"):
            spend(1 + next(numbers))

    taken = [seconds for _ in range(2) for seconds in stamps.sample([step], None, 3)[0]]
    assert taken == pytest.approx([2e-3, 3e-3, 4e-3, 6e-3, 7e-3, 8e-3])
    assert stamps.seconds(np.array(taken))["forward"] == pytest.approx(taken)


def test_a_phase_entered_twice_is_summed(cpu, spend):
    def accumulating(phase):
        for _ in range(2):
            with phase("forward"):
                spend(2)
        with phase("optimizer"):
            spend(1)

    timing = time_step(accumulating, cpu, **QUICK)
    assert timing.phases["forward"].samples_s.min() == 4e-3 and timing.verification.passed


def test_a_step_without_phases_and_one_whose_phases_change_are_refused(cpu):
    with pytest.raises(HyperionError, match="the step has no phases"):
        time_step(lambda phase: None, cpu, **QUICK)
    calls = []

    def changing(phase):
        calls.append(None)
        with phase(f"phase {len(calls) % 2}"):
            time.sleep(1e-4)

    with pytest.raises(HyperionError, match="the phases differ between steps"):
        time_step(changing, cpu, **QUICK)


def test_an_error_within_a_phase_reaches_the_caller(cpu):
    def failing(phase):
        with phase("forward"):
            raise MemoryError("no room")

    with pytest.raises(MemoryError, match="no room"):
        time_step(failing, cpu, **QUICK)


@pytest.mark.parametrize("interrupted", range(3))
def test_an_interruption_of_one_window_is_in_no_trace(cpu, interrupted, monkeypatch):
    class Profile:
        """A profiler whose windows last 10 and 11 ms, and the interrupted one 60 ms."""

        def __init__(self, activities): ...

        def __enter__(self):
            return self

        def __exit__(self, *exception): ...

        def export_chrome_trace(self, path):
            durations_ms = [10, 11]
            durations_ms.insert(interrupted, 60)
            window = {"ph": "X", "cat": "user_annotation", "name": trace._WINDOW, "tid": 1}
            starts = range(1, 4)
            events = [window | {"ts": n * 1e5, "dur": ms * 1e3} for n, ms in zip(starts, durations_ms, strict=True)]
            Path(path).write_text(json.dumps({"traceEvents": events}))

    monkeypatch.setattr(trace, "TraceProfiler", Profile)
    calls = []
    traced = trace.trace_steps(lambda: calls.append(None), None, cpu, 2)
    assert traced.end_ns - traced.start_ns == 11_000_000 and traced.steps == 2
    assert len(calls) == 1 + 3 * 2
