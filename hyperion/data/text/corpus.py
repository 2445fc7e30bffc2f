"""Text corpora with three splits.

A corpus is read from files that are fully checked, or it is synthetic text whose entropy is known exactly.

For synthetic text, the lowest possible loss of a model is known. A line is " w1 w2 ... w15 \n". It has LINE_UNITS units:
LINE_WORDS words and the newline. In the first line of a split, each word is drawn from a Zipf distribution q over 256
pronounceable words. In every other line, a word ECHOES the word at the same position in the line above, which is LINE_UNITS units
back, with probability p, and is drawn from q otherwise. So the words at each position form a Markov chain with the stationary
distribution q, and the positions are independent. Therefore:

    entropy rate per word      sum_x q(x) H(p d_x + (1 - p) q); the newline adds nothing, because all lines have equal length
    n-grams up to 16 units     H(q) per word, plus a small term, because the model does not know the position in the line

H is the entropy, and d_x is the distribution in which the word x has probability 1. A model that does not see the unit LINE_UNITS
units back learns only word frequencies. All entropies are in nats.
"""

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import numpy as np

from hyperion.data.store.folders import DataError
from hyperion.data.store.sources import Checksums
from hyperion.untrusted import open_regular

SPLITS = ("train", "valid", "test")
LINE_BYTES = 1 << 26  # maximum length of a line; without a limit, a file without newlines would exhaust the memory
LINE_WORDS = 15
LINE_UNITS = LINE_WORDS + 1
SYLLABLES = ("ba", "de", "fi", "go", "ku", "la", "me", "ni", "po", "ru", "sa", "te", "vi", "zo", "ja", "he")
VOCABULARY = len(SYLLABLES) ** 2
# With these numbers of lines, each split has about as many units as the split of WikiText-2 has words and <eos> tokens:
# 2,088,628, 217,646 and 245,569.
LINES_LIKE_WIKITEXT2 = {"train": 130_539, "valid": 13_602, "test": 15_348}


