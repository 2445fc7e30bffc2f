"""NumPy files that are written piece by piece, with a checksum of every record, so that damage can be named."""

import zlib
from pathlib import Path

import numpy as np

from hyperion.data.store.faults import DataError
from hyperion.untrusted import open_regular

FOLDER = "checksums"  # beside the arrays, one file of CRC-32 for each
BLOCK_BYTES = 2048


def rows_of_a_block(dtype: np.dtype, row_shape: tuple[int, ...]) -> int:
    """Rows that share a checksum: one image, 1,024 tokens of 16 bits."""
    return max(1, BLOCK_BYTES // (np.dtype(dtype).itemsize * int(np.prod(row_shape, dtype=np.int64))))


def narrowed(values: np.ndarray, dtype: np.dtype, where: object) -> np.ndarray:
    """Return a new array of `values` in `dtype`, with every value unchanged.

    Raises:
        DataError: a value does not fit (too large, negative, fractional, not a number); the first one is named.
    """
    values, dtype = np.asarray(values), np.dtype(dtype)
    if np.can_cast(values.dtype, dtype, casting="safe"):
        return np.array(values, dtype=dtype, order="C")
    with np.errstate(invalid="ignore"):  # a NaN cast to an integer warns; it is found below
        cast = np.array(values, dtype=dtype, order="C")
    # A negative number cast to an unsigned type and back can come back as it was, so the sign is compared as well.
    changed = np.flatnonzero(((cast != values) | ((cast < 0) != (values < 0))).reshape(-1))
    if len(changed):
        raise DataError(
            f"value {changed[0]} is {values.reshape(-1)[changed[0]]}, which {dtype} does not hold ({len(changed)} such)",
            where=where,
            next_step="check what made these values: ids must be smaller than the vocabulary, labels than the classes",
        )
    return cast


def open_array(path: Path) -> np.ndarray:
    """Memory map of the array in a .npy file; no more is mapped than the file holds.

    Raises:
        DataError: it is no regular file, or holds no array of plain numbers with at least one dimension.
    """
    again = "prepare the data again"
    try:
        open_regular(path, DataError, again).close()
        array = np.lib.format.open_memmap(path, mode="r")
    except (ValueError, OSError, TypeError, OverflowError, SyntaxError, MemoryError) as error:
        # NumPy parses the header as a Python literal: a broken one raises nearly anything of these.
        raise DataError(f"{path.name} is no array of numbers: {error}", where=path, next_step=again) from error
    if not array.ndim or array.dtype.kind not in "biuf" or 0 in array.shape[1:]:
        fault = f"{path.name} holds {array.dtype} {list(array.shape)}, no rows of numbers"
        raise DataError(fault, where=path, next_step=again)
    return array


class ArrayWriter:
    """The new file `<folder>/<name>.npy` of rows that come a few at a time, and `<folder>/checksums/<name>.npy`.

    Args:
        row_shape: of one row; () for a plain sequence of numbers.
    """

    def __init__(self, folder: Path, name: str, dtype: np.dtype, row_shape: tuple[int, ...] = ()):
        self.rows, self.dtype, self._row_shape = 0, np.dtype(dtype), tuple(row_shape)
        self._checksums, self._sums = folder / FOLDER / f"{name}.npy", bytearray()
        self._block = rows_of_a_block(self.dtype, self._row_shape) * self.dtype.itemsize * int(np.prod(row_shape, dtype=int))
        self._left = b""  # of a block that is not full yet
        self._file = open(folder / f"{name}.npy", "xb")  # noqa: SIM115 - closed by `close`
        self._write_header()

    def append(self, rows: np.ndarray) -> None:
        """Add rows [n, *row_shape] at the end.

        Raises:
            DataError: the file's type does not hold a value.
        """
        content = narrowed(rows, self.dtype, self._file.name)
        self._file.write(content.data)
        self.rows += len(content)
        ready = memoryview(self._left + content.tobytes())
        full = len(ready) - len(ready) % self._block
        self._add_sums(ready[:full])
        self._left = bytes(ready[full:])

    def close(self) -> None:
        """Write the number of rows, and the checksums."""
        self._add_sums(memoryview(self._left))
        end = self._file.tell()
        self._file.seek(0)
        self._write_header()
        self._file.seek(end)
        self._file.close()
        self._checksums.parent.mkdir(exist_ok=True)
        np.save(self._checksums, np.frombuffer(self._sums, np.uint32))

    def _write_header(self) -> None:
        # NumPy leaves room for a longer first dimension, so the second header takes the place of the first one.
        described = np.lib.format.dtype_to_descr(self.dtype)
        header = {"descr": described, "fortran_order": False, "shape": (self.rows, *self._row_shape)}
        np.lib.format.write_array_header_1_0(self._file, header)

    def _add_sums(self, content: memoryview) -> None:
        self._sums += _checksums(content, self._block).tobytes()

    def __enter__(self) -> "ArrayWriter":
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()  # a no-op after `close`; a file that was not finished goes with its staging folder


def damaged_rows(folder: Path, name: str) -> list[tuple[int, int]]:
    """Runs of rows (first, last) of `<name>.npy` that do not have their checksum; one run at least a block.

    Raises:
        DataError: file or checksums are missing or no arrays.
    """
    array, expected = open_array(folder / f"{name}.npy"), open_array(folder / FOLDER / f"{name}.npy")
    block = rows_of_a_block(array.dtype, array.shape[1:])
    runs: list[tuple[int, int]] = []
    for number, first in enumerate(range(0, len(array), block)):
        content = np.ascontiguousarray(array[first : first + block])
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
