"""What data would be taken: known by content, without loading."""

import shutil

import pytest

from hyperion.data import DataError
from hyperion.data.prepare.catalog import data_identity

NAMES = ("wikitext-2", "gpt2", "cifar-10")


def write(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def test_nothing_staged_is_nothing_and_synthetic_data_have_no_files(data_home):
    assert data_identity(NAMES, "auto") == dict.fromkeys(NAMES)
    write(data_home / "raw/gpt2/vocab.json", "{}")
    assert data_identity(["gpt2"], "auto")["gpt2"]["place"] == "cache"
    assert data_identity(["gpt2"], "synthetic") == data_identity(["gpt2"], "mirror") == {"gpt2": None}


def test_contents_count_and_places_are_tried_in_order(data_home, tmp_path, monkeypatch):
    write(data_home / "raw/wikitext-2/wiki.train.tokens", "cached")
    cached = data_identity(NAMES, "auto")
    assert data_identity(NAMES, "cache") == data_identity(NAMES, "download") == cached
    monkeypatch.setenv("HYPERION_DATA_MIRROR", str(tmp_path / "mirror"))
    batch = tmp_path / "mirror/cifar-10-batches-bin/data_batch_1.bin"
    write(batch, "pixels 1")
    first = data_identity(NAMES, "auto")
    assert first["wikitext-2"] == cached["wikitext-2"] and first["cifar-10"]["place"] == "mirror"
    write(batch, "pixels 2")  # the same size, as every batch of CIFAR-10
    assert data_identity(NAMES, "auto")["cifar-10"] != first["cifar-10"]
    write(tmp_path / "mirror/wikitext-2/wiki.train.tokens", "mirrored")
    assert data_identity(NAMES, "auto")["wikitext-2"]["place"] == "mirror"


def test_rows_at_the_top_of_a_mirror_or_in_a_folder_of_the_cache(data_home, tmp_path, monkeypatch):
    write(data_home / "raw/instructions/instructions.json", "[]")
    assert data_identity(["instructions"], "auto")["instructions"]["place"] == "cache"
    monkeypatch.setenv("HYPERION_DATA_MIRROR", str(tmp_path / "mirror"))
    write(tmp_path / "mirror/other", "")
    assert data_identity(["instructions"], "auto")["instructions"]["place"] == "cache"
    write(tmp_path / "mirror/instructions.json", "[]")
    assert data_identity(["instructions"], "auto")["instructions"]["place"] == "mirror"


def test_half_staged_and_quarantined_things_count_for_nothing(data_home):
    write(data_home / "raw/gpt2/vocab.json", "{}")
    before = data_identity(NAMES, "auto")
    write(data_home / "raw/.wikitext-2.1.part/wiki.train.tokens", "half")
    write(data_home / "raw/quarantine/cifar-10-python.tar.gz", "bad")
    write(data_home / "raw/gpt2/merges.txt.part", "half")
    write(data_home / "raw/cifar-10/.work.part/cifar-10-python.tar.gz", "half")
    assert data_identity(NAMES, "auto") == before
    shutil.rmtree(data_home / "raw/gpt2")
    assert data_identity(NAMES, "auto") == dict.fromkeys(NAMES)


@pytest.mark.mirror
def test_each_set_is_official_or_not(mirror, monkeypatch, tmp_path):
    monkeypatch.setenv("HYPERION_DATA_MIRROR", str(mirror))
    found = {name: place["official"] for name, place in data_identity((*NAMES, "instructions"), "mirror").items()}
    assert found["gpt2"] and found["instructions"] and not found["cifar-10"], "no checksum is published for its layout"
    shutil.copytree(mirror / "gpt2", tmp_path / "gpt2")
    (tmp_path / "gpt2/merges.txt").chmod(0o644)
    write(tmp_path / "gpt2/merges.txt", "others")
    monkeypatch.setenv("HYPERION_DATA_MIRROR", str(tmp_path))
    assert data_identity(["gpt2"], "mirror")["gpt2"]["official"] is False


def test_a_mirror_that_is_no_folder_is_an_error_where_it_was_asked_for(tmp_path, monkeypatch):
    monkeypatch.setenv("HYPERION_DATA_MIRROR", str(tmp_path / "absent"))
    with pytest.raises(DataError, match="not a folder"):
        data_identity(["gpt2"], "auto")
    assert data_identity(["gpt2"], "cache") == data_identity([], "auto") | {"gpt2": None}
