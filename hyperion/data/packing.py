"""Count the tokens in rows of equal length: packed (one stream cut into windows) or padded (one line per row).

`loaders.LanguageBatches` builds packed rows, `loaders.PaddedBatches` padded ones. Works without torch.
"""

from dataclasses import dataclass

import numpy as np

from hyperion.data.store.folders import DataError

IGNORE_INDEX = -100  # PyTorch's default: targets with this value carry no loss


def packed_windows(tokens: int, length: int) -> tuple[int, int]:
    """Return the number of windows of `length` inputs, targets shifted by one token, and of the tokens left over at the end.

    Raises:
        DataError: fewer than length + 1 tokens.
    """
    windows = (tokens - 1) // length
    if windows < 1:
        raise DataError(f"{tokens} tokens do not fill a window of {length} + 1", next_step="use a shorter length or more text")
    return windows, tokens - windows * length - 1


@dataclass(frozen=True)
class Padding:
    """Token counts of padded rows, one sample per row.

    Attributes:
        samples: number of rows.
        tokens: number of real tokens.
        padding: number of padding positions, which are never counted as tokens.
        truncated: number of tokens cut from samples that are longer than a row.
    """

    samples: int = 0
    tokens: int = 0
    padding: int = 0
    truncated: int = 0

    @classmethod
    def of(cls, sizes: np.ndarray, length: int) -> "Padding":
        """Count rows of `length` for samples of `sizes` tokens, int64 [samples]."""
        tokens = int(np.minimum(sizes, length).sum())
        return cls(len(sizes), tokens, len(sizes) * length - tokens, int(sizes.sum()) - tokens)

    def __add__(self, other: "Padding") -> "Padding":
        return Padding(
            self.samples + other.samples,
            self.tokens + other.tokens,
            self.padding + other.padding,
            self.truncated + other.truncated,
        )

    @property
    def share(self) -> float:
        """Padding positions divided by all positions."""
        return self.padding / (self.tokens + self.padding)
