"""Write a corpus as Megatron's token files: one pair of files for each split, and a fingerprint that is equal on all machines.

The files for a path prefix are `PREFIX_<split>.bin`, `PREFIX_<split>.idx` and the fingerprint, `PREFIX.json`. The fingerprint
contains counts and hashes, but no path, no time and no other property of the machine. So two machines have the same tokens if
their fingerprints are equal.
"""

import contextlib
import gzip
import hashlib
import json
import os
import re
import tempfile
import zlib
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

import numpy as np

from hyperion.data.store.folders import DataError, sha256_of
from hyperion.data.text.corpus import LINE_BYTES, SPLITS, TextCorpus
from hyperion.data.text.encoding import workers_for
from hyperion.data.text.indexed_tokens import AGAIN, IndexedTokensWriter, TokenFingerprint, stored_dtype, token_fingerprint
from hyperion.data.text.tokenizer import Tokenizer
from hyperion.errors import refused_write
from hyperion.forms import read_form
from hyperion.paths import flush
from hyperion.untrusted import open_regular, parse_json, read_json

Split = Literal["train", "validation", "test"]
# The split of a document, and the texts of the document. Each text becomes a sequence.
Document = tuple[Split, Sequence[str]]
_SPLIT_OF: dict[str, Split] = {"train": "train", "valid": "validation", "test": "test"}
HELD_OUT_EVERY = 20  # on average, one of 20 documents of a file is put into the test split
_COUNTS = ("documents", "sequences", "tokens")
_NO_FILE = "give a file with a JSON object in each line"
_TITLE = re.compile(r" = [^=].* = \n")  # title of an article; titles of sections have more equals signs


@dataclass(frozen=True)
class Source:
    """Name and hash of a text or a tokenizer."""

    name: str
    sha256: str


@dataclass(frozen=True)
class TokenFiles:
    """Fingerprint: names, counts and hashes that identify the token files that were written with one prefix.

    Args:
        data: name of the text, and hash of its content.
        tokenizer: name of the tokenizer, and hash of its definition.
        dtype: dtype of the tokens.
        splits: counts and hashes of each pair of files.
    """

    data: Source
    tokenizer: Source
    dtype: str
    splits: dict[Split, TokenFingerprint]


def write_corpus_tokens(prefix: Path, corpus: TextCorpus, tokenizer: Tokenizer) -> TokenFiles:
    """Write token files for a corpus that has WikiText's format. An article becomes a document, and a non-empty line a sequence.

    Args:
        prefix: start of the paths of the files. Missing folders are created.
        corpus: the text.
        tokenizer: the tokenizer. Its end-of-text token ends each document.

    Raises:
        DataError: a file exists, a document contains the end-of-text token, or a write failed. Then no file is written.
    """
    documents: Iterator[Document] = (
        (_SPLIT_OF[split], article) for split in SPLITS for article in articles(list(corpus.splits[split]))
    )
    workers = workers_for(sum(map(corpus.characters, SPLITS)))
    return _write(prefix, ("train", "validation", "test"), documents, Source(corpus.name, corpus.sha256), tokenizer, workers)


def write_jsonl_tokens(prefix: Path, path: Path, tokenizer: Tokenizer) -> TokenFiles:
    """Write token files for a file with one JSON object per line, the format of C4 and of Megatron's tools.

    The value of "text" in each object becomes a document with one sequence. The hash of this text determines whether the document
    is in the split 'train' or 'test'. So equal documents are in the same split, and the split of a document does not depend on
    other documents.

    Args:
        prefix: start of the paths of the files. Missing folders are created.
        path: the file. It is decompressed if its name ends with .gz.
        tokenizer: the tokenizer. Its end-of-text token ends each document.

    Raises:
        DataError: a line is not a JSON object with a text (the error names the line), or one of the causes in
            `write_corpus_tokens`.
    """
    try:
        source, size = Source(path.name, sha256_of(path)), path.stat().st_size
    except OSError as error:
        raise DataError(f"cannot read {path.name}: {error.strerror}", where=path, next_step=_NO_FILE) from error
    documents: Iterator[Document] = ((split_of(text), [text]) for text in jsonl_texts(path))
    return _write(prefix, ("train", "test"), documents, source, tokenizer, workers_for(size))


