"""Verify data folders: find every damaged file and record, and move damaged folders to quarantine."""

import json
import math
import os
import uuid
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

from hyperion.data.errors import DataError
from hyperion.data.prepare.catalog import staged_sets
from hyperion.data.prepare.content import ARRAYS_OF, FORMAT, content_faults
from hyperion.data.store.arrays import FOLDER as CHECKSUMS
from hyperion.data.store.arrays import damaged_rows, is_array, open_array
from hyperion.data.store.manifest import FILE_NAME, DataManifest, read_manifest
from hyperion.data.store.sources import Sourced
from hyperion.data.store.staging import MARK, QUARANTINE, processed_root, sha256_of
from hyperion.errors import refused_write
from hyperion.untrusted import open_regular, printable

REASON_FILE = "REASON.json"
PREPARE_AGAIN = "run `make reproduce ONLY=01_dataset_preparation`, which prepares it again from its source"
OUTDATED = "another version of Hyperion wrote it and this version cannot read it: remove it with `hyperion clean --data`"
STAGE_AGAIN = "stage it again with `make fetch`, or name a folder that has it with HYPERION_DATA_MIRROR"
_SHOWN_RUNS = 3


class Verdict(NamedTuple):
    """Result of the verification of one folder.

    Attributes:
        findings: its faults; empty if the folder is unchanged.
        moved_to: the new place of a damaged folder, None if it was not moved.
        next_step: what the user should do, "" if nothing.
        origin: source of the data, and whether they are official; "" if it could not be read.
    """

    folder: Path
    findings: list["Finding"]
    moved_to: Path | None
    next_step: str
    origin: str = ""


@dataclass(frozen=True)
class Finding:
    """One fault.

    Attributes:
        file: the file, relative to the folder.
        fault: what is wrong, with the numbers of damaged records.
    """

    file: str
    fault: str


def verify(folder: Path | None = None) -> list[Verdict]:
    """Verify prepared and staged data, and move damaged folders to quarantine.

    Args:
        folder: a prepared folder, or a folder of prepared folders; None for data/processed/ and data/raw/.

    Raises:
        DataError: the folder does not exist, or contains nothing that can be verified.
    """
    staged = staged_sets()
    if folder is None:
        return [*map(_verdict, _products(processed_root())), *map(_staged_verdict, staged)]
    chosen = [place for place in staged if folder.resolve() in (place[0].resolve(), place[0].parent.resolve())]
    products = [folder] if is_prepared(folder) else _products(folder)
    if not chosen and not products:
        raise DataError(
            f"nothing to verify in {folder}: " + ("it holds no prepared data" if folder.is_dir() else "there is no such folder"),
            where=folder,
            next_step=f"give a folder in {processed_root()}, or no folder to verify all of them",
        )
    return [_staged_verdict(place) for place in chosen] or [_verdict(product) for product in products]


def is_prepared(folder: Path) -> bool:
    """Return True if a folder contains, or once contained, data prepared by Hyperion.

    Decided by its manifest or by the checksums of one of its arrays. Other folders are never touched.
    """
    names = (name for of_kind in ARRAYS_OF.values() for name in of_kind)
    return _kind_of(folder) in ARRAYS_OF or any((folder / CHECKSUMS / f"{name}.npy").is_file() for name in names)


def examine(folder: Path) -> list[Finding]:
    """Return every fault of a prepared folder; an empty list if it is unchanged.

    First, each file is compared with the manifest: missing, truncated, changed (with the records whose checksum differs),
    swapped with another file, or unlisted. Then the contents of undamaged files are checked: ids within the vocabulary, text
    that the stored tokenizer reproduces, finite images, valid labels, and the counts recorded when the data were prepared.
    """
    try:
        manifest = read_manifest(folder)
        if manifest is None:
            return [Finding(FILE_NAME, "it is missing, so the expected content of the files is unknown")]
    except DataError as fault:
        return [Finding(FILE_NAME, fault.what)]
    kind = manifest.facts.get("kind")
    if not isinstance(kind, str) or kind not in ARRAYS_OF:
        return [Finding(FILE_NAME, f"unknown kind of data: {printable(repr(kind))[:80]}")]
    names = ARRAYS_OF[kind]
    findings = [*_file_findings(folder, manifest)]
    findings += [Finding(f"{n}.npy", "the manifest does not list it") for n in names if f"{n}.npy" not in manifest.files]
    damaged = {finding.file for finding in findings}
    arrays = {}
    for name in names:
        file = f"{name}.npy"
        if file in manifest.files and file not in damaged:
            try:
                arrays[name] = open_array(folder / file)
            except DataError as fault:
                findings.append(Finding(file, fault.what))
    faults = content_faults(folder, arrays, manifest, thorough=True)
    return findings + [Finding(Path(str(fault.where)).name, fault.what) for fault in faults]


