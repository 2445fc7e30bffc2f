"""CIFAR-10's official layouts, Python and binary, folder or archive, read without running anything in them.

Layout: https://www.cs.toronto.edu/~kriz/cifar.html. A binary record is one label byte and 3072 pixel bytes (red, green
and blue planes, row by row). A Python batch is a pickle of a dictionary; it is read by an unpickler that knows the
three globals such a file needs and refuses all others.
"""

import io
import pickle
import tarfile
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from hyperion.data.faults import DataError
from hyperion.data.imageset import IMAGE_SHAPE

RECORD_BYTES = 1 + 3 * 32 * 32
CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
TRAIN_BATCHES = tuple(f"data_batch_{number}" for number in range(1, 6))
TEST_BATCH = "test_batch"
PYTHON_FOLDER, PYTHON_ARCHIVE = "cifar-10-batches-py", "cifar-10-python.tar.gz"
BINARY_FOLDER, BINARY_ARCHIVE = "cifar-10-batches-bin", "cifar-10-binary.tar.gz"
LAYOUTS = (PYTHON_FOLDER, PYTHON_ARCHIVE, BINARY_FOLDER, BINARY_ARCHIVE)
REMEDY = "copy the file again from where it came, or remove it and run `make fetch`"


@dataclass(frozen=True)
class Batches:
    """Images uint8 [N, 3, 32, 32] and labels int64 [N] of both splits, as they lie in the files."""

    train_images: np.ndarray
    train_labels: np.ndarray
    test_images: np.ndarray
    test_labels: np.ndarray


def find_layout(root: Path) -> Path | None:
    """The first official folder or archive of CIFAR-10 in `root`, or None."""
    return next((root / name for name in LAYOUTS if (root / name).exists()), None)


def read_layout(path: Path) -> Batches:
    """Read any of the four official layouts.

    Raises:
        DataError: a batch is missing, truncated, of another shape, or a pickle that asks for more than arrays.
    """
    binary = path.name in (BINARY_FOLDER, BINARY_ARCHIVE)
    suffix = ".bin" if binary else ""
    read = read_binary_batch if binary else read_python_batch
    wanted = [f"{batch}{suffix}" for batch in (*TRAIN_BATCHES, TEST_BATCH)]
    contents = _from_folder(path, wanted) if path.is_dir() else _from_archive(path, wanted)
    batches = {name: read(content, path / name) for name, content in contents}
    missing = [name for name in wanted if name not in batches]
    if missing:
        raise DataError(f"{path.name} lacks {', '.join(missing)}", where=path, next_step=REMEDY)
    images, labels = zip(*(batches[name] for name in wanted), strict=True)
    return Batches(np.concatenate(images[:-1]), np.concatenate(labels[:-1]), images[-1].copy(), labels[-1])


def read_binary_batch(content: bytes, where: object) -> tuple[np.ndarray, np.ndarray]:
    """Images uint8 [N, 3, 32, 32] and labels int64 [N] of one binary batch.

    Raises:
        DataError: the size is not a whole number of 3073-byte records.
    """
    records, rest = divmod(len(content), RECORD_BYTES)
    if rest or not records:
        raise DataError(
            f"{len(content)} bytes are {records} records of {RECORD_BYTES} bytes and {rest} bytes more: "
            "truncated, or not CIFAR-10's binary layout",
            where=where,
            next_step=REMEDY,
        )
    table = np.frombuffer(content, np.uint8).reshape(records, RECORD_BYTES)
    return table[:, 1:].reshape(records, *IMAGE_SHAPE), table[:, 0].astype(np.int64)


def read_python_batch(content: bytes, where: object) -> tuple[np.ndarray, np.ndarray]:
    """Images uint8 [N, 3, 32, 32] and labels int64 [N] of one pickled batch; nothing in the file can run.

    Raises:
        DataError: not a pickle, a pickle that asks for a global which arrays do not need, or another content.
    """
    try:
        batch = _ArraysOnly(io.BytesIO(content), where).load()
    except DataError:
        raise
    except Exception as error:  # a broken pickle can raise nearly anything
        raise DataError(
            f"no readable pickle: {type(error).__name__}: {error}", where=where, next_step=REMEDY
        ) from error
    if not isinstance(batch, dict) or not {b"data", b"labels"} <= batch.keys():
        raise DataError("pickle is no dictionary with 'data' and 'labels'", where=where, next_step=REMEDY)
    images, labels = batch[b"data"], batch[b"labels"]
    if not (isinstance(images, np.ndarray) and images.dtype == np.uint8 and images.shape[1:] == (RECORD_BYTES - 1,)):
        shape = f"{images.dtype} {list(images.shape)}" if isinstance(images, np.ndarray) else type(images).__name__
        raise DataError(f"'data' is {shape}, expected uint8 [N, 3072]", where=where, next_step=REMEDY)
    if not (isinstance(labels, list) and all(type(label) is int for label in labels) and len(labels) == len(images)):
        raise DataError(f"'labels' is no list of {len(images)} integers", where=where, next_step=REMEDY)
    return images.reshape(-1, *IMAGE_SHAPE), np.array(labels, dtype=np.int64)


class _ArraysOnly(pickle.Unpickler):
    """Knows what a pickled NumPy array of bytes needs (under the module names of NumPy 1 and 2), and nothing else."""

    def __init__(self, file: io.BytesIO, where: object):
        super().__init__(file, encoding="bytes")
        self.where = where

    def find_class(self, module: str, name: str):
        if name == "_reconstruct" and module in ("numpy.core.multiarray", "numpy._core.multiarray"):
            return _empty_array
        if module == "numpy" and name in ("ndarray", "dtype"):
            return getattr(np, name)
        raise DataError(
            f"pickle asks for {module}.{name}, which no CIFAR-10 batch needs; nothing was run",
            where=self.where,
            next_step="do not trust this file: delete it and copy the official archive",
        )


def _empty_array(kind: type, shape: tuple, code: bytes) -> np.ndarray:
    if kind is not np.ndarray or shape != (0,):
        raise ValueError(f"array of kind {kind} and shape {shape}")
    return np.ndarray(shape, np.int8)  # the pickle's next step sets shape, dtype and content


def _from_folder(folder: Path, wanted: list[str]) -> Iterator[tuple[str, bytes]]:
    for name in wanted:
        try:
            yield name, (folder / name).read_bytes()
        except OSError as error:
            raise DataError(f"cannot read {name}: {error.strerror}", where=folder / name, next_step=REMEDY) from error


def _from_archive(archive: Path, wanted: list[str]) -> Iterator[tuple[str, bytes]]:
    try:
        with tarfile.open(archive, "r|gz") as tar:  # a stream: every byte is unpacked once and nothing touches the disk
            for member in tar:
                name = Path(member.name).name
                if member.isfile() and name in wanted:
                    yield name, tar.extractfile(member).read()
    except (tarfile.TarError, EOFError, OSError, zlib.error) as error:
        raise DataError(
            f"{archive.name} ({archive.stat().st_size} bytes) cannot be unpacked: {error}",
            where=archive,
            next_step=REMEDY,
        ) from error
