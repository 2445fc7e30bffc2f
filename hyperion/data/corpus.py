"""A text corpus in three splits, and the strict reading of its files."""

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from hyperion.data.faults import DataError
from hyperion.data.synthetic_text import EchoLanguage

SPLITS = ("train", "valid", "test")


@dataclass(frozen=True)
class TextCorpus:
    """Lines of text in three splits, with where they came from.

    Attributes:
        name: 'wikitext-2' or 'synthetic-echo'; a synthetic corpus never carries the real one's name.
        source: 'mirror', 'cache', 'download' or 'synthetic'.
        detail: what the source says of itself, without machine paths.
        splits: 'train', 'valid', 'test' to lines, each with its newline.
        language: the true model of a synthetic corpus (entropy rate, exact likelihoods), None for a real one.
    """

    name: str
    source: str
    detail: str
    splits: dict[str, list[str]] = field(repr=False)
    language: EchoLanguage | None = None

    @property
    def sha256(self) -> str:
        """Hash of all splits' text."""
        digest = hashlib.sha256()
        for split in SPLITS:
            digest.update(f"{split}\0".encode())
            digest.update("".join(self.splits[split]).encode())
        return digest.hexdigest()


def count_words_with_eos(lines: Iterable[str]) -> int:
    """Words, separated by white space, plus one end of sentence a line: the divisor of WikiText's word perplexity."""
    return sum(len(line.split()) + 1 for line in lines)


def count_non_empty(lines: Iterable[str]) -> int:
    """Lines that hold more than white space."""
    return sum(1 for line in lines if line.strip())


def read_lines(path: Path) -> list[str]:
    """Lines of a UTF-8 text file, each with its newline; only '\\n' ends a line.

    Raises:
        DataError: the file is missing, is not UTF-8 (line and byte offset are named), holds carriage returns, or ends
            without a newline (cut off).
    """
    again = "copy the file again from where it came, as UTF-8 text with Unix line ends"
    try:
        content = path.read_bytes()
    except OSError as error:
        raise DataError(f"cannot read {path.name}: {error.strerror}", where=path, next_step=again) from error
    try:
        text = content.decode("utf-8")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise DataError(
            f"{path.name} is not UTF-8: byte 0x{content[error.start]:02x} at offset {error.start} ({error.reason})",
            where=f"{path}, line {line}",
            next_step=again,
        ) from error
    if "\r" in text:
        line = text.count("\n", 0, text.index("\r")) + 1
        raise DataError(f"{path.name} holds a carriage return", where=f"{path}, line {line}", next_step=again)
    if not text.endswith("\n"):
        raise DataError(f"{path.name} does not end with a newline: cut off or empty", where=path, next_step=again)
    return [line + "\n" for line in text[:-1].split("\n")]


def require_counts(
    name: str, found: Sequence[int], expected: Sequence[int], units: Sequence[str], where: object
) -> None:
    """Compare counts pairwise.

    Raises:
        DataError: names the first count that differs, what was expected, and where.
    """
    for have, want, unit in zip(found, expected, units, strict=True):
        if have != want:
            raise DataError(
                f"{name} has {have} {unit}, expected {want}",
                where=where,
                next_step="the file is incomplete or another variant: remove it and stage it again with `make fetch`",
            )
