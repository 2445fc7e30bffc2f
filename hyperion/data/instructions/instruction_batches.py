"""Batches of instruction rows on the device, in the resumable order and the parts of ranks of every loader."""

import numpy as np
import torch

from hyperion.data.batches.loaders import ResumableBatches
from hyperion.data.batches.token_stream import on_device
from hyperion.data.instructions.completions import Completions

WIDTH_MULTIPLE = 8  # batches are padded to a multiple of this: matrix units want one, and shapes repeat more often


class InstructionBatches(ResumableBatches):
    """Batches of inputs and targets int64 [batch, width], targets IGNORE_INDEX on prompts and padding.

    The width is that of the longest row of the whole batch, so that each rank's part has it too and a row is computed in
    the same shape on any number of ranks.

    Args:
        completions: rows from tokenize_completions, kept on the device.
        batch_size: rows in a batch, of all ranks together.
        shuffle: a new order every epoch, else the order of the rows (evaluation).
        drop_last: leave out the rows that fill no whole batch, else end the epoch with a smaller one.
        rank, ranks: this process's part of each batch; evaluation takes whole batches, on every rank.

    Raises:
        DataError: too few rows for one batch, or a batch that the ranks do not divide.
    """

    def __init__(
        self,
        completions: Completions,
        batch_size: int,
        seed: int = 0,
        *,
        shuffle: bool = True,
        drop_last: bool = True,
        device: str | torch.device = "cpu",
        rank: int = 0,
        ranks: int = 1,
    ):
        super().__init__(len(completions.inputs), batch_size, seed, drop_last, rank, ranks)
        self.shuffle, self._sizes = shuffle, completions.sizes
        self._inputs, self._targets = (
            torch.from_numpy(values).to(device) for values in (completions.inputs, completions.targets)
        )

    def _identity(self) -> dict:
        return {**super()._identity(), "shuffle": self.shuffle, "tokens": int(self._sizes.sum())}

    def _order(self, epoch: int) -> np.ndarray:
        if not self.shuffle:
            return np.arange(self.records)
        return np.random.default_rng((self.seed, epoch)).permutation(self.records)

    def _batch(self, epoch: int, position: int) -> tuple[torch.Tensor, torch.Tensor]:
        longest = int(self._sizes[self._whole_batch(epoch, position)].max())
        width = min(-(-longest // WIDTH_MULTIPLE) * WIDTH_MULTIPLE, self._inputs.shape[1])
        own = on_device(self._examples(epoch, position), self._inputs.device)
        return self._inputs[own, :width].long(), self._targets[own, :width].long()
