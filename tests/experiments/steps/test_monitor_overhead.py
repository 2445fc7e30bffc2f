"""The overhead of the monitor: the blocks are paired, a stopped monitor reads nothing, and a step is timed without the first."""

import contextlib
import csv
import itertools
import subprocess
import time

import pytest

from hyperion.errors import HyperionError
from hyperion.experiments.steps import monitor_overhead
from tests.chapter.toy import perform, toy_context

SIZES = {"model": "encoder_d128_h2_l2", "batch_size": 1, "interval_s": 0.02, "block_s": 0.3, "pairs": 3}


def times_of_readings(file):
    with file.open(newline="") as lines:
        return [float(row["time_s"]) for row in csv.DictReader(lines)]


@pytest.mark.process
def test_the_real_monitor_reads_in_each_of_its_blocks(tmp_path):
    result = perform(toy_context("monitor_overhead", SIZES, tmp_path), tmp_path)
    (row,) = result.rows
    assert row.n == 3 and row.ci_low < row.value < row.ci_high
    assert row.params["readings"] >= 3 and row.params["devices"] == 1
    assert result.samples.groupby("kind").size().to_dict() == {"monitor running": 3, "monitor stopped": 3}


@pytest.mark.process
def test_a_stopped_monitor_reads_nothing_and_a_continued_one_reads_on(tmp_path):
    with monitor_overhead.monitor(0.02, tmp_path / "readings.csv") as set_running:
        set_running(False)
        time.sleep(0.6)
        set_running(True)
        time.sleep(1.0)  # on a machine with other work, the monitor does not run at once
    times = times_of_readings(tmp_path / "readings.csv")
    gaps = [later - earlier for earlier, later in itertools.pairwise(times)]
    assert max(gaps) >= 0.5 and gaps[-1] < max(gaps)


@pytest.mark.process
def test_a_monitor_that_does_not_start_is_an_error_with_its_message(tmp_path):
    with (
        pytest.raises(HyperionError, match="--interval 0.001s is too short"),
        monitor_overhead.monitor(0.001, tmp_path / "no.csv"),
    ):
        pass


@pytest.mark.process
def test_a_monitor_that_says_nothing_is_an_error_and_no_endless_wait(tmp_path, monkeypatch):
    launch = subprocess.Popen
    monkeypatch.setattr(monitor_overhead, "_LONGEST_S", 0.2)
    monkeypatch.setattr(monitor_overhead.subprocess, "Popen", lambda command, **options: launch(["sleep", "60"], **options))
    with pytest.raises(HyperionError, match="did not start within"), monitor_overhead.monitor(0.02, tmp_path / "no.csv"):
        pass


def test_the_difference_is_that_of_pairs_whatever_their_order(tmp_path, monkeypatch):
    """The machine becomes 10 % slower with each block. Only differences within a pair, of both orders, show a 5 % overhead."""
    state, order, slower = {"running": True}, [], itertools.count()

    def fake_seconds(*arguments) -> float:
        order.append(state["running"])
        return 1.1 ** (next(slower) // 2) * (1.05 if state["running"] else 1.0)

    @contextlib.contextmanager
    def fake_monitor(interval_s, file):
        yield lambda running: state.update(running=running)
        file.write_text("time_s,device\n" + "0.0,0: CPU\n" * 7)

    monkeypatch.setattr(monitor_overhead, "monitor", fake_monitor)
    next(slower)  # so that the two blocks of a pair have the same speed, after the warm-up
    monkeypatch.setattr(monitor_overhead, "seconds_per_step", fake_seconds)
    (row,) = perform(toy_context("monitor_overhead", SIZES | {"pairs": 12}, tmp_path), tmp_path).rows
    assert row.value == pytest.approx(0.05) and row.n == 12 and row.params["readings"] == 7
    assert set(zip(order[1::2], order[2::2], strict=True)) == {(True, False), (False, True)}


def test_the_first_step_of_a_block_is_not_timed(monkeypatch):
    clock = {"now": 0.0}
    durations = itertools.chain([5.0], itertools.repeat(0.25))
    monkeypatch.setattr(monitor_overhead.time, "perf_counter", lambda: clock["now"])

    def step(phase) -> None:
        clock["now"] += next(durations)

    assert monitor_overhead.seconds_per_step(step, "cpu", 1.0) == 0.25
    assert clock["now"] == 6.0
