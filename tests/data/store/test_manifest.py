import json

import pytest

from hyperion.data.store.folders import FILE_NAME, DataError, read_manifest, write_manifest


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "words.txt").write_text("one two\n")
    (tmp_path / "more").mkdir()
    (tmp_path / "more" / "numbers.bin").write_bytes(bytes(100))
    write_manifest(tmp_path, name="set", source="cache", detail="for a test", facts={"lines": 1})
    return tmp_path


def test_a_manifest_comes_back_and_vouches_for_its_files(folder):
    manifest = read_manifest(folder)
    assert (manifest.name, manifest.source, manifest.facts) == ("set", "cache", {"lines": 1})
    assert manifest.files["more/numbers.bin"]["bytes"] == 100
    manifest.verify(folder)


@pytest.mark.parametrize(
    ("content", "fault"),
    [(b"one two", "has 7 bytes, expected 8: truncated or edited"), (b"one tw0\n", "sha256"), (None, "words.txt is missing")],
)
def test_damage_is_named(folder, content, fault):
    if content is None:
        (folder / "words.txt").unlink()
    else:
        (folder / "words.txt").write_bytes(content)
    with pytest.raises(DataError, match=fault) as caught:
        read_manifest(folder).verify(folder)
    assert str(folder / "words.txt") in str(caught.value)


def test_a_folder_without_one_has_none(tmp_path):
    assert read_manifest(tmp_path) is None


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"name": 1, "source": 1, "detail": 1, "files": {"a": {}}}'])
def test_an_unreadable_manifest_is_refused(folder, content):
    (folder / FILE_NAME).write_text(content)
    with pytest.raises(DataError, match="unreadable manifest"):
        read_manifest(folder)


def test_another_version_is_refused(folder):
    entries = json.loads((folder / FILE_NAME).read_text())
    (folder / FILE_NAME).write_text(json.dumps({**entries, "schema_version": 99}))
    with pytest.raises(DataError, match="schema 99"):
        read_manifest(folder)
