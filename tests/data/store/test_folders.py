"""Folders appear whole or not at all, and their manifests find damage."""

import json
import os
import subprocess

import pytest

from hyperion.data.store.folders import FILE_NAME, DataError, content_hash, read_manifest, sha256_of, staged, write_manifest


def test_a_folder_appears_whole(tmp_path):
    target = tmp_path / "deep" / "target"
    with staged(target) as work:
        (work / "file").write_text("content")
        assert not target.exists()
    assert (target / "file").read_text() == "content"
    assert [path.name for path in target.parent.iterdir()] == ["target"]


def test_an_error_leaves_nothing(tmp_path):
    with pytest.raises(ValueError, match="midway"), staged(tmp_path / "target") as work:
        (work / "file").write_text("half")
        raise ValueError("midway")
    assert not list(tmp_path.iterdir())


def test_the_first_of_two_wins_and_the_second_leaves_nothing(tmp_path):
    target = tmp_path / "target"
    with staged(target) as late:
        (late / "file").write_text("late")
        with staged(target) as early:
            (early / "file").write_text("early")
    assert (target / "file").read_text() == "early"
    assert [path.name for path in tmp_path.iterdir()] == ["target"]


def test_a_folder_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(DataError, match="cannot stage data") as caught, staged(tmp_path / "file" / "target"):
        pass
    assert "HYPERION_DATA" in str(caught.value)


@pytest.mark.process
def test_a_full_disk_is_named_and_leaves_nothing(tmp_path):
    disk = tmp_path / "disk"
    disk.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(disk)], capture_output=True).returncode:
        pytest.skip("this account may not mount a small tmpfs")
    try:
        with pytest.raises(DataError, match="the disk is full; nothing was staged"), staged(disk / "target") as work:
            (work / "file").write_bytes(os.urandom(1 << 20))
        assert not list(disk.iterdir())
    finally:
        subprocess.run(["umount", str(disk)], check=True)


def test_hashes(tmp_path):
    (tmp_path / "file").write_bytes(b"abc")
    assert sha256_of(tmp_path / "file").startswith("ba7816bf8f01cfea")
    assert content_hash(tmp_path / "file", "md5") == "900150983cd24fb0d6963f7d28e17f72"


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