def check_token_files(prefix: Path) -> TokenFiles:
    """Compute the fingerprint of token files again, and compare it with the stored one.

    Raises:
        DataError: a file is missing or was changed. The error names it.
    """
    path = Path(f"{prefix}.json")
    try:
        document = read_json(path, DataError, AGAIN)
    except OSError as error:
        raise DataError(f"cannot read the fingerprint {path.name}: {error.strerror}", where=path, next_step=AGAIN) from error
    stated = read_form(TokenFiles, document, path.name)
    for split, expected in stated.splits.items():
        part = f"{prefix}_{split}"
        found = token_fingerprint(Path(part))
        # Compare the hashes first. If a file was changed, its counts may differ too, and the error must name this file and not
        # the fingerprint.
        for field, name in (("index_sha256", f"{part}.idx"), ("sha256", f"{part}.bin"), *((count, path) for count in _COUNTS)):
            have, want = getattr(found, field), getattr(expected, field)
            if have != want:
                what = f"{Path(name).name} was changed: {field} of {split} is {have}, but {path.name} states {want}"
                raise DataError(what, where=name, next_step="copy the files again, or remove them and write them again")
    return stated


def articles(lines: Sequence[str]) -> list[list[str]]:
    """Return the non-empty lines of each article. An article begins with a title such as " = Title = " between two empty lines.

    Table legends such as " = Wins = " look like titles, but have no empty lines around them.
    """
    found: list[list[str]] = []
    for number, line in enumerate(lines):
        if not line.strip():
            continue
        around = "".join([*lines[max(0, number - 1) : number], *lines[number + 1 : number + 2]])
        if not found or (_TITLE.fullmatch(line) and not around.strip()):
            found.append([])
        found[-1].append(line)
    return found


def split_of(text: str) -> Split:
    """Return the split of a document, 'train' or 'test', which the hash of its text determines."""
    number = int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big")
    return "test" if number % HELD_OUT_EVERY == 0 else "train"


def jsonl_texts(path: Path) -> Iterator[str]:
    """Yield the value of "text" in each line of a file with one JSON object per line.

    Raises:
        DataError: the file cannot be read, a line is too long, or a line is not a JSON object with a non-empty text.
    """
    remedy = 'each line must be a JSON object with a non-empty "text"; correct this line, or remove it'
    number = 0
    try:
        with contextlib.ExitStack() as opened:
            file = opened.enter_context(open_regular(path, DataError, _NO_FILE))
            if path.suffix == ".gz":
                file = opened.enter_context(gzip.open(file))
            # Reading one byte more than the limit distinguishes a line of exactly the limit from a longer one.
            for number, content in enumerate(iter(lambda: file.readline(LINE_BYTES + 1), b""), 1):
                where = f"{path}, line {number}"
                if len(content) > LINE_BYTES:
                    raise DataError(f"the line has more than {LINE_BYTES >> 20} MiB", where=where, next_step=remedy)
                record = parse_json(content, DataError, remedy, where=where)
                text = record.get("text") if isinstance(record, dict) else None
                if not isinstance(text, str) or not text:
                    raise DataError('the line has no "text"', where=where, next_step=remedy)
                yield text
    except (OSError, EOFError, zlib.error) as error:
        what = f"cannot read {path.name} after line {number}: {getattr(error, 'strerror', None) or error}"
        raise DataError(what, where=path, next_step="copy the file again from its source") from error


