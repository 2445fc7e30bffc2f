"""The token ids that a loader reads windows of: on the device, or left in their file because they may not fit anywhere else."""

import numpy as np
import torch
from torch import Tensor

from hyperion.data.store.array_files import narrowed
from hyperion.data.store.faults import DataError


def on_device(values: np.ndarray, device: torch.device) -> Tensor:
    """The array on the device. The host does not wait: for a copy out of memory that is not pinned it would, until the device
    had done all that it was asked for before, the last training step among it.
    """
    tensor = torch.from_numpy(np.ascontiguousarray(values))
    return tensor if device.type == "cpu" else tensor.pin_memory().to(device, non_blocking=True)


class TokenStream:
    """Windows of a token stream.

    Args:
        tokens: ids [tokens], often a memory map.
        device: where the windows are made.
        resident: hold the stream there in 32 bits; else it stays where it is, and windows are read from it on the host.

    Raises:
        DataError: a stream that stays in its file has no windows on another device than the CPU; an id is no int32.
    """

    def __init__(self, tokens: np.ndarray, device: str | torch.device, resident: bool):
        self._device = torch.device(device)
        if not resident and self._device.type != "cpu":
            raise DataError(
                f"a stream that is left in its file has no windows on {self._device}",
                next_step="make them on the CPU and let Prefetched bring them to the device",
            )
        self._last = len(tokens) - 1
        self._held = torch.from_numpy(narrowed(tokens, np.int32, "token stream")).to(self._device) if resident else None
        self._tokens = tokens

    def windows(self, starts: np.ndarray, length: int) -> Tensor:
        """Ids int64 [starts, length] from each start on; beyond the stream's end its last id."""
        if self._held is None:
            index = np.minimum(starts[:, None] + np.arange(length), self._last)
            return torch.from_numpy(self._tokens[index].astype(np.int64))
        places = on_device(starts, self._device)[:, None] + torch.arange(length, device=self._device)
        return self._held[places.clamp(max=self._last)].long()
