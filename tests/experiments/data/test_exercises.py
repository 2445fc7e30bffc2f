"""The exercise on broken data: the cell as given fails, hashes alone do not do, and the library's own check passes."""

import json

import pytest

from hyperion.data.prepare.verify import examine
from hyperion.data.store.folders import read_manifest
from hyperion.experiments.data.exercises import SOUND, broken_folders, judge_folder_check, library_findings
from tests.exercise_scores import solved


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    return broken_folders(tmp_path_factory.mktemp("exercise") / "folders")


def by_hash(folder):
    read_manifest(folder).verify(folder)
    return True


def test_no_shortcut_passes_and_the_library_does(folders):
    as_given = judge_folder_check(lambda folder: json.loads((folder / "manifest.json").read_text())["files"], folders)
    assert not solved(as_given) and len(as_given) == 9
    hashes = judge_folder_check(by_hash, folders)
    assert hashes["right"].sum() == 5, "hashes find what was done to files, not what was hashed anew"
    assert not solved(judge_folder_check(lambda folder: False, folders))
    assert solved(judge_folder_check(lambda folder: not examine(folder), folders))


def test_the_library_names_file_and_fault(folders):
    findings = library_findings(folders).groupby("what was done", sort=False).first()
    assert list(findings.index) == list(folders) and (findings.loc[list(SOUND), "found"] == "nothing").all()
    assert findings.loc["a NaN in an image, manifest renewed", "found"] == "image 7 holds NaN or infinity"
    assert findings.loc["a bit of an image flipped", "file"] == "train_images.npy"
    assert "record 11 has the label 10" in findings.loc["a label out of range, manifest renewed", "found"]
