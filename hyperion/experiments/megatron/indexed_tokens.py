"""Does this library read megatron-core's token files correctly?

megatron-core writes a file. Then megatron-core's reader and this library's reader read it, and the results are compared.
"""

from pathlib import Path

import numpy as np
import pandas as pd

from hyperion.chapter.context import Context, Experiment, Forecast, Options, Report, Result
from hyperion.chapter.rows import checked
from hyperion.chapter.variants import run_variant
from hyperion.data.text.indexed_tokens import index_bytes, read_index
from hyperion.experiments.megatron.bytes_of_text import DATA, documents
from hyperion.parallel.megatron.release import adapted_copy, use_adapted, why_unavailable

WRITER = "megatron-core"
SEQUENCES, DOCUMENTS, TOKENS, DIFFERENT = "sequences", "documents", "tokens", "tokens that differ from the text"
BIN_BYTES, IDX_BYTES = "bytes of .bin", "bytes of .idx"


class IndexedTokensOptions(Options):
    """Options of `indexed_tokens`.

    Args:
        lines: number of lines of the text. A line is a sequence.
        lines_of_a_document: number of lines of a document.
    """

    lines: int
    lines_of_a_document: int


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
