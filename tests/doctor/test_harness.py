"""`hyperion doctor --harness`: the table of planted faults, and an exit code that tells when one gets through."""

import re

import pytest
from typer.testing import CliRunner

from hyperion.cli import app
from hyperion.doctor import harness
from hyperion.measure.clock import timing
from hyperion.measure.planted_faults import FaultResult


@pytest.mark.slow
@pytest.mark.long
def test_all_faults_are_caught_here_and_the_exit_code_is_0():
    done = CliRunner().invoke(app, ["doctor", "--harness"])
    shown = re.sub(r"[\s│┃]+", " ", done.output)
    assert done.exit_code == 0, shown
    faults = len(harness.ALL_FAULTS)
    assert f"{faults} of {faults} planted faults caught, {faults} of {faults} clean twins pass" in shown
    assert "no synchronisation" in shown and "require_whole_work" in shown


@pytest.fixture
def few_faults(monkeypatch):
    names = ("no cache flush", "only the fastest sample")
    monkeypatch.setattr(harness, "ALL_FAULTS", tuple(f for f in harness.ALL_FAULTS if f.name in names))


def test_a_fault_that_gets_through_makes_it_1(monkeypatch, few_faults):
    monkeypatch.setattr(timing, "require_flushed", lambda *given: None)
    done = CliRunner().invoke(app, ["doctor", "--harness"])
    assert done.exit_code == 1
    assert "1 of 2 planted faults caught, 2 of 2 clean twins pass" in done.output
    assert "not distinguished: no cache flush" in done.output and "no error raised" in done.output


def test_a_clean_twin_that_is_refused_makes_it_1(monkeypatch):
    refused = FaultResult("a fault", "7 [TFLOPS]", "a check", True, "caught", False, "refused [too]", 0.1)
    monkeypatch.setattr(harness, "run_self_test", lambda device, faults: [refused])
    done = CliRunner().invoke(app, ["doctor", "--harness"])
    assert done.exit_code == 1
    assert "1 of 1 planted faults caught, 0 of 1 clean twins pass" in done.output
    assert "refused [too]" in done.output and "7 [TFLOPS]" in done.output
