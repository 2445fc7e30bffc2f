"""Is what lies in a data folder what was put there? All faults of a prepared folder, each with its file and record."""

import json
import math
import os
import uuid
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

from hyperion.data.images import cifar10
from hyperion.data.instructions import instructions
from hyperion.data.prepare.content import ARRAYS_OF, FORMAT, content_faults
from hyperion.data.store.array_files import FOLDER as CHECKSUMS
from hyperion.data.store.array_files import damaged_rows, open_array
from hyperion.data.store.faults import DataError
from hyperion.data.store.manifest import FILE_NAME, DataManifest, read_manifest
from hyperion.data.store.shards import is_array
from hyperion.data.store.sources import Sourced
from hyperion.data.store.staging import MARK, QUARANTINE, cache_root, processed_root, sha256_of
from hyperion.data.text import tokenizer, wikitext2
from hyperion.errors import refused_write
from hyperion.untrusted import open_regular, printable

REASON_FILE = "REASON.json"
PREPARE_AGAIN = "what needs it prepares it again from its source; the first does so: `make reproduce ONLY=01_dataset_preparation`"
OUTDATED = "another version of this library made it and this one does not read it: `hyperion clean --data` removes it"
STAGE_AGAIN = "stage it again with `make fetch`, or name a folder that has it with HYPERION_DATA_MIRROR"
_SHOWN_RUNS = 3


class Verdict(NamedTuple):
    """What became of one folder.

    Attributes:
        findings: its faults, none where it is as it was written.
        kept: where a damaged one was moved, None where it stayed.
        next_step: what to do about it, "" where nothing is to be done.
        origin: source of the data and whether they are their publisher's, "" where that could not be read.
    """

    folder: Path
    findings: list["Finding"]
    kept: Path | None
    next_step: str
    origin: str = ""


@dataclass(frozen=True)
class Finding:
    """One fault.

    Attributes:
        file: where it was found, by its name in the folder.
        fault: what is wrong, the record named where one is damaged.
    """

    file: str
    fault: str


def verify(folder: Path | None = None) -> list[Verdict]:
    """Examine prepared data and what was staged, and move what is damaged into quarantine.

    Args:
        folder: one product, or a folder of products; None for data/processed/ and data/raw/.

    Raises:
        DataError: there is no such folder, or nothing in it that can be verified.
    """
    staged = _staged_sets()
    if folder is None:
        return [*map(_verdict, _products(processed_root())), *map(_staged_verdict, staged)]
    chosen = [place for place in staged if folder.resolve() in (place[0].resolve(), place[0].parent.resolve())]
    products = [folder] if is_prepared(folder) else _products(folder)
    if not chosen and not products:
        raise DataError(
            f"nothing to verify in {folder}: " + ("it holds no prepared data" if folder.is_dir() else "there is no such folder"),
            where=folder,
            next_step=f"name a folder of {processed_root()}, or none for all of them",
        )
    return [_staged_verdict(place) for place in chosen] or [_verdict(product) for product in products]


def is_prepared(folder: Path) -> bool:
    """Whether a folder holds, or held, a product of this library, by its manifest or the checksums of one of its arrays;
    nothing else is touched.
    """
    names = (name for of_kind in ARRAYS_OF.values() for name in of_kind)
    return _kind_of(folder) in ARRAYS_OF or any((folder / CHECKSUMS / f"{name}.npy").is_file() for name in names)


def examine(folder: Path) -> list[Finding]:
    """Every fault of a prepared folder; none where all is as it was written.

    First each file against the manifest: missing, truncated, changed (with the records that no longer have their checksum),
    put in another one's place, or not listed. Then what sound files hold: ids of the vocabulary, text that the stored
    tokenizer gives back, finite images, labels of the classes, and in each split what was counted when it was made.
    """
    try:
        manifest = read_manifest(folder)
        if manifest is None:
            return [Finding(FILE_NAME, "it is missing: nothing says what these files should hold")]
    except DataError as fault:
        return [Finding(FILE_NAME, fault.what)]
    kind = manifest.facts.get("kind")
    if not isinstance(kind, str) or kind not in ARRAYS_OF:
        return [Finding(FILE_NAME, f"it says nothing of the kind of product: {printable(repr(kind))[:80]}")]
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
    return findings + [Finding(Path(fault.where).name, fault.what) for fault in content_faults(folder, arrays, manifest, True)]


