"""Files of a run: atomic writes, a manifest of all files in a folder, and safe reading of samples.

A run folder may come from another person. Therefore names in its files may not point outside the folder, and readers never write.
A writer lists the renames of a commit in a file before it executes them. If the writer is killed in between, readers use this
list to find the files, and the next writer executes the renames.
"""

import contextlib
import errno
import functools
import glob
import hashlib
import io
import json
import os
import re
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, BinaryIO, cast

from hyperion.errors import HyperionError, refused_write
from hyperion.locks import file_lock
from hyperion.paths import flush
from hyperion.untrusted import inner_path, open_regular, parse_json, read_bounded

if TYPE_CHECKING:
    import pandas as pd  # its import takes most of a second in every process, and most processes store no samples

MANIFEST = "MANIFEST"
PENDING = "MANIFEST.pending"
LOCK, WRITER_LOCK = ".lock", ".writer.lock"
DRIVER_LOCK = ".driver.lock"  # held by the call of `reproduce` or `launches` that uses the run
LARGEST_FILE_BYTES = 2**30  # maximum size of a file in a run; samples usually take a few MiB
# Larger samples are not decoded. These limits are generous: the largest experiment of Hyperion records 50,000 rows.
LARGEST_ROWS, LARGEST_CELLS, LARGEST_DECODED_BYTES = 20_000_000, 100_000_000, 2**30
_OWN = (MANIFEST, PENDING, LOCK, WRITER_LOCK)
_SHA256 = re.compile(r"[0-9a-f]{64}")
RESTORE = "restore the file from where it was copied, or delete the run and measure again"
_MOVE_AWAY = "restore the file, or move the folder away and run again"
_DISTRUST = "do not use this folder: its files contain names that Hyperion never writes; delete it or copy it again"


class StoreError(HyperionError):
    """Raised if a results folder cannot be written or is damaged."""


@dataclass(frozen=True)
class Manifest:
    """The manifest of a folder, and the temporary names of its files during an unfinished commit.

    Args:
        folder: the folder.
        entries: {name: {"sha256": …, "size": bytes}} for every file.
        moved: {name: name of the temporary file} for files that an unfinished commit has written but not yet renamed.
    """

    folder: Path
    entries: dict[str, dict]
    moved: dict[str, str]

    def read(self, name: str) -> bytes:
        """Return the verified content of a file.

        Raises:
            StoreError: the file is missing, is not a regular file, is not in the manifest, or its size or hash does not match
                the manifest.
        """
        with self._opened(name) as file:
            # Reading one byte more than expected detects a file that grew after its size was checked.
            content = file.read(self.entries[name]["size"] + 1)
            self._check(name, len(content), hashlib.sha256(content).hexdigest())
        return content

    def verify(self, name: str) -> None:
        """Verify the size and the hash of a file without loading the whole file into memory.

        Raises:
            StoreError: for the same reasons as in `read`.
        """
        with self._opened(name) as file:
            self._check(
                name, os.fstat(file.fileno()).st_size, hashlib.file_digest(cast(io.BufferedReader, file), "sha256").hexdigest()
            )

    @contextlib.contextmanager
    def _opened(self, name: str) -> Iterator[BinaryIO]:
        path = self.folder / name
        if name not in self.entries:
            raise StoreError("file is not in the run's manifest", where=path, next_step=RESTORE)
        # During an unfinished commit, the new content is still under its temporary name.
        place = inner_path(self.folder, self.moved.get(name, name), StoreError, _DISTRUST)
        try:
            with open_regular(place, StoreError, RESTORE) as file:
                # Check the size first, so that an enormous file is not hashed.
                self._check(name, os.fstat(file.fileno()).st_size)
                yield file
        except (FileNotFoundError, NotADirectoryError) as error:
            raise StoreError("file named by the manifest is missing", where=path, next_step=RESTORE) from error
        except OSError as error:
            raise StoreError(f"file cannot be read: {error.strerror}", where=path, next_step=RESTORE) from error

    def _check(self, name: str, size: int, digest: str | None = None) -> None:
        path, entry = self.folder / name, self.entries[name]
        if size != entry["size"]:
            fault = f"file has {size} bytes, but its manifest says {entry['size']}: it was truncated or edited"
            raise StoreError(fault, where=path, next_step=RESTORE)
        if digest is not None and digest != entry["sha256"]:
            raise StoreError("file does not match the sha256 in its manifest: it was edited", where=path, next_step=RESTORE)


