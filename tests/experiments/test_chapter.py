"""A chapter keeps what it measured, measures again what changed, and replays without measuring."""

import json

import pytest

from hyperion.errors import HyperionError
from hyperion.experiments import experiment_names, load_profile, open_chapter, profile_names
from hyperion.results import Run, StoreError

NOTEBOOK = "02_core_framework"


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory):
    """A run that holds `leakage`, the quickest experiment that trains."""
    folder = tmp_path_factory.mktemp("runs") / "first"
    chapter = open_chapter(NOTEBOOK, profile="smoke", output=str(folder))
    chapter.predict("leakage", guess=4.0)
    chapter.run("leakage")
    return folder


def test_rows_carry_the_estimate_written_before(run_folder):
    row = Run.open(run_folder).rows(NOTEBOOK, "leakage")[0]
    assert row.predicted == pytest.approx(4.1589, abs=1e-4)
    assert row.check_error <= row.check_tolerance == 4.0


def test_a_guess_made_after_the_fact_changes_nothing_and_says_so(run_folder, capsys):
    chapter = open_chapter(NOTEBOOK, profile="smoke", output=str(run_folder))
    assert list(chapter.predict("leakage", guess=4.16)["guess"]) == [4.0]
    assert "the guess 4 was written down before, and stays; 4.16 came too late" in capsys.readouterr().out
    chapter.predict("leakage", guess=4.0)
    assert "too late" not in capsys.readouterr().out


def test_a_second_call_measures_nothing_again(run_folder, capsys):
    before = (run_folder / "rows.csv").read_bytes()
    result = open_chapter(NOTEBOOK, profile="smoke", output=str(run_folder)).run("leakage")
    assert "nothing measured again" in capsys.readouterr().out
    assert (run_folder / "rows.csv").read_bytes() == before
    assert len(result.samples) == load_profile("smoke").sizes(NOTEBOOK, "leakage")["steps"]


def test_another_seed_is_another_experiment(run_folder):
    first = Run.open(run_folder).rows(NOTEBOOK, "leakage")
    chapter = open_chapter(NOTEBOOK, profile="smoke", output=str(run_folder), seed=1)
    assert chapter.run("leakage").rows[0].value != first[0].value
    assert len(Run.open(run_folder).rows(NOTEBOOK, "leakage")) == 1
    # The seed goes back, and the same loss comes back with it, bit for bit.
    again = open_chapter(NOTEBOOK, profile="smoke", output=str(run_folder), seed=0).run("leakage")
    assert again.rows[0].value == first[0].value


def test_replay_takes_rows_from_the_reference_and_measures_nothing(run_folder, tmp_path, monkeypatch, capsys):
    reference = tmp_path / "reference"
    reference.mkdir()
    (reference / "machine").symlink_to(run_folder)
    monkeypatch.setattr("hyperion.experiments.replay.reference_folder", lambda: reference)
    chapter = open_chapter(NOTEBOOK, profile="replay", output=str(tmp_path / "replayed"))
    assert "BANNER: replay" in capsys.readouterr().out
    result = chapter.run("leakage")
    assert result.replayed_from == "machine" or result.replayed_from == run_folder.name
    assert result.rows == Run.open(run_folder).rows(NOTEBOOK, "leakage")
    assert Run.open(tmp_path / "replayed").rows() == result.rows
    with pytest.raises(HyperionError, match="holds no experiment gemm"):
        chapter.run("gemm")


def test_replay_without_a_reference_says_what_to_do(tmp_path, monkeypatch):
    monkeypatch.setattr("hyperion.experiments.replay.reference_folder", lambda: tmp_path)
    with pytest.raises(HyperionError, match="no reference run holds") as error:
        open_chapter(NOTEBOOK, profile="replay", output=str(tmp_path / "out"))
    assert "PROFILE=smoke" in error.value.next_step


def test_edited_rows_are_refused_by_name(run_folder, tmp_path):
    import shutil

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


def test_every_profile_has_sizes_for_every_experiment_that_any_has():
    profiles = [load_profile(name) for name in profile_names() if name != "replay"]
    sections = [{(nb, e): set(sizes) for nb, es in p.sections.items() for e, sizes in es.items()} for p in profiles]
    assert all(section.keys() == sections[0].keys() for section in sections)
    assert {experiment for _, experiment in sections[0]} == set(experiment_names())


def test_run_json_names_no_folder_of_this_machine(run_folder):
    text = json.dumps(Run.open(run_folder).information())
    assert str(run_folder.parent) not in text and "/home/" not in text and "/root" not in text
