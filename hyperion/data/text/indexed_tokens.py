"""Read and write Megatron's token files: a `.bin` file with the tokens, and an `.idx` file with the index.

The index contains the length of each sequence and the first sequence of each document. A document may have several sequences, so
the header has two counts. A reader that skips one of the counts reads all later fields at wrong offsets. All numbers are
little-endian here. megatron-core uses the byte order of the machine, which is the same on all machines that it supports.

Source of the format: megatron-core 0.16.1, megatron/core/datasets/indexed_dataset.py.
"""

import hashlib
import struct
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import DTypeLike

from hyperion.data.store.arrays import narrowed
from hyperion.data.store.folders import DataError, sha256_of
from hyperion.untrusted import open_regular

_MAGIC = b"MMIDIDX\x00\x00"
_HEADER = struct.Struct("<QBQQ")  # version, code of the dtype, number of sequences, length of the list of documents
_VERSION = 1
_DTYPES = {1: "u1", 2: "i1", 3: "<i2", 4: "<i4", 5: "<i8", 6: "<f8", 7: "<f4", 8: "<u2"}
_CODES = {np.dtype(name): code for code, name in _DTYPES.items()}
_UINT16_BELOW = 65500  # megatron-core stores the tokens of smaller vocabularies as uint16, and others as int32
AGAIN = "write the files again"


@dataclass(frozen=True)
class Index:
    """The content of an `.idx` file.

    Args:
        dtype: dtype of the tokens in the `.bin` file.
        lengths: number of tokens of each sequence, int32.
        starts: offset in bytes of each sequence in the `.bin` file, int64.
        documents: number of the first sequence of each document, and at the end the number of sequences, int64.
    """

    dtype: np.dtype
    lengths: np.ndarray
    starts: np.ndarray
    documents: np.ndarray


@dataclass(frozen=True)
class TokenFingerprint:
    """Counts and hashes of a pair of token files. They are the same on every machine.

    Args:
        documents, sequences, tokens: the counts.
        sha256: hash of the tokens as little-endian bytes, which are the content of the `.bin` file.
        index_sha256: hash of the `.idx` file.
    """

    documents: int
    sequences: int
    tokens: int
    sha256: str
    index_sha256: str


class IndexedTokensWriter:
    """Writer of the files `prefix`.bin and `prefix`.idx, which must not exist yet. Use it as a context manager.

    Args:
        prefix: path without the suffix.
        dtype: dtype of the tokens in the file.
    """

    def __init__(self, prefix: Path, dtype: DTypeLike):
        self._index_path, self._dtype = _file(prefix, ".idx"), np.dtype(dtype).newbyteorder("<")
        self._lengths: list[int] = []
        self._documents = [0]
        self._digest = hashlib.sha256()
        self._tokens = open(_file(prefix, ".bin"), "xb")  # noqa: SIM115 - closed by `close`

    def add_sequence(self, tokens: np.ndarray) -> None:
        """Append a sequence to the current document.

        Raises:
            DataError: the dtype of the file cannot represent a token.
        """
        content = narrowed(tokens, self._dtype, self._tokens.name).tobytes()
        self._tokens.write(content)
        self._digest.update(content)
        self._lengths.append(len(tokens))

    def end_document(self) -> None:
        """End the current document. The next sequence belongs to a new document."""
        self._documents.append(len(self._lengths))

    def close(self) -> TokenFingerprint:
        """Write the `.idx` file, and return the counts and hashes of both files."""
        self._tokens.close()
        lengths = np.array(self._lengths, "<i4")
        documents = np.array(self._documents, "<i8")
        header = _MAGIC + _HEADER.pack(_VERSION, _CODES[self._dtype], len(lengths), len(documents))
        index = header + lengths.tobytes() + _starts(lengths, self._dtype).tobytes() + documents.tobytes()
        with open(self._index_path, "xb") as file:
            file.write(index)
        tokens = int(lengths.sum(dtype=np.int64))
        hashed = self._digest.hexdigest(), hashlib.sha256(index).hexdigest()
        return TokenFingerprint(len(documents) - 1, len(lengths), tokens, *hashed)

    def __enter__(self) -> "IndexedTokensWriter":
        return self

    def __exit__(self, *_: object) -> None:
        self._tokens.close()


