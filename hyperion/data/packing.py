"""Count the tokens and the padding in training rows of equal length.

Rows are either packed or padded. Packed rows are windows of one token stream, built by `hyperion.data.batches.LanguageBatches`.
Each padded row is one line of the text, built by `hyperion.data.batches.PaddedBatches`. This module does not import torch.
"""

from dataclasses import dataclass

import numpy as np

from hyperion.data.store.folders import DataError

IGNORE_INDEX = -100  # the default of PyTorch's losses, which ignore targets with this value


def packed_windows(tokens: int, length: int) -> tuple[int, int]:
    """Return the number of windows in a stream of `tokens` tokens, and the number of tokens left over at its end.

    A window has `length` inputs. Its targets are the inputs shifted by one token, so one window needs length + 1 tokens.

    Raises:
        DataError: there are fewer than length + 1 tokens.
    """
    # Neighbouring windows share one token (the last target of the first, the first input of the second), so n windows need
    # n * length + 1 tokens.
    windows = (tokens - 1) // length
    if windows < 1:
        raise DataError(f"{tokens} tokens do not fill a window of {length} + 1", next_step="use a shorter length or more text")
    return windows, tokens - windows * length - 1


@dataclass(frozen=True)
class Padding:
    """Token counts of padded rows. Each row contains one sample, such as one line of text.

    Attributes:
        samples: number of rows.
        tokens: number of real tokens.
        padding: number of padding positions. They are not counted as tokens.
        truncated: number of tokens cut from samples that are longer than a row.
    """

    samples: int = 0
    tokens: int = 0
    padding: int = 0
    truncated: int = 0

    @classmethod
    def of(cls, sizes: np.ndarray, length: int) -> "Padding":
        """Return the counts for samples with these numbers of tokens, int64 [samples], in rows of `length` positions."""
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
        """Number of padding positions divided by the total number of positions."""
        return self.padding / (self.tokens + self.padding)
