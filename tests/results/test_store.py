"""The run folder: transactions that survive kills and company."""

import dataclasses
import itertools
import json
import math
import os
import random
import re
import signal
import subprocess
import sys
import time

import pandas as pd
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hyperion.results import Prediction, Row, RowError, Run, StoreError
from hyperion.results.execution import KEPT, LOG, MEASURED, executed
from hyperion.results.files import MANIFEST
from hyperion.results.predictions import LATE

WRITER = """
import sys
import pandas as pd
from pathlib import Path
from hyperion.results import Row, Run
run = Run.open(Path(sys.argv[1]))
name, rounds = sys.argv[2], int(sys.argv[3])
for i in range(rounds):
    rows = [Row(notebook="nb", experiment=f"{name}{i % 7}", variant=str(v), metric="count", value=i) for v in range(20)]
    run.record("nb", f"{name}{i % 7}", rows, pd.DataFrame({"i": [i] * 100}), input_hash=str(i))
    print(i, flush=True)
"""


def writer(run, name, rounds):
    # stderr goes to the test's own: a writer that fails says why.
    return subprocess.Popen([sys.executable, "-c", WRITER, str(run.folder), name, str(rounds)], stdout=subprocess.PIPE, text=True)


def test_record_and_read_back(new_run, row, samples):
    run = new_run()
    run.record(row().notebook, "gemm", [row(), row(dtype="float32")], samples, input_hash="h1", source="mirror")
    again = Run.open(run.folder)
    assert again.rows() == [row(), row(dtype="float32")]
    assert again.information()["profile"] == "smoke"
    expected = {"input_hash": "h1", "rows": 2, "source": "mirror", "data": {}, "provenance": {}}
    assert again.finished(row().notebook, "gemm") == expected
    assert again.finished(row().notebook, "bandwidth") is None
    pd.testing.assert_frame_equal(again.samples(row().notebook, "gemm"), samples)
    run.record(row().notebook, "gemm", [row(dtype="float16")], samples, input_hash="h2")
    assert again.rows(experiment="gemm") == [row(dtype="float16")]
    assert "rows.csv" in again.verify()


@pytest.mark.parametrize(
    ("changes", "fault"),
    [
        ([{"value": None}], "null without a reason"),
        ([{"experiment": "bandwidth"}], "row belongs to"),
        ([{}, {}], "2 rows have the same key: cold bfloat16"),
    ],
)
def test_one_bad_row_stores_nothing(new_run, row, samples, changes, fault):
    run = new_run()
    with pytest.raises(RowError, match=fault):
        run.record(row().notebook, "gemm", [row(dtype="float64")] + [row(**c) for c in changes], samples, input_hash="h")
    assert run.rows() == [] and run.finished(row().notebook, "gemm") is None


def test_create_refuses_a_folder_with_a_run_and_open_one_without(new_run, tmp_path):
    new_run()
    with pytest.raises(StoreError, match="already holds a run"):
        new_run()
    with pytest.raises(StoreError, match="no run here"):
        Run.open(tmp_path)


def test_another_schema_is_refused(new_run):
    run = new_run()
    run.write({"run.json": json.dumps({"schema": 99}).encode()})
    with pytest.raises(StoreError, match="schema 99"):
        Run.open(run.folder)


@pytest.mark.parametrize("name", ["rows.csv", "run.json", "experiments.json", "predictions.json", "samples/nb.e.parquet"])
@pytest.mark.parametrize("damage", ["truncated", "edited", "missing"])
def test_a_damaged_file_is_refused_by_name(new_run, samples, name, damage):
    run = new_run()
    run.predict([prediction()])
    run.record("nb", "e", [], samples, input_hash="h")
    path = run.folder / name
    content = path.read_bytes()
    if damage == "missing":
        path.unlink()
    else:
        path.write_bytes(content[:-1] if damage == "truncated" else content[:-2] + b"x" + content[-1:])
    with pytest.raises(StoreError) as refusal:
        again = Run(run.folder)
        again.information(), again.rows(), again.finished("nb", "e"), again.predictions(), again.samples("nb", "e")
    assert name in str(refusal.value)
    with pytest.raises(StoreError):
        run.verify()