def _write(
    prefix: Path, splits: Sequence[Split], documents: Iterator[Document], data: Source, tokenizer: Tokenizer, workers: int
) -> TokenFiles:
    """Write the files of all splits in a working folder, read them back to check them, then move them to their final names."""
    names = [f"{prefix.name}_{split}{suffix}" for split in splits for suffix in (".bin", ".idx")] + [f"{prefix.name}.json"]
    _require_new(prefix.parent, names)
    dtype = stored_dtype(tokenizer.vocab_size)
    try:
        prefix.parent.mkdir(parents=True, exist_ok=True)
        # A hard link works only within one file system, so the working folder is next to the final files.
        with tempfile.TemporaryDirectory(prefix=f".{prefix.name}.", suffix=".part", dir=prefix.parent) as folder:
            work = Path(folder)
            with contextlib.ExitStack() as opened:
                writers: dict[Split, IndexedTokensWriter] = {
                    split: opened.enter_context(IndexedTokensWriter(work / f"{prefix.name}_{split}", dtype)) for split in splits
                }
                _encode(documents, writers, tokenizer, workers, data.name)
                written: dict[Split, TokenFingerprint] = {split: writer.close() for split, writer in writers.items()}
            for split, expected in written.items():
                if not expected.documents:
                    what = f"no document of {data.name} is in the split {split}"
                    raise DataError(what, where=data.name, next_step="give a text with more documents")
                if token_fingerprint(work / f"{prefix.name}_{split}") != expected:
                    what = f"the files of the split {split} differ from what was written"
                    raise DataError(what, where=prefix.parent, next_step="check this disk, or write to another one")
            made = TokenFiles(data, Source(tokenizer.name, tokenizer.sha256), dtype.name, written)
            (work / names[-1]).write_text(json.dumps(asdict(made), indent=1) + "\n", encoding="utf-8")
            _publish(work, prefix.parent, names)
    except OSError as error:
        raise refused_write(
            error,
            DataError,
            action="cannot write token files",
            unchanged="no token file was written",
            where=error.filename or prefix,
            elsewhere="give a PREFIX in another folder",
        ) from error
    return made


def _encode(
    documents: Iterator[Document], writers: dict[Split, IndexedTokensWriter], tokenizer: Tokenizer, workers: int, name: str
) -> None:
    """Tokenize the documents, and pass each sequence to the writer of its split.

    Raises:
        DataError: a text contains the end-of-text token, or decoding does not reproduce a text.
    """
    # For each text that is being encoded: number of the document, split of the document, and whether this is its last text.
    pending: deque[tuple[int, Split, bool]] = deque()

    def texts() -> Iterator[str]:
        for number, (split, sequences) in enumerate(documents, 1):
            pending.extend((number, split, place == len(sequences)) for place in range(1, len(sequences) + 1))
            yield from sequences

    with tokenizer.encoding(workers) as encoding:
        for encoded in encoding.encode(texts()):
            if encoded.lost:
                what = f"decoding does not reproduce the text {encoded.lost[:60]!r}"
                raise DataError(what, where=name, next_step="use a byte-level tokenizer without normalisation")
            for ids in np.split(encoded.ids, np.cumsum(encoded.sizes)[:-1]):
                number, split, last = pending.popleft()
                if (ids == tokenizer.eos_id).any():
                    what = f"document {number} contains the end-of-text token, which would end it"
                    raise DataError(what, where=name, next_step="remove this token from the text")
                writers[split].add_sequence(np.append(ids, np.uint32(tokenizer.eos_id)) if last else ids)
                if last:
                    writers[split].end_document()


def _require_new(folder: Path, names: Sequence[str]) -> None:
    for name in names:
        if os.path.lexists(folder / name):
            what = f"{name} exists, and token files are never written over"
            raise DataError(what, where=folder / name, next_step="give another PREFIX, or remove the files of this one")


def _publish(work: Path, folder: Path, names: Sequence[str]) -> None:
    """Publish the files under their final names. The fingerprint comes last, so files without a fingerprint are incomplete."""
    for name in names:
        flush(work / name)
    linked: list[Path] = []
    try:
        for name in names:
            # Unlike a rename, a link never replaces a file that another process has written meanwhile.
            os.link(work / name, folder / name)
            linked.append(folder / name)
        flush(folder)
    except BaseException:
        for path in linked:
            path.unlink()
        raise
