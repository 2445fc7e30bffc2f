"""A chapter keeps what it measured, measures again what changed, and replays without measuring."""

import json
import math
import shutil
import subprocess
import sys
from dataclasses import asdict, replace
from functools import partial

import numpy as np
import pandas as pd
import pytest
import torch

from hyperion.chapter import Chapter, experiment_names, load_profile, open_chapter, profile_names
from hyperion.chapter.context import Context, Experiment, Forecast, Result
from hyperion.chapter.profiles import require_valid_sizes
from hyperion.chapter.subjects import module_of
from hyperion.chapter.variants import run_experiment, unpacked
from hyperion.data import DataError
from hyperion.dependencies import reached_source_hash
from hyperion.errors import HyperionError
from hyperion.results import Row, RowError, Run, StoreError
from hyperion.results.execution import UNEXPECTED_CLAIM, UNEXPECTED_ROW, unexpected
from hyperion.results.predictions import predictions_digest
from hyperion.results.store import utc_now
from hyperion.workloads import datasets

HARDWARE, NOTEBOOK = "01_hardware_exploration", "02_core_framework"


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory):
    """A run that holds `leakage`, the quickest experiment that trains."""
    folder = tmp_path_factory.mktemp("runs") / "first"
    chapter = open_chapter(NOTEBOOK, profile="smoke", output=str(folder))
    chapter.predict("leakage", guess=4.0)
    chapter.run("leakage")
    return folder


@pytest.mark.slow
def test_rows_carry_the_estimate_written_before(run_folder):
    row = Run.open(run_folder).rows(NOTEBOOK, "leakage")[0]
    assert row.predicted == pytest.approx(4.1589, abs=1e-4)
    assert row.check_error <= row.check_tolerance == 4.0


@pytest.mark.slow
def test_predictions_are_stored_with_time_and_hash_before_the_first_sample(tmp_path, monkeypatch):
    chapter, seen, measure = open_chapter(NOTEBOOK, profile="smoke", output=str(tmp_path / "run")), [], Chapter._measure
    sampled_at = []

    def first_sample(*arguments):
        sampled_at.append(utc_now())
        seen.extend(Run.open(tmp_path / "run").predictions(NOTEBOOK, "leakage"))
        return measure(*arguments)

    monkeypatch.setattr(Chapter, "_measure", first_sample)
    chapter.run("leakage")
    run = Run.open(tmp_path / "run")
    entry = run.finished(NOTEBOOK, "leakage")
    assert seen and seen == run.predictions(NOTEBOOK, "leakage")
    assert all(p.made_at and p.digest == p.sealed().digest and p.made_at <= entry["started_at"] <= sampled_at[0] for p in seen)
    assert entry["predictions"] == predictions_digest(seen)
    run.verify()


def test_a_guess_made_after_the_fact_changes_nothing_and_says_so(run_folder, capsys):
    chapter = open_chapter(NOTEBOOK, profile="smoke", output=str(run_folder))
    assert list(chapter.predict("leakage", guess=4.16)["guess"]) == [4.0]
    assert "The guess 4 is already stored and stays; the new guess 4.16 is ignored" in capsys.readouterr().out
    chapter.predict("leakage", guess=4.0)
    assert "too late" not in capsys.readouterr().out


def test_an_experiment_is_measured_again_if_a_package_that_it_lacked_is_installed(tmp_path, monkeypatch, capsys):
    goes = count_with_errors(monkeypatch, [{}])
    open_again = partial(open_chapter, NOTEBOOK, profile="smoke", output=str(tmp_path / "run"))
    open_again().run("leakage")
    monkeypatch.setattr("hyperion.chapter.chapter.installed_since", lambda rows: ["expecttest"] if len(rows) == 2 else [])
    chapter = open_again()
    chapter.run("leakage")
    assert "measured again, because these packages were installed since: expecttest" in capsys.readouterr().out
    chapter.run("leakage")
    assert len(goes) == 2


def test_a_refused_value_is_not_restored_from_a_checkpoint_if_a_package_was_installed_too(tmp_path, monkeypatch):
    goes = count_with_errors(monkeypatch, [{"check_error": 0.5}, {}])
    open_again = partial(open_chapter, NOTEBOOK, profile="smoke", output=str(tmp_path / "run"))
    open_again().run("leakage")
    monkeypatch.setattr("hyperion.chapter.chapter.installed_since", lambda rows: ["expecttest"])
    open_again().run("leakage")
    assert goes == [[], []]


def test_a_second_call_measures_nothing_again(run_folder, capsys):
    before = (run_folder / "rows.csv").read_bytes()
    result = open_chapter(NOTEBOOK, profile="smoke", output=str(run_folder)).run("leakage")
    assert "nothing measured again" in capsys.readouterr().out
    assert (run_folder / "rows.csv").read_bytes() == before
    assert len(result.samples) == load_profile("smoke").sizes("leakage")["steps"]


@pytest.fixture
def chapter(tmp_path):
    """A chapter of its own run."""
    return open_chapter(NOTEBOOK, profile="smoke", output=str(tmp_path / "own run"))


