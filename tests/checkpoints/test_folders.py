"""A checkpoint is whole or not there, and is used only when every byte is what was written."""

import json
import os
import resource
import shutil
import subprocess
import sys

import pytest
import torch

from hyperion.checkpoints import CheckpointError, checkpoint_path, newest_good, saving, verify
from hyperion.checkpoints.folders import _put_back
from tests.checkpoints.single import load, load_latest, save


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


def test_a_folder_that_is_no_checkpoint_does_not_replace_one(tmp_path):
    path = put(tmp_path, 3)
    replaced = path.rename(tmp_path / ".replaced-step-00000003")
    path.mkdir()
    _put_back(tmp_path)
    assert (replaced / "part" / "data.bin").read_bytes() == b"content"


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
    truncate: ("truncated or modified", "data.bin"),
    edit: ("sha256 differs", "data.bin"),
    remove: ("is missing", "data.bin"),
    add: ("does not list", "extra.pkl"),
    damage_manifest: ("manifest cannot be read", "manifest.json"),
    no_manifest: ("manifest cannot be read", "manifest.json"),
    other_format: ("the format is 'other-9'", "manifest.json"),
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
    with pytest.raises(CheckpointError, match="none of the 1 checkpoints can be used"):
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


@pytest.mark.process
def test_a_full_disk_leaves_the_checkpoint_before_intact(small_disk):
    put(small_disk, 1, b"x" * 400_000)
    with pytest.raises(CheckpointError, match="No space left") as caught:
        put(small_disk, 2, b"x" * 900_000)
    assert caught.value.where == small_disk
    assert names(small_disk) == ["step-00000001"]
    verify(checkpoint_path(small_disk, 1))


def test_a_folder_that_cannot_be_made_is_named(tmp_path):
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(CheckpointError, match="cannot write the checkpoint of step 1") as caught:
        put(tmp_path / "file", 1)
    assert caught.value.where == tmp_path / "file"


STATE = {"weights": torch.arange(6.0).reshape(2, 3), "loader": {"epoch": 2, "position": 5}, "rates": [0.1, 0.2]}


def assert_is_state(state):
    assert torch.equal(state["weights"], STATE["weights"])
    assert {name: state[name] for name in ("loader", "rates")} == {name: STATE[name] for name in ("loader", "rates")}


def test_saved_and_loaded(tmp_path):
    path = save(tmp_path, 12, STATE)
    found = load_latest(tmp_path)
    assert (found.path, found.step) == (path, 12)
    assert_is_state(found.state)


def test_nothing_saved_is_none(tmp_path):
    assert load_latest(tmp_path) is None


def test_a_pickle_with_a_matching_manifest_is_refused_and_the_last_good_one_used(tmp_path, capsys):
    import hashlib

    save(tmp_path, 1, STATE)
    bad = save(tmp_path, 2, STATE)
    torch.save({"x": 1}, bad / "tensors.safetensors")
    manifest = json.loads((bad / "manifest.json").read_text())
    content = (bad / "tensors.safetensors").read_bytes()
    manifest["files"]["tensors.safetensors"] = {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    (bad / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(CheckpointError, match="pickle"):
        load(bad)
    found = load_latest(tmp_path)
    assert found.step == 1
    assert_is_state(found.state)
    assert "pickle" in capsys.readouterr().err


WRITE_TOO_MUCH = """
import resource, signal, sys
import torch
from hyperion.checkpoints import CheckpointError, saving, write_state
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
try:
    with saving(sys.argv[1], 2) as new:
        write_state(new, {"weights": torch.zeros(100_000)})
except CheckpointError as error:
    sys.exit(f"refused: {error}")
"""


@pytest.mark.slow
def test_a_write_error_leaves_the_checkpoint_before_intact(tmp_path):
    save(tmp_path, 1, STATE)
    child = subprocess.run([sys.executable, "-c", WRITE_TOO_MUCH, tmp_path], capture_output=True, text=True)
    assert child.returncode == 1
    assert "refused: cannot write the tensors" in child.stderr, child.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000001"]
    assert_is_state(load_latest(tmp_path).state)
    assert resource.getrlimit(resource.RLIMIT_FSIZE)[0] != 100_000  # only the child was limited
