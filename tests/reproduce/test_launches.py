"""Launches are runs of new processes in numbered folders; published, they are no reference machine of a replay."""

import contextlib
import io
import json
from pathlib import Path

import pandas as pd
import pytest
from typer.testing import CliRunner

from hyperion.book.headline_page import runs_in
from hyperion.chapter.profiles import reference_run, reference_runs
from hyperion.cli import app
from hyperion.errors import HyperionError
from hyperion.reproduce import launches as module
from hyperion.reproduce import publishing
from hyperion.reproduce.launches import measure_launch, measure_launches, notebook_of, publish_launches
from hyperion.results import Row, Run, find_run, find_runs, verify_run
from hyperion.results.execution import LEDGER


def _launch(folder: Path, value: float) -> Path:
    run = Run.create(folder, {"environment": {"gpus": []}, "profile": "smoke"})
    row = Row(notebook="nb", experiment="counting", variant="v", metric="count", value=value)
    run.record("nb", "counting", [row], pd.DataFrame({"x": [value]}), input_hash="h")
    run.write({"notebooks/nb.html": b"page", "benchmarks/counting/a.png": b"picture", "report.html": b"report"})
    return folder


@pytest.fixture
def five(tmp_path):
    return [_launch(tmp_path / "results/h200-launches" / str(number), float(number)) for number in range(1, 6)]


def test_published_launches_have_rows_and_samples_and_are_no_reference_machine(five, tmp_path, monkeypatch):
    reference = tmp_path / "reference"
    _launch(reference / "h200", 0.0)
    folder = publish_launches(five, "h200-launches", reference)
    assert sorted(path.name for path in folder.iterdir()) == ["1", "2", "3", "4", "5", "README.md"]
    for number in range(1, 6):
        run = Run.open(folder / str(number))
        assert [row.value for row in run.rows()] == [float(number)] and verify_run(run)
        assert set(run.verify()) == {"run.json", "rows.csv", "experiments.json", "samples/nb.counting.parquet"}
        assert not list(run.folder.glob(".*lock"))
    assert sorted(runs_in(reference).values()) == ["h200", *["h200-launches"] * 5]
    monkeypatch.setattr("hyperion.results.places.reference_folder", lambda: reference)
    assert [run.folder.name for run in reference_runs()] == ["h200"]


def test_a_replay_prefers_a_run_that_executed_the_notebook_to_launches_of_single_experiments(tmp_path, monkeypatch):
    single, whole = _launch(tmp_path / "a", 0.0), _launch(tmp_path / "b", 1.0)
    monkeypatch.setattr("hyperion.results.places.reference_folder", lambda: tmp_path)
    assert reference_run("", "nb").folder == single
    Run.open(whole).write({LEDGER: json.dumps({"notebooks": {"nb": {"status": "done"}}}).encode()})
    assert reference_run("", "nb").folder == whole
    # A notebook that was interrupted may lack experiments.
    Run.open(single).write({LEDGER: json.dumps({"notebooks": {"nb": {"status": "interrupted"}}}).encode()})
    assert reference_run("", "nb").folder == whole


def test_publishing_again_replaces_all_launches(five, tmp_path):
    publish_launches(five, "launches", tmp_path / "reference")
    folder = publish_launches(five[:3], "launches", tmp_path / "reference")
    assert sorted(path.name for path in folder.iterdir()) == ["1", "2", "3", "README.md"]
    assert [path.name for path in folder.parent.iterdir()] == ["launches"]


def test_a_copy_of_a_launch_a_machine_of_this_name_and_too_large_launches_are_refused(five, tmp_path, monkeypatch):
    reference = tmp_path / "reference"
    copy = _launch(tmp_path / "results/h200-launches/6", 5.0)
    with pytest.raises(HyperionError, match="launches 5 and 6 have the same rows"):
        publish_launches([*five, copy], "launches", reference)
    with pytest.raises(HyperionError, match="today: launches are the runs 1, 2"):
        publish_launches([five[0], _launch(tmp_path / "results/today", 1.0)], "launches", reference)
    _launch(reference / "h200", 0.0)
    with pytest.raises(HyperionError, match="reference of a machine"):
        publish_launches(five, "h200", reference)
    monkeypatch.setattr(publishing, "LARGEST_BYTES", 1000)
    with pytest.raises(HyperionError, match="larger than its limit"):
        publish_launches(five, "launches", reference)
    assert [path.name for path in reference.iterdir()] == ["h200"]


def test_an_edited_launch_and_a_path_of_the_machine_are_refused(five, tmp_path):
    Run.open(five[0]).write({"experiments.json": b'{"a": "/home/me/x"}'})
    with pytest.raises(HyperionError, match="/home/me/x"):
        publish_launches(five, "launches", tmp_path / "reference")
    (five[1] / "rows.csv").write_text("edited")
    with pytest.raises(HyperionError):
        publish_launches(five[1:], "launches", tmp_path / "reference")
    assert not (tmp_path / "reference/launches").exists()