@pytest.mark.parametrize("true", [True, np.True_, np.array([True]), torch.tensor(True), torch.tensor([[True]])])
def test_a_claim_that_holds_is_silent_and_one_that_does_not_is_unexpected(chapter, capsys, monkeypatch, tmp_path, true):
    monkeypatch.setenv("HYPERION_EXECUTION_LOG", str(tmp_path / "log"))
    capsys.readouterr()
    chapter.expect(true, "not so")
    assert capsys.readouterr().out == ""
    chapter.expect(not true if isinstance(true, bool) else ~true, "loss 7.1,\n above 4")
    # The driver passes on what begins like this, a line at a time.
    assert capsys.readouterr().out == "UNEXPECTED: loss 7.1, above 4\n"
    assert unexpected(tmp_path / "log", NOTEBOOK) == ["loss 7.1, above 4"]


@pytest.mark.parametrize("holds", [None, 1, 0.0, "true", [], [True], np.array([True, False]), torch.ones(2) > 0, np.array([])])
def test_what_is_no_truth_value_is_refused_by_name(chapter, holds):
    with pytest.raises(HyperionError, match=rf"the check of 'a claim' got {type(holds).__name__} .*not a truth value"):
        chapter.expect(holds, "a claim")


def test_a_claim_about_times_is_unexpected_on_a_gpu_and_a_warning_on_a_cpu(chapter, capsys):
    claim = "more bytes, less time"
    capsys.readouterr()
    chapter.environment = chapter.environment | {"gpus": [{"name": "a GPU"}]}
    chapter.expect_timing(True, claim)
    assert capsys.readouterr().out == ""
    chapter.expect_timing(False, claim)
    assert capsys.readouterr().out == f"UNEXPECTED: {claim}\n"
    chapter.environment = chapter.environment | {"gpus": []}
    chapter.expect_timing(True, claim)
    assert capsys.readouterr().out == ""
    chapter.expect_timing(False, claim)
    assert capsys.readouterr().out.startswith(f"WARNING: {claim}. On a CPU")


@pytest.mark.parametrize(
    ("low", "high", "said"),
    [
        (0.99, 1.01, ""),
        (0.98, 1.02, ""),
        (0.97, 1.01, "WARNING: undecided"),
        (0.99, 1.03, "WARNING: undecided"),
        (0.9, 1.1, "WARNING: undecided"),
        (1.021, 1.03, "UNEXPECTED"),
        (0.9, 0.979, "UNEXPECTED"),
    ],
)
def test_two_clocks_agree_with_the_whole_interval(chapter, capsys, low, high, said):
    chapter.environment = chapter.environment | {"gpus": [{"name": "a GPU"}]}
    row = Row(
        notebook=NOTEBOOK,
        experiment="gemm",
        variant="v",
        metric="speedup",
        value=(low + high) / 2,
        n=30,
        ci_low=low,
        ci_high=high,
        limit_source="no limit",
    )
    capsys.readouterr()
    chapter.expect_within(row, 0.98, 1.02, "our clock over a plain loop's")
    out = capsys.readouterr().out
    assert out.startswith(said) if said else out == ""
    assert not said or f"{low:.4g} to {high:.4g}" in out


def count_with_errors(monkeypatch, errors: list[dict], isolated: bool = False) -> list:
    """Make every experiment count twice, the second time with the columns given for each go; returns the goes done."""
    goes = []

    def run(context, report):
        context.workspace.mkdir(parents=True, exist_ok=True)
        goes.append(sorted(path.name for path in context.workspace.iterdir()))
        (context.workspace / "step-1").mkdir(exist_ok=True)
        shared = {"check": "as counted", "check_error": 0.0, "check_tolerance": 0.1}
        columns = shared | errors[min(len(goes), len(errors)) - 1]
        rows = [context.row("good", "count", 7.0, **shared), context.row("bad", "count", 8.0, **columns)]
        return Result(rows, pd.DataFrame({"x": [1]}))

    experiment = Experiment(lambda context: [], run, isolated=isolated)
    monkeypatch.setattr("hyperion.chapter.chapter.experiment_named", lambda name: experiment)
    monkeypatch.setattr("hyperion.chapter.chapter.run_isolated", run)
    return goes


@pytest.mark.parametrize("isolated", [False, True])
def test_a_row_that_fails_keeps_the_others_and_is_measured_again_by_a_later_call(tmp_path, monkeypatch, capsys, isolated):
    goes = count_with_errors(monkeypatch, [{"check_error": 0.5}, {}], isolated)
    monkeypatch.setenv("HYPERION_EXECUTION_LOG", str(tmp_path / "log"))
    open_again = partial(open_chapter, NOTEBOOK, profile="smoke", output=str(tmp_path / "run"))
    chapter = open_again()
    result = chapter.run("leakage")
    sentence = "leakage, bad: count 8 items failed its check 'as counted': error 0.5 above tolerance 0.1"
    assert f"UNEXPECTED: {sentence}\n" in capsys.readouterr().out
    assert unexpected(tmp_path / "log", NOTEBOOK, UNEXPECTED_ROW) == [sentence]
    assert unexpected(tmp_path / "log", NOTEBOOK, UNEXPECTED_CLAIM) == []
    assert result.rows == Run.open(tmp_path / "run").rows() and [row.value for row in result.rows] == [7.0, None]
    chapter.run("leakage")
    assert len(goes) == 1  # what this very notebook measured stays, until its next execution
    assert [row.value for row in open_again().run("leakage").rows] == [7.0, 8.0]
    assert "measured again, because a value of it was unexpected" in capsys.readouterr().out
    assert goes == [[], []]  # no checkpoint of the go that went wrong was resumed
    open_again().run("leakage")
    assert len(goes) == 2 and "nothing measured again" in capsys.readouterr().out


