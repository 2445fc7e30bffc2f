"""What makes a notebook stale, and which reference it replays."""

from types import SimpleNamespace

import pandas as pd
import pytest

from hyperion import dependencies
from hyperion.errors import HyperionError
from hyperion.reproduce.freshness import Freshness, hashed_inputs, library_modules, reference_for, rows_digest
from hyperion.reproduce.notebooks import read_notebook
from hyperion.reproduce.runs import Request, require_reference
from hyperion.results import Row, Run
from tests.reproduce.small_book import write_notebook


@pytest.fixture
def checkout(tmp_path, monkeypatch):
    """A checkout with the references a_empty, b_half and c_whole, of 01_x's experiments counting and weighing."""
    (tmp_path / "pyproject.toml").write_text("")
    write_notebook(tmp_path / "phase1_hardware", "01_x", ["1"], produces=["counting", "weighing"])
    for machine, experiments in (("a_empty", ()), ("b_half", ["counting"]), ("c_whole", ["counting", "weighing"])):
        run = Run.create(tmp_path / "results/reference" / machine, {})
        for experiment in experiments:
            row = Row(notebook="01_x", experiment=experiment, variant="v", metric="count", value=2.0)
            run.record("01_x", experiment, [row], pd.DataFrame({"x": [1.0]}), input_hash="h")
    monkeypatch.chdir(tmp_path)
    return read_notebook(tmp_path / "phase1_hardware/01_x.ipynb")


def test_the_first_machine_that_holds_every_experiment_is_taken(checkout):
    reference, reason = reference_for(checkout, None)
    assert reference.machine == "c_whole" and reason == ""
    assert reference_for(checkout, "c_whole") == (reference, "")


@pytest.mark.parametrize("changed", ["value", "sample", "nothing"])
def test_a_reference_published_again_is_another_one_if_anything_replayed_differs(checkout, tmp_path, changed):
    before, _ = reference_for(checkout, "c_whole")
    row = Row(notebook="01_x", experiment="weighing", variant="v", metric="count", value=3.0 if changed == "value" else 2.0)
    samples = pd.DataFrame({"x": [9.0 if changed == "sample" else 1.0]})
    Run.open(tmp_path / "results/reference/c_whole").record("01_x", "weighing", [row], samples, input_hash="h")
    assert (reference_for(checkout, "c_whole")[0] == before) == (changed == "nothing")


def test_a_named_machine_without_them_gives_the_reason_and_an_unknown_one_is_an_error(checkout):
    assert reference_for(checkout, "b_half") == (None, "no rows of this chapter in the reference run (b_half)")
    with pytest.raises(HyperionError, match="no reference run of 'd'") as caught:
        require_reference(Request(profile="replay", replay_of="d"))
    assert "a_empty, b_half, c_whole" in caught.value.next_step


def test_a_reference_older_than_an_experiment_is_taken_if_the_notebook_works_without_its_values(tmp_path, monkeypatch):
    (tmp_path / "pyproject.toml").write_text("")
    monkeypatch.chdir(tmp_path)
    run = Run.create(tmp_path / "results/reference/old", {})
    row = Row(notebook="01_x", experiment="collectives", variant="v", metric="count", value=2.0)
    run.record("01_x", "collectives", [row], pd.DataFrame({"x": [1.0]}), input_hash="h")
    for produces, taken in ((["collectives", "mpi_collectives"], True), (["collectives", "gemm"], False)):
        notebook = read_notebook(write_notebook(tmp_path / "phase1_hardware", "01_x", ["1"], produces=produces))
        assert (reference_for(notebook, "old")[0] is not None) == taken
    notebook = read_notebook(write_notebook(tmp_path / "phase1_hardware", "02_y", ["1"], produces=["mpi_collectives"]))
    assert reference_for(notebook, "old")[0] is None, "there is nothing to replay"


USES_RESULTS = "from hyperion.results import Run"


def digest(tmp_path, cells=(USES_RESULTS,), parameters=None, upstream=None, **metadata):
    notebook = read_notebook(write_notebook(tmp_path, "01_x", list(cells), **metadata))
    return hashed_inputs(notebook, parameters or {}, upstream or {})


@pytest.mark.slow
def test_text_parameters_upstream_and_needs_change_the_hash(tmp_path):
    same = digest(tmp_path)
    assert same == digest(tmp_path)
    others = {
        "the notebook": [digest(tmp_path, [USES_RESULTS + "\n"]), digest(tmp_path, produces=["other"])],
        "the seed": [digest(tmp_path, parameters={"the seed": 1})],
        "rows of 00_w": [digest(tmp_path, upstream={"00_w": "abc"})],
    }
    for name, changed in others.items():
        for inputs in changed:
            assert inputs != same and {key for key in inputs if inputs[key] != same.get(key)} == {name}


