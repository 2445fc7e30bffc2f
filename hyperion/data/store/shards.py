"""Arrays on disk, written whole with a manifest, verified when opened, read through memory maps."""

from collections.abc import Callable
from pathlib import Path

import numpy as np

from hyperion.data.store.array_files import ArrayWriter, open_array
from hyperion.data.store.faults import DataError
from hyperion.data.store.manifest import DataManifest, read_manifest, write_manifest
from hyperion.data.store.staging import staged

ROWS_AT_ONCE = 4096
ROWS_READ_AT_ONCE = 1 << 18  # a stream may be longer than memory


def token_dtype(vocab_size: int, where: object = "vocabulary") -> np.dtype:
    """The smallest of uint16 and uint32 that holds every token id.

    Args:
        vocab_size: largest id + 1, which is more than the number of entries where ids are left out.

    Raises:
        DataError: an id needs more than 31 bits; loaders hold ids in int32.
    """
    if not 1 <= vocab_size <= 1 << 31:
        fault = f"a vocabulary of {vocab_size} ids, expected 1 to {1 << 31}"
        raise DataError(fault, where=where, next_step="use a tokenizer whose ids begin at 0 and have few gaps")
    return np.dtype(np.uint16 if vocab_size <= 1 << 16 else np.uint32)


def write_shards(folder: Path, arrays: dict[str, np.ndarray], *, name: str, source: str, detail: str, facts: dict) -> None:
    """Store each array as `<key>.npy` in the new folder `folder`, with checksums of its records and a manifest; all of it
    appears at once or not at all.

    Raises:
        DataError: the disk is full or not writable; nothing is left behind.
    """
    with staged(folder) as work:
        for key, array in arrays.items():
            with ArrayWriter(work, key, array.dtype, array.shape[1:]) as writer:
                for first in range(0, len(array), ROWS_AT_ONCE):
                    writer.append(array[first : first + ROWS_AT_ONCE])
                writer.close()
        write_manifest(work, name=name, source=source, detail=detail, facts=facts)


def open_shards(folder: Path) -> tuple[dict[str, np.ndarray], DataManifest]:
    """Memory maps of a folder's arrays by name, after every file has passed its manifest.

    Raises:
        DataError: names the file that is missing, truncated, edited or no array of plain numbers.
    """
    manifest = read_manifest(folder)
    if manifest is None:
        raise DataError("no manifest: not a folder of prepared data", where=folder, next_step="prepare the data again")
    manifest.verify(folder)
    return {Path(name).stem: open_array(folder / name) for name in manifest.files if is_array(name)}, manifest


def is_array(name: str) -> bool:
    """Whether a file of a manifest is one of the arrays: neither their checksums nor a tokenizer."""
    return name.endswith(".npy") and "/" not in name


def check_tokens(tokens: np.ndarray, vocab_size: int, where: object) -> None:
    """Refuse a token stream that does not fit a vocabulary.

    Args:
        vocab_size: largest id + 1.

    Raises:
        DataError: the stream is not [tokens] in the type of `token_dtype`, or an id lies outside the vocabulary (the
            first one is named): these tokens belong to another tokenizer.
    """
    if tokens.ndim != 1 or tokens.dtype.kind not in "iu":
        fault = f"tokens are {tokens.dtype} {list(tokens.shape)}, expected integers [tokens]"
        raise DataError(fault, where=where, next_step="prepare the data again")
    first, count = first_bad(tokens, lambda part: (part < 0) | (part >= vocab_size))
    if first is not None:
        raise DataError(
            f"token {first} has the id {tokens[first]}, outside a vocabulary of {vocab_size} ({count} such)",
            where=where,
            next_step="prepare the data again with this tokenizer",
        )


def first_bad(rows: np.ndarray, is_bad: Callable[[np.ndarray], np.ndarray]) -> tuple[int | None, int]:
    """The first row that is bad, None where there is none, and how many are; the array may be longer than memory.

    Args:
        is_bad: bool [n] for any n rows.
    """
    first, count = None, 0
    for start in range(0, len(rows), ROWS_READ_AT_ONCE):
        bad = np.flatnonzero(is_bad(np.asarray(rows[start : start + ROWS_READ_AT_ONCE])))
        count += len(bad)
        if first is None and len(bad):
            first = start + int(bad[0])
    return first, count
