"""NumPy files that are written piece by piece, with a checksum of every record, so that damage can be named."""

import zlib
from pathlib import Path

import numpy as np

FOLDER = "checksums"  # beside the arrays, one file of CRC-32 for each
BLOCK_BYTES = 2048


def rows_of_a_block(dtype: np.dtype, row_shape: tuple[int, ...]) -> int:
    """Rows that share a checksum: one image, 1,024 tokens of 16 bits."""
    return max(1, BLOCK_BYTES // (np.dtype(dtype).itemsize * int(np.prod(row_shape, dtype=np.int64))))


class ArrayWriter:
    """The new file `<folder>/<name>.npy` of rows that come a few at a time, and `<folder>/checksums/<name>.npy`.

    Args:
        row_shape: of one row; () for a plain sequence of numbers.
    """

    def __init__(self, folder: Path, name: str, dtype: np.dtype, row_shape: tuple[int, ...] = ()):
        self.rows, self.dtype, self._row_shape = 0, np.dtype(dtype), tuple(row_shape)
        self._checksums, self._sums = folder / FOLDER / f"{name}.npy", bytearray()
        self._block = (
            rows_of_a_block(self.dtype, self._row_shape) * self.dtype.itemsize * int(np.prod(row_shape, dtype=int))
        )
        self._left = b""  # of a block that is not full yet
        self._file = open(folder / f"{name}.npy", "xb")  # noqa: SIM115 - closed by `close`
        self._write_header()

    def append(self, rows: np.ndarray) -> None:
        """Add rows [n, *row_shape] at the end."""
        content = np.ascontiguousarray(rows, dtype=self.dtype)
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
        OSError, ValueError: file or checksums are missing or no arrays.
    """
    array = np.load(folder / f"{name}.npy", mmap_mode="r", allow_pickle=False)
    expected = np.load(folder / FOLDER / f"{name}.npy", allow_pickle=False)
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
