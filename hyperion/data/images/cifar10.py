"""Load CIFAR-10 from a mirror, the cache or its official address. Verify the files before use, and never run code in them.

CIFAR-10 is published in two layouts, Python and binary. Each layout exists as a folder and as an archive. A record of the
binary layout is one label byte and 3072 pixel bytes (the red, green and blue planes, row by row). A file of the Python layout
is a pickled dict. The pickle reader in this module calls no functions, and accepts only the three globals that such a file
needs.

Source: Krizhevsky, Learning Multiple Layers of Features from Tiny Images, 2009;
https://www.cs.toronto.edu/~kriz/cifar.html
"""

import gzip
import hashlib
import io
import pickletools
import tarfile
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, cast

import numpy as np

from hyperion.data.images.imageset import CIFAR10, IMAGE_SHAPE, ImageSet, channel_statistics, check_split, synthetic_images
from hyperion.data.store.folders import DataError, DataUnavailable, read_manifest, staged, write_manifest
from hyperion.data.store.overlap import image_overlap, require_little_overlap
from hyperion.data.store.sources import Checksums, PublishedSet, compare_checksums, download, take
from hyperion.errors import not_none
from hyperion.untrusted import open_regular, printable, read_bounded

RECORD_BYTES = 1 + 3 * 32 * 32
CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
TRAIN_BATCHES = tuple(f"data_batch_{number}" for number in range(1, 6))
TEST_BATCH = "test_batch"
PYTHON_FOLDER, PYTHON_ARCHIVE = "cifar-10-batches-py", "cifar-10-python.tar.gz"
BINARY_FOLDER, BINARY_ARCHIVE = "cifar-10-batches-bin", "cifar-10-binary.tar.gz"
LAYOUTS = (PYTHON_FOLDER, PYTHON_ARCHIVE, BINARY_FOLDER, BINARY_ARCHIVE)
BATCH_BYTES = 1 << 26  # maximum size of a batch file; the official files have 31 MB
UNPACKED_BYTES = 1 << 28  # maximum size of an unpacked archive; the official archives have 186 MB
# Maximum number of opcodes in a pickle. An official pickle has about 40,000: two for each label and each file name.
CODES = 200_000
REMEDY = "copy the file again from its source, or remove it and run `make fetch`"
URL = "https://www.cs.toronto.edu/~kriz/cifar-10-python.tar.gz"
FOLDER = "cifar-10"  # name of the folder in the cache; a mirror has the official files at its top level
COUNTS = {"train": 50_000, "test": 10_000}
TRAIN_MEANS = (0.4914, 0.4822, 0.4465)
MEAN_TOLERANCE_OFFICIAL = 1e-4  # tolerance for the official pixels, because the published means have four digits
MEAN_TOLERANCE_OTHER = 5e-3  # tolerance for re-encoded pixels, because lossy compression at 37 dB shifts a mean by up to 3e-3
# Hash of all labels in the official order, first train, then test, one byte per label. If the pixels were re-encoded, no
# published checksum applies, but the labels must still match. Permuted labels would have correct counts, but a model could not
# learn from them.
LABELS_SHA256 = "3edb456524d5918aefded81f5aef7c32efab2a788211df998a4eb0c8957baa1f"
# The md5 hashes of the archives are from the web page of the data set, and those of the files in the Python layout from
# torchvision.
OFFICIAL_MD5 = {
    PYTHON_ARCHIVE: "c58f30108f718f92721af3b95e74349a",
    BINARY_ARCHIVE: "c32a1d4ab5d03f1284b67883e8d87530",
    "data_batch_1": "c99cafc152244af753f735de768cd75f",
    "data_batch_2": "d4bba439e000b95fd0a9bffe97cbabec",
    "data_batch_3": "54ebc095f3ab1f0389bbae665268c751",
    "data_batch_4": "634d18415352ddfa80567beed471001a",
    "data_batch_5": "482c414d41f54cd18b22e5b47cb7c3cb",
    "test_batch": "40351d587109b95175f43aff81a1287e",
}