def write_atomically(path: Path, content: bytes) -> None:
    """Write `content` to `path` atomically. Readers see either the old or the new file, even after a power failure.

    Raises:
        StoreError: the folder is not writable or the disk is full; the old file is unchanged.
    """
    # The content is written to disk (fsync) before the rename. Otherwise, a power failure could leave an empty file under the
    # final name.
    temporary = _write_temporary(path, content)
    try:
        os.replace(temporary, path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise _write_error(error, path) from error
    # BaseException includes Ctrl-C, which is not an OSError.
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    # A rename is durable only after an fsync of the folder that contains the name.
    flush(path.parent)


def commit(folder: Path, contents: dict[str, bytes]) -> None:
    """Add or replace several files of a folder and its manifest as one transaction.

    A commit has three steps. First, it writes the new files and the new manifest under temporary names. Then it writes the list
    of renames. Finally, it renames the files, which needs no disk space. If the process is killed after the second step, readers
    use the list to find the files, and the next writer executes the renames.

    Args:
        folder: the folder; it is created if it does not exist.
        contents: a dict that maps the path of a file, relative to `folder`, to its content of at most `LARGEST_FILE_BYTES`.

    Raises:
        StoreError: the folder is not writable; the disk is full; or a name points outside the folder, is a link, or is the name
            of one of the store's own files. The old files are unchanged.
    """
    make_folder(folder)
    with locked(folder, create=True):
        # An earlier writer may have been killed after it wrote its list of renames. Complete its commit first.
        _finish(folder)
        _require_writable_names(folder, contents)
        entries = read_manifest(folder).entries | {
            name: {"sha256": hashlib.sha256(content).hexdigest(), "size": len(content)} for name, content in contents.items()
        }
        manifest = json.dumps({"schema": 1, "files": entries}, indent=1, sort_keys=True).encode()
        moves: dict[str, str] = {}
        try:
            # The manifest is the last file in the list, so it is renamed after the files that it describes.
            for name, content in (contents | {MANIFEST: manifest}).items():
                _remove_strays(folder / name)
                moves[str(_write_temporary(folder / name, content).relative_to(folder))] = name
            # This write is the commit point: before it, the old files are valid; after it, the new ones.
            write_atomically(folder / PENDING, json.dumps(moves, indent=1).encode())
        except BaseException:
            # Once the list of renames is written, the commit is valid, so its temporary files must not be removed.
            if not (folder / PENDING).exists():
                for temporary in moves:
                    (folder / temporary).unlink(missing_ok=True)
            raise
        _finish(folder)


def read_verified(folder: Path, name: str) -> bytes:
    """Return the verified bytes of a file.

    Raises:
        StoreError: the file is missing, is not in the manifest, or its size or hash does not match the manifest.
    """
    with locked(folder):
        return read_manifest(folder).read(name)


def manifest_names(folder: Path) -> set[str]:
    """Return the names of the files in the manifest."""
    with locked(folder):
        return set(read_manifest(folder).entries)


def verify_folder(folder: Path) -> list[str]:
    """Verify every file in the manifest and return the names.

    Raises:
        StoreError: a file is missing, truncated or edited. The message names the first such file.
    """
    with locked(folder):
        manifest = read_manifest(folder)
        for name in manifest.entries:
            manifest.verify(name)
    return sorted(manifest.entries)


def read_manifest(folder: Path) -> Manifest:
    """Return the manifest of a folder. A new folder has a manifest without entries. The caller must hold the folder's lock.

    Raises:
        StoreError: the manifest or the list of renames is damaged, or contains the name of a file outside the folder.
    """
    # If a temporary file no longer exists, the interrupted writer has already renamed it.
    moved = {name: temporary for temporary, name in _pending(folder).items() if os.path.lexists(folder / temporary)}
    path = inner_path(folder, moved.get(MANIFEST, MANIFEST), StoreError, _DISTRUST)
    if not os.path.lexists(path):
        return Manifest(folder, {}, moved)
    return Manifest(folder, _entries(folder, path, _content(path)), moved)


@functools.lru_cache(maxsize=32)
def _entries(folder: Path, path: Path, content: bytes) -> dict[str, dict]:
    """Return the validated entries of a manifest. The caller must not change them.

    They are cached, because each read of a file reads the manifest of its run first. `Manifest` and `commit` check again that the
    name of a file which they open or write passes through no link.

    Args:
        folder: the folder of the manifest.
        path: file of the manifest, for error messages.
        content: its content.
    """
    document = _parsed(path, content)
    if not isinstance(document, dict) or document.get("schema") != 1 or not isinstance(document.get("files"), dict):
        raise _unreadable(path, 'it is not {"schema": 1, "files": {…}}')
    for name, entry in document["files"].items():
        _require_file_name(folder, name)
        known = isinstance(entry, dict) and entry.keys() == {"sha256", "size"}
        if not known or not isinstance(entry["sha256"], str) or not _SHA256.fullmatch(entry["sha256"]):
            raise _unreadable(path, f"{name!r} has no sha256 and size")
        # `isinstance` would accept True, because bool is a subclass of int.
        if type(entry["size"]) is not int or not 0 <= entry["size"] <= LARGEST_FILE_BYTES:
            raise _unreadable(path, f"{name!r} has a size of {entry['size']!r:.40} bytes")
    return document["files"]


@contextlib.contextmanager
def locked(folder: Path, name: str = LOCK, create: bool = False) -> Iterator[None]:
    """Context manager that holds a lock on the folder, so that only one process at a time uses the folder.

    Writers create the lock file. Readers use the lock file only if it exists and is writable. In a fresh checkout, the reference
    results have no lock file, and readers do not need one.

    Args:
        folder: the folder.
        name: name of the lock file.
        create: if True, create the lock file if it does not exist. True for writers.

    Raises:
        StoreError: the lock file is a link, a named pipe or a folder, or it cannot be created.
    """
    path = inner_path(folder, name, StoreError, _DISTRUST)
    # A read-only copy of a run and a fresh checkout have no writers for which a reader must wait.
    if not create and not (os.path.lexists(path) and os.access(path, os.W_OK)):
        yield
        return
    with contextlib.ExitStack() as held:
        try:
            held.enter_context(file_lock(path))
        except OSError as error:
            raise _write_error(error, path) from error
        yield


def encode_samples(samples: "pd.DataFrame", where: object) -> bytes:
    """Return the table as the content of a Parquet file.

    Args:
        samples: the table.
        where: the experiment, for the error message.

    Raises:
        StoreError: a column contains objects that Parquet cannot store, or two columns have the same name.
    """
    buffer = io.BytesIO()
    try:
        samples.to_parquet(buffer, index=False)
    except (ValueError, TypeError, NotImplementedError) as error:  # also the errors of Arrow
        raise StoreError(
            f"the samples cannot be stored: {'; '.join(map(str, error.args))[:300]}",
            where=where,
            next_step="use columns of numbers or texts with different names; tensors need .tolist()",
        ) from error
    return buffer.getvalue()


def read_samples(content: bytes, where: object) -> "pd.DataFrame":
    """Return the table of a Parquet file. The size is checked before the file is decoded, and nothing in the file is executed.

    The types of the columns come from the Parquet schema. The pandas metadata in the file is ignored, because it can name
    arbitrary Python types.

    Args:
        content: the bytes of the file.
        where: name of the file for error messages.

    Raises:
        StoreError: the content is not Parquet, the table is larger than anything that Hyperion records, two columns have the same
            name, or a column has another type than numbers, dates, strings and lists of numbers.
    """
    import pyarrow as pa

    try:
        table = _samples_table(content, where)
        table.validate(full=True)  # without this check, strings that are not UTF-8 would fail later in pandas
        return table.to_pandas(ignore_metadata=True)
    except (pa.ArrowException, ValueError, OSError, OverflowError) as error:
        raise StoreError(f"unreadable samples: {str(error)[:200]}", where=where, next_step=RESTORE) from error


def _pending(folder: Path) -> dict[str, str]:
    """Return the renames of an unfinished commit as {temporary name: name}, or {} if there is no unfinished commit."""
    path = inner_path(folder, PENDING, StoreError, _DISTRUST)
    if not os.path.lexists(path):
        return {}
    moves = _parsed(path, _content(path))
    if not isinstance(moves, dict):
        raise _unreadable(path, "it is not a list of renames")
    for temporary, name in moves.items():
        if name != MANIFEST:
            _require_file_name(folder, name)
        inner_path(folder, temporary, StoreError, _DISTRUST)
        target, source = PurePosixPath(name), PurePosixPath(temporary)
        # Accept only names that `_write_temporary` gives. Otherwise, a manipulated list could replace any file.
        ours = source.parent == target.parent and re.fullmatch(rf"\.{re.escape(target.name)}\.\w+\.tmp", source.name)
        if not ours:
            fault = f"{temporary!r} is not a temporary file of {name!r}"
            raise StoreError(f"a rename that Hyperion never writes: {fault}", where=path, next_step=_DISTRUST)
    if len(set(moves.values())) != len(moves):
        raise _unreadable(path, "two files would get the same name")
    return moves


def _finish(folder: Path) -> None:
    """Execute the renames of this commit or of an unfinished earlier one. The caller must be a writer that holds the lock."""
    for temporary, name in _pending(folder).items():
        # After an interruption, some of the renames have already been executed.
        if os.path.lexists(folder / temporary):
            try:
                os.replace(folder / temporary, folder / name)
            except OSError as error:
                raise _write_error(error, folder / name) from error
            flush((folder / name).parent)
    # The list is removed last. Until then, the renames can be repeated without harm.
    (folder / PENDING).unlink(missing_ok=True)


def _require_file_name(folder: Path, name: object) -> None:
    """Raise an error if a name points outside the folder, passes through a link, or is one of the store's own files."""
    inner_path(folder, name, StoreError, _DISTRUST)
    if name in _OWN:
        raise StoreError(
            f"the manifest lists {name!r}, which is reserved for the store itself", where=folder, next_step=_DISTRUST
        )


def _require_writable_names(folder: Path, contents: dict[str, bytes]) -> None:
    for name, content in contents.items():
        _require_file_name(folder, name)
        if len(content) > LARGEST_FILE_BYTES:
            fault = f"{len(content)} bytes exceed the largest size of a file of a run ({LARGEST_FILE_BYTES})"
            raise StoreError(fault, where=folder / name, next_step="record fewer samples")


def _content(path: Path) -> bytes:
    try:
        return read_bounded(path, StoreError, _MOVE_AWAY)
    except StoreError as error:
        raise _unreadable(path, error.what) from error
    except OSError as error:
        raise _unreadable(path, error) from error


def _parsed(path: Path, content: bytes) -> object:
    try:
        return parse_json(content, StoreError, _MOVE_AWAY, where=path)
    except StoreError as error:
        raise _unreadable(path, error.what) from error


def _remove_strays(path: Path) -> None:
    # A writer that was killed before it wrote its list of renames leaves temporary files. The caller holds the lock, so no other
    # process uses these files. The name of a notebook may contain characters that are special in patterns, such as "[".
    for stray in path.parent.glob(f".{glob.escape(path.name)}.*.tmp"):
        stray.unlink(missing_ok=True)


def _write_temporary(path: Path, content: bytes) -> Path:
    # The name is unpredictable and the file must not exist yet, so an attacker cannot place a link there in advance.
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(temporary, "xb") as file:
            file.write(content)
            file.flush()
            # The bytes must be on disk before a rename makes them visible.
            os.fsync(file.fileno())
    except OSError as error:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise _write_error(error, path) from error
    return temporary


def make_folder(folder: Path) -> None:
    """Create `folder` if it does not exist.

    Raises:
        StoreError: the folder cannot be created, or it is not writable.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise _write_error(error, folder) from error
    # `mkdir` accepts an existing folder that is not writable. Writing would then fail only after the measurement.
    if not os.access(folder, os.W_OK):
        raise _write_error(PermissionError(errno.EACCES, "folder is not writable"), folder)


def _unreadable(path: Path, fault: object) -> StoreError:
    return StoreError(f"unreadable manifest: {fault}", where=path, next_step=_MOVE_AWAY)


def _write_error(error: OSError, path: Path) -> StoreError:
    return refused_write(
        error,
        StoreError,
        action="cannot write",
        unchanged="nothing was changed",
        where=path,
        elsewhere="name another folder (for runs: HYPERION_RESULTS=/some/folder)",
    )


def _samples_table(content: bytes, where: object):
    import pyarrow as pa
    import pyarrow.parquet as parquet

    file = parquet.ParquetFile(pa.BufferReader(content))
    # Columns with contradictory metadata raise an error here. Otherwise, `group.column` below would abort the process.
    next(file.iter_batches(batch_size=1, use_threads=False), None)
    metadata = file.metadata
    groups = [metadata.row_group(group) for group in range(metadata.num_row_groups)]
    chunks = [group.column(column) for group in groups for column in range(group.num_columns)]
    _require_size(0 <= metadata.num_rows <= LARGEST_ROWS, f"{metadata.num_rows} rows", where)
    cells = sum(chunk.num_values for chunk in chunks)
    _require_size(all(chunk.num_values >= 0 for chunk in chunks) and cells <= LARGEST_CELLS, f"{cells} values", where)
    # The sizes in the metadata come from the file and may be wrong. Checking them excludes honest mistakes before decoding.
    decoded = sum(chunk.total_uncompressed_size for chunk in chunks)
    _require_size(0 <= decoded <= LARGEST_DECODED_BYTES, f"{decoded} bytes", where)

    schema = metadata.schema.to_arrow_schema()
    if len(set(schema.names)) != len(schema.names):
        raise StoreError("samples with two columns of the same name", where=where, next_step=RESTORE)
    for field in schema:
        if not _is_plain(field.type):
            fault = f"samples with a column of type {field.type} ({field.name!r:.40})"
            raise StoreError(fault, where=where, next_step="record numbers, dates, texts and lists of numbers")
    # Parquet can store a string once and repeat it a million times. Such a column is small in the file and large after decoding,
    # so the decoded size is computed first.
    texts = [field.name for field in schema if _is_text(field.type)]
    # Read as dictionaries, repeated strings stay small in memory until their decoded size is known.
    table = parquet.ParquetFile(pa.BufferReader(content), read_dictionary=texts).read(use_threads=False)
    for name in texts:
        column = table.column(name)
        if pa.types.is_dictionary(column.type):
            decoded += sum(map(_text_bytes, column.chunks))
            _require_size(decoded <= LARGEST_DECODED_BYTES, f"{decoded} bytes", where)
            table = table.set_column(table.column_names.index(name), name, column.cast(column.type.value_type))
    return table


def _text_bytes(chunk) -> int:
    import pyarrow.compute as compute

    # The functions are called by their names, because pyarrow creates them at import and type checkers do not see them.
    lengths = compute.call_function("binary_length", [chunk.dictionary])
    # Bytes of the decoded column: sum of the lengths of the strings that the indices select.
    return compute.call_function("sum", [lengths.take(chunk.indices).cast("int64")]).as_py() or 0


def _is_plain(kind) -> bool:
    from pyarrow import types

    if types.is_list(kind) or types.is_large_list(kind):
        return types.is_primitive(kind.value_type)
    if types.is_dictionary(kind):
        return _is_plain(kind.value_type)
    return types.is_primitive(kind) or types.is_null(kind) or _is_text(kind)


def _is_text(kind) -> bool:
    from pyarrow import types

    if types.is_dictionary(kind):
        return _is_text(kind.value_type)
    return types.is_string(kind) or types.is_large_string(kind)


def _require_size(holds: bool, size: str, where: object) -> None:
    if not holds:
        raise StoreError(f"samples of {size} are more than Hyperion records", where=where, next_step=RESTORE)
