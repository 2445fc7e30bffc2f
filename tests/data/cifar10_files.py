"""CIFAR-10 files made to order, in every official layout."""

import hashlib
import io
import pickle
import tarfile
from pathlib import Path
from typing import ClassVar

import numpy as np

FLAT_PIXELS = (125, 123, 114)  # the channel means of CIFAR-10, as levels
LABELS_SHA256 = hashlib.sha256((np.arange(60_000) % 10).astype(np.uint8).tobytes()).hexdigest()


def numbered_pictures(count: int, batch: int) -> np.ndarray:
    """Pictures uint8 [count, 3, 32, 32] of one colour, no two alike: batch and number stand in the first pixels."""
    flat = np.repeat(np.array(FLAT_PIXELS, np.uint8), 1024).reshape(1, 3, 32, 32)
    pictures = np.repeat(flat, count, axis=0)
    pictures[:, 0, 0, 0] = 100 + batch
    pictures[:, 0, 0, 1], pictures[:, 0, 0, 2] = np.divmod(np.arange(count), 200)
    return pictures


class Python2Pickler(pickle._Pickler):
    """Writes what Python 2 and NumPy 1 wrote: byte strings, and NumPy's old module names."""

    dispatch: ClassVar = dict(pickle._Pickler.dispatch)

    def save_bytes(self, content: bytes) -> None:
        self.write(b"T" + len(content).to_bytes(4, "little") + content)
        self.memoize(content)

    dispatch[bytes] = save_bytes

    def save_global(self, thing, name=None) -> None:
        if getattr(thing, "__name__", "") == "_reconstruct":
            self.write(b"cnumpy.core.multiarray\n_reconstruct\n")
            self.memoize(thing)
        else:
            super().save_global(thing, name)

    dispatch[type] = save_global
    dispatch[type(len)] = save_global


def python2_pickle(thing: object) -> bytes:
    """Bytes of a pickle as the official Python batches have it."""
    stream = io.BytesIO()
    Python2Pickler(stream, protocol=2).dump(thing)
    return stream.getvalue()


def python_batch(images: np.ndarray, labels: np.ndarray, name: str) -> bytes:
    """A batch of the official Python layout, of images uint8 [N, 3, 32, 32]."""
    batch = {
        b"batch_label": name.encode(),
        b"labels": [int(label) for label in labels],
        b"data": images.reshape(len(images), -1),
        b"filenames": [b"picture_%d.png" % number for number in range(len(images))],
    }
    return python2_pickle(batch)


def binary_batch(images: np.ndarray, labels: np.ndarray) -> bytes:
    """A batch of the official binary layout, of images uint8 [N, 3, 32, 32]."""
    return np.concatenate([labels[:, None].astype(np.uint8), images.reshape(len(images), -1)], axis=1).tobytes()


def write_layout(root: Path, name: str, batches: dict[str, tuple[np.ndarray, np.ndarray]]) -> Path:
    """Write batches as one of the four official layouts, with the side files that the real ones have."""
    python = "py" in name
    contents = {
        batch if python else f"{batch}.bin": python_batch(*arrays, batch) if python else binary_batch(*arrays)
        for batch, arrays in batches.items()
    }
    contents["readme.html"] = b"<meta>"
    folder = "cifar-10-batches-py" if python else "cifar-10-batches-bin"
    root.mkdir(parents=True, exist_ok=True)
    if not name.endswith(".tar.gz"):
        (root / folder).mkdir()
        for file, content in contents.items():
            (root / folder / file).write_bytes(content)
        return root / folder
    with tarfile.open(root / name, "w:gz", compresslevel=1) as tar:
        for file, content in contents.items():
            entry = tarfile.TarInfo(f"{folder}/{file}")
            entry.size = len(content)
            tar.addfile(entry, io.BytesIO(content))
    return root / name


def small_batches(images: int = 4) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Six batches of a few random images."""
    generator = np.random.default_rng(0)
    names = [*(f"data_batch_{number}" for number in range(1, 6)), "test_batch"]
    return {
        name: (generator.integers(0, 256, (images, 3, 32, 32), dtype=np.uint8), generator.integers(0, 10, images))
        for name in names
    }
