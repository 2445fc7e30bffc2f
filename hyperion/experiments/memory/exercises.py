"""Self-marking exercise for the chapter on memory: measure how much memory activation checkpointing saves."""

from collections.abc import Callable

import pandas as pd
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from hyperion.chapter.exercises import Question, explains_errors
from hyperion.hardware import detect_cpu
from hyperion.measure import TensorMemory
from hyperion.training import largest_batch

BEST_INTERVAL = Question(8, "the derivative of 64/k + k is zero where k times k is 64")

Saving = Callable[[nn.Module, nn.Module, Tensor], float]
_BLOCKS, _WIDTH, _BATCH = 8, 32, 64


def judge_largest_batch(answer: int | None, peak_gib: Callable[[int], float], memory_gib: float) -> str:
    """Judge the reader's answer to the question which batch size is the largest that fits into memory. Return a sentence.

    Args:
        answer: the batch size given by the reader, or None if there is no answer yet.
        peak_gib: function that takes a batch size and returns the peak memory of a step in GiB.
        memory_gib: size of the memory in GiB.
    """
    hint = f"increase the batch by one sequence until it needs more than {memory_gib:g} GiB"
    expected = 0 if answer is None else largest_batch(peak_gib, memory_gib)
    return Question(expected, hint, tolerance=0.0).judge(answer)


@explains_errors
def judge_saving(my_saving: Saving) -> pd.DataFrame:
    """Test a measurement of the memory that activation checkpointing saves.

    Args:
        my_saving: function that takes a model, the same model with checkpointing, and a batch. It returns by how many bytes the
            peak memory of the forward and backward pass is smaller for the second model.

    Returns:
        A table with one line per pair of models: the reader's measurement, the true value, and whether both agree within 5 %.
    """
    pairs = {"every block checkpointed": _BLOCKS, "every second block checkpointed": _BLOCKS // 2, "none checkpointed": 0}
    batch = torch.randn(_BATCH, _WIDTH)
    lines = []
    for name, checkpointed in pairs.items():
        plain, changed = _Deep(0), _Deep(checkpointed)
        measured = float(my_saving(plain, changed, batch))
        true = _peak_bytes(_Deep(0), batch) - _peak_bytes(_Deep(checkpointed), batch)
        right = abs(measured - true) <= 0.05 * abs(true)
        lines.append({"second model": name, "you measured": measured, "true": true, "right": right})
    return pd.DataFrame(lines)


class _Deep(nn.Module):
    """A model with eight blocks. `checkpointed` is the number of blocks that use activation checkpointing, evenly spaced."""

    def __init__(self, checkpointed: int):
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(_WIDTH, 4 * _WIDTH), nn.GELU(), nn.Linear(4 * _WIDTH, _WIDTH)) for _ in range(_BLOCKS)
        )
        self.checkpointed = {index * _BLOCKS // checkpointed for index in range(checkpointed)}

    def forward(self, x_BD: Tensor) -> Tensor:
        for index, block in enumerate(self.blocks):
            x_BD = checkpoint(block, x_BD, use_reentrant=False) if index in self.checkpointed else block(x_BD)
        return x_BD


def _peak_bytes(model: nn.Module, batch: Tensor) -> int:
    """Return the peak memory in bytes of the tensors that one forward and backward pass creates."""
    with TensorMemory(detect_cpu()) as memory:
        model(batch).sum().backward()
    return memory.peak_bytes
