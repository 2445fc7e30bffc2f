"""Data folders: written completely or not at all, even if several processes write one at once, with a manifest of their files."""

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
from dataclasses import asdict, dataclass, field
from io import BufferedReader
from pathlib import Path
from typing import cast

from hyperion.errors import HyperionError, refused_write
from hyperion.forms import FieldError, read_form
from hyperion.paths import data_folder
from hyperion.untrusted import inner_path, open_regular, printable, read_json

# `staged` writes this file into every folder: size and modification time of each file, by relative path. Without it,
# `hyperion clean` could not distinguish Hyperion's files from the user's. The dot excludes it from a data set's identity.
MARK = ".hyperion.json"
# Working folders of `staged`: ".<name>.<process>.<random>.part".
WORKING = re.compile(r"\..+\.\d+\.[0-9a-f]{8}\.part")
QUARANTINE = "quarantine"  # folder of the data that failed a check, for the user to inspect


FILE_NAME = "manifest.json"
SCHEMA_VERSION = 1


class DataError(HyperionError):
    """The data are wrong (truncated, miscounted, unsafe), or the request is invalid. Never skipped."""


class DataUnavailable(DataError):
    """This source does not have the data. With `data_source=auto` the next source is tried, and the reason is printed."""


def cache_root() -> Path:
    """Return the folder of staged raw data."""
    return data_folder() / "raw"


def processed_root() -> Path:
    """Return the folder of prepared data."""
    return data_folder() / "processed"


@contextlib.contextmanager
def staged(target: Path) -> Iterator[Path]:
    """Yield an empty working folder that becomes `target` when the block ends without an error.

    The working folder is next to `target`. It is flushed to disk and then renamed. If another process has created `target`
    in the meantime, this copy is discarded; callers verify what they load in any case. After an error, a full disk included,
    the working folder is removed.

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
    """Return size in bytes and modification time in ns; an edit changes at least one of them."""
    facts = path.lstat()
    return [facts.st_size, facts.st_mtime_ns]


def strangers(folder: Path, names_alone: bool = False) -> list[Path]:
    """Return the files of a folder that `staged` did not write.

    This is the folder itself if it has no mark, else each file, link or special file that the mark does not list or that was
    changed later. Links are not followed.

    Args:
        names_alone: compare names only, so that changed files count as Hyperion's.

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
    """Return the hex sha256 of a regular file.

    Raises:
        DataError: it is a named pipe, a device, a socket or a folder.
    """
    return _digest_of(path, "sha256")


def content_hash(path: Path, algorithm: str) -> str:
    """Return the hex hash of a regular file by any algorithm of hashlib (some publishers state md5 or sha1).

    The hash is cached in the process until the file's size or modification time changes.

    Raises:
        DataError: it is a named pipe, a device, a socket or a folder.
    """
    facts = path.stat()
    return _known_hash(path, algorithm, facts.st_size, facts.st_mtime_ns)


@functools.cache
def _known_hash(path: Path, algorithm: str, size: int, mtime_ns: int) -> str:
    return _digest_of(path, algorithm)


def _digest_of(path: Path, algorithm: str) -> str:
    with open_regular(path, DataError, "remove it, or replace it by a regular file") as file:
        return hashlib.file_digest(cast(BufferedReader, file), lambda: hashlib.new(algorithm, usedforsecurity=False)).hexdigest()


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
    """Return the DataError for a failed write to the data folder."""
    return refused_write(
        error,
        DataError,
        action="cannot stage data",
        kept="nothing was staged",
        where=error.filename or target,
        elsewhere="name another folder with HYPERION_DATA=/some/folder",
    )


@dataclass(frozen=True)
class DataManifest:
    """Content of a data folder.

    Attributes:
        name, source, detail: as in the corpus or image set, without paths of the machine.
        files: file name to {'sha256': hex, 'bytes': size}.
        facts: counts and settings of the step that wrote the folder, JSON-able.
    """

    name: str
    source: str
    detail: str
    files: dict[str, dict]
    facts: dict = field(default_factory=dict)
    schema_version: int = SCHEMA_VERSION

    def verify(self, folder: Path) -> None:
        """Check size and hash of every file.

        Raises:
            DataError: a file is missing, truncated or edited; the first one is named.
        """
        for name in self.files:
            self.verify_file(folder, name)

    def verify_file(self, folder: Path, name: str) -> None:
        """Check size and hash of one file.

        Raises:
            DataError: the file is missing, truncated or edited, or its name leads out of the folder.
        """
        remedy = f"remove {folder} and stage or prepare it again"
        expected, path = self.files[name], inner_path(folder, name, DataError, remedy)
        if not path.is_file():
            raise DataError(f"{name} is missing", where=path, next_step=remedy)
        size = path.stat().st_size
        if size != expected["bytes"]:
            fault = f"{name} has {size} bytes, expected {expected['bytes']}: truncated or edited"
            raise DataError(fault, where=path, next_step=remedy)
        if sha256_of(path) != expected["sha256"]:
            raise DataError(f"{name} was edited: its sha256 differs from the manifest", where=path, next_step=remedy)


def write_manifest(folder: Path, *, name: str, source: str, detail: str, facts: dict | None = None) -> DataManifest:
    """Hash every file of `folder` (a working folder of `staged`) and write the manifest into it."""
    files = {
        path.relative_to(folder).as_posix(): {"sha256": sha256_of(path), "bytes": path.stat().st_size}
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }
    manifest = DataManifest(name, source, detail, files, facts or {})
    (folder / FILE_NAME).write_text(json.dumps(asdict(manifest), indent=1) + "\n")
    return manifest


def read_manifest(folder: Path) -> DataManifest | None:
    """Return the manifest of `folder`, or None if it has none (files that a user put there).

    Raises:
        DataError: the manifest is unreadable, has fields of wrong types, names a file outside the folder, or has another
            schema version.
    """
    path = folder / FILE_NAME
    remedy = f"remove {folder} and stage or prepare it again"
    try:
        document = read_json(path, _UnreadableManifest, remedy)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise DataError(f"unreadable manifest: {error.strerror}", where=path, next_step=remedy) from error
    try:
        manifest = read_form(DataManifest, document, "the manifest")
        entries = read_form(dict[str, _FileEntry], manifest.files, "files")
    except FieldError as error:
        raise _UnreadableManifest(printable(error.what)[:200], where=path, next_step=remedy) from error
    if negative := [name for name, entry in entries.items() if entry.bytes < 0]:
        fault = f"{printable(negative[0])[:80]!r} has {entries[negative[0]].bytes} bytes"
        raise _UnreadableManifest(fault, where=path, next_step=remedy)
    if manifest.schema_version != SCHEMA_VERSION or not manifest.files:
        raise DataError(
            f"manifest has schema {manifest.schema_version} and {len(manifest.files)} files, expected schema {SCHEMA_VERSION}",
            where=path,
            next_step=remedy,
        )
    for name in manifest.files:
        inner_path(folder, name, DataError, remedy)
    return manifest


class _UnreadableManifest(DataError):
    """The manifest is not a JSON document."""

    def __init__(self, what: str, *, where: object = None, next_step: str | None = None):
        super().__init__(f"unreadable manifest: {what}", where=where, next_step=next_step)


@dataclass(frozen=True)
class _FileEntry:
    """Entry of a file in a manifest."""

    sha256: str
    bytes: int