def test_a_row_that_is_malformed_is_an_error_and_nothing_is_stored(tmp_path, monkeypatch):
    count_with_errors(monkeypatch, [{"check_tolerance": None}])
    with pytest.raises(RowError, match="lacks its error or tolerance"):
        open_chapter(NOTEBOOK, profile="smoke", output=str(tmp_path / "run")).run("leakage")
    assert Run.open(tmp_path / "run").rows() == []


@pytest.mark.parametrize("isolated", [False, True])
def test_only_an_isolated_experiment_runs_in_a_process_of_its_own(tmp_path, monkeypatch, isolated):
    places = []
    experiment = Experiment(lambda context: [], lambda context, report: places.append("here"), isolated=isolated)
    monkeypatch.setattr("hyperion.chapter.chapter.experiment_named", lambda name: experiment)
    monkeypatch.setattr("hyperion.chapter.chapter.run_isolated", lambda context, report: places.append("in a process"))
    open_chapter(NOTEBOOK, profile="smoke", output=str(tmp_path / "run"))._measure("leakage", "inputs", {})
    assert places == ["in a process" if isolated else "here"]


def test_other_inputs_or_other_data_resume_no_checkpoint(tmp_path, monkeypatch):
    folders = []
    experiment = Experiment(lambda context: [], lambda context, report: folders.append(context.workspace))
    monkeypatch.setattr("hyperion.chapter.chapter.experiment_named", lambda name: experiment)
    chapter = open_chapter(NOTEBOOK, profile="smoke", output=str(tmp_path / "run"))
    for digest, data in (("inputs", "files"), ("other inputs", "files"), ("inputs", "other files"), ("inputs", "files")):
        chapter._measure("leakage", digest, {"gpt2": data})
    assert len(set(folders)) == 3 and folders[0] == folders[3]


def test_data_that_changed_during_the_run_keep_the_identity_from_before_it(tmp_path, monkeypatch):
    """Which of the two the run read is unknown. With the identity from before, a later call measures again."""
    data: dict = {"staged": "old", "fetched": None}

    def run(context, report):
        data.update(staged="new", fetched="new")
        return Result([context.row("v", "count", 7.0)], pd.DataFrame({"x": [1]}))

    monkeypatch.setattr("hyperion.chapter.chapter.experiment_named", lambda name: Experiment(lambda context: [], run))
    monkeypatch.setattr(Chapter, "_data", lambda self, experiment: dict(data))
    chapter = open_chapter(NOTEBOOK, profile="smoke", output=str(tmp_path / "run"))
    chapter.run("leakage")
    assert chapter.results.finished(NOTEBOOK, "leakage")["data"] == {"staged": "old", "fetched": "new"}


@pytest.mark.parametrize(("isolated", "times"), [(False, 2), (True, 1)])
def test_a_failed_check_of_the_notebook_repeats_no_isolated_experiment(tmp_path, monkeypatch, isolated, times):
    goes = count_with_errors(monkeypatch, [{}], isolated)
    monkeypatch.setenv("HYPERION_REMEASURE", "1")
    for _ in range(2):
        open_chapter(NOTEBOOK, profile="smoke", output=str(tmp_path / "run")).run("leakage")
    assert len(goes) == times


def test_a_replay_reports_the_rows_that_were_unexpected_on_the_reference_machine(tmp_path, monkeypatch, capsys):
    count_with_errors(monkeypatch, [{"check_error": 0.5}])
    open_chapter(NOTEBOOK, profile="smoke", output=str(tmp_path / "reference/machine")).run("leakage")
    for module in ("chapter.profiles", "results.places"):
        monkeypatch.setattr(f"hyperion.{module}.reference_folder", lambda: tmp_path / "reference")
    capsys.readouterr()
    open_chapter(NOTEBOOK, profile="replay", output=str(tmp_path / "replayed")).run("leakage")
    assert "UNEXPECTED: leakage, bad: count 8 items failed its check 'as counted'" in capsys.readouterr().out


