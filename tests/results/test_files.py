"""Files whole or not at all: truncation, edits, full disks, unwritable folders and kills between the renames."""

import errno
import fcntl
import json
import os
import subprocess

import pytest

from hyperion.results.files import (
    MANIFEST,
    PENDING,
    StoreError,
    commit,
    manifest_names,
    read_verified,
    verify_folder,
    write_atomically,
)


def mounted(folder, *options):
    """Mount a small tmpfs on `folder`, or skip."""
    folder.mkdir(exist_ok=True)
    if os.geteuid() != 0:
        pytest.skip("mounting a tmpfs needs root")
    mount = subprocess.run(["mount", "-t", "tmpfs", *options, "tmpfs", folder], capture_output=True, text=True)
    if mount.returncode:
        pytest.skip(f"this machine forbids mounting a tmpfs: {mount.stderr.strip()}")
    return folder


@pytest.fixture
def small_disk(tmp_path):
    disk = mounted(tmp_path / "disk", "-o", "size=256k")
    yield disk
    subprocess.run(["umount", disk], check=True)


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_write_atomically_replaces_and_leaves_nothing_beside(tmp_path):
    write_atomically(tmp_path / "a.txt", b"old")
    write_atomically(tmp_path / "a.txt", b"new")
    assert contents(tmp_path) == {"a.txt": b"new"}


@pytest.mark.parametrize(
    ("damage", "fault"),
    [
        (lambda path: path.write_bytes(path.read_bytes()[:-3]), "truncated or edited"),
        (lambda path: path.write_bytes(b"X" + path.read_bytes()[1:]), "sha256"),
        (lambda path: path.unlink(), "missing"),
    ],
)
def test_a_damaged_file_is_refused_by_name(tmp_path, damage, fault):
    commit(tmp_path, {"sub/a.csv": b"one,two,three\n", "b.json": b"{}"})
    damage(tmp_path / "sub/a.csv")
    for reading in (lambda: read_verified(tmp_path, "sub/a.csv"), lambda: verify_folder(tmp_path)):
        with pytest.raises(StoreError) as refusal:
            reading()
        assert fault in refusal.value.what and str(tmp_path / "sub/a.csv") in str(refusal.value)
    assert read_verified(tmp_path, "b.json") == b"{}"


def test_a_file_nobody_vouched_for_is_refused(tmp_path):
    commit(tmp_path, {"a": b"1"})
    (tmp_path / "b").write_bytes(b"2")
    with pytest.raises(StoreError, match="not in the run's manifest"):
        read_verified(tmp_path, "b")


def test_a_torn_manifest_is_refused_by_name(tmp_path):
    commit(tmp_path, {"a": b"1"})
    (tmp_path / MANIFEST).write_text('{"files": ')
    with pytest.raises(StoreError, match="unreadable manifest") as refusal:
        verify_folder(tmp_path)
    assert MANIFEST in str(refusal.value)


@pytest.mark.parametrize("name", ["MANIFEST", "MANIFEST.pending"])
@pytest.mark.parametrize("content", ["", "[]", '{"files": []}', '{"files": {"a": {}}}', "\x00"])
def test_any_other_content_of_a_manifest_is_refused_by_name(tmp_path, name, content):
    commit(tmp_path, {"a": b"1"})
    (tmp_path / name).write_text(content)
    with pytest.raises(StoreError) as refusal:
        read_verified(tmp_path, "b")
    assert str(tmp_path) in str(refusal.value)


@pytest.mark.process
def test_a_full_disk_is_explained_and_changes_nothing(small_disk):
    commit(small_disk, {"a": b"old", "sub/b": b"old"})
    before = contents(small_disk)
    with pytest.raises(StoreError, match="disk is full") as refusal:
        commit(small_disk, {"a": b"new", "sub/b": bytes(2**20)})
    assert refusal.value.next_step
    assert contents(small_disk) == before
    assert verify_folder(small_disk) == ["a", "sub/b"]
    with pytest.raises(StoreError, match="disk is full"):
        write_atomically(small_disk / "a", bytes(2**20))
    assert contents(small_disk) == before


@pytest.mark.process
def test_a_disk_that_is_full_to_the_last_byte_still_reads(small_disk):
    commit(small_disk, {"a": b"old"})
    (small_disk / "filler").write_bytes(b"")
    with pytest.raises(OSError, match="No space"), open(small_disk / "filler", "wb", buffering=0) as filler:
        while True:
            filler.write(bytes(4096))
    with pytest.raises(StoreError, match="disk is full"):
        commit(small_disk, {"a": b"new"})
    assert read_verified(small_disk, "a") == b"old"


