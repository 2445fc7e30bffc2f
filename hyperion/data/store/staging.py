"""Folders that appear whole or not at all, however many processes stage the same one at once."""

import contextlib
import errno
import functools
import hashlib
import json
import os
import re
import shutil
import stat
import uuid
from collections.abc import Iterator
from pathlib import Path

from hyperion.data.store.faults import DataError
from hyperion.errors import refused_write
from hyperion.paths import data_folder
from hyperion.untrusted import open_regular, read_json

# In every folder that `staged` makes: size and time of change of the files that were in it then, by relative path. Without it,
# `hyperion clean` could not distinguish Hyperion's files from the user's. The dot keeps it out of the identity of a data set.
MARK = ".hyperion.json"
# Working folders of `staged`: ".<name>.<process>.<random>.part".
WORKING = re.compile(r"\..+\.\d+\.[0-9a-f]{8}\.part")
QUARANTINE = "quarantine"  # the folder for what failed a check, kept to be looked at


def cache_root() -> Path:
    """Folder of raw data staged earlier, laid out like a mirror."""
    return data_folder() / "raw"


def processed_root() -> Path:
    """Folder of the pipelines' products."""
    return data_folder() / "processed"


@contextlib.contextmanager
def staged(target: Path) -> Iterator[Path]:
    """Yield an empty working folder that becomes `target` when the block ends without an error.

    The folder lies beside `target` under a name of its own, is flushed to disk and renamed. A process that finds
    `target` already made by another one drops its own copy: callers verify what they load, whoever made it. An error,
    a full disk included, leaves nothing behind.

    Raises:
        DataError: the disk is full or the folder is not writable.
    """
    work = target.with_name(f".{target.name}.{os.getpid()}.{uuid.uuid4().hex[:8]}.part")
    try:
        work.mkdir(parents=True)
        yield work
        files = {path.relative_to(work).as_posix(): _marked(path) for path in work.rglob("*") if path.is_file()}
        (work / MARK).write_text(json.dumps({"made_by": "hyperion", "files": files}, indent=1), encoding="utf-8")
        for path in (work, *sorted(work.rglob("*"))):
            _flush(path)
        _take_the_name(work, target)
    except OSError as error:
        raise explained(error, target) from error
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _marked(path: Path) -> list[int]:
    """Size in bytes and time of change in nanoseconds: an edit changes one of them."""
    facts = path.lstat()
    return [facts.st_size, facts.st_mtime_ns]


def strangers(folder: Path, names_alone: bool = False) -> list[Path]:
    """Return what `staged` did not write in a folder: the folder itself if it has no mark, else each file, link or special
    file in it that is not listed in the mark, or changed since. Links are not followed.

    Args:
        names_alone: a listed file may have changed.

    Raises:
        DataError: the mark cannot be read.
    """
    mark = folder / MARK
    if folder.is_symlink() or not mark.is_file() or mark.is_symlink():
        return [folder]
    remedy = f"look into {folder}, and remove it yourself if it holds nothing of yours"
    content = read_json(mark, DataError, remedy)
    if not isinstance(content, dict) or not isinstance(content.get("files"), dict):
        raise DataError("not a mark that Hyperion wrote", where=mark, next_step=remedy)
    found = []
    for place, folders, files in os.walk(folder):
        for path in [Path(place, name) for name in sorted(files + folders)]:
            facts = path.lstat()
            if stat.S_ISDIR(facts.st_mode) or path == mark:
                continue
            listed = content["files"].get(path.relative_to(folder).as_posix())
            changed = listed is None if names_alone else listed != _marked(path)
            if not stat.S_ISREG(facts.st_mode) or changed:
                found.append(path)
    return found


def sha256_of(path: Path) -> str:
    """Hex sha256 of a regular file, read in pieces.

    Raises:
        DataError: it is a named pipe, a device, a socket or a folder.
    """
    return _digest_of(path, "sha256")


def content_hash(path: Path, algorithm: str) -> str:
    """Hex hash of a regular file by any algorithm of hashlib (publishers state md5 and sha1 too).

    A file is read once per process while its size and its time of change stay the same.

    Raises:
        DataError: it is a named pipe, a device, a socket or a folder.
    """
    facts = path.stat()
    return _known_hash(path, algorithm, facts.st_size, facts.st_mtime_ns)


@functools.cache
def _known_hash(path: Path, algorithm: str, size: int, mtime_ns: int) -> str:
    return _digest_of(path, algorithm)


def _digest_of(path: Path, algorithm: str) -> str:
    with open_regular(path, DataError, "remove it, or replace it by the file that it should be") as file:
        return hashlib.file_digest(file, lambda: hashlib.new(algorithm, usedforsecurity=False)).hexdigest()


def _take_the_name(work: Path, target: Path) -> None:
    try:
        os.rename(work, target)
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
            raise
        return  # another process staged it first
    _flush(target.parent)


def _flush(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def explained(error: OSError, target: Path) -> DataError:
    """The system's refusal to write below the data folder, in words."""
    return refused_write(
        error,
        DataError,
        action="cannot stage data",
        kept="nothing was staged",
        where=error.filename or target,
        elsewhere="name another folder with HYPERION_DATA=/some/folder",
    )
