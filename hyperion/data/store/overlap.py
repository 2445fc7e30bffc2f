"""Find records that occur in more than one split: a test on records seen in training measures nothing.

Records are compared exactly: images byte by byte, lines by their words or token ids. Changed copies (compressed again, cropped,
edited) are not detected. CIFAR-10 has such near duplicates for 3.3 % of its test images: Barz and Denzler, Do We Train on Test
Data?, J. Imaging 2020.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from hashlib import blake2b

import numpy as np

from hyperion.data.store.folders import DataError

# Headings and short sentences repeat in correct splits too. Of WikiText-2's lines of at least 10 words, 7 in valid and test also
# occur in another split, all of them headings; of those of at least 12 words (train 16,281, valid 1,736, test 1,963), none.
LONG_LINE_WORDS = 12
# Used where only token ids are known; a synthetic line has 16. In GPT-2's tokens, 66 of WikiText-2's lines of at least 12 tokens
# occur in another split, and none of those of at least 16 (train 16,363, valid 1,746, test 1,995).
LONG_LINE_TOKENS = 16
# Largest allowed share of a split's records. WikiText-2 and CIFAR-10 have 0. A few repeated records do not change a score, and a
# user's own corpus may repeat a notice.
TOLERANCE = 1e-3
_ROWS_AT_ONCE = 1 << 16


@dataclass(frozen=True)
class SplitOverlap:
    """Number of records of a split that also occur in another split.

    Attributes:
        records: number of compared records: all images, or the long lines.
        repeated: number of these that another split contains too.
        first: number of the first repeated record, in the caller's numbering; None if there is none.
    """

    records: int
    repeated: int
    first: int | None

    @property
    def share(self) -> float:
        """Repeated records divided by compared records, 0 if there are none."""
        return self.repeated / self.records if self.records else 0.0

    def as_dict(self) -> dict:
        """Return the fields, JSON-able, for a manifest."""
        return asdict(self)


def line_overlap(splits: Mapping[str, Iterable[str]]) -> dict[str, SplitOverlap]:
    """Compare the lines of at least LONG_LINE_WORDS words of every split but 'train' with those of all other splits.

    White space and case do not count. Lines are numbered from 1.
    """
    return _overlap({split: _long_lines(lines) for split, lines in splits.items()})


def token_overlap(tokens: Mapping[str, np.ndarray], samples: Mapping[str, np.ndarray]) -> dict[str, SplitOverlap]:
    """Compare the lines of at least LONG_LINE_TOKENS tokens. Memory grows with the splits other than 'train' only.

    Args:
        tokens: split to token ids [tokens].
        samples: split to int64 [samples, 2]: start of each line in the stream, and its number of tokens.
    """
    return _overlap({split: _long_samples(tokens[split], samples[split]) for split in tokens})


def image_overlap(train: np.ndarray, test: np.ndarray) -> dict[str, SplitOverlap]:
    """Compare the images [N, ...] of the test split with those of the train split, byte by byte."""
    return _overlap({"train": _numbered(train), "test": _numbered(test)})


def require_little_overlap(found: Mapping[str, SplitOverlap], what: str, where: object) -> None:
    """Check that at most TOLERANCE of each split occurs in another split.

    Args:
        what: name of the records, such as "images".

    Raises:
        DataError: names the split, the share and the first record.
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
            yield begin + number, tokens[start : start + size].tobytes()


def _numbered(images: np.ndarray) -> Iterator[tuple[int, bytes]]:
    return ((number, image.tobytes()) for number, image in enumerate(images))
