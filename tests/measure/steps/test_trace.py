"""A step's phases are those of the timed steps, and add up to it; what runs outside of every phase is caught."""

import itertools
import time

import numpy as np
import pytest

from hyperion.errors import HyperionError
from hyperion.hardware import detect_cpu
from hyperion.measure import time_step

PHASES = ("forward", "backward", "optimizer")
QUICK = {"minimum_samples": 10, "time_limit_s": 0.05}


@pytest.fixture(scope="module")
def cpu():
    return detect_cpu()


def step_of(*milliseconds, outside_ms=0.0):
    """A step that spends its time in phases, and some of it in none."""

    def step(phase):
        for name, duration in zip(PHASES, milliseconds, strict=True):
            with phase(name):
                time.sleep(duration / 1e3)
        time.sleep(outside_ms / 1e3)

    return step


def test_phases_have_a_sample_for_each_step_and_add_up(cpu):
    timing = time_step(step_of(2, 4, 1), cpu, **QUICK)
    assert list(timing.phases) == list(PHASES)
    assert {len(phase.samples_s) for phase in timing.phases.values()} == {len(timing.whole.samples_s)}
    assert timing.verification.name == "forward + backward + optimizer = step" and timing.verification.passed
    # A sleep lasts at least as long as it was asked to.
    for phase, least in zip(timing.phases.values(), (2e-3, 4e-3, 1e-3), strict=True):
        assert phase.samples_s.min() >= least
    assert np.all(sum(phase.samples_s for phase in timing.phases.values()) <= timing.whole.samples_s)
    assert timing.phases["forward"].warm == timing.whole.warm and not timing.whole.cold


def test_time_outside_of_every_phase_fails_the_check(cpu):
    timing = time_step(step_of(2, 2, 1, outside_ms=3), cpu, **QUICK)
    assert not timing.verification.passed and timing.verification.error > 0.2


def test_the_slow_first_step_is_in_no_sample(cpu):
    steps = []

    def step(phase):
        steps.append(None)
        with phase("forward"):
            time.sleep(0.2 if len(steps) == 1 else 1e-3)

    assert time_step(step, cpu, **QUICK).phases["forward"].samples_s.max() < 0.2


def test_phases_belong_to_the_sampled_steps_when_the_clock_is_checked_after_them(cpu, monkeypatch):
    def check(sample_s, in_a_row, again, over):
        in_a_row(1)
        again(2)

    monkeypatch.setattr("hyperion.measure.clock.timing.require_whole_work", check)
    # The check runs after the samples if the last window of the warm-up was slow. With this factor it always was.
    monkeypatch.setattr("hyperion.measure.clock.timing._COVER_FACTOR", 0)
    numbers = itertools.count()

    def step(phase):
        with phase("forward"):
            time.sleep(0.002 if next(numbers) % 2 else 0.006)

    timing = time_step(step, cpu, **QUICK)
    # The phase of a neighbouring step would often be longer than the whole step.
    assert np.all(timing.phases["forward"].samples_s <= timing.whole.samples_s)


def test_a_phase_entered_twice_is_summed(cpu):
    def accumulating(phase):
        for _ in range(2):
            with phase("forward"):
                time.sleep(2e-3)
        with phase("optimizer"):
            time.sleep(1e-3)

    timing = time_step(accumulating, cpu, **QUICK)
    assert timing.phases["forward"].samples_s.min() >= 4e-3 and timing.verification.passed


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
