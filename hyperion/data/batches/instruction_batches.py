"""Batches of tokenized instruction rows on the device, as wide as their longest row."""

import numpy as np
import torch

from hyperion.data.batches.loaders import ResumableBatches, on_device
from hyperion.data.text.instructions import Completions

WIDTH_MULTIPLE = 8  # matrix units prefer such widths, and fewer distinct shapes occur


class InstructionBatches(ResumableBatches):
    """Batches of inputs and targets int64 [batch, width], with targets IGNORE_INDEX on prompts and padding.

    The width is that of the longest row of the global batch, rounded up to WIDTH_MULTIPLE. So a row has the same shape on any
    number of ranks.

    Args:
        completions: rows from `tokenize_completions`; they are copied to the device.
        batch_size: rows in a global batch.
        shuffle: use a new order in every epoch; otherwise the order of the rows (evaluation).
        drop_last: leave out the last, incomplete batch of an epoch.
        rank, ranks: this process's part of each batch. For evaluation use whole batches on every rank.

    Raises:
        DataError: the rows do not fill one batch, or the ranks do not divide the batch.
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