def load_cifar10(
    source: str = "auto",
    *,
    allow_synthetic: bool = True,
    synthetic_counts: dict[str, int] = COUNTS,
    seed: int = 0,
    url: str = URL,
) -> ImageSet:
    """Load CIFAR-10, or the synthetic image set if it is requested or allowed as a fallback.

    Args:
        source: 'auto', 'mirror', 'cache', 'download' or 'synthetic'.
        allow_synthetic: if True, 'auto' uses the synthetic set if no other source has CIFAR-10.
        synthetic_counts, seed: number of images per split, and seed, of the synthetic set; not used for CIFAR-10.
        url: address of cifar-10-python.tar.gz; the file must have the official md5.

    Raises:
        DataError: a file is missing, truncated or unsafe; the number of records, the pixels or the labels are not those of
            CIFAR-10; the train split contains images of the test split; or no source has the data set.
    """
    suppliers = {**published(url).suppliers(), "synthetic": lambda: synthetic_images(synthetic_counts, seed)}
    return take(CIFAR10, source, suppliers, allow_synthetic)


def published(url: str = URL) -> PublishedSet[ImageSet]:
    """Return the official CIFAR-10, downloaded from `url` if necessary.

    In a mirror, the files are at the top level under their official names.
    """

    def fetch(target: Path) -> None:
        with staged(target) as work:
            # The publisher states only md5, which detects damage. Labels, counts and pixels are checked when the file is read.
            download(url, work / PYTHON_ARCHIVE, md5=OFFICIAL_MD5[PYTHON_ARCHIVE])
            write_manifest(work, name=FOLDER, source="download", detail=f"downloaded from {url}")

    return PublishedSet(FOLDER, _read, lambda root: layout_files(not_none(find_layout(root))), fetch, at_top=True)


def checksums(layout: Path, note: str = "") -> Checksums:
    """Compare the md5 hashes of a layout's files with the published ones. For the unpacked binary layout, none are published.

    Args:
        layout: official folder or archive, as `find_layout` returns it.
        note: what was checked instead, for files that do not have the published md5.
    """
    return compare_checksums({file: OFFICIAL_MD5.get(file.name, "") for file in layout_files(layout)}, "md5", note)


def _read(root: Path, source: str, label: str) -> ImageSet:
    layout = find_layout(root)
    if layout is None:
        raise DataUnavailable(
            f"{label} has no CIFAR-10", where=root, next_step=f"put one of {', '.join(LAYOUTS)} there, or run `make fetch`"
        )
    manifest = None if source == "mirror" else read_manifest(root)  # the top level of a mirror belongs to its owner
    if manifest is not None:
        manifest.verify(root)
    batches = read_layout(layout)
    for split, images, labels in (
        ("train", batches.train_images, batches.train_labels),
        ("test", batches.test_images, batches.test_labels),
    ):
        check_split(images, labels, len(CLASSES), f"{layout}, {split} split")
        _require_balance(split, labels, layout)
    _require_labels(batches.train_labels, batches.test_labels, layout)
    shift = _require_means(batches.train_images, layout)
    overlap = image_overlap(batches.train_images, batches.test_images)
    require_little_overlap(overlap, "images", layout)
    lossy = "lossy mirror: other pixels than the official ones" if shift > MEAN_TOLERANCE_OFFICIAL else "pixels unproven"
    compared = checksums(layout, f"{lossy}, means within {shift:.1e}")
    detail = (
        f"{layout.name}: {compared}; counts and labels verified, {overlap['test'].repeated} test images among the train images"
    )
    arrays = (batches.train_images, batches.train_labels, batches.test_images, batches.test_labels)
    return ImageSet(CIFAR10, source, detail, *arrays, CLASSES, ("crop", "flip"), checksums=compared)