@dataclass(frozen=True)
class EchoLanguage:
    """Generator of the synthetic text. It is also the true model of this text, with exact probabilities and entropies.

    Attributes:
        echo_probability: p, the probability that a word repeats the word at the same position in the line above.
        zipf_exponent: exponent of the word distribution: q of the word with rank r is proportional to r ** -zipf_exponent.
        words: the 256 words, from the most to the least frequent one.
    """

    echo_probability: float = 0.7
    zipf_exponent: float = 1.0
    words: tuple[str, ...] = field(init=False, repr=False)

    def __post_init__(self):
        # 89 is odd, so each of the 256 pairs of syllables occurs once. Words with neighbouring ranks have different syllables.
        codes = [(rank * 89 + 7) % VOCABULARY for rank in range(VOCABULARY)]
        object.__setattr__(self, "words", tuple(SYLLABLES[code // 16] + SYLLABLES[code % 16] for code in codes))

    @cached_property
    def probabilities(self) -> np.ndarray:
        """Probabilities q of the words, float64 [256], from the most to the least frequent word."""
        weights = np.arange(1, VOCABULARY + 1, dtype=np.float64) ** -self.zipf_exponent
        return weights / weights.sum()

    def sample(self, lines: int, seed: int | Sequence[int]) -> list[str]:
        """Return `lines` lines of text. The same seed gives the same text."""
        generator = np.random.default_rng(seed)
        shape = (lines, LINE_WORDS)
        # Inverse transform sampling: a uniform number falls into the interval of a word with probability q.
        edges = np.cumsum(self.probabilities)[:-1]
        fresh = np.searchsorted(edges, generator.random(shape), side="right")
        echo = generator.random(shape) < self.echo_probability
        # No word of the first line can be an echo, because there is no line above it.
        echo[:1] = False
        # For each position, find the latest line, up to this one, whose word was drawn. An echo copies the word of that line,
        # possibly through several lines.
        origin = np.maximum.accumulate(np.where(echo, 0, np.arange(lines)[:, None]), axis=0)
        ranks = np.take_along_axis(fresh, origin, axis=0)
        table = np.array([f" {word}" for word in self.words], dtype=object)
        return ["".join(row) + " \n" for row in table[ranks]]

    def ranks(self, lines: Sequence[str]) -> np.ndarray:
        """Return the ranks of the words in a text in this language, int64 [lines, 15].

        Raises:
            DataError: a line is not in the language. The error names the number of the line.
        """
        rank_of = {word: rank for rank, word in enumerate(self.words)}
        table = np.empty((len(lines), LINE_WORDS), dtype=np.int64)
        for number, line in enumerate(lines):
            row = [rank_of.get(word, -1) for word in line.split()]
            if len(row) != LINE_WORDS or -1 in row or not line.endswith(" \n"):
                raise DataError(
                    "the line is not in the synthetic language",
                    where=f"line {number + 1}: {line[:60]!r}",
                    next_step="pass lines from EchoLanguage.sample",
                )
            table[number] = row
        return table

    def true_negative_log_likelihood(self, lines: Sequence[str]) -> float:
        """Return -ln P(lines) in nats under the true model. No other model has a lower expected value."""
        ranks, q, p = self.ranks(lines), self.probabilities, self.echo_probability
        fresh = q[ranks]
        total = -np.log(fresh[:1]).sum()
        echoed = ranks[1:] == ranks[:-1]
        return float(total - np.log(p * echoed + (1 - p) * fresh[1:]).sum())

    def entropy_rate_nats_per_word(self) -> float:
        """Return the entropy of a word given all previous text, the lower bound on the loss per word after the first line."""
        # If the word above is x, the next word is x with probability p + (1 - p) q(x), and any other word y with probability
        # (1 - p) q(y).
        q, p = self.probabilities, self.echo_probability
        repeated = p + (1 - p) * q  # probability that the next word equals the word above
        others = (1 - p) * q  # probability of any other word
        # The sum over all words y except x is the sum over all words minus the term of x.
        surprise = others * np.log(others)
        given = -(repeated * np.log(repeated) + surprise.sum() - surprise)
        return float(q @ given)


@dataclass(frozen=True)
class LineFile:
    """The lines of a UTF-8 text file, read on demand. Only '\\n' ends a line, and it is part of the line."""

    path: Path

    def __iter__(self) -> Iterator[str]:
        """Yield the lines.

        Raises:
            DataError: the file is missing, is not a regular file, is not UTF-8, contains a carriage return or a line of more
                than LINE_BYTES bytes, is empty, or does not end with a newline (it may be truncated). The error names the line
                and, if the file is not UTF-8, the byte offset.
        """
        again = "copy the file again from its source, as UTF-8 text with Unix line endings"
        name, offset, number, content = self.path.name, 0, 0, b""
        try:
            with open_regular(self.path, DataError, again) as file:
                # Reading one byte more than the limit distinguishes a line of exactly the limit from a longer one.
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
                    # Do not yield a last line without a newline. The check after the loop reports it as an error.
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
        if not content:
            raise DataError(f"{name} is empty", where=self.path, next_step=again)
        if not content.endswith(b"\n"):
            complete = "if the file is complete, add a newline at its end; if it was cut off, copy it again from its source"
            raise DataError(f"{name} does not end with a newline", where=f"{self.path}, line {number}", next_step=complete)


@dataclass(frozen=True)
class TextCorpus:
    """Text corpus: lines of text in three splits, with the source of the text.

    Attributes:
        name: 'wikitext-2', 'synthetic-echo', or the name that the caller of `corpus_of_files` chose.
        source: 'mirror', 'cache', 'download', 'synthetic' or 'files'.
        detail: description of the source, without local paths.
        splits: the lines of the splits 'train', 'valid' and 'test', each with its newline. The lines are a list, or a LineFile,
            which reads its file again in every iteration.
        language: generator and true model of a synthetic corpus; None for a real corpus.
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
        """Return the approximate number of characters in a split."""
        lines = self.splits[split]
        return lines.path.stat().st_size if isinstance(lines, LineFile) else sum(map(len, lines))


def count_words_with_eos(lines: Iterable[str]) -> int:
    """Count the words, plus one <eos> per line. Words are separated by white space.

    WikiText's perplexity per word is computed with this number.
    """
    return sum(len(line.split()) + 1 for line in lines)


def count_non_empty(lines: Iterable[str]) -> int:
    """Count the lines that contain more than white space."""
    return sum(1 for line in lines if line.strip())


def read_lines(path: Path) -> list[str]:
    """Return all lines of a text file (see `LineFile`)."""
    return list(LineFile(path))


def corpus_of_files(name: str, files: Mapping[str, Path | str]) -> TextCorpus:
    """Return a corpus of the user's own text files. The files may be larger than the memory.

    Only the existence of the files is checked here. Their text is checked when it is read.

    Args:
        name: name of the corpus.
        files: a dict that maps the names of the splits 'train', 'valid' and 'test' to the paths of their UTF-8 text files with
            Unix line endings.

    Raises:
        DataError: a split is missing or unknown, or there is no file for a split.
    """
    if set(files) != set(SPLITS):
        raise DataError(
            f"the corpus has the splits {', '.join(map(repr, files)) or 'none'}, expected {', '.join(map(repr, SPLITS))}",
            where=f"files of the corpus {name!r}",
            next_step="give one text file for each of these splits, for example corpus_of_files(name, {'train': path, …})",
        )
    paths = {split: Path(files[split]) for split in SPLITS}
    for split, path in paths.items():
        if not path.is_file():
            fault = f"there is no file for the split {split!r}"
            raise DataError(fault, where=path, next_step="create the file, or correct its path in corpus_of_files")
    detail = ", ".join(f"{split}: {path.name}" for split, path in paths.items())
    return TextCorpus(name, "files", detail, {split: LineFile(path) for split, path in paths.items()})


def require_counts(name: str, found: Sequence[int], expected: Sequence[int], units: Sequence[str], where: object) -> None:
    """Check that counts are equal to the expected counts.

    Args:
        name: name of the file, for the error message.
        found: the counts.
        expected: the expected counts, in the same order.
        units: the unit of each count, such as "lines".
        where: value for the field `where` of the error.

    Raises:
        DataError: a count differs. The message contains the first such count and its expected value.
    """
    for have, want, unit in zip(found, expected, units, strict=True):
        if have != want:
            raise DataError(
                f"{name} has {have} {unit}, expected {want}",
                where=where,
                next_step="the file is incomplete, or belongs to another variant of the data set: remove it and run `make fetch`",
            )