def quarantine(folder: Path, findings: list[Finding]) -> Path:
    """Move a damaged folder to `quarantine/` next to it and write the reasons into a file; nothing is deleted.

    Returns:
        The folder's new place.

    Raises:
        DataError: the folder cannot be moved.
    """
    kept = folder.parent / QUARANTINE / f"{folder.name}.{uuid.uuid4().hex[:8]}"
    try:
        kept.parent.mkdir(exist_ok=True)
        os.rename(folder, kept)
        reasons = {"was": folder.name, "findings": [asdict(finding) for finding in findings]}
        # Of a symbolic link only the link was moved: its target belongs to somebody else and must not be written to.
        report = kept.with_name(f"{kept.name}.{REASON_FILE}") if kept.is_symlink() else kept / REASON_FILE
        report.write_text(json.dumps(reasons, indent=1) + "\n", encoding="utf-8")
    except OSError as error:
        there = kept if kept.is_dir() else folder
        raise refused_write(
            error,
            DataError,
            action="cannot move damaged data to quarantine",
            kept=f"the data are in {there}",
            where=there,
            elsewhere="move that folder yourself",
        ) from error
    return kept


def _file_findings(folder: Path, manifest: DataManifest) -> Iterator[Finding]:
    """Yield the files that are missing, changed or unlisted."""
    hashes = {entry["sha256"]: name for name, entry in manifest.files.items() if is_array(name)}
    for name, expected in manifest.files.items():
        path = folder / name
        try:
            manifest.verify_file(folder, name)
        except DataError as fault:
            if not path.is_file() or path.is_symlink():
                yield Finding(name, fault.what)
                continue
            other = hashes.get(sha256_of(path))
            if other is not None and other != name:
                yield Finding(name, f"it has the content of {other}: the files of the splits were swapped")
            elif path.stat().st_size < expected["bytes"]:
                yield Finding(name, f"{fault.what}; {_missing_rows(path, expected['bytes'])}")
            else:
                yield Finding(name, f"{fault.what}; {_changed_rows(folder, name)}")
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        # A link to a folder counts as an unlisted file, because its target was not checked.
        known = name in manifest.files or name in (FILE_NAME, MARK)
        if (path.is_symlink() or not path.is_dir()) and not known:
            yield Finding(printable(name), "the manifest does not list this file")


def _missing_rows(path: Path, whole_bytes: int) -> str:
    """Describe which rows a truncated file has lost."""
    try:
        with open_regular(path, DataError, PREPARE_AGAIN) as file:
            version = np.lib.format.read_magic(file)
            read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
            shape, _, dtype = read(file)
            header = file.tell()
        row = dtype.itemsize * math.prod(shape[1:])
    except (ValueError, OSError, TypeError, SyntaxError, OverflowError):
        return "its header is lost too"
    if not shape or not row or header + row * shape[0] != whole_bytes:
        return "its header was changed too"
    whole = max(0, path.stat().st_size - header) // row
    return f"records {whole} to {shape[0] - 1} are missing"


def _changed_rows(folder: Path, name: str) -> str:
    """Describe which records of a file were changed."""
    if not is_array(name):
        return "it has no records"
    try:
        runs = damaged_rows(folder, Path(name).stem)
    except DataError as fault:
        return f"the damaged records cannot be determined: {fault.what}"
    if not runs:
        return f"no record is damaged, so its header or {CHECKSUMS}/{name} was changed"
    shown = ", ".join(f"record {a}" if a == b else f"records {a} to {b}" for a, b in runs[:_SHOWN_RUNS])
    return f"damaged: {shown}" + (f" and {len(runs) - _SHOWN_RUNS} more ranges" if len(runs) > _SHOWN_RUNS else "")


def _products(folder: Path) -> list[Path]:
    folders = sorted(path for path in folder.glob("[!.]*") if path.is_dir() and path.name != QUARANTINE)
    return [path for path in folders if is_prepared(path)]


def _verdict(folder: Path) -> Verdict:
    if _kind_of(folder) in ARRAYS_OF and _facts_of(folder).get("format") != FORMAT:
        return Verdict(folder, [], None, OUTDATED)
    findings, origin = examine(folder), _origin_of(folder)
    kept = quarantine(folder, findings) if findings else None
    return Verdict(folder, findings, kept, PREPARE_AGAIN if findings else "", origin)


def _origin_of(folder: Path) -> str:
    """Return the source named in the manifest, "" if there is none."""
    try:
        manifest = read_manifest(folder)
    except DataError:
        return ""
    if manifest is None:
        return ""
    official = manifest.facts.get("official")
    publisher = "" if official is None else "official, " if official is True else "not official, "
    return f"{publisher}{manifest.source}: {manifest.detail}"


def _facts_of(folder: Path) -> dict:
    """Return the facts in the manifest, an empty dict if it is missing or unreadable."""
    try:
        manifest = read_manifest(folder)
    except DataError:
        return {}
    return {} if manifest is None else manifest.facts


def _kind_of(folder: Path) -> str | None:
    kind = _facts_of(folder).get("kind")
    return kind if isinstance(kind, str) else None


def _staged_verdict(place: tuple[Path, Callable[[], Sourced]]) -> Verdict:
    """Verify a staged set with its own loader, which checks counts, checksums, hashes and overlap."""
    folder, read = place
    try:
        origin = read().detail
    except DataError as fault:
        findings = [Finding(Path(str(fault.where)).name, fault.what)]
        return Verdict(folder, findings, quarantine(folder, findings), STAGE_AGAIN)
    return Verdict(folder, [], None, "", origin)
