"""Arrays on disk, written whole with a manifest, verified when opened, read through memory maps."""

from collections.abc import Callable
from pathlib import Path

import numpy as np

from hyperion.data.array_files import ArrayWriter
from hyperion.data.faults import DataError
from hyperion.data.manifest import DataManifest, read_manifest, write_manifest
from hyperion.data.staging import staged

ROWS_AT_ONCE = 4096
ROWS_READ_AT_ONCE = 1 << 18  # a stream may be longer than memory


def token_dtype(vocab_size: int) -> np.dtype:
    """The smallest of uint16 and uint32 that holds every token id."""
    return np.dtype(np.uint16 if vocab_size <= 1 << 16 else np.uint32)


def write_shards(
    folder: Path, arrays: dict[str, np.ndarray], *, name: str, source: str, detail: str, facts: dict
) -> None:
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


def open_array(path: Path) -> np.ndarray:
    """Memory map of a file's array.

    Raises:
        DataError: it holds no array of plain numbers.
    """
    try:
        return np.load(path, mmap_mode="r", allow_pickle=False)
    except (ValueError, OSError) as error:
        raise DataError(
            f"{path.name} is no array of numbers: {error}", where=path, next_step="prepare the data again"
        ) from error


def check_tokens(tokens: np.ndarray, vocab_size: int, where: object) -> None:
    """Refuse a token stream that does not fit a vocabulary.

    Raises:
        DataError: names the first id outside the vocabulary: these tokens belong to another tokenizer.
    """
    first, count = first_bad(tokens, lambda part: part >= vocab_size)
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
