"""Data, results, disk and caches, in folders made for the test."""

import pytest

from hyperion.data.store.folders import DataUnavailable
from hyperion.doctor import checks


def no_mirror():
    raise DataUnavailable("no mirror: HYPERION_DATA_MIRROR is not set")


def test_a_filled_mirror_is_found(tmp_path, monkeypatch):
    (tmp_path / "wikitext-2").mkdir()
    monkeypatch.setenv("HYPERION_DATA_MIRROR", str(tmp_path))
    result = checks.check_data_source()
    assert (result.status, result.evidence) == ("ok", f"mirror {tmp_path}")


@pytest.mark.parametrize("made", [True, False])
def test_an_empty_or_missing_mirror_that_was_named_is_a_failure(tmp_path, monkeypatch, made):
    named = tmp_path / "mirror"
    if made:
        named.mkdir()
    monkeypatch.setenv("HYPERION_DATA_MIRROR", str(named))
    result = checks.check_data_source()
    assert result.status == "fail" and "HYPERION_DATA_MIRROR" in result.remedy


def test_staged_data_are_found(tmp_path):
    (tmp_path / "wikitext-2").mkdir()
    (tmp_path / ".cifar-10.part").mkdir()
    result = checks.check_data_source(no_mirror, tmp_path)
    assert result.status == "ok" and result.evidence.endswith("holds wikitext-2")


def test_no_data_is_a_warning_with_the_ways_to_get_some(tmp_path):
    result = checks.check_data_source(no_mirror, tmp_path / "absent")
    assert result.status == "warn" and "make fetch" in result.remedy


def test_a_results_folder_yet_to_be_made_is_fine(tmp_path):
    assert checks.check_results_folder(tmp_path / "a/b").status == "ok"
    assert not (tmp_path / "a").exists(), "the check leaves nothing behind"


def test_a_file_in_the_place_of_the_results_folder_is_a_failure(tmp_path):
    (tmp_path / "results").write_text("")
    result = checks.check_results_folder(tmp_path / "results")
    assert result.status == "fail" and "is not a folder" in result.evidence and "HYPERION_RESULTS" in result.remedy


def test_a_results_folder_that_refuses_writing_is_a_failure():
    result = checks.check_results_folder(checks.Path("/proc/self"))  # refuses root as well
    assert result.status == "fail" and result.remedy


@pytest.mark.parametrize(("free_gb", "status"), [(100.0, "ok"), (3.0, "warn"), (0.2, "fail")])
def test_disk_space(tmp_path, free_gb, status):
    result = checks.check_disk_space(tmp_path, free_gb)
    assert result.status == status and f"{free_gb:.1f} GB free" in result.evidence


def test_disk_space_is_read_for_a_folder_yet_to_be_made(tmp_path):
    assert "GB free" in checks.check_disk_space(tmp_path / "later").evidence


def test_caches_below_a_writable_home_are_fine(tmp_path):
    assert checks.check_caches({}, tmp_path).status == "ok"


def test_a_cache_that_cannot_be_written_is_named_with_the_setting(tmp_path):
    (tmp_path / "file").write_text("")
    result = checks.check_caches({"TRITON_CACHE_DIR": str(tmp_path / "file")}, tmp_path)
    assert result.status == "fail" and "TRITON_CACHE_DIR" in result.evidence
    assert "export TRITON_CACHE_DIR=" in result.remedy and "HF_HOME" not in result.remedy
