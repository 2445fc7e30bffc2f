"""Megatron's files of tokens: `.bin` has the tokens, and `.idx` has the length of each sequence and the start of each document.

A document may have several sequences, so the header has two counts. A reader that skips one of them reads garbage.
"""

import struct
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd

from hyperion.chapter.context import Context, Experiment, Forecast, Options, Report, Result
from hyperion.chapter.rows import checked
from hyperion.chapter.variants import run_variant
from hyperion.errors import HyperionError
from hyperion.experiments.megatron.bytes_of_text import DATA, documents
from hyperion.parallel.megatron.release import adapted_copy, use_adapted, why_unavailable

WRITER = "megatron-core"
SEQUENCES, DOCUMENTS, TOKENS, DIFFERENT = "sequences", "documents", "tokens", "tokens that differ from the text"
BIN_BYTES, IDX_BYTES = "bytes of .bin", "bytes of .idx"
_MAGIC = b"MMIDIDX\x00\x00"
_HEADER = struct.Struct("<QBQQ")  # version, code of the dtype, number of sequences, entries of the list of documents
_DTYPES = {1: "uint8", 2: "int8", 3: "int16", 4: "int32", 5: "int64", 6: "float64", 7: "float32", 8: "uint16"}


class IndexedTokensOptions(Options):
    """Options of `indexed_tokens`.

    Args:
        lines: number of lines of the text. A line is a sequence.
        lines_of_a_document: number of lines of a document.
    """

    lines: int
    lines_of_a_document: int


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


def read_index(path: Path) -> Index:
    """Read an `.idx` file without megatron-core.

    Raises:
        HyperionError: the file is no index, or its counts do not fit its size.
    """
    content = path.read_bytes()
    head = len(_MAGIC) + _HEADER.size
    if not content.startswith(_MAGIC) or len(content) < head:
        raise HyperionError(
            "no index of tokens: the first bytes are not MMIDIDX", where=str(path), next_step="write the files again"
        )
    version, code, sequences, entries = _HEADER.unpack_from(content, len(_MAGIC))
    if version != 1 or code not in _DTYPES or len(content) != index_bytes(sequences, entries - 1):
        raise HyperionError(
            f"version {version}, dtype {code}, {sequences} sequences and {entries} entries of documents need another size than "
            f"{len(content)} bytes",
            where=str(path),
            next_step="write the files again",
        )
    lengths = np.frombuffer(content, np.int32, sequences, head)
    starts = np.frombuffer(content, np.int64, sequences, head + lengths.nbytes)
    return Index(
        np.dtype(_DTYPES[code]), lengths, starts, np.frombuffer(content, np.int64, entries, head + lengths.nbytes + starts.nbytes)
    )


def index_bytes(sequences: int, documents: int) -> int:
    """Return the size of an `.idx` file: a header, 12 bytes for each sequence, and 8 for each document and for the end."""
    return len(_MAGIC) + _HEADER.size + 12 * sequences + 8 * (documents + 1)


def forecast(context: Context) -> list[Forecast]:
    """Predict the counts and the size of the index. The number of tokens depends on the text."""
    options = IndexedTokensOptions.of(context)
    papers = -(-options.lines // options.lines_of_a_document)
    size = index_bytes(options.lines, papers)
    return [
        Forecast(WRITER, "count", options.lines, "one sequence for each line", params=_params(options, SEQUENCES)),
        Forecast(WRITER, "count", papers, "lines / lines of a document, rounded up", params=_params(options, DOCUMENTS)),
        Forecast(WRITER, "count", size, "34 + 12 x sequences + 8 x (documents + 1)", params=_params(options, IDX_BYTES)),
    ]


def run(context: Context, report: Report) -> Result:
    """Write the text with megatron-core's writer, and read it with its reader and with `read_index`."""
    options = IndexedTokensOptions.of(context)
    if reason := why_unavailable():
        names = (SEQUENCES, DOCUMENTS, TOKENS, DIFFERENT)
        return Result(
            [context.absent_row(WRITER, "count", reason, params=_params(options, name)) for name in names], pd.DataFrame()
        )
    adapted_copy()
    return run_variant(context, report, round_trip)


EXPERIMENT = Experiment(forecast, run, data=DATA, options=IndexedTokensOptions)


def write_indexed(prefix: Path, sequences: list[np.ndarray], lines_of_a_document: int) -> None:
    """Write sequences with megatron-core's writer, as `prefix`.bin and `prefix`.idx.

    Args:
        prefix: path without the suffix.
        sequences: the tokens of each sequence, uint8.
        lines_of_a_document: number of sequences of a document.
    """
    import torch
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder  # pyright: ignore[reportMissingImports]

    builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=np.uint8)
    for first in range(0, len(sequences), lines_of_a_document):
        document = sequences[first : first + lines_of_a_document]
        builder.add_document(torch.from_numpy(np.concatenate(document)), [len(sequence) for sequence in document])
    builder.finalize(f"{prefix}.idx")


def read_indexed(prefix: Path) -> np.ndarray:
    """Return all tokens of the files that `write_indexed` wrote, read with megatron-core's reader."""
    from megatron.core.datasets.indexed_dataset import IndexedDataset  # pyright: ignore[reportMissingImports]

    stored = IndexedDataset(str(prefix))
    return np.concatenate([stored[number] for number in range(len(stored))])


def round_trip(context: Context, report: Report) -> Result:
    """Write the text and read it back. Return the counts as rows."""
    options = IndexedTokensOptions.of(context)
    use_adapted()
    from megatron.core.datasets.indexed_dataset import IndexedDataset  # pyright: ignore[reportMissingImports]

    lines, source = documents(context)
    lines = lines[: options.lines]
    prefix = context.workspace / "text"
    write_indexed(prefix, lines, options.lines_of_a_document)
    index, theirs = read_index(prefix.with_suffix(".idx")), IndexedDataset(str(prefix))
    text = np.concatenate(lines)
    stored = read_indexed(prefix)
    papers = -(-len(lines) // options.lines_of_a_document)
    different = int((stored != text).sum()) if len(stored) == len(text) else max(len(stored), len(text))
    own = np.fromfile(prefix.with_suffix(".bin"), index.dtype)
    found = (
        (SEQUENCES, len(index.lengths), len(lines), len(theirs.sequence_lengths)),
        (DOCUMENTS, len(index.documents) - 1, papers, len(theirs.document_indices) - 1),
        (TOKENS, int(index.lengths.sum()), len(text), int(theirs.sequence_lengths.sum())),
        (DIFFERENT, different, 0, int((own != text).sum())),
        (BIN_BYTES, prefix.with_suffix(".bin").stat().st_size, text.nbytes, text.nbytes),
        (IDX_BYTES, prefix.with_suffix(".idx").stat().st_size, index_bytes(len(lines), papers), index_bytes(len(lines), papers)),
    )
    rows = [
        context.row(
            WRITER,
            "count",
            ours,
            params=_params(options, name),
            data_source=source,
            **checked("the text, and megatron-core's reader", max(abs(ours - expected), abs(ours - megatron)), 0),
        )
        for name, ours, expected, megatron in found
    ]
    return Result(rows, pd.DataFrame(), source)


def _params(options: IndexedTokensOptions, what: str) -> dict:
    return {"what": what, "lines": options.lines, "lines_of_a_document": options.lines_of_a_document}
