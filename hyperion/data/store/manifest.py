"""Manifests of data folders: the files, their source, and their hashes."""

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path

from hyperion.data.errors import DataError
from hyperion.data.store.staging import sha256_of
from hyperion.untrusted import inner_path, printable, read_json

FILE_NAME = "manifest.json"
SCHEMA_VERSION = 1


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
    """Hash every file of `folder` (a working folder of `staging.staged`) and write the manifest into it."""
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
    fault = _fault_of(document)
    if fault:
        raise DataError(f"unreadable manifest: {fault}", where=path, next_step=remedy)
    manifest = DataManifest(**document)
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


_TYPES = {"name": str, "source": str, "detail": str, "files": dict, "facts": dict, "schema_version": int}


def _fault_of(document: object) -> str:
    """Return why a document is not a manifest, "" if it is one."""
    if not isinstance(document, dict):
        return "it is not a JSON object"
    if unknown := sorted(document.keys() - _TYPES.keys()):
        return f"it has the unknown fields {printable(', '.join(unknown))[:80]}"
    for name, kind in _TYPES.items():
        if name not in document and name not in ("facts", "schema_version"):
            return f"it lacks {name!r}"
        if type(document.get(name, kind())) is not kind:
            return f"{name!r} is {type(document[name]).__name__}, expected {kind.__name__}"
    for name, entry in document["files"].items():
        good = isinstance(entry, dict) and entry.keys() == {"sha256", "bytes"}
        if not good or not isinstance(entry["sha256"], str) or type(entry["bytes"]) is not int or entry["bytes"] < 0:
            return f"its entry of {printable(name)[:80]!r} is not a sha256 with a number of bytes"
    return ""
