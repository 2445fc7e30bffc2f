"""Tokens into rows of one length: packed (one stream cut into windows) or padded (one sample a row)."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from hyperion.data.faults import DataError

IGNORE_INDEX = -100  # PyTorch's default for targets that carry no loss


@dataclass(frozen=True)
class Packed:
    """Windows of a token stream.

    Attributes:
        inputs, targets: int32 [windows, length]; targets are the inputs one token later.
        left_over: tokens at the end that fill no window.
    """

    inputs: np.ndarray
    targets: np.ndarray
    left_over: int


@dataclass(frozen=True)
class Padded:
    """One sample a row.

    Attributes:
        inputs: int32 [samples, length], padded with the padding id.
        targets: int32 [samples, length], the next token of the sample, IGNORE_INDEX where there is none.
        tokens: real tokens in `inputs`.
        padding: padded positions of `inputs`; never counted as tokens.
        truncated: tokens cut off samples longer than a row.
    """

    inputs: np.ndarray
    targets: np.ndarray
    tokens: int
    padding: int
    truncated: int

    @property
    def padding_share(self) -> float:
        """Padded positions as a share of all."""
        return self.padding / self.inputs.size


def pack(tokens: np.ndarray, length: int) -> Packed:
    """Cut a stream into windows of `length` whose targets are one token ahead.

    Raises:
        DataError: fewer than length + 1 tokens.
    """
    windows = (len(tokens) - 1) // length
    if windows < 1:
        raise DataError(
            f"{len(tokens)} tokens fill no window of {length} + 1", next_step="use a shorter length or more text"
        )
    used = windows * length
    stream = np.asarray(tokens[: used + 1], dtype=np.int32)
    inputs, targets = stream[:-1].reshape(windows, length), stream[1:].reshape(windows, length)
    return Packed(inputs, targets, len(tokens) - used - 1)


def pad(samples: Sequence[np.ndarray], length: int, padding_id: int) -> Padded:
    """Put every sample into a row of its own, cut or padded to `length`.

    Raises:
        DataError: no samples, or an empty one (named by number).
    """
    sizes = np.array([len(sample) for sample in samples])
    if not len(sizes) or not sizes.all():
        number = int(np.argmin(sizes)) if len(sizes) else 0
        raise DataError(f"sample {number} is empty", next_step="filter empty lines before padding")
    kept = np.minimum(sizes, length)
    inputs = np.full((len(samples), length), padding_id, dtype=np.int32)
    targets = np.full((len(samples), length), IGNORE_INDEX, dtype=np.int32)
    for row, (sample, size) in enumerate(zip(samples, kept, strict=True)):
        inputs[row, :size] = sample[:size]
        targets[row, : size - 1] = sample[1:size]
    tokens = int(kept.sum())
    return Padded(inputs, targets, tokens, inputs.size - tokens, int((sizes - kept).sum()))
