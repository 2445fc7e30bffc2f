"""Files written whole or not at all, and folders whose every file is vouched for by a manifest."""

import contextlib
import errno
import fcntl
import glob
import hashlib
import json
import os
from collections.abc import Iterator
from pathlib import Path

from hyperion.errors import HyperionError, refused_write

MANIFEST = "MANIFEST"
PENDING = "MANIFEST.pending"
LOCK, WRITER_LOCK = ".lock", ".writer.lock"


class StoreError(HyperionError):
    """A results folder that cannot be written or must not be believed."""


def write_atomically(path: Path, content: bytes) -> None:
    """Write `content` to `path` so that a reader, or a power cut, meets the old file or the new one and nothing between.

    Raises:
        StoreError: the folder is not writable or the disk is full; the old file is untouched.
    """
    temporary = _write_beside(path, content)
    try:
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    _sync_folder(path.parent)


def commit(folder: Path, contents: dict[str, bytes]) -> None:
    """Add or replace several files of a vouched folder as one transaction.

    The new files and the manifest that will vouch for them are written beside the old ones, then the list of renames,
    then all are renamed. A process killed in between leaves that list, and the next writer or reader finishes it. Nothing
    after the list needs disk space.

    Args:
        contents: bytes by path relative to `folder`.

    Raises:
        StoreError: the folder is not writable or the disk is full; the old files are untouched.
    """
    make_folder(folder)
    with locked(folder, create=True):
        manifest = read_manifest(folder)
        manifest |= {
            name: {"sha256": hashlib.sha256(content).hexdigest(), "size": len(content)}
            for name, content in contents.items()
        }
        vouching = json.dumps({"schema": 1, "files": manifest}, indent=1, sort_keys=True).encode()
        moves: dict[str, str] = {}
        try:
            for name, content in (contents | {MANIFEST: vouching}).items():
                _remove_strays(folder / name)
                moves[str(_write_beside(folder / name, content).relative_to(folder))] = name
            write_atomically(folder / PENDING, json.dumps(moves, indent=1).encode())
        except BaseException:
            # Once the list of renames is in place the change is made, whatever interrupted us: its files must stay.
            if not (folder / PENDING).exists():
                for temporary in moves:
                    (folder / temporary).unlink(missing_ok=True)
            raise
        _finish(folder)


def read_verified(folder: Path, name: str) -> bytes:
    """The bytes of a vouched file.

    Raises:
        StoreError: the file is missing, is not in the manifest, or its size or hash is not what the manifest says.
    """
    with locked(folder):
        manifest = read_manifest(folder)
        _verify_entry(folder, name, manifest)
        return (folder / name).read_bytes()


def vouched_names(folder: Path) -> set[str]:
    """Names of the files that the manifest vouches for."""
    with locked(folder):
        return set(read_manifest(folder))


def verify_folder(folder: Path) -> list[str]:
    """Check every file that the manifest vouches for; return their names.

    Raises:
        StoreError: names the first file that is missing, truncated or edited.
    """
    with locked(folder):
        manifest = read_manifest(folder)
        for name in manifest:
            _verify_entry(folder, name, manifest)
    return sorted(manifest)


def read_manifest(folder: Path) -> dict[str, dict]:
    """The manifest's entries {name: {sha256, size}}, empty for a new folder. Call it under the folder's lock."""
    if (folder / PENDING).exists():
        _finish(folder)
    path = folder / MANIFEST
    if not path.exists():
        return {}
    try:
        files = json.loads(path.read_text())["files"]
        return {name: {"sha256": str(entry["sha256"]), "size": int(entry["size"])} for name, entry in files.items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise _unreadable(path, error) from error


@contextlib.contextmanager
def locked(folder: Path, name: str = LOCK, create: bool = False) -> Iterator[None]:
    """Hold a lock of the folder: one process at a time.

    Writers create the lock file; readers use it where it exists. A folder in which nobody ever wrote (a fresh checkout of
    the reference results) has none and needs none.
    """
    path = folder / name
    if not create and not (path.exists() and os.access(path, os.W_OK)):
        yield
        return
    try:
        lock = open(path, "a")  # noqa: SIM115 - closed below; only the opening may be explained as a fault of the folder
    except OSError as error:
        raise _explained(error, path) from error
    with lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _finish(folder: Path) -> None:
    try:
        moves = {str(temporary): str(name) for temporary, name in json.loads((folder / PENDING).read_text()).items()}
    except (ValueError, AttributeError) as error:
        raise _unreadable(folder / PENDING, error) from error
    for temporary, name in moves.items():
        if (folder / temporary).exists():
            os.replace(folder / temporary, folder / name)
            _sync_folder((folder / name).parent)
    (folder / PENDING).unlink()


def _remove_strays(path: Path) -> None:
    # Left by a writer killed before its list of renames. The caller holds the folder's lock, so nobody is writing them.
    for stray in path.parent.glob(f".{glob.escape(path.name)}.*.tmp"):
        stray.unlink(missing_ok=True)


def _verify_entry(folder: Path, name: str, manifest: dict) -> None:
    path, entry = folder / name, manifest.get(name)
    remedy = "restore the file from where it was copied, or delete the run and measure again"
    if entry is None:
        raise StoreError("file is not in the run's manifest", where=path, next_step=remedy)
    if not path.is_file():
        raise StoreError("file named by the manifest is missing", where=path, next_step=remedy)
    content = path.read_bytes()
    if len(content) != entry["size"]:
        fault = f"file is {len(content)} bytes long where its manifest says {entry['size']}: truncated or edited"
        raise StoreError(fault, where=path, next_step=remedy)
    if hashlib.sha256(content).hexdigest() != entry["sha256"]:
        raise StoreError("file does not have its manifest's sha256: it was edited", where=path, next_step=remedy)


def _write_beside(path: Path, content: bytes) -> Path:
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(temporary, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise _explained(error, path) from error
    return temporary


def make_folder(folder: Path) -> None:
    """Make `folder` if need be.

    Raises:
        StoreError: it cannot be made, or not be written to.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise _explained(error, folder) from error
    if not os.access(folder, os.W_OK):
        raise _explained(PermissionError(errno.EACCES, "folder is not writable"), folder)


def _unreadable(path: Path, error: Exception) -> StoreError:
    remedy = "restore the file, or move the folder away and run again"
    return StoreError(f"unreadable manifest: {error!r}", where=path, next_step=remedy)


def _explained(error: OSError, path: Path) -> StoreError:
    return refused_write(
        error, StoreError, action="cannot write", kept="nothing was changed", where=path,
        elsewhere="name another folder with HYPERION_RESULTS=/some/folder",
    )  # fmt: skip


def _sync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
