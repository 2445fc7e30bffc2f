"""Tokens in rows of one length, counted: packed (one stream cut into windows) or padded (one line a row).

`loaders.LanguageBatches` makes the packed rows, `padded_batches.PaddedBatches` the padded ones.
"""

from dataclasses import dataclass

import numpy as np

from hyperion.data.store.faults import DataError

IGNORE_INDEX = -100  # PyTorch's default for targets that carry no loss


def packed_windows(tokens: int, length: int) -> tuple[int, int]:
    """Windows of `length` whose targets are one token ahead, and the tokens left over at the end.

    Raises:
        DataError: fewer than length + 1 tokens.
    """
    windows = (tokens - 1) // length
    if windows < 1:
        raise DataError(f"{tokens} tokens fill no window of {length} + 1", next_step="use a shorter length or more text")
    return windows, tokens - windows * length - 1


@dataclass(frozen=True)
class Padding:
    """What rows of one sample each hold.

    Attributes:
        samples: rows.
        tokens: real tokens in them.
        padding: positions filled up; never counted as tokens.
        truncated: tokens cut off samples longer than a row.
    """

    samples: int = 0
    tokens: int = 0
    padding: int = 0
    truncated: int = 0

    @classmethod
    def of(cls, sizes: np.ndarray, length: int) -> "Padding":
        """Rows of `length` for samples of so many tokens, int64 [samples]."""
        kept = int(np.minimum(sizes, length).sum())
        return cls(len(sizes), kept, len(sizes) * length - kept, int(sizes.sum()) - kept)

    def __add__(self, other: "Padding") -> "Padding":
        return Padding(
            self.samples + other.samples,
            self.tokens + other.tokens,
            self.padding + other.padding,
            self.truncated + other.truncated,
        )

    @property
    def share(self) -> float:
        """Positions filled up as a share of all."""
        return self.padding / (self.tokens + self.padding)
