"""Data that a split has in common with another one: what a model has seen in training tells nothing when it is tested.

Records are compared exactly: images byte by byte, lines by their words or token ids. A copy that was changed (compressed
again, cut otherwise, edited) is not found. CIFAR-10 is known for such near duplicates: Barz and Denzler, Do We Train on
Test Data?, J. Imaging 2020, find one for 3.3 % of its test images.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from hashlib import blake2b

import numpy as np

from hyperion.data.store.faults import DataError

# Headings and short sentences repeat in honest splits: of WikiText-2's lines with 10 words or more, 7 of valid and test stand
# in another split too, all headings; of those with 12 words or more (train 16,281, valid 1,736, test 1,963) none does.
LONG_LINE_WORDS = 12
# Where only token ids are known; a made-up line has 16. In GPT-2's tokens, of WikiText-2's lines with 12 or more 66 stand in
# another split too, of those with 16 or more (16,363, 1,746, 1,995) none does.
LONG_LINE_TOKENS = 16
# Share of a split's records. WikiText-2 and the mirror's CIFAR-10 have 0; a few do not change a score, and a corpus of one's
# own may repeat a notice.
TOLERANCE = 1e-3
_ROWS_AT_ONCE = 1 << 16


@dataclass(frozen=True)
class Overlap:
    """How many records of a split stand in another split too.

    Attributes:
        records: of the split that were compared: all images, or the long lines.
        repeated: of these, those that another split has as well.
        first: place of the first repeated one, counted as the caller counts its records; None where there is none.
    """

    records: int
    repeated: int
    first: int | None

    @property
    def share(self) -> float:
        """Repeated records over all that were compared, 0 where there are none."""
        return self.repeated / self.records if self.records else 0.0

    def as_dict(self) -> dict:
        """JSON-able, for a manifest."""
        return asdict(self)


def line_overlap(splits: Mapping[str, Iterable[str]]) -> dict[str, Overlap]:
    """Compare the lines of at least LONG_LINE_WORDS words of every split but 'train' with those of all other splits.

    White space and case do not count. Lines are numbered from 1.
    """
    return _overlap({split: _long_lines(lines) for split, lines in splits.items()})


def token_overlap(tokens: Mapping[str, np.ndarray], samples: Mapping[str, np.ndarray]) -> dict[str, Overlap]:
    """The same for lines of at least LONG_LINE_TOKENS tokens; memory grows with the splits other than 'train' only.

    Args:
        tokens: split to token ids [tokens].
        samples: split to int64 [samples, 2]: where each line begins in the stream, and its number of tokens.
    """
    return _overlap({split: _long_samples(tokens[split], samples[split]) for split in tokens})


def image_overlap(train: np.ndarray, test: np.ndarray) -> dict[str, Overlap]:
    """Compare the images [N, ...] of the test split with those of the train split, byte by byte."""
    return _overlap({"train": _numbered(train), "test": _numbered(test)})


def require_little_overlap(found: Mapping[str, Overlap], what: str, where: object) -> None:
    """Refuse splits of which more than TOLERANCE stands in another split.

    Args:
        what: the records, as "images".

    Raises:
        DataError: names split, share and the first record.
    """
    for split, overlap in found.items():
        if overlap.share > TOLERANCE:
            raise DataError(
                f"{overlap.repeated} of {overlap.records} {what} of the {split} split ({overlap.share:.2%}) stand in "
                f"another split too, the first is number {overlap.first}; at most {TOLERANCE:.1%} may",
                where=where,
                next_step="a score on them would be none: copy the original files, or remove them from one split",
            )


def _overlap(splits: Mapping[str, Iterator[tuple[int, bytes]]]) -> dict[str, Overlap]:
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
        result[split] = Overlap(len(records), len(repeated), repeated[0] if repeated else None)
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