def test_a_ceiling_that_an_earlier_version_stored_is_no_prediction_in_a_replay(tmp_path, monkeypatch):
    def forecast(context):
        return [Forecast("v", metric, 9.0, "b", dtype="fp32") for metric in ("gemm_tflops", "count")]

    def run(context, report):
        check = {"check": "c", "check_error": 0.0, "check_tolerance": 1.0}
        timed = {"n": 30, "ci_low": 1.0, "ci_high": 1.0, "limit_source": "no limit: made up"} | check
        rows = [context.row("v", "gemm_tflops", 1.0, dtype="fp32", **timed), context.row("v", "count", 1.0, dtype="fp32")]
        return Result(rows, pd.DataFrame({"x": [1]}))

    monkeypatch.setattr("hyperion.chapter.chapter.experiment_named", lambda name: Experiment(forecast, run))
    open_chapter(NOTEBOOK, profile="smoke", output=str(tmp_path / "reference/machine")).run("leakage")
    for module in ("chapter.profiles", "results.places"):
        monkeypatch.setattr(f"hyperion.{module}.reference_folder", lambda: tmp_path / "reference")
    predictions = Run.predictions
    monkeypatch.setattr(Run, "predictions", lambda *names: [replace(p, made_at="", digest="") for p in predictions(*names)])
    rows = open_chapter(NOTEBOOK, profile="replay", output=str(tmp_path / "replayed")).run("leakage").rows
    assert [row.predicted for row in rows] == [None, 9.0]


@pytest.mark.parametrize(
    ("returned", "says"),
    [
        (lambda context: None, "'gemm' returned NoneType, not a Result"),
        (lambda context: Result([], pd.DataFrame({"x": [1.0]})), "'gemm' returned no rows"),
        (lambda context: Result([context.row("a", "count", 1.0)], {"x": [1.0]}), "'gemm' returned samples of type dict"),
        (lambda context: Result(context.row("a", "count", 1.0), pd.DataFrame({"x": [1.0]})), "rows are Row, not a list of Row"),
        (lambda context: Result([{"value": 1.0}], pd.DataFrame({"x": [1.0]})), "rows are a list with dict, not of Row"),
        (lambda context: Result([context.row("a", "count", 1.0, batch=8)], pd.DataFrame()), "rows have no column 'batch'"),
    ],
)
def test_what_an_experiment_returned_is_refused_by_its_name_if_it_cannot_be_stored(tmp_path, monkeypatch, returned, says):
    experiment = Experiment(lambda context: [], lambda context, report: returned(context))
    monkeypatch.setattr("hyperion.chapter.chapter.experiment_named", lambda name: experiment)
    chapter = open_chapter(NOTEBOOK, profile="smoke", output=str(tmp_path / "run"))
    with pytest.raises(HyperionError, match=says):
        chapter.run("gemm")
    assert chapter.results.finished(NOTEBOOK, "gemm") is None


def test_a_worker_refuses_what_an_experiment_returned(tmp_path, monkeypatch):
    monkeypatch.setattr("hyperion.chapter.variants.experiment_named", lambda name: Experiment(lambda c: [], lambda c, r: None))
    context = Context(notebook="n", experiment="gemm", sizes={}, workspace=tmp_path)
    with pytest.raises(HyperionError, match="'gemm' returned NoneType, not a Result"):
        run_experiment(context, lambda done, total, note="": None)


def test_samples_that_no_file_can_hold_are_refused(tmp_path, monkeypatch):
    run = lambda context, report: Result([context.row("a", "count", 1.0)], pd.DataFrame({"x": [object()]}))  # noqa: E731
    monkeypatch.setattr("hyperion.chapter.chapter.experiment_named", lambda name: Experiment(lambda context: [], run))
    chapter = open_chapter(NOTEBOOK, profile="smoke", output=str(tmp_path / "run"))
    with pytest.raises(StoreError, match="the samples cannot be stored: .*column x"):
        chapter.run("gemm")
    with pytest.raises(HyperionError, match="'gemm' has no options"):
        chapter.options("gemm")


@pytest.mark.parametrize(
    ("found", "says"), [(None, "NoneType, not a list of Forecast"), ([1.0], "a list with float, not of Forecast")]
)
def test_what_a_forecast_returned_is_refused_by_the_name_of_its_experiment(tmp_path, monkeypatch, found, says):
    experiment = Experiment(lambda context: found, lambda context, report: None)
    monkeypatch.setattr("hyperion.chapter.chapter.experiment_named", lambda name: experiment)
    chapter = open_chapter(NOTEBOOK, profile="smoke", output=str(tmp_path / "run"))
    with pytest.raises(HyperionError, match=f"the forecast of the experiment 'gemm' returned {says}"):
        chapter.predict("gemm")


def test_a_row_that_fails_in_a_worker_comes_back_with_the_others(tmp_path):
    rows = [
        Context(notebook="n", experiment="e", sizes={}, workspace=tmp_path).row(
            "v", "count", 1.0, params={"number": number}, check="c", check_error=error, check_tolerance=0.1
        )
        for number, error in enumerate((0.0, 0.5, math.nan))
    ]
    pd.DataFrame({"x": [1]}).to_parquet(tmp_path / "samples.parquet")
    answer = json.loads(json.dumps({"rows": [asdict(row) for row in rows], "source": ""}))
    result = unpacked(answer, tmp_path / "samples.parquet")
    assert [row.without_failed_value().value for row in result.rows] == [1.0, None, None]


