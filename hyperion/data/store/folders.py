"""Data folders with a manifest of their files.

A folder is written completely or not at all, even if several processes write the same folder at the same time.
"""

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
from hyperion.paths import data_folder, flush
from hyperion.untrusted import inner_path, open_regular, printable, read_json

# `staged` writes this file, the mark, into every folder. It contains the size and the modification time of each file, by
# relative path. Without the mark, `hyperion clean` could not distinguish Hyperion's files from the user's. The dot in the name
# excludes the mark from the hash of a data set.
MARK = ".hyperion.json"
# Pattern for the names of the working folders that `staged` creates: ".<name>.<process ID>.<random digits>.part".
WORKING = re.compile(r"\..+\.\d+\.[0-9a-f]{8}\.part")
QUARANTINE = "quarantine"  # folder for data that failed a check, where the user can inspect them


FILE_NAME = "manifest.json"
SCHEMA_VERSION = 1


class DataError(HyperionError):
    """Raised if data are wrong, for example truncated, incomplete or unsafe, or if a request for data is invalid.

    With `data_source=auto`, this error is not ignored, and no other source is tried.
    """


class DataUnavailable(DataError):
    """Raised if a source does not have the data.

    With `data_source=auto`, the reason is printed and the next source is tried.
    """


def cache_root() -> Path:
    """Return the cache folder, which contains the raw files of data sets."""
    return data_folder() / "raw"


def processed_root() -> Path:
    """Return the folder of prepared data."""
    return data_folder() / "processed"


@contextlib.contextmanager
def staged(target: Path) -> Iterator[Path]:
    """Context manager that yields an empty working folder. If the block succeeds, the folder is renamed to `target`.

    The working folder is next to `target`, and is flushed to the disk before it is renamed. If another process has created
    `target` meanwhile, the working folder is removed and `target` is not changed. This is safe, because callers verify all data
    that they load. The working folder is also removed after an error, such as a full disk.

    Raises:
        DataError: the disk is full or the folder is not writable.
    """
    # A rename is atomic only within one file system, so the working folder is next to the target. Its name is unique for each
    # call.
    work = target.with_name(f".{target.name}.{os.getpid()}.{uuid.uuid4().hex[:8]}.part")
    try:
        work.mkdir(parents=True)
        yield work
        files = {path.relative_to(work).as_posix(): _marked(path) for path in work.rglob("*") if path.is_file()}
        # The mark is written last, because it lists the sizes and times of all other files.
        (work / MARK).write_text(json.dumps({"made_by": "hyperion", "files": files}, indent=1), encoding="utf-8")
        # Files and folders are flushed before the rename. Otherwise, a power failure could leave empty files in `target`.
        for path in (work, *sorted(work.rglob("*"))):
            flush(path)
        _take_the_name(work, target)
    except OSError as error:
        raise explained(error, target) from error
    finally:
        # After a successful rename, the working folder no longer exists and this call does nothing.
        shutil.rmtree(work, ignore_errors=True)


def _marked(path: Path) -> list[int]:
    """Return the size of a file in bytes and its modification time in ns. Editing the file changes at least one of them."""
    # `lstat` examines a link itself and not its target.
    facts = path.lstat()
    return [facts.st_size, facts.st_mtime_ns]


def strangers(folder: Path, names_alone: bool = False) -> list[Path]:
    """Return the files of a folder that are not Hyperion's own, because `staged` did not write them.

    If the folder has no mark (see MARK), the folder itself is returned. Otherwise each file, link or special file is returned
    that the mark does not list, or that was changed after it was written. Links are not followed.

    Args:
        folder: the folder to search.
        names_alone: if True, compare only names, so that changed files of Hyperion are not returned.

    Raises:
        DataError: the mark cannot be read.
    """
    mark = folder / MARK
    if folder.is_symlink() or not mark.is_file() or mark.is_symlink():
        return [folder]
    remedy = f"look into {folder}, and remove this folder yourself if it contains none of your files"
    content = read_json(mark, DataError, remedy)
    if not isinstance(content, dict) or not isinstance(content.get("files"), dict):
        raise DataError(f"{mark.name} is not a list of files that Hyperion wrote", where=mark, next_step=remedy)
    found = []
    for place, folders, files in os.walk(folder):
        # `os.walk` lists a link to a folder among the folders without entering it, so folders are also examined.
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
    """Return the sha256 of a regular file as hexadecimal digits.

    Raises:
        DataError: the path is a named pipe, a device, a socket or a folder.
    """
    return _digest_of(path, "sha256")


