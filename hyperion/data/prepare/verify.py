"""Verify data folders. Find every damaged file and record, and move each damaged folder to a quarantine folder.

The content of prepared arrays is checked too: token ids must be within the vocabulary and decode to the recorded text, images and
labels must be valid, and all counts must equal those that were recorded when the data were prepared.
"""

import json
import math
import os
import uuid
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import tokenizers

from hyperion.data.images.imageset import IMAGE_SHAPE, channel_statistics, check_images, check_labels
from hyperion.data.prepare.catalog import staged_sets
from hyperion.data.store.arrays import FOLDER as CHECKSUMS
from hyperion.data.store.arrays import check_tokens, damaged_rows, first_bad, is_array, open_array, token_dtype
from hyperion.data.store.folders import (
    FILE_NAME,
    MARK,
    QUARANTINE,
    DataError,
    DataManifest,
    processed_root,
    read_manifest,
    sha256_of,
)
from hyperion.data.store.overlap import SplitOverlap, image_overlap, require_little_overlap, token_overlap
from hyperion.data.store.sources import Sourced
from hyperion.data.text.corpus import SPLITS
from hyperion.errors import refused_write
from hyperion.untrusted import open_regular, printable, read_bounded

REASON_FILE = "REASON.json"
PREPARE_AGAIN = "run `make reproduce ONLY=01_dataset_preparation`, which prepares the data again from their source"
OUTDATED = (
    "another version of Hyperion wrote this folder, and this version cannot read it: remove it with `hyperion clean --data`"
)
STAGE_AGAIN = "download the data again with `make fetch`, or set HYPERION_DATA_MIRROR to a folder that contains them"
_SHOWN_RUNS = 3
FORMAT = 3  # version of the folder layout; it is part of folder names and manifests, so that a new layout gets new folders
SAMPLES = "_samples"  # name suffix of the array with the start and the length of each line in a split
TOKENIZER_FILE = "tokenizer.json"
ARRAYS_OF = {
    "text": tuple(f"{split}{kind}" for split in SPLITS for kind in ("", SAMPLES)),
    "images": tuple(f"{split}_{kind}" for split in ("train", "test") for kind in ("images", "labels")),
}
_REMEDY = "prepare the data again"


class FolderVerdict(NamedTuple):
    """Result of the verification of one folder.

    Attributes:
        folder: the folder that was verified.
        findings: problems found in the folder; empty if the data are undamaged.
        moved_to: new path of a damaged folder; None if the folder was not moved.
        next_step: what the user should do; "" if there is nothing to do.
        origin: source of the data, and whether they are the publisher's files; "" if the source could not be read.
    """

    folder: Path
    findings: list["DataFinding"]
    moved_to: Path | None
    next_step: str
    origin: str = ""


@dataclass(frozen=True)
class DataFinding:
    """A problem found in a data folder.

    Attributes:
        file: path of the damaged file, relative to the folder.
        fault: description of the problem, with the indices of the damaged records if they are known.
    """

    file: str
    fault: str