def _require_balance(split: str, labels: np.ndarray, layout: Path) -> None:
    expected = COUNTS[split] // len(CLASSES)
    counts = np.bincount(labels, minlength=len(CLASSES))
    remedy = "the files are incomplete or belong to another data set: copy the official archive"
    if len(labels) != COUNTS[split]:
        raise DataError(f"{split} split has {len(labels)} images, expected {COUNTS[split]}", where=layout, next_step=remedy)
    for name, count in zip(CLASSES, counts, strict=True):
        if count != expected:
            raise DataError(
                f"{split} split has {count} images of class {name}, expected {expected}", where=layout, next_step=remedy
            )


def _require_labels(train: np.ndarray, test: np.ndarray, layout: Path) -> None:
    """Check that the labels have the official order. Permuted labels would pass all other checks."""
    found = hashlib.sha256(np.concatenate([train, test]).astype(np.uint8).tobytes()).hexdigest()  # all are 0 to 9
    if found != LABELS_SHA256:
        raise DataError(
            f"the labels have sha256 {found[:12]}, expected {LABELS_SHA256[:12]}: the labels are permuted or the records "
            "shuffled, so the labels may belong to other images",
            where=layout,
            next_step="copy CIFAR-10 with its records in the official order",
        )


def _require_means(images: np.ndarray, layout: Path) -> float:
    tolerance = MEAN_TOLERANCE_OTHER
    means, _ = channel_statistics(images)
    shift = max(abs(mean - official) for mean, official in zip(means, TRAIN_MEANS, strict=True))
    if shift > tolerance:
        raise DataError(
            f"channel means of the train split are {', '.join(f'{mean:.4f}' for mean in means)}, "
            f"expected {', '.join(map(str, TRAIN_MEANS))} within {tolerance:g}",
            where=layout,
            next_step="these are not the pixels of CIFAR-10 (channel order, scale or content): copy the official archive",
        )
    return shift


@dataclass(frozen=True)
class SplitArrays:
    """Images (uint8 [N, 3, 32, 32]) and labels (int64 [N]) of both splits, in the order of the files."""

    train_images: np.ndarray
    train_labels: np.ndarray
    test_images: np.ndarray
    test_labels: np.ndarray


def find_layout(root: Path) -> Path | None:
    """Return the first official folder or archive of CIFAR-10 in `root`, or None if there is none."""
    return next((root / name for name in LAYOUTS if (root / name).exists()), None)


def layout_files(path: Path) -> list[Path]:
    """Return the data files of a layout: the archive, or the six batches of the folder."""
    return [path / name for name in _batch_names(path)] if path.is_dir() else [path]


def _batch_names(path: Path) -> list[str]:
    suffix = ".bin" if path.name in (BINARY_FOLDER, BINARY_ARCHIVE) else ""
    return [f"{batch}{suffix}" for batch in (*TRAIN_BATCHES, TEST_BATCH)]


def read_layout(path: Path) -> SplitArrays:
    """Read any of the four official layouts.

    Raises:
        DataError: a batch file is missing or truncated, has another shape, or is a pickle that contains more than arrays.
    """
    binary = path.name in (BINARY_FOLDER, BINARY_ARCHIVE)
    read = read_binary_batch if binary else read_python_batch
    wanted = _batch_names(path)
    contents = _from_folder(path, wanted) if path.is_dir() else _from_archive(path, wanted)
    batches = {name: read(content, path / name) for name, content in contents}
    missing = [name for name in wanted if name not in batches]
    if missing:
        raise DataError(f"{path.name} lacks {', '.join(missing)}", where=path, next_step=REMEDY)
    # Sort in the order of `wanted` (five train batches, then the test batch), because an archive may have another order.
    images, labels = zip(*(batches[name] for name in wanted), strict=True)
    # The test images are a view into the bytes of their file. A copy releases these bytes.
    return SplitArrays(np.concatenate(images[:-1]), np.concatenate(labels[:-1]), images[-1].copy(), labels[-1])