def quarantine(folder: Path, findings: list[Finding]) -> Path:
    """Move a damaged folder aside, into `quarantine/` beside it, with a file that says why; nothing is deleted.

    Returns:
        Where it lies now.

    Raises:
        DataError: it cannot be moved.
    """
    kept = folder.parent / QUARANTINE / f"{folder.name}.{uuid.uuid4().hex[:8]}"
    try:
        kept.parent.mkdir(exist_ok=True)
        os.rename(folder, kept)
        reasons = {"was": folder.name, "findings": [asdict(finding) for finding in findings]}
        # A link was moved, not what it leads to, which is not ours to write into.
        told = kept.with_name(f"{kept.name}.{REASON_FILE}") if kept.is_symlink() else kept / REASON_FILE
        told.write_text(json.dumps(reasons, indent=1) + "\n", encoding="utf-8")
    except OSError as error:
        there = kept if kept.is_dir() else folder
        raise refused_write(
            error,
            DataError,
            action="cannot put damaged data into quarantine",
            kept=f"they lie in {there}",
            where=there,
            elsewhere="move that folder away by hand",
        ) from error
    return kept


def _file_findings(folder: Path, manifest: DataManifest) -> Iterator[Finding]:
    """Files that are missing, changed or strange."""
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
                yield Finding(name, f"it holds what the manifest says of {other}: the splits' files were swapped")
            elif path.stat().st_size < expected["bytes"]:
                yield Finding(name, f"{fault.what}; {_missing_rows(path, expected['bytes'])}")
            else:
                yield Finding(name, f"{fault.what}; {_changed_rows(folder, name)}")
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        # A link to a folder is a file that is not known too: nothing behind it was looked at.
        known = name in manifest.files or name in (FILE_NAME, MARK)
        if (path.is_symlink() or not path.is_dir()) and not known:
            yield Finding(printable(name), "the manifest does not know this file")


def _missing_rows(path: Path, whole_bytes: int) -> str:
    """Which rows of a file that was cut are gone, in words."""
    try:
        with open_regular(path, DataError, PREPARE_AGAIN) as file:
            version = np.lib.format.read_magic(file)
            read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
            shape, _, dtype = read(file)
            header = file.tell()
        row = dtype.itemsize * math.prod(shape[1:])
    except (ValueError, OSError, TypeError, SyntaxError, OverflowError):
        return "its header is gone with the rest"
    if not shape or not row or header + row * shape[0] != whole_bytes:
        return "its header was changed as well"
    whole = max(0, path.stat().st_size - header) // row
    return f"records {whole} to {shape[0] - 1} are cut off"


def _changed_rows(folder: Path, name: str) -> str:
    """Which records of a file are not what they were, in words."""
    if not is_array(name):
        return "it holds no records of its own"
    try:
        runs = damaged_rows(folder, Path(name).stem)
    except DataError as fault:
        return f"the records cannot be told: {fault.what}"
    if not runs:
        return f"no record is damaged: its header, or {CHECKSUMS}/{name}, was changed"
    shown = ", ".join(f"record {a}" if a == b else f"records {a} to {b}" for a, b in runs[:_SHOWN_RUNS])
    return f"damaged: {shown}" + (f" and {len(runs) - _SHOWN_RUNS} stretches more" if len(runs) > _SHOWN_RUNS else "")


def _products(folder: Path) -> list[Path]:
    found = sorted(path for path in folder.glob("[!.]*") if path.is_dir() and path.name != QUARANTINE)
    return [path for path in found if is_prepared(path)]


def _verdict(folder: Path) -> Verdict:
    if _made_by_another_version(folder):
        return Verdict(folder, [], None, OUTDATED)
    findings, origin = examine(folder), _origin_of(folder)
    kept = quarantine(folder, findings) if findings else None
    return Verdict(folder, findings, kept, PREPARE_AGAIN if findings else "", origin)


def _origin_of(folder: Path) -> str:
    """What a product's manifest says of its source."""
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
    """What a folder's manifest says of it, nothing where there is none that can be read."""
    try:
        manifest = read_manifest(folder)
    except DataError:
        return {}
    return {} if manifest is None else manifest.facts


def _kind_of(folder: Path) -> str | None:
    kind = _facts_of(folder).get("kind")
    return kind if isinstance(kind, str) else None


def _made_by_another_version(folder: Path) -> bool:
    return _kind_of(folder) in ARRAYS_OF and _facts_of(folder).get("format") != FORMAT


def _staged_sets() -> list[tuple[Path, Callable[[], Sourced]]]:
    """The sets that lie in the cache, and what reads and checks each."""
    found = {
        wikitext2.FOLDER: wikitext2.cached_wikitext2,
        tokenizer.FOLDER: tokenizer.cached_tokenizer,
        cifar10.FOLDER: cifar10.cached_cifar10,
        instructions.FOLDER: instructions.cached_instructions,
    }
    return [(cache_root() / name, check) for name, check in found.items() if (cache_root() / name).is_dir()]


def _staged_verdict(place: tuple[Path, Callable[[], Sourced]]) -> Verdict:
    """A set that is staged is verified by its own loader: counts, checksums, hashes and overlap."""
    folder, read = place
    try:
        origin = read().detail
    except DataError as fault:
        findings = [Finding(Path(str(fault.where)).name, fault.what)]
        return Verdict(folder, findings, quarantine(folder, findings), STAGE_AGAIN)
    return Verdict(folder, [], None, "", origin)
