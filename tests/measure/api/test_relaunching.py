"""Relaunching: a user's file is accepted or refused, turns are planned, rounds are normalised, a dying launch is named."""

import contextlib
import os
import sys

import numpy as np
import pytest

from hyperion.errors import HyperionError
from hyperion.measure import relaunch
from hyperion.measure.api import relaunching
from hyperion.measure.api.relaunch_worker import files_from, functions_of
from hyperion.measure.api.relaunching import normalise_rounds, plan_turns
from hyperion.processes import JobError


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("x = 1", r"has no function work\(\)"),
        ("def work(): return [print]", r"work\(\) returned list, not functions by name"),
        ("def work(): return {}", "returned a dict with the keys"),
        ("def work(): return {'a': 1}", "int is not callable"),
        ("def work(): return {'a': lambda x: x}", "is called with nothing"),
    ],
)
def test_a_file_without_functions_is_refused(tmp_path, text, message):
    (tmp_path / "work.py").write_text(text)
    with pytest.raises(HyperionError, match=message) as error:
        functions_of(tmp_path / "work.py")
    assert error.value.next_step


def test_paths_are_checked_before_anything_is_started(tmp_path):
    with pytest.raises(HyperionError, match="no such file"):
        relaunch(tmp_path / "work.py", tmp_path, tmp_path)
    (tmp_path / "work.py").write_text("")
    with pytest.raises(HyperionError, match="no such folder"):
        relaunch(tmp_path / "work.py", tmp_path, tmp_path / "b")
    (tmp_path / "hyperion").mkdir()
    with pytest.raises(HyperionError, match="does not support relaunch"):
        relaunch(tmp_path / "work.py", tmp_path, tmp_path)


def test_a_side_of_which_nothing_was_imported_is_refused_unless_there_is_only_one(tmp_path):
    sides = {"A": tmp_path / "old", "B": tmp_path / "new"}
    with pytest.raises(HyperionError, match=r"work\.py imported nothing from the folder of side B") as error:
        relaunching._require_use(tmp_path / "work.py", sides, {"A": {"x.py": "1"}, "B": {}})
    assert error.value.where == sides["B"]
    relaunching._require_use(tmp_path / "work.py", dict.fromkeys("AB", tmp_path), {"A": {}, "B": {}})


def test_a_file_that_changes_between_launches_is_named(tmp_path):
    with contextlib.ExitStack() as stack:
        team = relaunching._Team(tmp_path / "work.py", dict.fromkeys("AB", tmp_path), stack)
        team.prepared = {("B", number): {"files": {"x.py": digest}} for number, digest in ((1, "a"), (2, "a"), (3, "b"))}
        team.require_same_files("B", 1), team.require_same_files("B", 2)
        with pytest.raises(HyperionError, match="changed before launch 3 of B") as error:
            team.require_same_files("B", 3)
    assert error.value.where == tmp_path / "x.py"


def test_the_files_of_a_side_are_those_that_stand_on_the_import_path(tmp_path, monkeypatch):
    (tmp_path / "lib").mkdir()
    for file in ("relaunched_one.py", "lib/relaunched_two.py"):
        (tmp_path / file).write_text("")
    for folder in (tmp_path, tmp_path / "lib"):
        monkeypatch.syspath_prepend(str(folder))
    __import__("relaunched_one"), __import__("relaunched_two")
    assert list(files_from(tmp_path)) == ["relaunched_one.py"]  # the other one belongs to an environment in the folder
    for name in ("relaunched_one", "relaunched_two"):
        sys.modules.pop(name)


def test_slices_are_short_and_slow_functions_still_get_thirty_turns():
    quick = plan_turns({"f": 1e-5, "g": 2e-4}, launches=10, seconds=0.6)
    assert (quick.rounds, quick.calls) == (120, {"f": 50, "g": 2}) and quick.slice_s == pytest.approx(5e-3)
    slow = plan_turns({"f": 0.4}, launches=10, seconds=0.6)
    assert (slow.rounds, slow.calls) == (30, {"f": 1}) and slow.expected_s >= 30 * 10 * 2 * 0.4


def test_what_a_round_does_to_all_launches_is_levelled_and_what_sets_them_apart_stays():
    random = np.random.default_rng(0)
    own = np.array([1.0, 1.02, 0.99, 1.01, 1.1, 1.12, 1.09, 1.11])[:, None]
    machine = random.lognormal(0, 0.3, (1, 60))
    times = normalise_rounds(own * machine)
    assert np.allclose(times / times[0], own) and np.allclose(times, times[:, :1])
    assert np.median(times) == pytest.approx(np.median(own * np.median(machine)), rel=1e-6)


@pytest.mark.parametrize("change", [0.0, 0.03, 0.5])
def test_levelling_draws_the_sides_not_together_where_turns_are_noisy(change):
    random, seen = np.random.default_rng(0), []
    for _ in range(200):
        sides = np.repeat([1.0, 1 + change], 5)[:, None]
        times = normalise_rounds(sides * random.lognormal(0, 0.1, (1, 120)) * random.lognormal(0, 0.02, (10, 120)))
        logarithms = np.log(np.median(times, axis=1))
        seen.append(logarithms[5:].mean() - logarithms[:5].mean())
    assert np.mean(seen) == pytest.approx(np.log1p(change), abs=5e-4)


@pytest.mark.process
@pytest.mark.slow
def test_a_launch_that_dies_in_its_turn_is_named_and_no_process_stays(tmp_path):
    for side in "ab":
        (tmp_path / side).mkdir()
        (tmp_path / side / "relaunched_side.py").write_text(f"side = {side!r}")
    pids, work = tmp_path / "pids", tmp_path / "work.py"
    work.write_text(
        f"""
import os, signal, relaunched_side
open({str(pids)!r}, "a").write(f"{{os.getpid()}}\\n")
def step():
    if relaunched_side.side == "b" and os.path.exists({str(tmp_path / "now")!r}):
        os.kill(os.getpid(), signal.SIGKILL)
def work():
    return {{"step": step}}
"""
    )

    def report(done: int, total: int, note: str) -> None:
        if note == "launched":
            (tmp_path / "now").touch()

    with pytest.raises(JobError, match=r"launch 1 of B \(b\) was killed by SIGKILL"):
        relaunch(work, tmp_path / "a", tmp_path / "b", launches=1, report=report)
    started = [int(pid) for pid in pids.read_text().split()]
    assert len(started) == 2 and not any(os.path.exists(f"/proc/{pid}") for pid in started)