@pytest.mark.process
def test_a_read_only_folder_is_explained(tmp_path):
    folder = mounted(tmp_path / "disk", "-o", "size=256k")
    try:
        commit(folder, {"a": b"old"})
        subprocess.run(["mount", "-o", "remount,ro", folder], check=True)
        with pytest.raises(StoreError, match="not writable"):
            commit(folder, {"a": b"new"})
        assert read_verified(folder, "a") == b"old"
    finally:
        subprocess.run(["umount", folder], check=True)


def test_a_file_where_the_folder_should_be_is_explained(tmp_path):
    (tmp_path / "file").write_text("not a folder")
    for folder in (tmp_path / "file", tmp_path / "file" / "run"):
        with pytest.raises(StoreError, match="cannot write") as refusal:
            commit(folder, {"a": b"1"})
        assert "HYPERION_RESULTS" in refusal.value.next_step


def interrupt_renames_after(monkeypatch, count):
    """Let `count` renames of the next commit happen, then raise as Ctrl-C would."""
    renames, rename = [], os.replace

    def replace(source, target):
        if len(renames) == count:
            raise KeyboardInterrupt
        renames.append(target)
        rename(source, target)

    monkeypatch.setattr(os, "replace", replace)


@pytest.mark.parametrize("count", range(4))
def test_an_interruption_at_any_rename_leaves_the_old_or_the_new(tmp_path, monkeypatch, count):
    """Rename 0 makes the change; readers read through the others, and the next writer finishes them."""
    commit(tmp_path, {"a": b"old", "b": b"old"})
    with monkeypatch.context() as patch:
        interrupt_renames_after(patch, count)
        with pytest.raises(KeyboardInterrupt):
            commit(tmp_path, {"a": b"new", "b": b"new", "c": b"new"})
    expected = {"a": b"old", "b": b"old"} if count == 0 else dict.fromkeys("abc", b"new")
    assert {name: read_verified(tmp_path, name) for name in manifest_names(tmp_path)} == expected
    assert verify_folder(tmp_path) == sorted(expected)
    commit(tmp_path, {"d": b"later"})
    assert {name: read_verified(tmp_path, name) for name in manifest_names(tmp_path)} == expected | {"d": b"later"}
    assert not (tmp_path / PENDING).exists()
    assert not list(tmp_path.glob("*.tmp")) and not list(tmp_path.glob(".*.tmp"))


def test_an_interruption_just_after_the_change_was_made_keeps_its_files(tmp_path, monkeypatch):
    """The folder's fsync follows the rename that makes the change; Ctrl-C there must not take the new files away."""
    commit(tmp_path, {"a": b"old"})

    def interrupted(folder):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("hyperion.results.files.flush", interrupted)
        with pytest.raises(KeyboardInterrupt):
            commit(tmp_path, {"a": b"new"})
    assert read_verified(tmp_path, "a") == b"new"


@pytest.mark.parametrize("count", range(1, 5))
def test_readers_write_nothing(tmp_path, monkeypatch, count):
    """A reader that finished another's commit would rename files in whatever folder it is shown."""
    commit(tmp_path, {"a": b"old", "sub/b": b"old"})
    with monkeypatch.context() as patch:
        interrupt_renames_after(patch, count)
        with pytest.raises(KeyboardInterrupt):
            commit(tmp_path, {"a": b"new", "sub/b": b"new", "c": b"new"})

    def state():
        return {path: (path.lstat().st_mtime_ns, path.lstat().st_ino) for path in [tmp_path, *tmp_path.rglob("*")]}

    before = state()
    assert (tmp_path / PENDING).exists()
    assert {name: read_verified(tmp_path, name) for name in manifest_names(tmp_path)} == {
        "a": b"new",
        "sub/b": b"new",
        "c": b"new",
    }
    assert verify_folder(tmp_path) == ["a", "c", "sub/b"]
    assert state() == before


HOSTILE_NAMES = [
    "/{}/outside/file",
    "../outside/file",
    "sub/../../outside/file",
    "link/file",
    "",
    ".",
    "a\0b",
    "MANIFEST.pending",
]


@pytest.fixture
def between(tmp_path):
    """A vouched folder with a link out of it, and a neighbour that nobody may change."""
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / "file").write_bytes(b"mine")
    folder = tmp_path / "run"
    commit(folder, {"a": b"1"})
    (folder / "link").symlink_to(tmp_path / "outside")
    return folder