@pytest.mark.parametrize(
    "ingredient", ["sizes", "seed", "data source", "synthetic", "allowed", "upstream", "device", "torch", "library"]
)
def test_each_ingredient_changes_the_hash_of_what_an_experiment_depends_on(tmp_path, monkeypatch, ingredient):
    experiment = Experiment(lambda context: [], lambda context, report: None, reads=("gemm",), data=("gpt2",))
    monkeypatch.setattr("hyperion.chapter.chapter.experiment_named", lambda name: experiment)
    chapter = open_chapter(NOTEBOOK, profile="smoke", output=str(tmp_path / "run"))
    record_ceilings(chapter.results, 1.0)
    before = chapter._input_hash("leakage")
    assert chapter._input_hash("leakage") == before
    assert chapter._input_hash("ngram_baselines") != before
    if ingredient == "sizes":
        sizes = chapter.sizes("leakage") | {"steps": 999}
        chapter.sizes = lambda experiment: sizes
    elif ingredient == "seed":
        chapter.seed = 1
    elif ingredient == "data source":
        chapter.data_source = "synthetic"
    elif ingredient == "synthetic":
        chapter.profile = replace(chapter.profile, synthetic={"lines": {"train": 1}})
    elif ingredient == "allowed":
        chapter.profile = replace(chapter.profile, allow_synthetic=not chapter.profile.allow_synthetic)
    elif ingredient == "upstream":
        record_ceilings(chapter.results, 2.0)
    elif ingredient == "device":
        monkeypatch.setattr(Context, "device", replace(chapter._context("leakage", ()).device, name="another"))
    elif ingredient == "torch":
        monkeypatch.setattr(torch, "__version__", "0.1")
    else:
        monkeypatch.setattr("hyperion.chapter.chapter.reached_source_hash", lambda module: "edited")
    assert chapter._input_hash("leakage") != before


def test_a_new_prediction_of_a_row_that_an_experiment_reads_leaves_its_hash_alone(tmp_path, monkeypatch):
    experiment = Experiment(lambda context: [], lambda context, report: None, reads=("gemm",))
    monkeypatch.setattr("hyperion.chapter.chapter.experiment_named", lambda name: experiment)
    chapter = open_chapter(NOTEBOOK, profile="smoke", output=str(tmp_path / "run"))
    record_ceilings(chapter.results, 1.0)
    before = chapter._input_hash("leakage")
    (row,) = chapter.results.rows(HARDWARE, "gemm")
    chapter.results.confirm(HARDWARE, "gemm", [replace(row, predicted=2.0)])
    assert chapter._input_hash("leakage") == before


def test_data_and_rows_that_an_experiment_does_not_read_leave_its_hash_alone(tmp_path, monkeypatch):
    experiment = Experiment(lambda context: [], lambda context, report: None)
    monkeypatch.setattr("hyperion.chapter.chapter.experiment_named", lambda name: experiment)
    chapter = open_chapter(NOTEBOOK, profile="smoke", output=str(tmp_path / "run"))
    before = chapter._input_hash("leakage")
    record_ceilings(chapter.results, 1.0)
    chapter.data_source = "synthetic"
    assert chapter._input_hash("leakage") == before


@pytest.mark.slow
def test_another_seed_is_another_experiment(run_folder):
    first = Run.open(run_folder).rows(NOTEBOOK, "leakage")
    chapter = open_chapter(NOTEBOOK, profile="smoke", output=str(run_folder), seed=1)
    assert chapter.run("leakage").rows[0].value != first[0].value
    assert len(Run.open(run_folder).rows(NOTEBOOK, "leakage")) == 1
    # run.json tells how the run began, provenance how each experiment was measured.
    assert Run.open(run_folder).information()["seed"] == 0
    provenance = Run.open(run_folder).finished(NOTEBOOK, "leakage")["provenance"]
    assert (provenance["seed"], provenance["profile"], provenance["torch"]) == (1, "smoke", torch.__version__)
    assert provenance["sizes"] == chapter.sizes("leakage") and len(provenance["source"]["hash"]) == 64
    assert provenance["code"] == reached_source_hash(module_of("leakage"))
    # The seed goes back, and the same loss comes back with it, bit for bit.
    again = open_chapter(NOTEBOOK, profile="smoke", output=str(run_folder), seed=0).run("leakage")
    assert again.rows[0].value == first[0].value


def test_replay_takes_rows_from_the_reference_and_measures_nothing(run_folder, tmp_path, monkeypatch, capsys):
    reference = tmp_path / "reference"
    reference.mkdir()
    (reference / "machine").symlink_to(run_folder)
    for module in ("chapter.profiles", "results.places"):
        monkeypatch.setattr(f"hyperion.{module}.reference_folder", lambda: reference)
    chapter = open_chapter(NOTEBOOK, profile="replay", output=str(tmp_path / "replayed"))
    assert "BANNER: replay" in capsys.readouterr().out
    result = chapter.run("leakage")
    assert result.replayed_from == "machine" or result.replayed_from == run_folder.name
    assert result.rows == Run.open(run_folder).rows(NOTEBOOK, "leakage")
    assert Run.open(tmp_path / "replayed").rows() == result.rows
    provenances = [
        Run.open(folder).finished(NOTEBOOK, "leakage")["provenance"] for folder in (run_folder, chapter.results.folder)
    ]
    assert provenances[0] == provenances[1] and chapter.sizes("leakage") == provenances[0]["sizes"]
    assert chapter.results.environments() == {provenances[0]["environment"]: chapter.environment}
    with pytest.raises(HyperionError, match="holds no experiment gemm"):
        chapter.run("gemm")
    # The notebook of this experiment also works without values, so the reference may be older than it.
    assert chapter.predict("mpi_collectives").empty
    (row,) = chapter.run("mpi_collectives").rows
    assert row.value is None and row.value_reason == "not measured: the reference run machine is older than this experiment"
    assert row in chapter.results.rows(NOTEBOOK, "mpi_collectives")