def prediction(**changes):
    fields = {"notebook": "nb", "experiment": "e", "variant": "v", "dtype": "float32", "metric": "gemm_tflops"}
    values = {"params": {"n": 64}, "guess": 1.0, "estimate": 2.0, "basis": "datasheet", "input_hash": "h"}
    return Prediction(**fields | values | changes)


def test_a_prediction_is_never_changed(new_run):
    run = new_run()
    run.predict([prediction()])
    run.predict([prediction(guess=9.0), prediction(variant="w")])
    assert run.predictions("nb", "e") == [prediction(), prediction(variant="w")]


def test_a_prediction_has_a_time_and_a_hash_which_an_edit_breaks(new_run):
    run = new_run()
    run.predict([prediction(made_at="2026-01-01T00:00:00.000+00:00", low=1.0, high=4.0, ceiling=9.0, guess=None)])
    (stored,) = run.predictions()
    assert len(stored.digest) == 16 and stored.made_at.startswith("2026") and stored == stored.sealed()
    run.predict([prediction(made_at="2026-02-01T00:00:00.000+00:00", guess=3.0)])
    assert run.predictions() == [dataclasses.replace(stored, guess=3.0)]  # the guess is the reader's
    for edit in ({"estimate": 2.5}, {"made_at": "2025-01-01T00:00:00.000+00:00"}, {"high": 9.0}, {"digest": ""}):
        edited = dataclasses.asdict(stored) | edit
        run.write({"predictions.json": json.dumps([edited]).encode()})
        with pytest.raises(StoreError, match="does not match its digest: it was edited"):
            run.predictions()


_RUN_NUMBERS = itertools.count()
_NUMBERS = st.none() | st.integers(-(2**53), 2**53) | st.floats(allow_nan=False, allow_infinity=False)
_PARAMS = st.dictionaries(st.text(), st.none() | st.booleans() | _NUMBERS | st.text() | st.lists(st.integers(0, 9)))


@pytest.mark.slow
@given(estimate=_NUMBERS, ceiling=_NUMBERS, low=_NUMBERS, high=_NUMBERS, params=_PARAMS)
@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
def test_whatever_is_predicted_can_be_read_back(new_run, estimate, ceiling, low, high, params):
    run = new_run(f"run-{next(_RUN_NUMBERS)}")
    numbers = {"estimate": estimate, "ceiling": ceiling, "low": low, "high": high}
    run.predict([prediction(made_at="2026-01-01T00:00:00.000+00:00", params=params, **numbers)])
    (stored,) = run.predictions()
    assert {name: getattr(stored, name) for name in numbers} == numbers and stored.params == params


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"estimate": "2"}, "prediction.estimate must be a valid number, not '2'"),
        ({"high": math.nan}, "prediction.high must be a finite number, not nan"),
        ({"guess": True}, "prediction.guess must be a valid number, not True"),
        ({"variant": 3}, "prediction.variant must be a valid string, not 3"),
        ({"params": {"n": {1, 2}}}, "{1, 2} is not a text, number, list or table"),
    ],
)
def test_a_prediction_that_could_not_be_read_back_is_refused_and_the_others_stay(new_run, changes, says):
    run = new_run()
    run.predict([prediction()])
    with pytest.raises(StoreError, match=re.escape(says)) as refusal:
        run.predict([prediction(experiment="other", **changes)])
    assert "nb / other" in str(refusal.value) and run.predictions() == [prediction()]


