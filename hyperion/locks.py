"""Locks between processes.

A lock uses flock if the file system supports it. Some cluster file systems refuse flock (ENOSYS, ENOLCK, EOPNOTSUPP). There, the
lock is a second file, `<name>.exclusive`, which only one process can create. The file names its owner, so that another process
can take over the lock after the owner has died.

This module uses only the standard library, because `hyperion.install` needs it before other packages are installed.
"""

import contextlib
import errno
import fcntl
import os
import socket
import stat
import sys
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

_UNSUPPORTED = (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOTSUP)
_POLL_S = 0.05
_LONGEST_OWNER = 512  # in bytes; enough for a host name of at most 64 characters and two numbers
_NOTICE_AFTER_S = 5.0
_UNNAMED_S = 60.0  # a lock file that stays empty for this long was created by a process that has died
_noticed: set[Path] = set()


class FileLock:
    """A lock that only one process can hold at a time.

    If the process ends without releasing the lock, the operating system or the next caller frees the lock.

    Args:
        path: the lock file. It is created if it does not exist, and it is never removed.
    """

    def __init__(self, path: Path):
        self.path = Path(path)
        self._exclusive = self.path.with_name(f"{self.path.name}.exclusive")
        self._descriptor: int | None = None
        self._owns_exclusive = False

    def acquire(self, wait: bool = True) -> bool:
        """Acquire the lock.

        Args:
            wait: if True, wait while another process holds the lock. If False, return False immediately in this case.

        Returns:
            True if this object now holds the lock.

        Raises:
            OSError: the lock file cannot be created or opened, or is a link, a named pipe or another special file.
        """
        # O_NOFOLLOW: in another user's folder, the lock file may be a link to a place where no file must be created.
        # O_NONBLOCK: opening a named pipe must not block. O_CLOEXEC: a child process must not inherit the lock and keep it held.
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
        self._descriptor = descriptor = os.open(self.path, flags, 0o666)
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            self.release()
            raise OSError(errno.EINVAL, "the lock is not a regular file", str(self.path))
        try:
            taken = self._flock(descriptor, wait)
        # BaseException includes Ctrl-C during the wait. The descriptor must be closed in this case too.
        except BaseException:
            self.release()
            raise
        if not taken:
            self.release()
        return taken

    def release(self) -> None:
        """Release the lock. Do nothing if this object does not hold it."""
        if self._owns_exclusive:
            self._owns_exclusive = False
            # Only the owner removes this file. The lock file for flock is never removed: if it were, two processes could lock
            # two different files of the same name.
            self._exclusive.unlink(missing_ok=True)
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def _flock(self, descriptor: int, wait: bool) -> bool:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
            return True
        except BlockingIOError:
            return False
        except OSError as error:
            if error.errno not in _UNSUPPORTED:
                raise
        _notice(self.path.parent, f"{self.path.parent} does not support flock; locks in it are files named *.exclusive")
        return self._create_exclusive(wait)

    def _create_exclusive(self, wait: bool) -> bool:
        began = time.monotonic()
        while True:
            try:
                # O_EXCL makes the creation atomic: exactly one process succeeds.
                file = os.open(self._exclusive, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
            except FileExistsError:
                if self._take_over():
                    continue
                if not wait:
                    return False
                if time.monotonic() - began > _NOTICE_AFTER_S:
                    owner = _read(self._exclusive) or "another process"
                    _notice(self._exclusive, f"waiting for {owner}; if this process has ended, remove {self._exclusive}")
                time.sleep(_POLL_S)
                continue
            self._owns_exclusive = True
            with os.fdopen(file, "w") as written:
                written.write(_owner(os.getpid()))
            return True

    def _take_over(self) -> bool:
        """Remove the lock file if its owner is a process of this host that has ended. Return True if the caller may try again."""
        owner = _read(self._exclusive)
        if not (_ended(owner) or _is_abandoned(self._exclusive)):
            return False
        # Renaming is atomic: if several processes take over the lock, one gets the file and the others get a
        # FileNotFoundError.
        aside = self._exclusive.with_name(f"{self._exclusive.name}.{uuid.uuid4().hex}")
        try:
            os.rename(self._exclusive, aside)
        except FileNotFoundError:
            return True
        # Another process may have acquired the lock between the read and the rename. In this case, restore its file.
        if _read(aside) != owner:
            with contextlib.suppress(FileExistsError):
                # `link` fails if the name exists, so it cannot overwrite a lock that a third process has taken since.
                os.link(aside, self._exclusive)
        aside.unlink()
        return True


@contextlib.contextmanager
def file_lock(path: Path) -> Iterator[None]:
    """Hold a `FileLock` during the block. Wait for the lock if another process holds it.

    Raises:
        OSError: the lock file cannot be created or opened.
    """
    lock = FileLock(path)
    lock.acquire()
    try:
        yield
    finally:
        lock.release()


@contextlib.contextmanager
def folder_lock(folder: Path) -> Iterator[bool]:
    """Hold a lock on a folder during the block, without a file in the folder. Yield False if it is already locked.

    On a file system that refuses flock, nothing is locked, and a notice says so.

    Raises:
        OSError: the folder cannot be opened or locked.
    """
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        acquired = True
    except BlockingIOError:
        acquired = False
    except OSError as error:
        if error.errno not in _UNSUPPORTED:
            os.close(descriptor)
            raise
        _notice(Path(folder), f"{folder} does not support flock, so two processes that use it at the same time are not detected")
        acquired = True
    try:
        yield acquired
    finally:
        os.close(descriptor)  # frees the lock


def _owner(pid: int) -> str:
    """Return text that identifies a process: its host, process ID and start time.

    The start time is needed because the operating system reuses process IDs.
    """
    return f"{socket.gethostname()} process {pid} started {_start_ticks(pid)}"


def _ended(owner: str) -> bool:
    host, _, rest = owner.partition(" process ")
    pid = rest.partition(" ")[0]
    # A different start time means that the ID now belongs to another process. "never" means that no process has this ID.
    return host == socket.gethostname() and pid.isdigit() and owner != _owner(int(pid))


def _start_ticks(pid: int) -> str:
    try:
        # The start time is field 22, see proc_pid_stat(5). Field 2, the name in parentheses, may contain spaces.
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except OSError:
        return "never"


def _is_abandoned(path: Path) -> bool:
    """Return True if a lock file has been empty for _UNNAMED_S seconds: its creator died before it wrote its name into it."""
    try:
        facts = path.lstat()
    except OSError:
        return False
    return stat.S_ISREG(facts.st_mode) and facts.st_size == 0 and time.time() - facts.st_mtime > _UNNAMED_S


def _read(path: Path) -> str:
    try:
        # In another user's folder, the file may be a named pipe or a device, and opening it must not block.
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
        with os.fdopen(descriptor, "rb") as file:
            return (file.read(_LONGEST_OWNER) or b"").decode(errors="replace")
    except OSError:
        return ""


def _notice(about: Path, text: str) -> None:
    if about not in _noticed:
        _noticed.add(about)
        print(f"hyperion: NOTICE: {text}", file=sys.stderr)
