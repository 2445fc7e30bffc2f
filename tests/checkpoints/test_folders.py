"""A checkpoint is whole or not there, and is used only when every byte is what was written."""

import json
import os
import shutil
import subprocess

import pytest

from hyperion.checkpoints import CheckpointError, checkpoint_path, newest_good, saving, verify


def put(folder, step, content=b"content", keep=2):
    with saving(folder, step, keep) as new:
        (new / "part").mkdir()
        (new / "part" / "data.bin").write_bytes(content)
    return checkpoint_path(folder, step)


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def test_a_whole_checkpoint_verifies(tmp_path):
    path = put(tmp_path, 7)
    manifest = verify(path)
    assert manifest["step"] == 7
    assert manifest["files"]["part/data.bin"]["bytes"] == 7


def test_the_newest_are_kept(tmp_path):
    for step in (1, 2, 10, 3):
        put(tmp_path, step)
    assert names(tmp_path) == ["step-00000003", "step-00000010"]


def test_an_error_while_writing_leaves_everything_as_it_was(tmp_path):
    put(tmp_path, 1)
    with pytest.raises(ZeroDivisionError), saving(tmp_path, 2) as new:
        (new / "half").write_text("half")
        raise ZeroDivisionError
    assert names(tmp_path) == ["step-00000001"]


def test_what_a_killed_save_left_is_no_checkpoint_and_is_removed_by_the_next(tmp_path):
    put(tmp_path, 1)
    left = tmp_path / ".unfinished-step-00000002"
    left.mkdir()
    (left / "half").write_text("half")
    assert newest_good(tmp_path, lambda path: path.name) == "step-00000001"
    put(tmp_path, 3)
    assert names(tmp_path) == ["step-00000001", "step-00000003"]


def test_saving_the_same_step_again_replaces_it(tmp_path):
    put(tmp_path, 1, b"old")
    path = put(tmp_path, 1, b"new")
    verify(path)
    assert (path / "part" / "data.bin").read_bytes() == b"new"
    assert names(tmp_path) == ["step-00000001"]


def test_a_kill_while_a_step_is_replaced_costs_nothing(tmp_path):
    put(tmp_path, 1, b"old").rename(tmp_path / ".replaced-step-00000001")  # as between the two renames
    assert newest_good(tmp_path, lambda path: verify(path)["step"]) == 1
    put(tmp_path, 1, b"new")
    assert names(tmp_path) == ["step-00000001"]


def truncate(path):
    (path / "part" / "data.bin").write_bytes(b"con")


def edit(path):
    (path / "part" / "data.bin").write_bytes(b"c0ntent")


def remove(path):
    (path / "part" / "data.bin").unlink()


def add(path):
    (path / "extra.pkl").write_bytes(b"x")


def damage_manifest(path):
    (path / "manifest.json").write_text("{")


def no_manifest(path):
    (path / "manifest.json").unlink()


def other_format(path):
    manifest = json.loads((path / "manifest.json").read_text())
    (path / "manifest.json").write_text(json.dumps(manifest | {"format": "other-9"}))


FAULTS = {
    truncate: ("cut off or edited", "data.bin"),
    edit: ("sha256 differs", "data.bin"),
    remove: ("is missing", "data.bin"),
    add: ("does not list", "extra.pkl"),
    damage_manifest: ("manifest cannot be read", "manifest.json"),
    no_manifest: ("manifest cannot be read", "manifest.json"),
    other_format: ("format 'other-9'", "manifest.json"),
}


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_a_bad_checkpoint_is_refused_with_the_reason_and_the_one_before_is_used(tmp_path, capsys, fault):
    put(tmp_path, 1)
    bad = put(tmp_path, 2)
    fault(bad)
    reason, file = FAULTS[fault]
    with pytest.raises(CheckpointError, match=reason) as caught:
        verify(bad)
    assert caught.value.where.name == file
    assert caught.value.next_step

    def read(path):
        verify(path)
        return path.name

    assert newest_good(tmp_path, read) == "step-00000001"
    warning = capsys.readouterr().err
    assert "WARNING" in warning and reason in warning and file in warning


def test_when_all_are_bad_the_error_says_so(tmp_path):
    truncate(put(tmp_path, 1))
    with pytest.raises(CheckpointError, match="none of 1 checkpoints can be used"):
        newest_good(tmp_path, verify)


def test_no_checkpoint_is_none(tmp_path):
    assert newest_good(tmp_path / "absent", verify) is None


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 1 MiB."""
    place = tmp_path / "disk"
    place.mkdir()
    if os.geteuid() != 0 or shutil.which("mount") is None:
        pytest.skip("only root can mount a small tmpfs; RLIMIT_FSIZE covers the write error elsewhere")
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", place], capture_output=True, text=True)
    if mounted.returncode != 0:
        pytest.skip(f"no tmpfs can be mounted here: {mounted.stderr.strip()}")
    yield place
    subprocess.run(["umount", place], check=True)


def test_a_full_disk_leaves_the_checkpoint_before_intact(small_disk):
    put(small_disk, 1, b"x" * 400_000)
    with pytest.raises(CheckpointError, match="No space left") as caught:
        put(small_disk, 2, b"x" * 900_000)
    assert caught.value.where == small_disk
    assert names(small_disk) == ["step-00000001"]
    verify(checkpoint_path(small_disk, 1))


def test_a_folder_that_cannot_be_made_is_named(tmp_path):
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(CheckpointError, match="could not be written") as caught:
        put(tmp_path / "file", 1)
    assert caught.value.where == tmp_path / "file"