def read_binary_batch(content: bytes, where: object) -> tuple[np.ndarray, np.ndarray]:
    """Return the images (uint8 [N, 3, 32, 32]) and labels (int64 [N]) of one binary batch.

    Raises:
        DataError: the size is not a whole number of 3073-byte records.
    """
    records, rest = divmod(len(content), RECORD_BYTES)
    if rest or not records:
        raise DataError(
            f"{len(content)} bytes are {records} records of {RECORD_BYTES} bytes and {rest} extra bytes: "
            "the file is truncated, or it is not a file of CIFAR-10's binary layout",
            where=where,
            next_step=REMEDY,
        )
    table = np.frombuffer(content, np.uint8).reshape(records, RECORD_BYTES)
    return table[:, 1:].reshape(records, *IMAGE_SHAPE), table[:, 0].astype(np.int64)


def read_python_batch(content: bytes, where: object) -> tuple[np.ndarray, np.ndarray]:
    """Return the images (uint8 [N, 3, 32, 32]) and labels (int64 [N]) of one pickled batch, without executing the pickle.

    Raises:
        DataError: the content is not a pickle, the pickle refers to a global that arrays do not need, or it does not contain
            the images and labels of CIFAR-10.
    """
    batch = _unpickled(content, where)
    batch = {_text(key): value for key, value in batch.items()} if type(batch) is dict else {}
    if not {"data", "labels"} <= batch.keys():
        raise DataError("the pickle is not a dictionary with 'data' and 'labels'", where=where, next_step=REMEDY)
    images, labels = batch["data"], batch["labels"]
    if not isinstance(images, _Pickled) or images.name not in _ARRAYS:
        raise DataError(f"'data' is {type(images).__name__}, expected uint8 [N, 3072]", where=where, next_step=REMEDY)
    pixels = _array(images, where)
    # `isinstance` would accept True as a label.
    if not (type(labels) is list and all(type(label) is int for label in labels) and len(labels) == len(pixels)):
        raise DataError(f"'labels' is not a list of {len(pixels)} integers", where=where, next_step=REMEDY)
    wrong = next((number for number, label in enumerate(labels) if not 0 <= label < 1 << 31), None)
    if wrong is not None:
        fault = f"record {wrong} has the label {str(labels[wrong])[:20]}, which is not a class"
        raise DataError(fault, where=where, next_step=REMEDY)
    return pixels.reshape(-1, *IMAGE_SHAPE), np.array(labels, dtype=np.int64)


@dataclass
class _Pickled:
    """Description of a pickled object: the call that would create it (this call is never made), and the object's state."""

    name: str
    arguments: tuple = ()
    state: Any = None


_ARRAYS = ("numpy.core.multiarray _reconstruct", "numpy._core.multiarray _reconstruct")  # NumPy 1 and 2
_GLOBALS = (*_ARRAYS, "numpy ndarray", "numpy dtype")
_MARK = object()
_CONSTANTS = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False}


