"""Launches become runs that `compare` reads: with real processes, and with made-up times for its verdicts."""

import numpy as np
import pandas as pd
import pytest

from hyperion.commands.compare import print_launches, print_relaunch
from hyperion.hardware import detect_cpu
from hyperion.hardware.telemetry import Telemetry
from hyperion.measure import Launched, Relaunched, TimeAnswer, Timing
from hyperion.measure.api.relaunching import TurnPlan
from hyperion.results import compare, relaunches

WORK = """
import relaunched_side

def step():
    return sum(range(relaunched_side.COUNT))

def same():
    return sum(range(20_000))

def work():
    print("a line that is no answer")
    return {"step": step, "same": same}
"""


@pytest.fixture
def sides(tmp_path, monkeypatch):
    """The work's file, and two folders: in B the step does three times as much."""
    monkeypatch.setenv("HYPERION_RESULTS", str(tmp_path / "results"))
    (tmp_path / "bench.py").write_text(WORK)
    for side, count in (("old", 20_000), ("new", 60_000)):
        (tmp_path / side).mkdir()
        (tmp_path / side / "relaunched_side.py").write_text(f"COUNT = {count}")
    return tmp_path / "bench.py", tmp_path / "old", tmp_path / "new"


@pytest.mark.long
@pytest.mark.process
@pytest.mark.slow
def test_real_launches_become_runs_that_compare_reads(sides, tmp_path, capsys):
    assert print_relaunch(*sides, launches=2, seconds=0.05) == 0  # two launches confirm nothing
    (place,) = (tmp_path / "results").glob("*-relaunch")
    runs = [relaunches(str(place / side)) for side in "AB"]
    assert [len(of_side) for of_side in runs] == [2, 2]
    for run in (run for of_side in runs for run in of_side):
        assert run.verify()
        rows = {row.variant: row for row in run.rows()}
        assert set(rows) == {"step", "same"} and all((r.metric, r.n) == ("call_time_s", 30) for r in rows.values())
        assert all(r.params == {"cache": "hot", "turns": "levelled by round"} for r in rows.values())
        samples, facts = run.samples("relaunch", "bench"), run.information()["relaunch"]
        assert samples["round"].nunique() == 30 == facts["rounds"] and (samples["time_s"] > 0).all()
        assert list(facts["files"]) == ["relaunched_side.py"] and "environment" in run.information()
        assert str(tmp_path) not in str(run.information())
    step = next(c for c in compare(*runs) if " step " in c.name)
    assert step.value_b > 1.5 * step.value_a and step.verdict == "indicative"
    said = capsys.readouterr().out
    assert "bench step" in said and f"compare --all {place / 'A'} {place / 'B'}" in " ".join(said.split())


def test_a_side_that_is_missing_leaves_no_folder_behind(sides, tmp_path):
    with pytest.raises(Exception, match="no such folder"):
        print_relaunch(sides[0], sides[1], tmp_path / "none", launches=5, seconds=0.05)
    assert list((tmp_path / "results").iterdir()) == []


def test_a_folder_with_files_of_others_hides_no_error_of_a_launch(sides, tmp_path, monkeypatch):
    def fail(*arguments, **options):
        (place,) = (tmp_path / "results").iterdir()
        (place / "notes.txt").touch()
        raise KeyboardInterrupt

    monkeypatch.setattr("hyperion.measure.relaunch", fail)
    with pytest.raises(KeyboardInterrupt):
        print_relaunch(*sides, launches=5, seconds=0.05)


@pytest.mark.parametrize(("factor", "code"), [(3.0, 1), (1.0, 0)])
def test_a_slowdown_is_exit_code_1_and_the_same_code_0(sides, tmp_path, capsys, factor, code):
    random, device, made = np.random.default_rng(0), detect_cpu(), []
    for side, level in (("A", 1e-3), ("B", 1e-3 * factor)):
        for number in range(1, 6):
            times = level * random.lognormal(0, 0.01) * random.lognormal(0, 0.02, 120)
            timing = Timing(times, (level,), True, cold=False, stopped="time limit", telemetry=Telemetry())
            samples = pd.DataFrame({"variant": "step", "round": range(120), "index": 0, "calls": 1, "time_s": times})
            made.append(Launched(side, number, {"step": TimeAnswer("step", timing, device)}, samples, {"s.py": side}))
    (tmp_path / "place").mkdir()
    relaunched = Relaunched(tuple(made), TurnPlan(120, 5e-3, {"step": 1}, 1.0))
    assert print_launches(relaunched, sides[0], sides[1:], tmp_path / "place") == code
    runs = [relaunches(str(tmp_path / "place" / side)) for side in "AB"]
    hashes = [{run.finished("relaunch", "bench")["input_hash"] for run in of_side} for of_side in runs]
    assert [len(of_side) for of_side in hashes] == [1, 1] and hashes[0] != hashes[1]
    said = capsys.readouterr().out
    assert ("regression" in said.split("launches:")[0]) == bool(code) and "power: a worsening of 3%" in said
    # What sets the versions apart is stated, and what they have in common is not.
    assert "relaunch folder: A old; B new" in said and "relaunch source: A" in said and "relaunch launch" not in said
    assert f"exit code {code}: {'1' if code else 'no'} confirmed regression" in said
