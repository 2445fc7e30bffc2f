"""BatchNorm's running statistics: once per step under activation checkpointing, equal on all ranks when they are used."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from hyperion.parallel.reductions import ranks_of


def frozen_statistics(block: nn.Module) -> tuple[AbstractContextManager, AbstractContextManager]:
    """Contexts of a block's forward pass and of its recomputation, for torch.utils.checkpoint's context_fn.

    The recomputation would add the same batch to the running statistics a second time.
    """
    return nullcontext(), _without_momentum([module for module in block.modules() if isinstance(module, _BatchNorm)])


@contextmanager
def _without_momentum(norms: list[_BatchNorm]) -> Iterator[None]:
    # The operation must be the same, or it would save other tensors than the forward pass did: only its weight is 0.
    before = [(norm.momentum, norm.num_batches_tracked) for norm in norms]
    for norm in norms:
        norm.momentum, norm.num_batches_tracked = 0.0, None
    try:
        yield
    finally:
        for norm, (momentum, batches) in zip(norms, before, strict=True):
            norm.momentum, norm.num_batches_tracked = momentum, batches


@torch.no_grad()
def average_statistics(model: nn.Module) -> None:
    """Give every rank the mean of all ranks' running means and variances; called by all ranks, before statistics are
    used or saved.

    A running statistic is a weighted sum over batches, so that its mean over ranks is the same whether it is taken now
    or later: averaging in between (an evaluation, a checkpoint) changes the result by rounding only. One device with
    the whole batch has other statistics: each rank normalises by its own part of the batch, as everywhere with DDP, and
    the variance within a part misses that between parts.
    """
    if (ranks := ranks_of(model)) == 1:
        return
    norms = [module for module in model.modules() if isinstance(module, _BatchNorm) and module.track_running_stats]
    statistics = [statistic for norm in norms for statistic in (norm.running_mean, norm.running_var)]
    if not statistics:
        return
    packed = torch.cat(statistics)
    dist.all_reduce(packed)
    packed /= ranks
    for statistic, mean in zip(statistics, packed.split([len(statistic) for statistic in statistics]), strict=True):
        statistic.copy_(mean)