@pytest.mark.process
def test_a_replay_shows_predictions_of_metrics_that_only_a_subject_defines(tmp_path):
    """In a new process, because here the metrics of all subjects may be registered already."""
    code = (
        "import sys\n"
        "from hyperion.book import show_predictions\n"
        "from hyperion.chapter import open_chapter\n"
        "chapter = open_chapter('12_inference_and_quantization', profile='replay:cpu-2cores-book', output=sys.argv[1])\n"
        "show_predictions(chapter.predict('runtimes'))\n"
    )
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "perplexity_ratio [ratio]" in done.stdout


def test_replay_keeps_this_readers_guess_and_shows_no_estimate_of_another_configuration(
    run_folder, tmp_path, monkeypatch, capsys
):
    reference = tmp_path / "reference"
    reference.mkdir()
    (reference / "machine").symlink_to(run_folder)
    for module in ("chapter.profiles", "results.places"):
        monkeypatch.setattr(f"hyperion.{module}.reference_folder", lambda: reference)
    stale = Run.open(run_folder).predictions(NOTEBOOK, "leakage")[0]
    stale = replace(stale, input_hash="another", guess=None, estimate=99.0)
    Run.open(run_folder).predict([stale, replace(stale, variant="another")])
    chapter = open_chapter(NOTEBOOK, profile="replay", output=str(tmp_path / "replayed"))
    assert chapter.predict("leakage")["guess"].isna().all()
    table = chapter.predict("leakage", guess=3.5)
    assert list(table["guess"]) == [3.5] and list(table["estimate"]) == [pytest.approx(4.1589, abs=1e-4)]
    chapter.run("leakage")
    chapter.predict("leakage", guess=3.6)
    assert "the new guess 3.6 is ignored" in capsys.readouterr().out
    (prediction,) = Run.open(tmp_path / "replayed").predictions()
    # The same inputs, but a reader who measured them in this folder has another guess.
    assert prediction.guess == 3.5 and prediction.input_hash.startswith("replay:machine:")


@pytest.mark.slow
@pytest.mark.parametrize("guess", ["ten", True, [3], float("nan"), 10**400])
def test_a_guess_that_is_no_number_is_refused_and_the_run_stays_usable(tmp_path, guess):
    chapter = open_chapter(NOTEBOOK, profile="smoke", output=str(tmp_path))
    with pytest.raises(HyperionError, match="the guess .* is not a finite number"):
        chapter.predict("leakage", guess=guess)
    again = open_chapter(NOTEBOOK, profile="smoke", output=str(tmp_path))
    assert list(again.predict("leakage", guess=np.float32(4))["guess"]) == [4.0]


def test_an_output_that_is_no_folder_is_refused():
    with pytest.raises(HyperionError, match="output is 5"):
        open_chapter(NOTEBOOK, profile="smoke", output=5)  # pyright: ignore[reportArgumentType]


def test_a_guess_after_the_measurement_is_told_that_it_came_too_late(run_folder, tmp_path, capsys):
    chapter = open_chapter(NOTEBOOK, profile="smoke", output=str(tmp_path / "run"))
    assert chapter.predict("leakage")["guess"].isna().all()
    assert list(chapter.predict("leakage", guess=4.0)["guess"]) == [4.0]
    other = open_chapter(NOTEBOOK, profile="smoke", output=str(tmp_path / "run"), seed=5)
    other.run("leakage")
    assert other.predict("leakage", guess=4.0)["guess"].isna().all()
    assert "The prediction is stored without a guess and stays; the new guess 4 is ignored" in capsys.readouterr().out


@pytest.mark.slow
def test_what_the_notebooks_check_failed_on_is_measured_anew_once(run_folder, tmp_path, monkeypatch, capsys):
    copy = tmp_path / "copy"
    shutil.copytree(run_folder, copy)
    monkeypatch.setenv("HYPERION_REMEASURE", "1")
    chapter = open_chapter(NOTEBOOK, profile="smoke", output=str(copy))
    chapter.run("leakage")
    assert "measured again" in capsys.readouterr().out
    chapter.run("leakage")
    assert "nothing measured again" in capsys.readouterr().out


def test_a_forecast_of_all_ranks_is_not_held_against_one_of_them(tmp_path, monkeypatch):
    def forecast(context):
        shared = {"variant": "v", "metric": "count", "basis": "b"}
        return [
            Forecast(estimate=8.0, params={"what": "together"}, **shared),
            Forecast(estimate=4.0, params={"what": "held"}, each_rank=True, **shared),
        ]

    def run(context, report):
        cells = [("together", None), ("together", 0), ("together", 1), ("held", 0), ("held", 1), ("held", None)]
        rows = [context.row("v", "count", 7.0, params={"what": what, "ranks": 2}, rank=rank) for what, rank in cells]
        return Result(rows, pd.DataFrame({"x": [1]}))

    monkeypatch.setattr("hyperion.chapter.chapter.experiment_named", lambda name: Experiment(forecast, run))
    chapter = open_chapter(NOTEBOOK, profile="smoke", output=str(tmp_path / "run"))
    chapter.run("leakage")
    stored = {(row.params["what"], row.rank): row.predicted for row in Run.open(tmp_path / "run").rows()}
    assert stored == {
        ("together", None): 8.0,
        ("together", 0): None,
        ("together", 1): None,
        ("held", 0): 4.0,
        ("held", 1): 4.0,
        ("held", None): None,
    }