def test_a_folder_of_launches_has_a_name_on_the_command_line(five, tmp_path, monkeypatch):
    monkeypatch.setenv("HYPERION_RESULTS", str(tmp_path / "results"))
    assert find_runs("h200-launches") == five
    assert find_runs("h200-launches/2") == [five[1]]
    with pytest.raises(HyperionError, match="no run 'absent'"):
        find_runs("absent")
    with pytest.raises(HyperionError, match="'h200-launches' is a folder of 5 runs") as refusal:
        find_run("h200-launches")
    assert str(five[0]) in (refusal.value.next_step or "")


def test_each_launch_is_a_job_with_the_notebook_of_each_experiment(tmp_path, monkeypatch):
    jobs = []
    monkeypatch.setattr(module, "run_job", lambda job, on_line: jobs.append(job))
    measure_launches(tmp_path, ["gemm", "language_training_speed"], 5, profile="smoke")
    with pytest.raises(HyperionError, match="measures nothing"):
        measure_launches(tmp_path / "copies", ["gemm"], 5, profile="replay:h200x2")
    assert [Path(job.params["folder"]).name for job in jobs] == ["1", "2", "3", "4", "5"]
    pairs = [("01_hardware_exploration", "gemm"), ("02_core_framework", "language_training_speed")]
    assert all((job.function, job.params["pairs"]) == (measure_launch, pairs) for job in jobs)
    with pytest.raises(HyperionError, match="no chapter has the experiment 'nothing'"):
        notebook_of("nothing")


def test_launches_are_locked_until_all_are_measured(five, tmp_path, monkeypatch):
    """A second call and `publish` are refused, also while the last launch is measured."""
    refused = []

    def other_calls(job, on_line):
        for call in (
            lambda: measure_launches(five[0].parent, ["gemm"], 5, profile="smoke"),
            lambda: publish_launches(five, "launches", tmp_path / "reference"),
        ):
            with pytest.raises(HyperionError, match="another call measures this launch|a running call uses this run"):
                call()
            refused.append(job.params["folder"])

    with monkeypatch.context() as patched:
        patched.setattr(module, "run_job", other_calls)
        measure_launches(five[0].parent, ["gemm"], 5, profile="smoke", on_line=lambda line: None)
    assert refused == [str(folder) for folder in five for _ in range(2)]
    assert not (tmp_path / "reference").exists()
    publish_launches(five, "launches", tmp_path / "reference")


def test_a_launch_that_failed_before_it_had_a_run_leaves_no_folder(five, monkeypatch):
    def fail(job, on_line):
        if Path(job.params["folder"]).name == "6":
            raise HyperionError("no memory")

    monkeypatch.setattr(module, "run_job", fail)
    with pytest.raises(HyperionError, match="no memory"):
        measure_launches(five[0].parent, ["gemm"], 6, profile="smoke")
    assert sorted(five[0].parent.iterdir()) == five


def test_the_name_of_a_run_is_no_name_of_launches(tmp_path, monkeypatch):
    monkeypatch.setenv("HYPERION_RESULTS", str(tmp_path))
    run = _launch(tmp_path / "mine", 1.0)
    before = sorted(run.rglob("*"))
    result = CliRunner().invoke(app, ["launches", "mine", "gemm", "--profile", "smoke"])
    assert isinstance(result.exception, HyperionError) and "this is a run" in result.exception.what
    assert sorted(run.rglob("*")) == before


@pytest.mark.book
@pytest.mark.slow
@pytest.mark.process
def test_two_launches_have_rows_of_their_own_and_a_second_call_measures_only_what_is_missing(tmp_path, monkeypatch):
    """The first launch is a process. Later ones run in this process, because a process takes seconds to load torch."""
    lines: list[str] = []

    def run_here(job, on_line):
        said = io.StringIO()
        with contextlib.redirect_stdout(said):
            answer = job.function(**job.params)
        for line in said.getvalue().splitlines():
            on_line(line)
        return answer

    measure_launches(tmp_path, ["leakage"], 1, profile="smoke", data_source="synthetic", on_line=lines.append)
    assert len(Run.open(tmp_path / "1").rows()) > 0 and not any("nothing measured again" in line for line in lines)
    first = Run.open(tmp_path / "1").finished("02_core_framework", "leakage")
    monkeypatch.setattr(module, "run_job", run_here)
    for already_there in (1, 3):
        measure_launches(tmp_path, ["leakage"], 2, profile="smoke", data_source="synthetic", on_line=lines.append)
        assert sum("nothing measured again" in line for line in lines) == already_there
    second = Run.open(tmp_path / "2")
    assert len(second.rows()) > 0 and second.finished("02_core_framework", "leakage")["started_at"] > first["started_at"]
    assert Run.open(tmp_path / "1").finished("02_core_framework", "leakage") == first