def test_a_source_that_could_not_be_read_back_is_refused_and_the_others_stay(new_run, samples):
    run = new_run()
    run.record("nb", "e", [Row(notebook="nb", experiment="e", variant="v", metric="count", value=1.0)], samples, input_hash="h")
    other = Row(notebook="nb", experiment="other", variant="v", metric="count", value=1.0)
    with pytest.raises(StoreError, match=re.escape("finished.source must be a valid string, not None")):
        run.record("nb", "other", [other], samples, input_hash="h", source=None)
    assert [row.experiment for row in Run(run.folder).rows()] == ["e"] and list(run.experiments()) == ["nb/e"]


def test_predictions_after_the_first_sample_are_refused(new_run, samples):
    run = new_run()
    run.predict([prediction(made_at="2026-01-01T00:00:02.000+00:00")])
    run.record("nb", "e", [], samples, input_hash="h", started_at="2026-01-01T00:00:03.000+00:00")
    run.verify()
    stored = run.predictions()
    run.write({"predictions.json": b"[]"})
    with pytest.raises(StoreError, match="are not those that were stored before its first sample"):
        run.verify()
    later = dataclasses.replace(stored[0], made_at="2026-01-01T00:00:04.000+00:00").sealed()
    run.write({"predictions.json": json.dumps([dataclasses.asdict(later)]).encode()})
    with pytest.raises(StoreError, match="was made at 2026-01-01T00:00:04.000.00:00, after the first sample"):
        run.verify()
    # A prediction that was replaced because the rows that it depends on have changed says that it is late.
    late = dataclasses.replace(later, basis=later.basis + LATE).sealed()
    run.write({"predictions.json": json.dumps([dataclasses.asdict(late)]).encode()})
    run.verify()


def test_predictions_for_other_inputs_are_not_those_of_the_experiment(new_run, samples):
    run = new_run()
    made = {"made_at": "2026-01-01T00:00:02.000+00:00"}
    run.predict([prediction(**made), prediction(variant="w", input_hash="of other sizes", **made)])
    run.record("nb", "e", [], samples, input_hash="h", started_at="2026-01-01T00:00:03.000+00:00")
    assert "predictions.json" in run.verify()


def test_rates_that_earlier_versions_stored_as_predictions_are_ceilings():
    assert prediction().is_ceiling and not prediction(estimate=None).is_ceiling
    assert not prediction(metric="samples_per_s").is_ceiling
    assert not prediction(made_at="2026-01-01T00:00:00.000+00:00").is_ceiling


def test_a_guess_left_out_is_taken_until_the_experiment_has_run(new_run, samples):
    run = new_run()
    run.predict([prediction(guess=None)])
    run.predict([prediction(guess=3.0, estimate=9.0)])
    assert run.predictions("nb", "e") == [prediction(guess=3.0)]
    run.predict([prediction(variant="w", guess=None)])
    run.record("nb", "e", [], samples, input_hash="h")
    run.predict([prediction(variant="w", guess=4.0)])
    assert run.predictions("nb", "e")[1].guess is None


def test_other_upstream_rows_replace_the_estimates_and_leave_the_guess(new_run, samples):
    run = new_run()
    run.predict([prediction(dtype="", params={}, guess=3.0, estimate=None), prediction(variant="w", guess=None)])
    run.record("nb", "e", [], samples, input_hash="h")
    run.predict([prediction(guess=7.0, estimate=5.0, upstream_hash="u")])
    assert run.predictions() == [prediction(guess=3.0, estimate=5.0, upstream_hash="u")]
    run.predict([prediction(estimate=6.0, input_hash="other", guess=7.0)])
    assert [p.guess for p in run.predictions()] == [3.0, 7.0]


def test_provenance_is_kept_by_experiment_and_each_environment_once(new_run, row, samples):
    run = new_run()
    for experiment, seed, environment in (("a", 0, {"torch": "1"}), ("b", 1, {"torch": "1"}), ("c", 0, {"torch": "2"})):
        run.record("nb", experiment, [], samples, input_hash="h", provenance={"seed": seed}, environment=environment)
    provenances = [run.finished("nb", experiment)["provenance"] for experiment in "abc"]
    assert [provenance["seed"] for provenance in provenances] == [0, 1, 0]
    assert [run.environments()[p["environment"]]["torch"] for p in provenances] == ["1", "1", "2"]
    assert len(run.environments()) == 2 and "environments.json" in run.verify()


