"""The exercises of the harness: precautions left out change what is timed; a check for each fault passes, shortcuts do not."""

import numpy as np
import pytest
import torch

from hyperion.experiments.hardware.exercises import (
    PRECAUTIONS,
    TOY_FAULTS,
    broken_benchmarks,
    judge_harness_check,
    toy_measurement,
    toy_timer,
)
from hyperion.hardware import detect_cpu
from tests.exercise_scores import solved

CPU = detect_cpu()


def thirds(m):
    return np.median(m.samples_s[:17]), np.median(m.samples_s[-17:])


SOLUTIONS = {
    "no synchronisation": lambda m: m.in_a_row_s < 3 * np.median(m.samples_s),
    "no warm-up": lambda m: m.samples_s[:5].mean() < 2 * np.median(m.samples_s),
    "no flush": lambda m: not m.cold or m.flushes >= len(m.samples_s),
    "constant data": lambda m: len(m.a_MK.unique()) > 10 and len(m.b_KN.unique()) > 10,
    "a multiply-add counted as one FLOP": lambda m: m.flops == 2 * len(m.a_MK) * m.b_KN.numel(),
    "clock drift": lambda m: thirds(m)[1] / thirds(m)[0] < 1.1,
    "half of the output never written": lambda m: torch.allclose(m.a_MK @ m.b_KN, m.c_MN, atol=1e-4),
    "a value above the peak": lambda m: m.tflops <= m.peak_tflops,
}


@pytest.mark.parametrize("fault", TOY_FAULTS)
def test_each_fault_has_a_check_that_catches_it_and_lets_sound_measurements_pass(fault):
    assert solved(judge_harness_check(SOLUTIONS[fault], fault))


@pytest.mark.parametrize("fault", TOY_FAULTS)
def test_each_fault_is_one_of_its_own(fault):
    """No other fault's check notices it, but for those that see slow first calls as a slope."""
    slopes = {"no warm-up", "clock drift"}
    others = [name for name in SOLUTIONS if name != fault and {name, fault} != slopes]
    assert not any(judge_harness_check(SOLUTIONS[name], fault)["right"].iloc[1] for name in others)


def test_the_check_as_given_and_one_that_refuses_everything_do_not_pass():
    as_given = judge_harness_check(lambda m: True)
    assert as_given["right"].sum() == 2 and len(as_given) == 2 + len(TOY_FAULTS)
    assert not solved(judge_harness_check(lambda m: False, "no flush"))


def test_all_checks_together_catch_all_faults():
    assert solved(judge_harness_check(lambda m: all(check(m) for check in SOLUTIONS.values())))


def test_a_check_that_stumbles_over_noise_is_wrong_about_a_sound_measurement():
    score = judge_harness_check(lambda m: np.ptp(m.samples_s) < 0.2 * np.median(m.samples_s), "clock drift")
    assert list(score["right"]) == [True, True, False]


def test_the_toy_measurement_is_below_its_peak():
    assert 0 < toy_measurement().tflops < toy_measurement().peak_tflops


@pytest.mark.slow
def test_a_clock_that_does_not_wait_reads_less_than_one_that_does():
    assert toy_timer(CPU, synchronise=False) < toy_timer(CPU)


@pytest.mark.slow
@pytest.mark.long
def test_the_table_has_every_precaution_and_rates_that_fit_its_times():
    table = broken_benchmarks(CPU, elements=1 << 16, rounds=2).set_index("omitted precaution")
    assert list(table.index) == ["nothing", *PRECAUTIONS]
    assert table.loc["nothing", "ratio to the correct rate"] == 1
    assert np.allclose(table["apparent GB/s"] * table["ms"] / 1e3, 2 * 4 * (1 << 16) / 1e9)
