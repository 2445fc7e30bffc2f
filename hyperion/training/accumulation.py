"""Gradient accumulation: a batch that does not fit at once, taken in parts whose gradients are added up."""

import contextlib
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager

from torch import Tensor, nn

from hyperion.errors import HyperionError
from hyperion.parallel import without_exchange


def micro_batches(
    batch: Sequence[Tensor], count: int, model: nn.Module
) -> Iterator[tuple[Sequence[Tensor], AbstractContextManager]]:
    """The batch in `count` parts of equal length, or nearly, each with the context of its forward and backward pass: ranks
    exchange gradients in the last one only.

    Args:
        batch: tensors [B, ...], alike in B.

    Raises:
        HyperionError: fewer than `count` examples.
    """
    if count == 1:
        yield batch, contextlib.nullcontext()
        return
    if (examples := len(batch[0])) < count:
        raise HyperionError(
            f"a batch of {examples} examples cannot be taken in {count} parts",
            where="gradient accumulation",
            next_step="give a larger batch, leave out the last, smaller one, or take fewer parts",
        )
    parts = list(zip(*(tensor.tensor_split(count) for tensor in batch), strict=True))
    for part in parts[:-1]:
        yield part, without_exchange(model)
    yield parts[-1], contextlib.nullcontext()