def test_what_is_recorded_or_confirmed_is_told_to_the_driver(new_run, row, samples, tmp_path, monkeypatch):
    monkeypatch.setenv(LOG, str(tmp_path / "log"))
    run, stem = new_run(), row().notebook
    run.record(stem, "gemm", [row()], samples, input_hash="h")
    assert executed(tmp_path / "log", stem) == {"gemm": MEASURED}
    (tmp_path / "log").unlink()
    entry = run.finished(stem, "gemm")
    run.confirm(stem, "gemm", [row(predicted=2.0)])
    assert executed(tmp_path / "log", stem) == {"gemm": KEPT} and executed(tmp_path / "log", "other") == {}
    assert run.rows()[0].predicted == 2.0 and run.finished(stem, "gemm") == entry


def test_a_prediction_interrupted_among_its_renames_still_stands(new_run, monkeypatch):
    """Killed before the renames, predictions.json is not there yet; a reader must finish, not start anew."""
    run, rename, calls = new_run(), os.replace, []

    def replace(source, target):
        calls.append(target)
        if len(calls) > 1:
            raise KeyboardInterrupt
        rename(source, target)

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", replace)
        with pytest.raises(KeyboardInterrupt):
            run.predict([prediction()])
    assert not (run.folder / "predictions.json").exists()
    run.predict([prediction(guess=9.0)])
    assert run.predictions() == [prediction()]


@pytest.mark.process
def test_killed_at_random_moments_the_run_stays_whole(new_run):
    run, moments = new_run(), random.Random(0)
    for round_ in range(6):
        process = writer(run, "e", 10_000)
        committed = int(process.stdout.readline())
        time.sleep(moments.uniform(0, 0.25))
        process.send_signal(signal.SIGKILL)
        committed = max([committed, *map(int, process.stdout.read().split())])
        process.wait()
        assert "rows.csv" in run.verify()
        by_experiment = {row.experiment: [r for r in run.rows() if r.experiment == row.experiment] for row in run.rows()}
        assert all(len(rows) == 20 and len({r.value for r in rows}) == 1 for rows in by_experiment.values()), round_
        # What the writer said was stored is stored; at most the one in flight is there as well.
        assert run.finished("nb", f"e{committed % 7}")["input_hash"] in (str(committed), str(committed + 7))
        for experiment, rows in by_experiment.items():
            assert run.finished("nb", experiment)["input_hash"] == str(int(rows[0].value))
            assert set(run.samples("nb", experiment)["i"]) == {int(rows[0].value)}
    assert not [name for name in json.loads((run.folder / MANIFEST).read_text())["files"] if ".tmp" in name]


@pytest.mark.process
def test_writers_side_by_side_lose_nothing(new_run):
    run = new_run()
    processes = [writer(run, name, 7) for name in "abcd"]
    assert [process.communicate(timeout=120) and process.returncode for process in processes] == [0] * 4
    assert {row.experiment for row in run.rows()} == {f"{name}{i}" for name in "abcd" for i in range(7)}
    assert len(run.rows()) == 4 * 7 * 20
    assert len(run.verify()) == 2 + 1 + 4 * 7  # run.json and rows.csv, experiments.json, samples


def test_samples_of_a_misspelt_experiment_are_not_taken_for_damaged(new_run, row, samples):
    run = new_run()
    run.record(row().notebook, "gemm", [row()], samples, input_hash="1" * 64)
    with pytest.raises(StoreError, match="no samples of the experiment 'gem' in the notebook") as refusal:
        run.samples(row().notebook, "gem")
    assert refusal.value.next_step.endswith(f"of {row().notebook}.gemm (similar)")
