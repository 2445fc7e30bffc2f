"""Manifests of data folders: what lies in them, where it came from, and the hash that proves it."""

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path

from hyperion.data.faults import DataError
from hyperion.data.staging import sha256_of

FILE_NAME = "manifest.json"
SCHEMA_VERSION = 1


@dataclass(frozen=True)
class DataManifest:
    """What a data folder holds.

    Attributes:
        name, source, detail: as in the corpus or image set (no machine paths).
        files: file name to {'sha256': hex, 'bytes': size}.
        facts: counts and settings of the step that made the folder, JSON-able.
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
            DataError: names the first file that is missing, truncated or edited.
        """
        for name in self.files:
            self.verify_file(folder, name)

    def verify_file(self, folder: Path, name: str) -> None:
        """Check size and hash of one file.

        Raises:
            DataError: it is missing, truncated or edited.
        """
        expected, path = self.files[name], folder / name
        remedy = f"remove {folder} and stage or prepare it again"
        if not path.is_file():
            raise DataError(f"{name} is missing", where=path, next_step=remedy)
        size = path.stat().st_size
        if size != expected["bytes"]:
            fault = f"{name} holds {size} bytes where its manifest says {expected['bytes']}: truncated or edited"
            raise DataError(fault, where=path, next_step=remedy)
        if sha256_of(path) != expected["sha256"]:
            raise DataError(f"{name} does not have its manifest's sha256: it was edited", where=path, next_step=remedy)


def write_manifest(folder: Path, *, name: str, source: str, detail: str, facts: dict | None = None) -> DataManifest:
    """Hash every file of `folder` (a staging folder, see staging.staged) and write its manifest beside them."""
    files = {
        path.relative_to(folder).as_posix(): {"sha256": sha256_of(path), "bytes": path.stat().st_size}
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }
    manifest = DataManifest(name, source, detail, files, facts or {})
    (folder / FILE_NAME).write_text(json.dumps(asdict(manifest), indent=1) + "\n")
    return manifest


def read_manifest(folder: Path) -> DataManifest | None:
    """The manifest of `folder`, or None where it has none (files that somebody put there by hand).

    Raises:
        DataError: the manifest cannot be read or belongs to another version.
    """
    path = folder / FILE_NAME
    if not path.is_file():
        return None
    try:
        manifest = DataManifest(**json.loads(path.read_text()))
        entries = [(entry["sha256"], entry["bytes"]) for entry in manifest.files.values()]
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise DataError(
            f"unreadable manifest: {error}", where=path, next_step=f"remove {folder} and stage or prepare it again"
        ) from error
    if manifest.schema_version != SCHEMA_VERSION or not entries:
        raise DataError(
            f"manifest has schema {manifest.schema_version} and {len(entries)} files, expected schema {SCHEMA_VERSION}",
            where=path,
            next_step=f"remove {folder} and stage or prepare it again",
        )
    return manifest
