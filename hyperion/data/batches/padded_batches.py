"""One line a row, filled up: the batches that most tutorials train on, with their padding told apart from their tokens."""

import numpy as np
import torch
from torch import Tensor

from hyperion.data.batches.loaders import ResumableBatches
from hyperion.data.batches.packing import IGNORE_INDEX, Padding
from hyperion.data.batches.token_stream import TokenStream, on_device


class PaddedBatches(ResumableBatches):
    """Shuffled lines: inputs and targets int64 [batch, length], one line a row, cut or filled up to `length`.

    A target is the next token of its line, IGNORE_INDEX where there is none: padding carries no loss, and whoever counts the
    tokens of a batch counts the targets that are not IGNORE_INDEX.

    Args:
        tokens: token ids [tokens].
        samples: int64 [samples, 2], where each line begins in `tokens` and how many it has.
        sequence_length: length of a row.
        batch_size: rows in a batch, of all ranks together.
        padding_id: what fills a row.
        resident: hold the tokens on the device; else they stay in their file, see TokenStream.
        rank, ranks: this process's part of each batch.

    Attributes:
        padding: what all rows hold: tokens, padding, and what was cut off.

    Raises:
        DataError: too few lines for one batch, or a batch that the ranks do not divide.
    """

    def __init__(
        self,
        tokens: np.ndarray,
        samples: np.ndarray,
        sequence_length: int,
        batch_size: int,
        padding_id: int,
        seed: int = 0,
        device: str | torch.device = "cpu",
        *,
        resident: bool = True,
        rank: int = 0,
        ranks: int = 1,
    ):
        super().__init__(len(samples), batch_size, seed, True, rank, ranks)
        self.sequence_length, self.padding_id = sequence_length, padding_id
        self.padding = Padding.of(np.asarray(samples[:, 1]), sequence_length)
        self._samples, self._stream = samples, TokenStream(tokens, device, resident)

    def _identity(self) -> dict:
        return {**super()._identity(), "sequence_length": self.sequence_length, "tokens": self.padding.tokens}

    def _order(self, epoch: int) -> np.ndarray:
        return np.random.default_rng((self.seed, epoch)).permutation(self.records)

    def _batch(self, epoch: int, position: int) -> tuple[Tensor, Tensor]:
        starts, sizes = np.asarray(self._samples[self._examples(epoch, position)]).T
        windows = self._stream.windows(starts, self.sequence_length + 1)
        places = torch.arange(self.sequence_length + 1, device=windows.device)
        outside = places >= on_device(sizes.copy(), windows.device)[:, None]
        inputs = windows[:, :-1].masked_fill(outside[:, :-1], self.padding_id)
        return inputs, windows[:, 1:].masked_fill(outside[:, 1:], IGNORE_INDEX)
