"""Arrays on disk, written whole with a manifest, verified when opened, read through memory maps."""

from pathlib import Path

import numpy as np

from hyperion.data.faults import DataError
from hyperion.data.manifest import DataManifest, read_manifest, write_manifest
from hyperion.data.staging import staged


def token_dtype(vocab_size: int) -> np.dtype:
    """The smallest of uint16 and uint32 that holds every token id."""
    return np.dtype(np.uint16 if vocab_size <= 1 << 16 else np.uint32)


def write_shards(
    folder: Path, arrays: dict[str, np.ndarray], *, name: str, source: str, detail: str, facts: dict
) -> None:
    """Store each array as `<key>.npy` in the new folder `folder`, with a manifest; all of it appears at once or not at
    all.

    Raises:
        DataError: the disk is full or not writable; nothing is left behind.
    """
    with staged(folder) as work:
        for key, array in arrays.items():
            np.save(work / f"{key}.npy", np.ascontiguousarray(array), allow_pickle=False)
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
    arrays = {}
    for file_name in manifest.files:
        try:
            arrays[Path(file_name).stem] = np.load(folder / file_name, mmap_mode="r", allow_pickle=False)
        except (ValueError, OSError) as error:
            raise DataError(
                f"{file_name} is no array of numbers: {error}",
                where=folder / file_name,
                next_step="prepare the data again",
            ) from error
    return arrays, manifest


def check_tokens(tokens: np.ndarray, vocab_size: int, where: object) -> None:
    """Refuse a token stream that does not fit a vocabulary.

    Raises:
        DataError: names the first id outside the vocabulary: these tokens belong to another tokenizer.
    """
    bad = np.flatnonzero(np.asarray(tokens) >= vocab_size)
    if len(bad):
        raise DataError(
            f"token {bad[0]} has the id {tokens[bad[0]]}, outside a vocabulary of {vocab_size} ({len(bad)} such)",
            where=where,
            next_step="prepare the data again with this tokenizer",
        )