def verify(folder: Path | None = None) -> list[FolderVerdict]:
    """Verify prepared data and the raw data in the cache, and move damaged folders to quarantine.

    Args:
        folder: a folder of prepared data, or a folder that contains such folders. None verifies everything in data/processed/ and
            data/raw/.

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
            next_step=f"give a folder in {processed_root()}, or give no folder to verify all data",
        )
    return [_staged_verdict(place) for place in chosen] or [_verdict(product) for product in products]


def is_prepared(folder: Path) -> bool:
    """Return True if a folder contains, or once contained, data prepared by Hyperion.

    Such a folder has a manifest, or checksums of at least one array. Other folders are never changed.
    """
    names = (name for of_kind in ARRAYS_OF.values() for name in of_kind)
    return _is_described(_manifest_of(folder)) or any((folder / CHECKSUMS / f"{name}.npy").is_file() for name in names)


def examine(folder: Path) -> list[DataFinding]:
    """Check a prepared folder, and return every problem found. The list is empty if the folder is undamaged.

    First, each file is compared with the manifest. A file can be missing, truncated, changed, swapped with another file, or not
    listed in the manifest. For a changed file, the finding names the records whose checksums do not match. Then the contents of
    the undamaged files are checked: token ids must be within the vocabulary and decode to the recorded text with the stored
    tokenizer, images must be finite, labels must be valid, and all counts must equal those that were recorded when the data were
    prepared.
    """
    try:
        manifest = read_manifest(folder)
        if manifest is None:
            return [DataFinding(FILE_NAME, "the manifest is missing, so the expected content of the files is unknown")]
    except DataError as fault:
        return [DataFinding(FILE_NAME, fault.what)]
    kind = manifest.facts.get("kind")
    if not isinstance(kind, str) or kind not in ARRAYS_OF:
        return [DataFinding(FILE_NAME, f"unknown kind of data: {printable(repr(kind))[:80]}")]
    names = ARRAYS_OF[kind]
    findings = [*_file_findings(folder, manifest)]
    findings += [DataFinding(f"{n}.npy", "the manifest does not list it") for n in names if f"{n}.npy" not in manifest.files]
    # A file that already has a finding is not opened again, so that each problem is reported once.
    damaged = {finding.file for finding in findings}
    arrays = {}
    for name in names:
        file = f"{name}.npy"
        if file in manifest.files and file not in damaged:
            try:
                arrays[name] = open_array(folder / file)
            except DataError as fault:
                findings.append(DataFinding(file, fault.what))
    faults = content_faults(folder, arrays, manifest, thorough=True)
    return findings + [DataFinding(Path(str(fault.where)).name, fault.what) for fault in faults]


def quarantine(folder: Path, findings: list[DataFinding]) -> Path:
    """Move a damaged folder to the folder `quarantine/` next to it, and write the findings to a file. Nothing is deleted.

    Returns:
        The new path of the folder.

    Raises:
        DataError: the folder cannot be moved.
    """
    quarantined = folder.parent / QUARANTINE / f"{folder.name}.{uuid.uuid4().hex[:8]}"
    try:
        quarantined.parent.mkdir(exist_ok=True)
        os.rename(folder, quarantined)
        reasons = {"was": folder.name, "findings": [asdict(finding) for finding in findings]}
        # If the folder is a symbolic link, only the link was moved. The target may belong to another user and is not changed.
        report = (
            quarantined.with_name(f"{quarantined.name}.{REASON_FILE}") if quarantined.is_symlink() else quarantined / REASON_FILE
        )
        report.write_text(json.dumps(reasons, indent=1) + "\n", encoding="utf-8")
    except OSError as error:
        there = quarantined if quarantined.is_dir() else folder
        raise refused_write(
            error,
            DataError,
            action="cannot move damaged data to quarantine",
            unchanged=f"the data are in {there}",
            where=there,
            elsewhere="move that folder yourself",
        ) from error
    return quarantined


def _file_findings(folder: Path, manifest: DataManifest) -> Iterator[DataFinding]:
    """Yield a finding for each file that is missing, changed or not listed in the manifest."""
    # Map the hash of each array in the manifest to its name, to recognise a file that has the content of another one.
    hashes = {entry["sha256"]: name for name, entry in manifest.files.items() if is_array(name)}
    for name, expected in manifest.files.items():
        path = folder / name
        try:
            manifest.verify_file(folder, name)
        except DataError as fault:
            if not path.is_file() or path.is_symlink():
                yield DataFinding(name, fault.what)
                continue
            other = hashes.get(sha256_of(path))
            if other is not None and other != name:
                yield DataFinding(name, f"it has the content of {other}: the files of the splits were swapped")
            elif path.stat().st_size < expected["bytes"]:
                yield DataFinding(name, f"{fault.what}; {_missing_rows(path, expected['bytes'])}")
            else:
                yield DataFinding(name, f"{fault.what}; {_changed_rows(folder, name)}")
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        # A link to a folder is reported as an unlisted file, because its target was not checked.
        # A file browser or a network file system may add hidden files, such as .DS_Store. Hyperion never reads them.
        known = name in manifest.files or name in (FILE_NAME, MARK) or (path.name.startswith(".") and not path.is_symlink())
        if (path.is_symlink() or not path.is_dir()) and not known:
            yield DataFinding(printable(name), "the manifest does not list this file")


def _missing_rows(path: Path, whole_bytes: int) -> str:
    """Describe which rows of a truncated file are missing."""
    try:
        with open_regular(path, DataError, PREPARE_AGAIN) as file:
            version = np.lib.format.read_magic(file)
            # The header of `ArrayWriter` has version 1.0. `read_array_header_2_0` reads the longer headers of other writers.
            read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
            shape, _, dtype = read(file)
            header = file.tell()
        row = dtype.itemsize * math.prod(shape[1:])
    except (ValueError, OSError, TypeError, SyntaxError, OverflowError):
        return "the header of the file is lost too"
    if not shape or not row or header + row * shape[0] != whole_bytes:
        return "the header of the file was changed too"
    # The header states the original number of rows. Only the rows that fit into the file are complete.
    whole = max(0, path.stat().st_size - header) // row
    return f"records {whole} to {shape[0] - 1} are missing"


def _changed_rows(folder: Path, name: str) -> str:
    """Describe which records of a file were changed."""
    if not is_array(name):
        return "the file has no records"
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


def _verdict(folder: Path) -> FolderVerdict:
    manifest, origin = _manifest_of(folder), ""
    if manifest is not None:
        # Data of another layout version are not damaged, so they are not moved to quarantine.
        if _is_described(manifest) and manifest.facts.get("format") != FORMAT:
            return FolderVerdict(folder, [], None, OUTDATED)
        official = manifest.facts.get("official")
        publisher = "" if official is None else "official, " if official is True else "not official, "
        origin = f"{publisher}{manifest.source}: {manifest.detail}"
    findings = examine(folder)
    quarantined = quarantine(folder, findings) if findings else None
    return FolderVerdict(folder, findings, quarantined, PREPARE_AGAIN if findings else "", origin)


def _manifest_of(folder: Path) -> DataManifest | None:
    """Return the manifest of a folder, or None if it is missing or unreadable."""
    try:
        return read_manifest(folder)
    except DataError:
        return None


def _is_described(manifest: DataManifest | None) -> bool:
    kind = None if manifest is None else manifest.facts.get("kind")
    return isinstance(kind, str) and kind in ARRAYS_OF


def _staged_verdict(place: tuple[Path, Callable[[], Sourced]]) -> FolderVerdict:
    """Verify the raw files of a data set in the cache. Its loader checks counts, checksums, hashes and overlap."""
    folder, read = place
    try:
        origin = read().detail
    except DataError as fault:
        findings = [DataFinding(Path(str(fault.where)).name, fault.what)]
        return FolderVerdict(folder, findings, quarantine(folder, findings), STAGE_AGAIN)
    return FolderVerdict(folder, [], None, "", origin)


def content_faults(
    folder: Path, arrays: dict[str, np.ndarray], manifest: DataManifest, thorough: bool = False
) -> Iterator[DataError]:
    """Yield one error for each problem in the content of prepared arrays.

    Args:
        folder: folder of prepared data.
        arrays: a dict that maps names to arrays. Other arrays of the folder are not checked.
        manifest: manifest of the folder.
        thorough: if True, also compare the arrays with the counts and statistics that were recorded when the data were prepared.
            This detects an undamaged file of another split or tokenizer, even if the manifest was rewritten to match it.
    """
    facts = manifest.facts
    checks = _text_checks if facts["kind"] == "text" else _image_checks
    try:
        for check, *arguments in checks(folder, arrays, facts, thorough):
            try:
                check(*arguments)
            except DataError as fault:
                yield fault
    # A user may have edited the manifest, so each of its facts may be missing or have a wrong type.
    except (KeyError, TypeError, ValueError, AttributeError, IndexError, OverflowError) as error:
        fault = f"the entry 'facts' of the manifest does not fit this kind of data: {printable(repr(error))[:200]}"
        yield DataError(fault, where=folder / FILE_NAME, next_step=_REMEDY)


def _text_checks(folder: Path, arrays: dict[str, np.ndarray], facts: dict, thorough: bool) -> Iterator[tuple]:
    decoder = _decoder(folder / TOKENIZER_FILE) if thorough else None
    for split in SPLITS:
        tokens, samples, steps = arrays.get(split), arrays.get(f"{split}{SAMPLES}"), facts["steps"][split]
        path, places = folder / f"{split}.npy", folder / f"{split}{SAMPLES}.npy"
        # The generator yields the function and the arguments of a check, and `content_faults` calls it, so that a failed check
        # does not prevent the others.
        if tokens is not None:
            yield _check_token_type, path, tokens, facts["vocab_size"]
            yield check_tokens, tokens, facts["vocab_size"], path
        if tokens is not None and thorough:
            yield _check_count, path, "tokens", len(tokens), steps["tokenize"]["tokens"]
        if tokens is not None and decoder is not None:
            yield _check_opening, path, tokens, decoder, steps["tokenize"]["opening"]
        if samples is not None:
            yield _check_samples, places, samples, steps["tokenize"]["tokens"]
        if samples is not None and thorough:
            yield _check_count, places, "samples", len(samples), steps["filter"]["non_empty"]
    if thorough and all(f"{split}{kind}" in arrays for split in SPLITS for kind in ("", SAMPLES)):
        yield _check_text_overlap, folder, arrays, facts["overlap"]


def _image_checks(folder: Path, arrays: dict[str, np.ndarray], facts: dict, thorough: bool) -> Iterator[tuple]:
    for split in ("train", "test"):
        images, labels, steps = arrays.get(f"{split}_images"), arrays.get(f"{split}_labels"), facts["steps"][split]
        path, label_path = folder / f"{split}_images.npy", folder / f"{split}_labels.npy"
        if images is not None:
            yield check_images, images, path
            yield _check_type, path, images, np.dtype(np.uint8), IMAGE_SHAPE
        if images is not None and thorough:
            yield _check_count, path, "images", len(images), steps["read"]["images"]
            yield _check_channels, path, images, steps["channels"]["mean"]
        if labels is not None:
            yield _check_type, label_path, labels, np.dtype(np.int64), ()
            yield check_labels, labels, steps["read"]["images"], len(facts["classes"]), label_path
        if labels is not None and thorough:
            yield _check_classes, label_path, labels, steps["classes"]
    if thorough and "train_images" in arrays and "test_images" in arrays:
        yield _check_image_overlap, folder, arrays, facts["overlap"]


def _decoder(path: Path) -> tokenizers.Tokenizer | None:
    """Return the stored tokenizer, or None if its file is damaged, which the check of the hashes reports."""
    try:
        return tokenizers.Tokenizer.from_buffer(read_bounded(path, DataError, _REMEDY))
    except Exception:  # tokenizers raises plain Exception
        return None


def _check_type(path: Path, array: np.ndarray, dtype: np.dtype, row_shape: tuple[int, ...]) -> None:
    fault = f"{path.name} is {array.dtype.str} {list(array.shape)}, expected {dtype.str} {['N', *row_shape]}"
    _require(array.dtype == dtype and array.shape[1:] == row_shape, fault, path)


def _check_token_type(path: Path, tokens: np.ndarray, vocab_size: int) -> None:
    _check_type(path, tokens, token_dtype(vocab_size, path), ())


def _check_text_overlap(folder: Path, arrays: dict[str, np.ndarray], expected: dict) -> None:
    tokens, samples = ({split: arrays[f"{split}{kind}"] for split in SPLITS} for kind in ("", SAMPLES))
    if any(array.ndim != 2 or array.shape[1] != 2 for array in samples.values()):
        return  # `_check_samples` reports this error
    _check_overlap(folder, token_overlap(tokens, samples), expected, "long lines")


def _check_image_overlap(folder: Path, arrays: dict[str, np.ndarray], expected: dict) -> None:
    _check_overlap(folder, image_overlap(arrays["train_images"], arrays["test_images"]), expected, "images")


def _check_overlap(folder: Path, found: dict[str, SplitOverlap], expected: dict, what: str) -> None:
    """Check that few records occur in more than one split, and that their number is the same as when the data were prepared."""
    require_little_overlap(found, what, folder / FILE_NAME)
    for split, overlap in found.items():
        fault = (
            f"{overlap.repeated} of {overlap.records} {what} of the {split} split also occur in another "
            f"split; when the data were prepared, it was {expected[split]['repeated']} of {expected[split]['records']}"
        )
        _require(overlap.as_dict() == expected[split], fault, folder / FILE_NAME)


def _check_count(path: Path, what: str, found: int, expected: int) -> None:
    fault = (
        f"{path.name} has {found} {what}, but had {expected} when it was prepared: "
        "it is the file of another split, or it was truncated"
    )
    _require(found == expected, fault, path)


def _check_opening(path: Path, tokens: np.ndarray, decoder: tokenizers.Tokenizer, opening: dict) -> None:
    count, text = opening["tokens"], opening["text"]
    found = decoder.decode(np.asarray(tokens[:count]).tolist(), skip_special_tokens=False)
    fault = (
        f"tokens 0 to {count - 1} of {path.name} decode to {found[:40]!r}, but the split begins with {text[:40]!r}: "
        "the tokens belong to another vocabulary, or it is the file of another split"
    )
    _require(found == text, fault, path)


def _check_samples(path: Path, samples: np.ndarray, tokens: int) -> None:
    _check_type(path, samples, np.dtype(np.int64), (2,))
    first, count = first_bad(samples, lambda part: (part[:, 0] < 0) | (part[:, 1] < 1) | (part[:, 1] > tokens - part[:, 0]))
    fault = f"sample {first} of {path.name} lies outside the {tokens} tokens of its split ({count} such samples)"
    _require(first is None, fault, path)


def _check_channels(path: Path, images: np.ndarray, expected: list[float]) -> None:
    if images.dtype != np.uint8 or images.shape[1:] != IMAGE_SHAPE or not len(images):
        return  # `check_images` reports this error
    means, _ = channel_statistics(images)
    found, wanted = (", ".join(f"{mean:.4f}" for mean in values) for values in (means, expected))
    fault = (
        f"{path.name} has the channel means {found}, but had {wanted} when it was prepared: "
        "it is the file of another split, or its pixels were changed"
    )
    # The means are computed from exact integer histograms, so they differ at most by the rounding of JSON numbers and of the
    # float64 division.
    _require(np.allclose(means, expected, rtol=0, atol=1e-9), fault, path)


def _check_classes(path: Path, labels: np.ndarray, expected: dict[str, int]) -> None:
    names = list(expected)
    if labels.dtype.kind not in "iu" or np.any((np.asarray(labels) < 0) | (np.asarray(labels) >= len(names))):
        return  # `check_labels` reports this error
    found = np.bincount(np.asarray(labels), minlength=len(names))
    for name, count in zip(names, found, strict=True):
        fault = (
            f"{path.name} has {count} labels of class {name!r}, but had {expected[name]} when it was prepared: "
            "it is the file of another split, or its labels were edited"
        )
        _require(count == expected[name], fault, path)


def _require(sound: bool, fault: str, path: Path) -> None:
    if not sound:
        raise DataError(fault, where=path, next_step=_REMEDY)