def everything_of(folder):
    return [
        lambda: read_verified(folder, "a"),
        lambda: manifest_names(folder),
        lambda: verify_folder(folder),
        lambda: commit(folder, {"b": b"2"}),
    ]


def test_a_file_that_becomes_a_link_after_its_manifest_was_read_is_refused(between):
    assert read_verified(between, "a") == b"1"
    (between / "a").unlink()
    (between / "a").symlink_to(between.parent / "outside" / "file")
    for use in (lambda: read_verified(between, "a"), lambda: verify_folder(between), lambda: commit(between, {"a": b"1"})):
        with pytest.raises(StoreError, match="link"):
            use()
    assert (between.parent / "outside" / "file").read_bytes() == b"mine"


@pytest.mark.parametrize("name", HOSTILE_NAMES)
@pytest.mark.parametrize("where", ["target", "source", "manifest"])
def test_a_name_that_leaves_the_folder_is_refused_by_readers_and_writers(between, name, where):
    name = name.format(str(between.parent).strip("/"))
    (between / ".a.1.tmp").write_bytes(b"theirs")
    if where == "manifest":
        entry = {"sha256": "0" * 64, "size": 4}
        (between / MANIFEST).write_text(json.dumps({"schema": 1, "files": {name: entry}}))
    else:
        moves = {".a.1.tmp": name} if where == "target" else {name: "a"}
        (between / PENDING).write_text(json.dumps(moves))
    before = contents(between.parent)
    for action in everything_of(between):
        with pytest.raises(StoreError):
            action()
    assert contents(between.parent) == before | {".lock": b""}
    with pytest.raises(StoreError):
        commit(between, {name: b"2"})
    assert contents(between.parent) == before | {".lock": b""}


def test_a_rename_that_no_commit_writes_is_refused(between):
    (between / PENDING).write_text(json.dumps({"a": "b"}))
    for action in everything_of(between):
        with pytest.raises(StoreError, match="never writes"):
            action()
    assert (between / "a").read_bytes() == b"1"


@pytest.mark.parametrize("name", ["a", MANIFEST, PENDING, ".lock"])
@pytest.mark.parametrize("kind", ["pipe", "link", "dangling link", "device", "folder"])
def test_what_is_no_regular_file_is_refused_at_once(between, name, kind):
    path = between / name
    path.unlink(missing_ok=True)
    target = between.parent / "outside" / ("file" if kind == "link" else "none")
    {"pipe": lambda: os.mkfifo(path), "folder": path.mkdir, "device": lambda: path.symlink_to("/dev/zero")}.get(
        kind, lambda: path.symlink_to(target)
    )()
    before = contents(between.parent)
    read, names, verify, write = everything_of(between)
    for action in (read, verify) if name == "a" else (read, names, verify, write):
        with pytest.raises(StoreError):
            action()
    assert contents(between.parent) == before
    assert not (between.parent / "outside" / "none").exists()


def test_links_laid_where_a_temporary_file_will_be_are_not_followed(between):
    for pid in (os.getpid(), 1):
        (between / f".a.{pid}.tmp").symlink_to(between.parent / "outside" / "file")
    commit(between, {"a": b"2"})
    assert (between.parent / "outside" / "file").read_bytes() == b"mine"
    assert read_verified(between, "a") == b"2"


def test_an_extended_file_is_refused_before_it_is_hashed(between):
    with open(between / "a", "ab") as file:
        file.truncate(2**40)
    for action in (lambda: read_verified(between, "a"), lambda: verify_folder(between)):
        with pytest.raises(StoreError, match="has 1099511627776 bytes"):
            action()


@pytest.mark.parametrize("number", [errno.ENOSYS, errno.ENOLCK])
def test_folders_work_without_flock(tmp_path, monkeypatch, number):
    def refuse(descriptor, operation):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "flock", refuse)
    commit(tmp_path, {"a": b"1"})
    commit(tmp_path, {"a": b"2"})
    assert read_verified(tmp_path, "a") == b"2" and verify_folder(tmp_path) == ["a"]
    assert not (tmp_path / ".lock.exclusive").exists()


def test_files_left_by_a_killed_writer_are_swept_by_the_next(tmp_path):
    commit(tmp_path, {"a": b"1"})
    (tmp_path / ".a.99999.tmp").write_bytes(b"half")
    commit(tmp_path, {"a": b"2"})
    assert not (tmp_path / ".a.99999.tmp").exists()
    assert set(json.loads((tmp_path / MANIFEST).read_text())["files"]) == {"a"}