def _unpickled(content: bytes, where: object) -> object:
    """Parse a pickle of dicts, lists, tuples, strings, numbers and NumPy arrays without executing it, and return its object.

    Python's unpickler is unsafe: it calls any function that the file names, and allocates arrays and tables of any size that
    the file declares. This function accepts only the opcodes that a CIFAR-10 batch file needs, and needs at most a small
    multiple of the file size as memory.

    Raises:
        DataError: the pickle has another opcode or global, or is broken.
    """
    # Pickle's virtual machine has a stack of objects, and a memo that stores objects for later references.
    stack: list = []
    memory: dict[int, object] = {}

    def above_mark() -> list:
        at = len(stack) - 1 - next(place for place, item in enumerate(reversed(stack)) if item is _MARK)
        items = stack[at + 1 :]
        del stack[at:]
        return items

    try:
        argument: Any  # the type of the argument depends on the opcode
        # `genops` only decodes opcodes. It imports and calls nothing.
        for number, (code, argument, _) in enumerate(pickletools.genops(content)):
            if number > CODES:
                raise ValueError(f"more than {CODES} opcodes")
            match code.name:
                case "PROTO" | "FRAME":
                    pass
                case "STOP":
                    return stack.pop()
                case "MARK":
                    stack.append(_MARK)
                case "NONE" | "NEWTRUE" | "NEWFALSE":
                    stack.append(_CONSTANTS[code.name])
                case "BININT" | "BININT1" | "BININT2" | "INT" | "LONG" | "LONG1":
                    stack.append(argument)
                case "STRING" | "BINSTRING" | "SHORT_BINSTRING":
                    stack.append(argument.encode("latin-1"))  # Python 2 strings are bytes
                case "BINBYTES" | "SHORT_BINBYTES" | "BINBYTES8":
                    stack.append(argument)
                case "UNICODE" | "BINUNICODE" | "SHORT_BINUNICODE":
                    stack.append(argument)
                case "EMPTY_DICT":
                    stack.append({})
                case "EMPTY_LIST":
                    stack.append([])
                case "EMPTY_TUPLE":
                    stack.append(())
                case "DICT":
                    items = above_mark()
                    stack.append(_filled({}, items))
                case "LIST":
                    stack.append(above_mark())
                case "TUPLE":
                    stack.append(tuple(above_mark()))
                case "TUPLE1" | "TUPLE2" | "TUPLE3":
                    size = int(code.name[-1])
                    stack[-size:] = [tuple(stack[-size:])]
                case "PUT" | "BINPUT" | "LONG_BINPUT":
                    memory[argument] = stack[-1]
                case "MEMOIZE":
                    # MEMOIZE has no argument: it uses the number of entries as the key.
                    memory[len(memory)] = stack[-1]
                case "GET" | "BINGET" | "LONG_BINGET":
                    stack.append(memory[argument])
                case "APPEND":
                    item = stack.pop()
                    _list(stack[-1]).append(item)
                case "APPENDS":
                    items = above_mark()
                    _list(stack[-1]).extend(items)
                case "SETITEM":
                    # The value is on top of the stack, and the key is below it.
                    items = [stack.pop(-2), stack.pop()]
                    _filled(stack[-1], items)
                case "SETITEMS":
                    items = above_mark()
                    _filled(stack[-1], items)
                case "GLOBAL" | "STACK_GLOBAL":
                    if code.name == "STACK_GLOBAL":
                        argument = f"{stack.pop(-2)} {stack.pop()}"
                    if argument not in _GLOBALS:
                        raise DataError(
                            f"the pickle refers to {printable(argument[:80]).replace(' ', '.')}, which no CIFAR-10 batch needs; "
                            "nothing was executed",
                            where=where,
                            next_step="do not trust this file: delete it and copy the official archive",
                        )
                    stack.append(_Pickled(argument))
                case "REDUCE":
                    arguments, function = stack.pop(), stack.pop()
                    if type(arguments) is not tuple:  # copying a long list again and again could exhaust the memory
                        raise TypeError(f"arguments are {type(arguments).__name__}")
                    stack.append(_Pickled(function.name, arguments))
                case "BUILD":
                    state = stack.pop()
                    stack[-1].state = state
                case other:
                    raise ValueError(f"the opcode {other}, which no CIFAR-10 batch needs")
    except DataError:
        raise
    except Exception as error:  # a broken pickle can raise nearly anything
        fault = f"not a readable pickle: {type(error).__name__}: {printable(str(error)[:200])}"
        raise DataError(fault, where=where, next_step=REMEDY) from error
    raise DataError("not a readable pickle: it has no end", where=where, next_step=REMEDY)


def _list(item: object) -> list:
    if type(item) is not list:
        raise TypeError(f"items for {type(item).__name__}")
    return item


def _filled(table: object, items: list) -> dict:
    """Add alternating keys and values to a dict. Keys must be strings or bytes, and each key must occur only once."""
    if type(table) is not dict:
        raise TypeError(f"keys for {type(table).__name__}")
    for key, value in zip(items[::2], items[1::2], strict=True):
        if not isinstance(key, bytes | str) or key in table:
            raise ValueError("a key that is not a string, or a duplicate key")
        table[key] = value
    return table


def _text(key: bytes | str) -> str:
    return key.decode("latin-1") if isinstance(key, bytes) else key


