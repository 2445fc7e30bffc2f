"""Names of runs, new folders for them, and the search for a run."""

from concurrent.futures import ThreadPoolExecutor

import pytest

from hyperion.errors import HyperionError
from hyperion.results import Run, StoreError, find_run, new_run_folder, set_latest


def test_many_at_once_get_a_folder_each(tmp_path):
    with ThreadPoolExecutor(8) as pool:
        folders = list(pool.map(lambda _: new_run_folder("smoke", tmp_path), range(24)))
    assert len(set(folders)) == 24 and all(folder.is_dir() for folder in folders)


@pytest.mark.parametrize("name", ["", "../up", "a/b", ".hidden", "latest", "reference", "a b"])
def test_a_name_that_cannot_be_a_folder_is_refused(tmp_path, name):
    with pytest.raises(HyperionError, match="cannot be the name of a run"):
        new_run_folder(name, tmp_path)


def test_a_file_in_place_of_the_results_folder_is_explained(tmp_path):
    (tmp_path / "results").write_text("")
    with pytest.raises(StoreError, match="cannot write") as refusal:
        new_run_folder("smoke", tmp_path / "results")
    assert "HYPERION_RESULTS" in refusal.value.next_step


def test_latest_moves_and_finds(tmp_path, monkeypatch):
    monkeypatch.setenv("HYPERION_RESULTS", str(tmp_path))
    for name in ("one", "two"):
        run = Run.create(tmp_path / name, {})
        set_latest(run.folder)
        assert find_run("latest") == run.folder
    assert find_run("one") == find_run(str(tmp_path / "one")) == tmp_path / "one"
    with pytest.raises(HyperionError, match="no run 'three'") as refusal:
        find_run("three")
    assert "one" in refusal.value.next_step and "two" in refusal.value.next_step
    with pytest.raises(HyperionError) as refusal:
        find_run(str(tmp_path / "three"))
    assert refusal.value.where == str(tmp_path / "three")
    (tmp_path / "three").mkdir()
    with pytest.raises(HyperionError, match="is no run, because it contains no run.json"):
        find_run(str(tmp_path / "three"))


def test_with_a_home_of_its_own_the_references_of_the_checkout_are_found(tmp_path, monkeypatch):
    here = find_run("h200x2")
    monkeypatch.delenv("HYPERION_RESULTS", raising=False)
    monkeypatch.setenv("HYPERION_HOME", str(tmp_path))
    assert find_run("h200x2") == here
    with pytest.raises(HyperionError, match="no run 'three'") as refusal:
        find_run("three")
    assert "h200x2" in refusal.value.next_step