def test_a_prediction_without_a_row_is_named(tmp_path, monkeypatch, capsys):
    def run(context, report):
        rows = [context.row("v", "count", 7.0, dtype="fp32", params={"size": 2}), context.row("w", "count", 7.0)]
        return Result(rows, pd.DataFrame({"x": [1]}))

    def printed(name, forecasts):
        monkeypatch.setattr("hyperion.chapter.chapter.experiment_named", lambda _: Experiment(lambda context: forecasts, run))
        open_chapter(NOTEBOOK, profile="smoke", output=str(tmp_path / name)).run("leakage")
        return capsys.readouterr().out

    matched = [Forecast("v", "count", 2.0, "b", dtype="fp32"), Forecast("w", "count", 2.0, "b")]
    assert "NOTE" not in printed("all", matched)
    without_dtype = Forecast("v", "count", 2.0, "b", params={"size": 2})
    assert "leakage has no row for these predictions: v count size=2. Nothing" in printed("one", [*matched, without_dtype])
    others = [Forecast(f"x{i}", "count", 2.0, "b", dtype="bf16") for i in range(5)]
    assert "x0 count bf16; x1 count bf16; x2 count bf16 and 2 more. Nothing" in printed("five", [*matched, *others])


def test_the_guess_is_one_of_the_first_prediction_and_an_interval_keeps_its_ends(tmp_path, monkeypatch):
    forecasts = [Forecast(variant, "count", 2.0, "b", low=1.0, high=3.0) for variant in ("first", "second")]
    experiment = Experiment(lambda context: forecasts, lambda context, report: None)
    monkeypatch.setattr("hyperion.chapter.chapter.experiment_named", lambda name: experiment)
    table = open_chapter(NOTEBOOK, profile="smoke", output=str(tmp_path / "run")).predict("leakage", guess=5.0)
    assert table["guess"].fillna(-1).tolist() == [5.0, -1.0]
    assert table[["low", "high"]].to_numpy().tolist() == [[1.0, 3.0]] * 2


def record_ceilings(run, tflops):
    for experiment, metric, value, params in (
        ("gemm", "gemm_tflops", tflops, {}),
        ("bandwidth", "bandwidth_gb_s", 100.0, {"elements": 10}),
    ):
        row = Row(
            notebook=HARDWARE,
            experiment=experiment,
            variant="copy",
            dtype="fp32",
            metric=metric,
            value=value,
            n=30,
            ci_low=value,
            ci_high=value,
            limit_source="no limit: made up",
            params=params,
            check="c",
            check_error=0.0,
            check_tolerance=1.0,
        )
        run.record(HARDWARE, experiment, [row], pd.DataFrame({"x": [1]}), input_hash="h")


def test_other_ceilings_make_another_roofline(tmp_path, capsys):
    chapter = open_chapter(HARDWARE, profile="smoke", output=str(tmp_path / "run"))
    record_ceilings(chapter.results, 1.0)
    assert chapter.run("roofline").rows[0].value == pytest.approx(10)
    chapter.run("roofline")
    assert "nothing measured again" in capsys.readouterr().out
    record_ceilings(chapter.results, 2.0)
    assert chapter.run("roofline").rows[0].value == pytest.approx(20)
    assert "nothing measured again" not in capsys.readouterr().out


def small(notebook, folder):
    """A chapter of smoke with a synthetic text that counting takes a second for."""
    chapter = open_chapter(notebook, profile="smoke", output=str(folder))
    chapter.profile = replace(chapter.profile, synthetic={"lines": {"train": 400, "valid": 40, "test": 40}})
    return chapter