def _array(pickled: _Pickled, where: object) -> np.ndarray:
    """Convert the description of a pickled array to a uint8 array [N, 3072].

    The state of a pickled array is (version, shape, dtype, Fortran order, content). The dtype is a code such as "u1".
    """
    try:
        _, shape, dtype, fortran, content = pickled.state
        code = dtype.arguments[0]
        code = _text(code)
        if isinstance(content, str):
            content = content.encode("latin-1")
        if dtype.name != "numpy dtype" or code not in ("u1", "|u1") or fortran not in (0, False):
            raise ValueError(f"type {code!r:.20}, Fortran order {fortran!r:.20}")
        records, width = shape
        if type(records) is not int or type(width) is not int or not isinstance(content, bytes):
            raise ValueError("the shape has no integers, or the content is not bytes")
        if width != RECORD_BYTES - 1 or records < 1 or records * width != len(content):
            fault = f"'data' is uint8 [{records}, {width}] in {len(content)} bytes, expected uint8 [N, 3072]"
            raise DataError(fault, where=where, next_step=REMEDY)
    except (ValueError, TypeError, AttributeError, IndexError) as error:
        fault = f"'data' is not an array of bytes: {printable(str(error)[:200])}"
        raise DataError(fault, where=where, next_step=REMEDY) from error
    return np.frombuffer(content, np.uint8).reshape(records, width)


def _from_folder(folder: Path, wanted: list[str]) -> Iterator[tuple[str, bytes]]:
    for name in wanted:
        try:
            yield name, read_bounded(folder / name, DataError, REMEDY, BATCH_BYTES)
        except OSError as error:
            raise DataError(f"cannot read {name}: {error.strerror}", where=folder / name, next_step=REMEDY) from error


def _from_archive(archive: Path, wanted: list[str]) -> Iterator[tuple[str, bytes]]:
    """Yield the requested batch files of an archive. The archive is read once as a stream, and nothing is written to disk."""
    folder = PYTHON_FOLDER if archive.name == PYTHON_ARCHIVE else BINARY_FOLDER
    names = {f"{folder}/{name}": name for name in wanted}
    seen: set[str] = set()
    try:
        with (
            open_regular(archive, DataError, REMEDY) as file,
            gzip.GzipFile(fileobj=file) as unpacked,
            tarfile.open(fileobj=cast(IO[bytes], _Bounded(unpacked, UNPACKED_BYTES)), mode="r|") as tar,
        ):
            for member in tar:
                name = names.get(member.name)
                # Links, devices and folders in an archive are skipped.
                if name is None or not member.isfile():
                    continue
                if name in seen or member.size > BATCH_BYTES:
                    fault = f"{name} occurs twice in the archive" if name in seen else f"{name} has {member.size} bytes"
                    raise DataError(fault, where=archive, next_step=REMEDY)
                seen.add(name)
                yield name, cast(IO[bytes], tar.extractfile(member)).read()  # never None for a regular file
    except (tarfile.TarError, EOFError, OSError, ValueError, OverflowError, zlib.error) as error:
        raise DataError(
            f"{archive.name} ({archive.stat().st_size} bytes) cannot be unpacked: {error}", where=archive, next_step=REMEDY
        ) from error


class _Bounded(io.RawIOBase):
    """Stream that raises an error after `limit_bytes` bytes. It is needed because a small archive can unpack to any size."""

    def __init__(self, stream: gzip.GzipFile, limit_bytes: int):
        self._stream, self._left = stream, limit_bytes

    def readable(self) -> bool:
        return True

    def read(self, size: int = -1) -> bytes:
        """Read at most `size` bytes.

        Raises:
            OSError: the stream exceeds its limit.
        """
        # Reading one byte beyond the limit detects a stream that is too long.
        content = self._stream.read(min(size, self._left + 1) if size >= 0 else self._left + 1)
        self._left -= len(content)
        if self._left < 0:
            raise OSError("it unpacks to more bytes than CIFAR-10 has")
        return content