def content_hash(path: Path, algorithm: str) -> str:
    """Return the hash of a regular file as hexadecimal digits.

    The hash is cached in this process until the size or the modification time of the file changes.

    Args:
        path: path of the file.
        algorithm: name of a hash algorithm of hashlib. Some publishers state md5 or sha1 instead of sha256.

    Raises:
        DataError: the path is a named pipe, a device, a socket or a folder.
    """
    facts = path.stat()
    return _known_hash(path, algorithm, facts.st_size, facts.st_mtime_ns)


@functools.cache
# `size` and `mtime_ns` are only part of the cache key, so that a changed file is hashed again.
def _known_hash(path: Path, algorithm: str, size: int, mtime_ns: int) -> str:
    return _digest_of(path, algorithm)


def _digest_of(path: Path, algorithm: str) -> str:
    with open_regular(path, DataError, "remove it, or replace it by a regular file") as file:
        # md5 and sha1 are used only as checksums. With this flag, they also work on machines in FIPS mode.
        return hashlib.file_digest(cast(BufferedReader, file), lambda: hashlib.new(algorithm, usedforsecurity=False)).hexdigest()


def _take_the_name(work: Path, target: Path) -> None:
    try:
        os.rename(work, target)
    except OSError as error:
        # A rename onto a folder with files fails with one of these two codes, depending on the system.
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
            raise
        return  # another process has already created `target`
    flush(target.parent)


def explained(error: OSError, target: Path) -> DataError:
    """Convert the error of a failed write to the data folder into a DataError."""
    return refused_write(
        error,
        DataError,
        action="cannot stage data",
        unchanged="nothing was staged",
        where=error.filename or target,
        elsewhere="name another folder with HYPERION_DATA=/some/folder",
    )


@dataclass(frozen=True)
class DataManifest:
    """Manifest of a data folder: the origin of the data, and the size and hash of each file.

    Attributes:
        name, source, detail: the same as in the corpus or the image set. They contain no local paths.
        files: a dict that maps each file name to {'sha256': hexadecimal digits, 'bytes': size}.
        facts: counts and settings of the step that wrote the folder, as JSON values.
        schema_version: version of the manifest's schema.
    """

    name: str
    source: str
    detail: str
    files: dict[str, dict]
    facts: dict = field(default_factory=dict)
    schema_version: int = SCHEMA_VERSION

    def verify(self, folder: Path) -> None:
        """Check the size and the hash of every file.

        Raises:
            DataError: a file is missing, truncated or edited. The message names the first such file.
        """
        for name in self.files:
            self.verify_file(folder, name)

    def verify_file(self, folder: Path, name: str) -> None:
        """Check the size and the hash of one file.

        Raises:
            DataError: the file is missing, truncated or edited, or its name is a path outside of the folder.
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
    """Hash every file in a folder, write the manifest to this folder, and return the manifest.

    Args:
        folder: working folder that `staged` yielded.
        name, source, detail: see `DataManifest`.
        facts: see `DataManifest`. None means no facts.
    """
    files = {
        path.relative_to(folder).as_posix(): {"sha256": sha256_of(path), "bytes": path.stat().st_size}
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }
    manifest = DataManifest(name, source, detail, files, facts or {})
    (folder / FILE_NAME).write_text(json.dumps(asdict(manifest), indent=1) + "\n")
    return manifest


def read_manifest(folder: Path) -> DataManifest | None:
    """Return the manifest of `folder`, or None if there is none. A folder that the user filled has no manifest.

    Raises:
        DataError: the manifest is unreadable, has a field of a wrong type, names a file outside of the folder, or has another
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
    """Raised if the manifest is not a JSON document of the expected form."""

    def __init__(self, what: str, *, where: object = None, next_step: str | None = None):
        super().__init__(f"unreadable manifest: {what}", where=where, next_step=next_step)


@dataclass(frozen=True)
class _FileEntry:
    """Entry of a file in a manifest."""

    sha256: str
    bytes: int
