"""Does the comparison keep its word? Twenty trials of the same code, of a planted 10 % and of a planted 3 %.

Relaunches are generated with the noise of real ones: within a launch samples are autocorrelated and heavy-tailed, with
stalls; between launches of the same code the level scatters by 1 %. All seeds are fixed.
"""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hyperion.results import Row, compare, sensitivity
from hyperion.results.compare import SIGNIFICANCE, SMALLEST_CHANGE
from hyperion.results.power import Rule, detectable_change, log_deviation, power

TRIALS, RELAUNCHES, VARIANTS, SAMPLES = 20, 5, 8, 120
BETWEEN_LAUNCHES = 0.01
SLOWED = "v0"


class Relaunch:
    """A run of generated rows, as `compare` asks for them."""

    def __init__(self, rows: list[Row]):
        self._rows, self.folder = rows, "generated"

    def rows(self) -> list[Row]:
        return self._rows

    def information(self) -> dict:
        return {}


def samples(random: np.random.Generator, level_s: float) -> np.ndarray:
    """One launch's samples in seconds: an autoregressive part, Student's t with three degrees of freedom, rare stalls."""
    shocks = random.standard_normal(SAMPLES) * 0.005
    drift = np.zeros(SAMPLES)
    for i in range(1, SAMPLES):
        drift[i] = 0.8 * drift[i - 1] + shocks[i]
    stalls = (random.random(SAMPLES) < 0.02) * random.exponential(1.0, SAMPLES)
    return level_s * random.lognormal(0, BETWEEN_LAUNCHES) * (1 + drift + 0.01 * np.abs(random.standard_t(3, SAMPLES)) + stalls)


def launch(random: np.random.Generator, slowdown: float) -> Relaunch:
    rows = []
    for variant in range(VARIANTS):
        name = f"v{variant}"
        seconds = samples(random, 0.01 * (variant + 1) * (1 + (slowdown if name == SLOWED else 0)))
        median = float(np.median(seconds))
        common = {"notebook": "nb", "experiment": "e", "variant": name, "n": SAMPLES, "limit_source": "none known"}
        rows.append(Row(**common, metric="step_time_s", value=median, ci_low=median, ci_high=median))
        rows.append(Row(**common, metric="samples_per_s", value=1 / median, ci_low=1 / median, ci_high=1 / median))
    return Relaunch(rows)


def trials(slowdown: float, count: int = TRIALS, first_seed: int = 0) -> list:
    outcomes = []
    for trial in range(count):
        random = np.random.default_rng([first_seed, trial])
        sides = [[launch(random, s) for _ in range(RELAUNCHES)] for s in (0.0, slowdown)]
        outcomes.append(compare(*sides))
    return outcomes


def caught(compared) -> bool:
    """Whether both metrics of the slowed variant are confirmed as worse."""
    return {c.metric for c in compared if c.name == f"e {SLOWED}" and c.verdict == "regression"} == {
        "step_time_s", "samples_per_s",
    }  # fmt: skip


def test_the_noise_is_what_it_says():
    random = np.random.default_rng(1)
    series = samples(random, 1.0)
    centred = series - np.median(series)
    clipped = np.clip(centred, -0.03, 0.03)
    assert np.corrcoef(clipped[:-1], clipped[1:])[0, 1] > 0.2  # autocorrelated
    assert series.max() - np.median(series) > 4 * np.std(clipped)  # heavy-tailed
    medians = [np.median(samples(random, 1.0)) for _ in range(200)]
    assert 0.8 * BETWEEN_LAUNCHES < np.std(np.log(medians)) < 1.5 * BETWEEN_LAUNCHES


def test_the_same_code_stays_silent_in_20_of_20():
    loud = [[(c.name, c.metric, c.verdict) for c in compared if c.verdict != "same"] for compared in trials(0.0)]
    assert loud == [[]] * TRIALS


def test_a_slowdown_of_ten_percent_is_caught_in_20_of_20_and_nothing_else():
    for compared in trials(0.10):
        assert caught(compared)
        assert {c.name for c in compared if c.verdict != "same"} == {f"e {SLOWED}"}


def test_three_percent_is_reported_with_its_power_and_the_power_is_true():
    # Of a change of 3 % in the rate: times grow by a little more.
    compared = trials(1 / 0.97 - 1, count=150, first_seed=7)
    rates = [next(c for c in trial if (c.name, c.metric) == (f"e {SLOWED}", "samples_per_s")) for trial in compared]
    stated = np.mean([c.power for c in rates])
    seen = np.mean([c.verdict == "regression" for c in rates])
    assert 0 < stated <= 0.5 and abs(stated - seen) < 0.1
    told = sensitivity(compared[0])
    assert "a change of 3% for the worse would have been confirmed with a chance of" in told


def test_what_is_called_detectable_is_caught_about_four_times_out_of_five():
    rule = Rule(RELAUNCHES, RELAUNCHES, SIGNIFICANCE / (2 * VARIANTS), SMALLEST_CHANGE)
    change = detectable_change(rule, 1.1 * BETWEEN_LAUNCHES)  # launches scatter by 1 %, medians of their samples by a little
    assert 0.03 < change < 0.10
    compared = trials(1 / (1 - change) - 1, count=60, first_seed=11)
    seen = np.mean([c.verdict == "regression" for t in compared for c in t if (c.name, c.metric) == ("e v0", "samples_per_s")])
    assert 0.65 < seen < 0.95


def test_too_few_relaunches_have_no_power():
    random = np.random.default_rng(0)
    compared = compare([launch(random, 0.0)], [launch(random, 0.1)])
    assert all(c.power is None and c.detectable is None for c in compared) and sensitivity(compared) == ""


@settings(deadline=None, max_examples=30)
@given(st.integers(5, 12), st.floats(1e-4, 0.2), st.floats(0.03, 0.5), st.integers(1, 500))
def test_power_is_a_chance_and_rises_with_the_change_and_falls_with_the_noise(count, deviation, change, tests):
    rule = Rule(count, count, SIGNIFICANCE / tests, SMALLEST_CHANGE)
    here = power(rule, deviation, change)
    assert 0 <= here <= 1
    assert power(rule, deviation, min(0.99, change * 1.5)) >= here - 0.01
    assert power(rule, deviation * 2, change) <= here + 0.05
    least = detectable_change(rule, deviation)
    assert least is None or power(rule, deviation, least) >= 0.8 and least > SMALLEST_CHANGE


def test_the_deviation_is_that_between_relaunches_of_one_side():
    assert log_deviation([1.0, 1.0], [2.0, 2.0]) == 0.0
    random = np.random.default_rng(3)
    a, b = np.exp(0.02 * random.standard_normal((2, 500)))
    assert log_deviation(a, 5 * b) == pytest.approx(0.02, rel=0.1)
    assert log_deviation([1.0], [1.0]) == 0.0
