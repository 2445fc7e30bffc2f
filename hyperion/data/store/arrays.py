"""Write arrays to disk incrementally, with a checksum per block of rows, and read them through memory maps."""

import zlib
from collections.abc import Callable
from pathlib import Path

import numpy as np
from numpy.typing import DTypeLike

from hyperion.data.store.folders import DataError, DataManifest, read_manifest, staged, write_manifest
from hyperion.untrusted import open_regular

FOLDER = "checksums"  # folder next to the arrays, with one file of CRC-32 values per array
BLOCK_BYTES = 2048


def rows_of_a_block(dtype: DTypeLike, row_shape: tuple[int, ...]) -> int:
    """Return the number of rows in a block, which has one checksum: 1 for CIFAR-10 images, and 1,024 for 16-bit tokens."""
    return max(1, BLOCK_BYTES // (np.dtype(dtype).itemsize * int(np.prod(row_shape, dtype=np.int64))))


def narrowed(values: np.ndarray, dtype: DTypeLike, where: object) -> np.ndarray:
    """Return the same values in a new array of type `dtype`.

    Raises:
        DataError: `dtype` cannot represent a value, because the value is too large, negative, fractional or NaN. The message
            names the first such value.
    """
    values, dtype = np.asarray(values), np.dtype(dtype)
    if np.can_cast(values.dtype, dtype, casting="safe"):
        return np.array(values, dtype=dtype, order="C")
    with np.errstate(invalid="ignore"):  # casting NaN to an integer warns, but the comparison below detects NaN
        cast = np.array(values, dtype=dtype, order="C")
    # A negative number that was cast to an unsigned type can compare equal to the original, so the signs are also compared.
    changed = np.flatnonzero(((cast != values) | ((cast < 0) != (values < 0))).reshape(-1))
    if len(changed):
        raise DataError(
            f"value {changed[0]} is {values.reshape(-1)[changed[0]]}, which {dtype} cannot represent ({len(changed)} values)",
            where=where,
            next_step="check the source of the values: ids must be below the vocabulary size, labels below the number of classes",
        )
    return cast


def open_array(path: Path) -> np.ndarray:
    """Return a read-only memory map of the array in a .npy file.

    Raises:
        DataError: the path is not a regular file, or the file does not contain an array of numbers with at least one dimension.
    """
    again = "prepare the data again"
    try:
        # Reading a named pipe or a device could block or never end, so the type of the file is checked first.
        open_regular(path, DataError, again).close()
        array = np.lib.format.open_memmap(path, mode="r")
    except (ValueError, OSError, TypeError, OverflowError, SyntaxError, MemoryError) as error:
        # NumPy parses the header as a Python literal, so a damaged header can raise any of these.
        raise DataError(f"{path.name} is not an array of numbers: {error}", where=path, next_step=again) from error
    # Reject rows without elements, because a block of such rows would have 0 bytes.
    if not array.ndim or array.dtype.kind not in "biuf" or 0 in array.shape[1:]:
        fault = f"{path.name} is {array.dtype} {list(array.shape)}, expected rows of numbers"
        raise DataError(fault, where=path, next_step=again)
    return array


class ArrayWriter:
    """Writer that appends the rows of one array to a new file, `<folder>/<name>.npy`.

    The checksums of the rows are written to `<folder>/checksums/<name>.npy`.

    Args:
        folder: folder for the two files.
        name: name of the array.
        dtype: dtype of the array in the file.
        row_shape: shape of one row; () if each row is one number.
    """

    def __init__(self, folder: Path, name: str, dtype: DTypeLike, row_shape: tuple[int, ...] = ()):
        self.rows, self.dtype, self._row_shape = 0, np.dtype(dtype), tuple(row_shape)
        self._checksums, self._sums = folder / FOLDER / f"{name}.npy", bytearray()
        self._block = rows_of_a_block(self.dtype, self._row_shape) * self.dtype.itemsize * int(np.prod(row_shape, dtype=int))
        self._left = b""  # bytes of the rows in the last block, which is not complete yet
        self._file = open(folder / f"{name}.npy", "xb")  # noqa: SIM115 - closed by `close`
        # The number of rows is not known yet. `close` writes the final header over this one.
        self._write_header()

    def append(self, rows: np.ndarray) -> None:
        """Append rows [n, *row_shape].

        Raises:
            DataError: the dtype of the file cannot represent a value.
        """
        content = narrowed(rows, self.dtype, self._file.name)
        self._file.write(content.data)
        self.rows += len(content)
        # Checksums are computed over complete blocks, so the bytes after the last complete block are kept for the next call.
        ready = memoryview(self._left + content.tobytes())
        full = len(ready) - len(ready) % self._block
        self._add_sums(ready[:full])
        self._left = bytes(ready[full:])

    def close(self) -> None:
        """Write the final number of rows and the checksums."""
        self._add_sums(memoryview(self._left))
        end = self._file.tell()
        self._file.seek(0)
        self._write_header()
        self._file.seek(end)
        self._file.close()
        self._checksums.parent.mkdir(exist_ok=True)
        np.save(self._checksums, np.frombuffer(self._sums, np.uint32))

    def _write_header(self) -> None:
        # NumPy reserves space in the header for a larger first dimension. Therefore the final header can replace the first one.
        described = np.lib.format.dtype_to_descr(self.dtype)
        header = {"descr": described, "fortran_order": False, "shape": (self.rows, *self._row_shape)}
        np.lib.format.write_array_header_1_0(self._file, header)

    def _add_sums(self, content: memoryview) -> None:
        self._sums += _checksums(content, self._block).tobytes()

    def __enter__(self) -> "ArrayWriter":
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()  # no effect after `close`; `staged` removes an unfinished file with its working folder


def damaged_rows(folder: Path, name: str) -> list[tuple[int, int]]:
    """Return the ranges (first, last) of rows in `<name>.npy` whose checksums do not match. A range consists of whole blocks.

    Raises:
        DataError: the array or its checksums are missing or unreadable.
    """
    array, expected = open_array(folder / f"{name}.npy"), open_array(folder / FOLDER / f"{name}.npy")
    block = rows_of_a_block(array.dtype, array.shape[1:])
    runs: list[tuple[int, int]] = []
    for number, first in enumerate(range(0, len(array), block)):
        content = np.ascontiguousarray(array[first : first + block])
        # A file with too few checksums counts as damaged from the first block without one.
        if number < len(expected) and zlib.crc32(content.data.cast("B")) == expected[number]:
            continue
        last = min(first + block, len(array)) - 1
        if runs and runs[-1][1] == first - 1:
            runs[-1] = (runs[-1][0], last)
        else:
            runs.append((first, last))
    return runs


def _checksums(content: memoryview, block: int) -> np.ndarray:
    return np.array([zlib.crc32(content[at : at + block]) for at in range(0, len(content), block)], dtype=np.uint32)


ROWS_AT_ONCE = 4096
ROWS_READ_AT_ONCE = 1 << 16  # a token stream may be larger than the memory


def token_dtype(vocab_size: int, where: object = "vocabulary") -> np.dtype:
    """Return uint16 if it can represent every token id, else uint32.

    Args:
        vocab_size: largest id + 1. This is more than the number of vocabulary entries if some ids are unused.
        where: value for the field `where` of an error.

    Raises:
        DataError: an id needs more than 31 bits. Loaders store ids as int32.
    """
    if not 1 <= vocab_size <= 1 << 31:
        fault = f"a vocabulary of {vocab_size} ids, expected 1 to {1 << 31}"
        raise DataError(fault, where=where, next_step="use a tokenizer whose ids start at 0 and have few gaps")
    return np.dtype(np.uint16 if vocab_size <= 1 << 16 else np.uint32)


def write_shards(folder: Path, arrays: dict[str, np.ndarray], *, name: str, source: str, detail: str, facts: dict) -> None:
    """Store each array as `<key>.npy` in a new folder, with checksums and a manifest.

    The folder is written completely or not at all.

    Raises:
        DataError: the disk is full, or the folder is not writable. Incomplete files are removed.
    """
    with staged(folder) as work:
        for key, array in arrays.items():
            with ArrayWriter(work, key, array.dtype, array.shape[1:]) as writer:
                for first in range(0, len(array), ROWS_AT_ONCE):
                    writer.append(array[first : first + ROWS_AT_ONCE])
                # Call `close` explicitly and not in `__exit__`, because the array must not get a final header after an error.
                writer.close()
        write_manifest(work, name=name, source=source, detail=detail, facts=facts)


def open_shards(folder: Path) -> tuple[dict[str, np.ndarray], DataManifest]:
    """Compare every file of a folder with its manifest. Return the memory-mapped arrays by name, and the manifest.

    Raises:
        DataError: a file is missing, was truncated or edited, or does not contain an array of numbers.
    """
    manifest = read_manifest(folder)
    if manifest is None:
        fault = "the folder has no manifest, so it is not a folder of prepared data"
        raise DataError(fault, where=folder, next_step="prepare the data again")
    manifest.verify(folder)
    return {Path(name).stem: open_array(folder / name) for name in manifest.files if is_array(name)}, manifest


def is_array(name: str) -> bool:
    """Return True if a file in a manifest is an array. Other files are checksums and tokenizers."""
    return name.endswith(".npy") and "/" not in name


def check_tokens(tokens: np.ndarray, vocab_size: int, where: object) -> None:
    """Check that all ids of a token stream are in a vocabulary.

    Args:
        tokens: the token stream.
        vocab_size: largest id + 1.
        where: value for the field `where` of an error.

    Raises:
        DataError: the stream is not an integer array [tokens], or an id is outside the vocabulary, which means that the tokens
            belong to another tokenizer. The message names the first such id.
    """
    if tokens.ndim != 1 or tokens.dtype.kind not in "iu":
        fault = f"tokens are {tokens.dtype} {list(tokens.shape)}, expected integers [tokens]"
        raise DataError(fault, where=where, next_step="prepare the data again")
    first, count = first_bad(tokens, lambda part: (part < 0) | (part >= vocab_size))
    if first is not None:
        raise DataError(
            f"token {first} has the id {tokens[first]}, outside a vocabulary of {vocab_size} ({count} such tokens)",
            where=where,
            next_step="prepare the data again with this tokenizer",
        )


def first_bad(rows: np.ndarray, is_bad: Callable[[np.ndarray], np.ndarray]) -> tuple[int | None, int]:
    """Return the index of the first bad row (None if no row is bad), and the number of bad rows.

    The array may be larger than the memory.

    Args:
        rows: array to search, with the rows along the first dimension.
        is_bad: function that takes n rows and returns bool [n], True for each bad row.
    """
    first, count = None, 0
    for start in range(0, len(rows), ROWS_READ_AT_ONCE):
        bad = np.flatnonzero(is_bad(np.asarray(rows[start : start + ROWS_READ_AT_ONCE])))
        count += len(bad)
        if first is None and len(bad):
            first = start + int(bad[0])
    return first, count
