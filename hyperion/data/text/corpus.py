"""A text corpus in three splits, read strictly from its files."""

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from hyperion.data.errors import DataError
from hyperion.data.store.sources import Checksums
from hyperion.data.text.synthetic_text import EchoLanguage
from hyperion.untrusted import open_regular

SPLITS = ("train", "valid", "test")
LINE_BYTES = 1 << 26  # limit, because a file without newlines would exhaust the memory


@dataclass(frozen=True)
class LineFile:
    """Lines of a UTF-8 text file, each with its newline, read lazily; only '\\n' ends a line."""

    path: Path

    def __iter__(self) -> Iterator[str]:
        """Yield the lines.

        Raises:
            DataError: the file is missing or not a regular file, is not UTF-8 (line and byte offset are named), contains a
                carriage return or a line of more than LINE_BYTES, or does not end with a newline (truncated).
        """
        again = "copy the file again from its source, as UTF-8 text with Unix line endings"
        name, offset, number, content = self.path.name, 0, 0, b""
        try:
            with open_regular(self.path, DataError, again) as file:
                for number, content in enumerate(iter(lambda: file.readline(LINE_BYTES + 1), b""), 1):
                    if len(content) > LINE_BYTES:
                        fault = f"{name} has a line of more than {LINE_BYTES >> 20} MiB"
                        raise DataError(fault, where=f"{self.path}, line {number}", next_step=again)
                    line = content.decode("utf-8")
                    if "\r" in line:
                        raise DataError(
                            f"{name} contains a carriage return", where=f"{self.path}, line {number}", next_step=again
                        )
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
            raise DataError(f"{name} does not end with a newline: truncated or empty", where=self.path, next_step=again)


@dataclass(frozen=True)
class TextCorpus:
    """Lines of text in three splits, with their source.

    Attributes:
        name: 'wikitext-2' or 'synthetic-echo'; a synthetic corpus never has the name of the real one.
        source: 'mirror', 'cache', 'download', 'synthetic' or 'files'.
        detail: description of the source, without paths of the machine.
        splits: 'train', 'valid', 'test' to lines, each with its newline: a list, or a LineFile, which reads its file each time.
        language: the true model of a synthetic corpus (entropy rate, exact likelihoods), None for a real one.
        checksums: result of the comparison with the published checksums; None for synthetic text and the user's own files.
    """

    name: str
    source: str
    detail: str
    splits: Mapping[str, list[str] | LineFile] = field(repr=False)
    language: EchoLanguage | None = None
    checksums: Checksums | None = None

    @property
    def sha256(self) -> str:
        """Hash of the text of all splits."""
        digest = hashlib.sha256()
        for split in SPLITS:
            digest.update(f"{split}\0".encode())
            for line in self.splits[split]:
                digest.update(line.encode())
        return digest.hexdigest()

    def characters(self, split: str) -> int:
        """Return the approximate number of characters of a split."""
        lines = self.splits[split]
        return lines.path.stat().st_size if isinstance(lines, LineFile) else sum(map(len, lines))


def count_words_with_eos(lines: Iterable[str]) -> int:
    """Count words separated by white space plus one <eos> per line, the divisor of WikiText's word perplexity."""
    return sum(len(line.split()) + 1 for line in lines)


def count_non_empty(lines: Iterable[str]) -> int:
    """Count the lines with more than white space."""
    return sum(1 for line in lines if line.strip())


def read_lines(path: Path) -> list[str]:
    """Return all lines of a text file; see `LineFile`."""
    return list(LineFile(path))


def corpus_of_files(name: str, files: dict[str, Path]) -> TextCorpus:
    """Return a corpus of the user's own text files, which may exceed memory.

    Args:
        files: 'train', 'valid' and 'test' to UTF-8 text files.
    """
    detail = ", ".join(f"{split}: {path.name}" for split, path in files.items())
    return TextCorpus(name, "files", detail, {split: LineFile(files[split]) for split in SPLITS})


def require_counts(name: str, found: Sequence[int], expected: Sequence[int], units: Sequence[str], where: object) -> None:
    """Check counts against their expected values, pairwise.

    Raises:
        DataError: a count differs; the first one is named with its expected value.
    """
    for have, want, unit in zip(found, expected, units, strict=True):
        if have != want:
            raise DataError(
                f"{name} has {have} {unit}, expected {want}",
                where=where,
                next_step="the file is incomplete or another variant: remove it and run `make fetch`",
            )
