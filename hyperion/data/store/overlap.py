"""Find records that occur in more than one split, because a model must not be tested on its own training data.

Records are compared exactly: images byte by byte, and lines by their words or token ids. Changed copies (recompressed, cropped or
edited) are not detected. In CIFAR-10, 3.3 % of the test images have such near duplicates: Barz and Denzler, Do We Train on Test
Data?, J. Imaging 2020.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from hashlib import blake2b

import numpy as np

from hyperion.data.store.folders import DataError

# Only long lines are compared, because headings and short sentences also occur in several splits of a correct corpus. In
# WikiText-2, 7 lines of at least 10 words in valid and test also occur in another split, and all of them are headings. No line
# of at least 12 words does (train has 16,281 such lines, valid 1,736 and test 1,963).
LONG_LINE_WORDS = 12
# Minimum length of a long line in tokens, used if only token ids are known. A synthetic line has 16 tokens. With the tokenizer of
# GPT-2, 66 lines of WikiText-2 with at least 12 tokens also occur in another split, but no line with at least 16 tokens does
# (train has 16,363 such lines, valid 1,746 and test 1,995).
LONG_LINE_TOKENS = 16
# Largest accepted share of repeated records in a split. In WikiText-2 and CIFAR-10, the share is 0. A few repeated records do not
# change a score, and the user's own corpus may repeat, for example, a copyright notice.
TOLERANCE = 1e-3
_ROWS_AT_ONCE = 1 << 16


@dataclass(frozen=True)
class SplitOverlap:
    """Number of records of a split that also occur in another split.

    Attributes:
        records: number of records that were compared: all images, or all long lines.
        repeated: number of the compared records that another split also contains.
        first: number of the first repeated record, in the caller's numbering; None if no record is repeated.
    """

    records: int
    repeated: int
    first: int | None

    @property
    def share(self) -> float:
        """Number of repeated records divided by the number of compared records; 0 if no records were compared."""
        return self.repeated / self.records if self.records else 0.0

    def as_dict(self) -> dict:
        """Return the fields as JSON values, for a manifest."""
        return asdict(self)


def line_overlap(splits: Mapping[str, Iterable[str]]) -> dict[str, SplitOverlap]:
    """Find long lines that also occur in another split, for every split except 'train'.

    A long line has at least LONG_LINE_WORDS words. White space and case are ignored. Lines are numbered from 1.
    """
    return _overlap({split: _long_lines(lines) for split, lines in splits.items()})


def token_overlap(tokens: Mapping[str, np.ndarray], samples: Mapping[str, np.ndarray]) -> dict[str, SplitOverlap]:
    """Find lines of at least LONG_LINE_TOKENS tokens that also occur in another split, for every split except 'train'.

    The required memory depends on the sizes of the other splits and not on the size of 'train'.

    Args:
        tokens: a dict that maps the name of a split to its token ids [tokens].
        samples: a dict that maps the name of a split to an int64 array [samples, 2]. For each line, it contains its start in the
            token stream and its number of tokens.
    """
    return _overlap({split: _long_samples(tokens[split], samples[split]) for split in tokens})


def image_overlap(train: np.ndarray, test: np.ndarray) -> dict[str, SplitOverlap]:
    """Find images of the test split that also occur in the train split. Images [N, ...] are compared byte by byte."""
    return _overlap({"train": _numbered(train), "test": _numbered(test)})


def require_little_overlap(found: Mapping[str, SplitOverlap], what: str, where: object) -> None:
    """Check that at most the share TOLERANCE of each split's records also occurs in another split.

    Args:
        found: a dict that maps the name of a split to its overlap.
        what: name of the records for the error message, such as "images".
        where: value for the field `where` of the error.

    Raises:
        DataError: a larger share is repeated. The message names the split, the share and the first repeated record.
    """
    for split, overlap in found.items():
        if overlap.share > TOLERANCE:
            raise DataError(
                f"{overlap.repeated} of {overlap.records} {what} of the {split} split ({overlap.share:.2%}) also occur "
                f"in another split; the first is number {overlap.first}, and at most {TOLERANCE:.1%} is allowed",
                where=where,
                next_step="copy the original files, or remove the repeated records from one split",
            )


def _overlap(splits: Mapping[str, Iterator[tuple[int, bytes]]]) -> dict[str, SplitOverlap]:
    # Keep only the digests of the smaller splits in memory. The records of 'train' are read one after the other.
    held = {
        split: [(number, _digest(content)) for number, content in records]
        for split, records in splits.items()
        if split != "train"
    }
    known = {split: {digest for _, digest in records} for split, records in held.items()}
    everywhere = set().union(*known.values())
    trained = {digest for _, content in splits["train"] if (digest := _digest(content)) in everywhere}
    result = {}
    for split, records in held.items():
        others = trained.union(*(digests for name, digests in known.items() if name != split))
        repeated = [number for number, digest in records if digest in others]
        result[split] = SplitOverlap(len(records), len(repeated), repeated[0] if repeated else None)
    return result


def _digest(content: bytes) -> bytes:
    # Digests have 128 bits, so it is practically impossible that two different records have the same digest.
    return blake2b(content, digest_size=16).digest()


def _long_lines(lines: Iterable[str]) -> Iterator[tuple[int, bytes]]:
    for number, line in enumerate(lines, 1):
        words = line.lower().split()
        if len(words) >= LONG_LINE_WORDS:
            yield number, " ".join(words).encode()


def _long_samples(tokens: np.ndarray, samples: np.ndarray) -> Iterator[tuple[int, bytes]]:
    for begin in range(0, len(samples), _ROWS_AT_ONCE):
        part = np.asarray(samples[begin : begin + _ROWS_AT_ONCE])
        for number in np.flatnonzero(part[:, 1] >= LONG_LINE_TOKENS).tolist():
            start, size = part[number].tolist()
            # Lines can be compared as bytes: all splits have the same dtype, so equal ids give equal bytes.
            yield begin + number, tokens[start : start + size].tobytes()


def _numbered(images: np.ndarray) -> Iterator[tuple[int, bytes]]:
    return ((number, image.tobytes()) for number, image in enumerate(images))
