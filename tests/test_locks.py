"""Locks with flock and without it: one holder at a time, and a dead holder's lock is taken over."""

import errno
import fcntl
import multiprocessing
import os

import pytest

from hyperion import locks
from hyperion.locks import FileLock, file_lock, folder_lock


@pytest.fixture(params=["flock", errno.ENOSYS, errno.ENOLCK], ids=["flock", "ENOSYS", "ENOLCK"])
def file_system(request, monkeypatch):
    if request.param != "flock":

        def refuse(descriptor, operation):
            raise OSError(request.param, os.strerror(request.param))

        monkeypatch.setattr(fcntl, "flock", refuse)
    return request.param


def count_up(path, times):
    for _ in range(times):
        with file_lock(path.with_name("lock")):
            number = int(path.read_text())
            path.write_text(str(number + 1))


@pytest.mark.process
def test_one_holder_at_a_time(tmp_path, file_system):
    counter = tmp_path / "counter"
    counter.write_text("0")
    fork = multiprocessing.get_context("fork")  # the patched flock goes with it
    workers = [fork.Process(target=count_up, args=(counter, 50)) for _ in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(60)
    assert counter.read_text() == "200"


def test_without_waiting_a_held_lock_is_refused(tmp_path, file_system):
    held, other = FileLock(tmp_path / "lock"), FileLock(tmp_path / "lock")
    assert held.acquire(wait=False)
    assert not other.acquire(wait=False)
    held.release()
    assert other.acquire(wait=False)
    other.release()


def test_a_folder_is_locked_without_a_file_in_it(tmp_path, capsys, file_system):
    with folder_lock(tmp_path) as first, folder_lock(tmp_path) as second:
        # Without flock, nothing is locked, and a notice says so.
        assert (first, second) == (True, file_system != "flock")
    assert ("does not support flock" in capsys.readouterr().err) == (file_system != "flock")
    with folder_lock(tmp_path) as again:
        assert again and list(tmp_path.iterdir()) == []


def test_another_error_of_the_lock_of_a_folder_is_raised(tmp_path, monkeypatch):
    def refuse(descriptor, operation):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(fcntl, "flock", refuse)
    open_before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(OSError, match="Input/output error"), folder_lock(tmp_path):
        pass
    assert len(os.listdir("/proc/self/fd")) == open_before


def die_holding(path):
    FileLock(path).acquire()
    os._exit(0)


@pytest.mark.process
def test_a_dead_holders_lock_is_taken_over(tmp_path, file_system):
    worker = multiprocessing.get_context("fork").Process(target=die_holding, args=(tmp_path / "lock",))
    worker.start()
    worker.join(60)
    assert (tmp_path / "lock.exclusive").exists() == (file_system != "flock")
    lock = FileLock(tmp_path / "lock")
    assert lock.acquire(wait=False)
    lock.release()
    assert [path.name for path in tmp_path.iterdir()] == ["lock"]


def test_a_lock_file_without_an_owner_is_taken_over_after_a_while(tmp_path, file_system):
    if file_system == "flock":
        pytest.skip("flock knows no owner file")
    unnamed = tmp_path / "lock.exclusive"
    unnamed.touch()
    assert not FileLock(tmp_path / "lock").acquire(wait=False)  # its owner may be about to write its name
    os.utime(unnamed, (0, 0))
    lock = FileLock(tmp_path / "lock")
    assert lock.acquire(wait=False)
    lock.release()


def test_lock_files_leave_their_mode_to_the_umask(tmp_path):
    before = os.umask(0o002)
    try:
        with file_lock(tmp_path / "lock"):
            pass
    finally:
        os.umask(before)
    assert (tmp_path / "lock").stat().st_mode & 0o777 == 0o664


def test_a_lock_of_another_host_is_not_taken_over(tmp_path, monkeypatch, file_system):
    if file_system == "flock":
        pytest.skip("flock knows no hosts")
    (tmp_path / "lock.exclusive").write_text("elsewhere process 1 started 7")
    assert not FileLock(tmp_path / "lock").acquire(wait=False)


def test_the_fallback_says_so_once(tmp_path, capsys, monkeypatch, file_system):
    monkeypatch.setattr(locks, "_noticed", set())
    for _ in range(2):
        with file_lock(tmp_path / "lock"):
            pass
    assert capsys.readouterr().err.count("does not support flock") == (0 if file_system == "flock" else 1)


def test_other_errors_are_raised(tmp_path, monkeypatch):
    def fail(descriptor, operation):
        raise OSError(errno.EIO, "broken disk")

    monkeypatch.setattr(fcntl, "flock", fail)
    with pytest.raises(OSError, match="broken disk"), file_lock(tmp_path / "lock"):
        pass


@pytest.mark.parametrize("kind", ["link", "dangling link", "pipe", "folder"])
def test_a_lock_that_is_no_regular_file_is_refused_at_once(tmp_path, kind, file_system):
    outside = tmp_path / "outside"
    if kind == "link":
        outside.write_text("mine")
    path = tmp_path / "lock"
    {"pipe": lambda: os.mkfifo(path), "folder": path.mkdir}.get(kind, lambda: path.symlink_to(outside))()
    for _ in range(2):
        with pytest.raises(OSError):
            FileLock(path).acquire()
    assert outside.exists() == (kind == "link")


@pytest.mark.parametrize("kind", ["link", "pipe"])
def test_a_hostile_owner_file_is_not_waited_for(tmp_path, kind, file_system):
    if file_system == "flock":
        pytest.skip("flock knows no owner file")
    path = tmp_path / "lock.exclusive"
    os.mkfifo(path) if kind == "pipe" else path.symlink_to("/dev/zero")
    assert not FileLock(tmp_path / "lock").acquire(wait=False)