def stored_dtype(vocab_size: int) -> np.dtype:
    """Return the dtype with which megatron-core stores the tokens of a vocabulary of this size."""
    return np.dtype("<u2" if vocab_size < _UINT16_BELOW else "<i4")


def read_index(path: Path) -> Index:
    """Read an `.idx` file without megatron-core.

    Raises:
        DataError: the file is missing or is not an index, its counts do not match its size, a sequence does not start where the
            previous one ends, or the documents do not cover all sequences in order.
    """
    try:
        with open_regular(path, DataError, AGAIN) as file:
            content = file.read()
    except OSError as error:
        raise DataError(f"cannot read {path.name}: {error.strerror}", where=path, next_step=AGAIN) from error
    head = len(_MAGIC) + _HEADER.size
    if not content.startswith(_MAGIC) or len(content) < head:
        raise DataError("no index of tokens: the first bytes are not MMIDIDX", where=path, next_step=AGAIN)
    version, code, sequences, entries = _HEADER.unpack_from(content, len(_MAGIC))
    if version != _VERSION or code not in _DTYPES or len(content) != index_bytes(sequences, entries - 1):
        raise DataError(
            f"version {version}, dtype {code}, {sequences} sequences and {entries} entries of documents need another size than "
            f"{len(content)} bytes",
            where=path,
            next_step=AGAIN,
        )
    lengths = np.frombuffer(content, "<i4", sequences, head)
    starts = np.frombuffer(content, "<i8", sequences, head + lengths.nbytes)
    documents = np.frombuffer(content, "<i8", entries, head + lengths.nbytes + starts.nbytes)
    dtype = np.dtype(_DTYPES[code])
    wrong = np.flatnonzero((lengths < 0) | (starts != _starts(lengths, dtype)))
    if wrong.size:
        raise DataError(f"sequence {wrong[0]} has a wrong length or start", where=path, next_step=AGAIN)
    if not entries or documents[0] != 0 or documents[-1] != sequences or (np.diff(documents) < 0).any():
        raise DataError(f"the documents do not divide the {sequences} sequences", where=path, next_step=AGAIN)
    return Index(dtype, lengths, starts, documents)


def index_bytes(sequences: int, documents: int) -> int:
    """Return the size of an `.idx` file: the header, 12 bytes per sequence, 8 bytes per document, and 8 bytes for the end."""
    return len(_MAGIC) + _HEADER.size + 12 * sequences + 8 * (documents + 1)


def token_fingerprint(prefix: Path) -> TokenFingerprint:
    """Read the files `prefix`.bin and `prefix`.idx, and return their counts and hashes.

    Raises:
        DataError: the `.idx` file is wrong (see `read_index`), the `.bin` file is missing, or its size differs from that in the
            index.
    """
    tokens, index_path = _file(prefix, ".bin"), _file(prefix, ".idx")
    index = read_index(index_path)
    count = int(index.lengths.sum(dtype=np.int64))
    size = tokens.stat().st_size if tokens.is_file() else None
    if size != count * index.dtype.itemsize:
        found = "is missing" if size is None else f"has {size} bytes"
        what = f"{tokens.name} {found}, but its index states {count} tokens of {index.dtype.itemsize} bytes"
        raise DataError(what, where=tokens, next_step=AGAIN)
    hashed = sha256_of(tokens), sha256_of(index_path)
    return TokenFingerprint(len(index.documents) - 1, len(index.lengths), count, *hashed)


def _file(prefix: Path, suffix: str) -> Path:
    # `with_suffix` cannot be used, because it would replace the end of a name such as c4.en.
    return Path(f"{prefix}{suffix}")


def _starts(lengths: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """Return the offset of each sequence in bytes, which is the total size of all earlier sequences."""
    sizes = lengths.astype("<i8") * dtype.itemsize
    return (np.cumsum(sizes) - sizes).astype("<i8")