def test_time_and_outputs_do_not(tmp_path):
    same = digest(tmp_path)
    notebook = tmp_path / "01_x.ipynb"
    notebook.write_text(notebook.read_text().replace('"outputs": []', '"outputs": [{"output_type": "stream", "text": "x"}]'))
    assert same == hashed_inputs(read_notebook(notebook), {}, {})
    assert same == digest(tmp_path, time_budget_s={"smoke": 99}, several_devices_s={"full": 9})


def test_a_change_in_a_library_file_counts_only_where_it_is_reached(tmp_path, monkeypatch):
    package = tmp_path / "hyperion"
    for room in ("near", "far"):
        (package / room).mkdir(parents=True)
        (package / room / "__init__.py").write_text("")
    (package / "near" / "__init__.py").write_text("from hyperion.near.deep import x")
    (package / "near" / "deep.py").write_text("x = 1")
    monkeypatch.setattr(dependencies, "_PACKAGE", package)
    cell = ["%matplotlib inline\nfrom hyperion import near"]
    before = digest(tmp_path, cell)
    (package / "far" / "__init__.py").write_text("y = 2")
    assert digest(tmp_path, cell) == before
    (package / "near" / "deep.py").write_text("x = 'devices.toml'")
    after = digest(tmp_path, cell)
    assert after != before
    (package / "near" / "devices.toml").write_text("a = 1")
    with_data = digest(tmp_path, cell)
    assert with_data != after
    (package / "near" / "sizes.toml").write_text("a = 1")  # sizes are among the parameters, by value
    assert digest(tmp_path, cell) == with_data


def test_experiments_are_reached_by_name_and_broken_cells_by_their_text(tmp_path):
    notebook = read_notebook(write_notebook(tmp_path, "01_x", ["def broken(", USES_RESULTS], produces=["gemm"]))
    assert {"hyperion.experiments.hardware.gemm", "hyperion.results.store"} <= library_modules(notebook)


def test_rows_digest_depends_on_values_not_on_order(tmp_path):
    def stored(folder, names, value=1.0):
        run = Run.create(tmp_path / folder, {})
        rows = [Row(notebook="n", experiment="e", variant=name, metric="count", value=value) for name in names]
        run.record("n", "e", rows, pd.DataFrame({"x": [1]}), input_hash="h")
        return rows_digest(run, "n"), rows_digest(run, "other")

    assert stored("a", "ab") == stored("b", "ba")
    assert stored("c", "ab", 2.0) != stored("d", "ab")
    assert stored("e", "a")[1] is None


@pytest.mark.parametrize(("profile", "again"), [("full", "installed since: expecttest"), ("replay", "changed: its data")])
def test_a_notebook_runs_again_if_a_package_that_its_rows_lacked_is_installed(profile, again, monkeypatch):
    monkeypatch.setattr("hyperion.reproduce.freshness.installed_since", lambda rows: ["expecttest"] if list(rows) else [])
    monkeypatch.setattr("hyperion.reproduce.freshness.data_changed", lambda *given: False)
    entry = SimpleNamespace(status="done", inputs={})
    run = SimpleNamespace(rows=lambda stem, name: ["a row"])
    ledger = SimpleNamespace(entries={"01_x": entry}, is_done=lambda *given: True, run=run)
    freshness = Freshness(SimpleNamespace(data_source="auto"), SimpleNamespace(profile=profile), ledger)
    notebook = SimpleNamespace(stem="01_x", produces=("gemm",))
    assert freshness.is_up_to_date(notebook, {}) is (profile == "replay")
    assert freshness.why_again(notebook, {}) == again


def test_the_rows_of_needed_and_of_optional_chapters_are_inputs(tmp_path):
    run = Run.create(tmp_path / "run", {})
    machine = SimpleNamespace(settings={"sizes": {}})
    freshness = Freshness(SimpleNamespace(), machine, SimpleNamespace(setting={}, run=run))
    notebook = read_notebook(write_notebook(tmp_path, "02_y", ["1"], needs=["00_w"], optional=["01_x"], produces=[]))

    def changed_by_rows_of(chapter):
        before = freshness.inputs(notebook, None)
        row = Row(notebook=chapter, experiment="e", variant="v", metric="count", value=1.0)
        run.record(chapter, "e", [row], pd.DataFrame({"x": [1.0]}), input_hash="h")
        after = freshness.inputs(notebook, None)
        assert set(after) == set(before)
        return {name for name, digest in after.items() if digest != before[name]}

    for chapter, changed in (("00_w", {"rows of 00_w"}), ("01_x", {"rows of 01_x"}), ("03_z", set())):
        assert changed_by_rows_of(chapter) == changed