@pytest.mark.slow
def test_upstream_rows_that_come_later_make_a_new_forecast_and_no_new_measurement(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("HYPERION_DATA", str(tmp_path / "data"))
    monkeypatch.setenv("HYPERION_OFFLINE", "1")
    monkeypatch.delenv("HYPERION_DATA_MIRROR", raising=False)
    folder = tmp_path / "run"
    chapter = small(NOTEBOOK, folder)
    chapter.predict("ngram_baselines", guess=300.0)
    first = chapter.run("ngram_baselines")
    assert all(row.predicted is None for row in first.rows)
    small("01_dataset_preparation", folder).run("text_pipeline")
    capsys.readouterr()
    second = chapter.run("ngram_baselines")
    assert "nothing measured again" in capsys.readouterr().out
    assert any(row.predicted for row in second.rows)
    assert [replace(row, predicted=None) for row in second.rows] == first.rows
    assert Run.open(folder).rows(NOTEBOOK, "ngram_baselines") == second.rows
    (prediction,) = chapter.results.predictions(NOTEBOOK, "ngram_baselines")
    assert prediction.guess == 300.0 and prediction.basis.endswith("made after the measurement")


def test_files_that_a_run_fetched_itself_leave_it_fresh_and_other_files_do_not(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("HYPERION_DATA", str(tmp_path / "data"))
    monkeypatch.setenv("HYPERION_OFFLINE", "1")
    monkeypatch.delenv("HYPERION_DATA_MIRROR", raising=False)
    load = datasets.load_wikitext2

    def load_and_stage(*arguments, **options):
        corpus = load(*arguments, **options)
        (tmp_path / "data/raw/wikitext-2").mkdir(parents=True)
        (tmp_path / "data/raw/wikitext-2/wiki.train.tokens").write_text("text")
        return corpus

    monkeypatch.setattr(datasets, "load_wikitext2", load_and_stage)
    chapter = small("01_dataset_preparation", tmp_path / "run")
    chapter.run("text_pipeline")
    chapter.run("text_pipeline")
    assert "nothing measured again" in capsys.readouterr().out
    (tmp_path / "data/raw/wikitext-2/wiki.train.tokens").write_text("edit")
    monkeypatch.setattr(datasets, "load_wikitext2", load)
    with pytest.raises(DataError, match=r"wiki\.|lines"):  # it is taken now, and it is no WikiText-2
        chapter.run("text_pipeline")


def test_replay_without_a_reference_says_what_to_do(tmp_path, monkeypatch):
    for module in ("chapter.profiles", "results.places"):
        monkeypatch.setattr(f"hyperion.{module}.reference_folder", lambda: tmp_path)
    with pytest.raises(HyperionError, match="no reference run holds") as error:
        open_chapter(NOTEBOOK, profile="replay", output=str(tmp_path / "out"))
    assert "PROFILE=smoke" in error.value.next_step


def test_edited_rows_are_refused_by_name(run_folder, tmp_path):
    copy = tmp_path / "edited"
    shutil.copytree(run_folder, copy)
    text = (copy / "rows.csv").read_text()
    (copy / "rows.csv").write_text(text.replace("4.1", "4.0"))
    with pytest.raises(StoreError, match="edited") as error:
        open_chapter(NOTEBOOK, profile="smoke", output=str(copy)).run("leakage")
    assert "rows.csv" in str(error.value)


def test_unknown_profile_and_experiment_list_what_there_is(tmp_path):
    with pytest.raises(HyperionError, match="unknown profile 'smoky'") as error:
        open_chapter(NOTEBOOK, profile="smoky", output=str(tmp_path / "x"))
    assert "PROFILE=smoke" in str(error.value)
    with pytest.raises(HyperionError, match="no experiment 'nonsense'"):
        open_chapter(NOTEBOOK, profile="smoke", output=str(tmp_path / "x")).run("nonsense")
    with pytest.raises(HyperionError, match=r"use one of bandwidth[\w, ]* \(similar\)"):
        open_chapter(NOTEBOOK, profile="smoke", output=str(tmp_path / "x")).run("bandwith")


def test_a_wrong_option_is_named_with_its_value_and_its_profile():
    sizes = load_profile("smoke").sizes("gemm")
    profile = replace(load_profile("smoke"), experiments={"gemm": sizes | {"time_limit_s": "soon"}})
    says = r"option 'time_limit_s' of the experiment 'gemm' in the profile 'smoke': .*; the value is 'soon'"
    with pytest.raises(HyperionError, match=says):
        require_valid_sizes(profile, ["gemm"])


def test_every_profile_has_sizes_for_every_experiment_that_any_has():
    profiles = [load_profile(name) for name in profile_names() if name != "replay"]
    assert all(profile.experiments.keys() == set(experiment_names()) for profile in profiles)


def test_run_json_names_no_folder_of_this_machine(run_folder):
    text = json.dumps(Run.open(run_folder).information())
    assert str(run_folder.parent) not in text and "/home/" not in text and "/root" not in text


def test_run_json_holds_the_seed(tmp_path):
    assert open_chapter(NOTEBOOK, profile="smoke", output=str(tmp_path), seed=5).results.information()["seed"] == 5


@pytest.mark.parametrize("named", ["20260101-120000-first", "results/20260101-120000-first"])
def test_a_run_is_found_by_its_name_from_the_folder_of_a_notebook(tmp_path, monkeypatch, named):
    results, elsewhere = tmp_path / "results", tmp_path / "lab/phase1_x"
    elsewhere.mkdir(parents=True)
    monkeypatch.setenv("HYPERION_RESULTS", str(results))
    monkeypatch.chdir(elsewhere)
    first = Run.create(results / "20260101-120000-first", {"profile": "smoke"})
    assert open_chapter(NOTEBOOK, profile="smoke", output=named).results.folder.resolve() == first.folder.resolve()
    own = open_chapter(NOTEBOOK, profile="smoke", output=str(elsewhere / "mine")).results.folder
    assert own == elsewhere / "mine" and list(results.iterdir()) == [first.folder]
    assert open_chapter(NOTEBOOK, profile="smoke", output="mine").results.folder.resolve() == own
