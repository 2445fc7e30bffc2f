"""A text corpus in three splits, and the strict reading of its files."""

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from hyperion.data.errors import DataError
from hyperion.data.store.sources import Checksums
from hyperion.data.text.synthetic_text import EchoLanguage
from hyperion.untrusted import open_regular

SPLITS = ("train", "valid", "test")
LINE_BYTES = 1 << 26  # no text has a longer line; a file without newlines would fill the memory


@dataclass(frozen=True)
class LineFile:
    """Lines of a UTF-8 text file, each with its newline, read as they are asked for; only '\\n' ends a line."""

    path: Path

    def __iter__(self) -> Iterator[str]:
        """Raises:
        DataError: the file is missing or no regular file, is not UTF-8 (line and byte offset are named), holds carriage
            returns or a line of more than LINE_BYTES, or ends without a newline (cut off).
        """
        again = "copy the file again from where it came, as UTF-8 text with Unix line ends"
        name, offset, content = self.path.name, 0, b""
        try:
            with open_regular(self.path, DataError, again) as file:
                for number, content in enumerate(iter(lambda: file.readline(LINE_BYTES + 1), b""), 1):
                    if len(content) > LINE_BYTES:
                        fault = f"{name} has a line of more than {LINE_BYTES >> 20} MiB"
                        raise DataError(fault, where=f"{self.path}, line {number}", next_step=again)
                    line = content.decode("utf-8")
                    if "\r" in line:
                        raise DataError(f"{name} holds a carriage return", where=f"{self.path}, line {number}", next_step=again)
                    offset += len(content)
                    if line.endswith("\n"):
                        yield line
        except OSError as error:
            raise DataError(f"cannot read {name}: {error.strerror}", where=self.path, next_step=again) from error
        except UnicodeDecodeError as error:
            raise DataError(
                f"{name} is not UTF-8: byte 0x{content[error.start]:02x} at offset {offset + error.start} ({error.reason})",
                where=f"{self.path}, line {number}",
                next_step=again,
            ) from error
        if not content.endswith(b"\n"):
            raise DataError(f"{name} does not end with a newline: cut off or empty", where=self.path, next_step=again)


@dataclass(frozen=True)
class TextCorpus:
    """Lines of text in three splits, with where they came from.

    Attributes:
        name: 'wikitext-2' or 'synthetic-echo'; a synthetic corpus never carries the real one's name.
        source: 'mirror', 'cache', 'download' or 'synthetic'.
        detail: what the source says of itself, without machine paths.
        splits: 'train', 'valid', 'test' to lines, each with its newline: a list, or a LineFile that reads them anew each time.
        language: the true model of a synthetic corpus (entropy rate, exact likelihoods), None for a real one.
        checksums: whether the files are their publisher's; None for a synthetic corpus and for files of one's own.
    """

    name: str
    source: str
    detail: str
    splits: dict[str, list[str] | LineFile] = field(repr=False)
    language: EchoLanguage | None = None
    checksums: Checksums | None = None

    @property
    def sha256(self) -> str:
        """Hash of all splits' text."""
        digest = hashlib.sha256()
        for split in SPLITS:
            digest.update(f"{split}\0".encode())
            for line in self.splits[split]:
                digest.update(line.encode())
        return digest.hexdigest()

    def characters(self, split: str) -> int:
        """About how long a split's text is."""
        lines = self.splits[split]
        return lines.path.stat().st_size if isinstance(lines, LineFile) else sum(map(len, lines))


def count_words_with_eos(lines: Iterable[str]) -> int:
    """Words, separated by white space, plus one end of sentence a line: the divisor of WikiText's word perplexity."""
    return sum(len(line.split()) + 1 for line in lines)


def count_non_empty(lines: Iterable[str]) -> int:
    """Lines that hold more than white space."""
    return sum(1 for line in lines if line.strip())


def read_lines(path: Path) -> list[str]:
    """All lines of a text file; see LineFile."""
    return list(LineFile(path))


def corpus_of_files(name: str, files: dict[str, Path]) -> TextCorpus:
    """A corpus of one's own, which may be longer than memory.

    Args:
        files: 'train', 'valid' and 'test' to text files in UTF-8.
    """
    detail = ", ".join(f"{split}: {path.name}" for split, path in files.items())
    return TextCorpus(name, "files", detail, {split: LineFile(files[split]) for split in SPLITS})


def require_counts(name: str, found: Sequence[int], expected: Sequence[int], units: Sequence[str], where: object) -> None:
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
