"""What blocks keep for their backward pass: the policies of a plan, put around the forward pass of each block."""

import contextlib
import functools
from collections.abc import Iterator
from contextlib import AbstractContextManager

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from hyperion.parallel.batch_norm import frozen_statistics
from hyperion.parallel.plan import BUDGET, NONE, SELECTIVE, ParallelPlan

Contexts = tuple[AbstractContextManager, AbstractContextManager]

# What takes nearly all of a block's time. Named without their overloads; attention has a name for each of its kernels.
_PRODUCTS = ("aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm", "aten::convolution", "aten::_scaled_dot_product_")


def apply_checkpointing(model: nn.Module, blocks: list[nn.Module], plan: ParallelPlan) -> None:
    """Replace the forward pass of the blocks that the plan's policy chooses; parameters keep their names."""
    if plan.checkpointing == NONE:
        return
    for module in model.modules():
        # A transformers model that fills a cache of keys and values would fill it twice, once in the recomputation.
        if getattr(getattr(module, "config", None), "use_cache", False):
            module.config.use_cache = False
    for block in blocks[: plan.checkpointed_blocks] if plan.checkpointing == BUDGET else blocks:
        _checkpoint_block(block, plan)


def _checkpoint_block(block: nn.Module, plan: ParallelPlan) -> None:
    """Non-reentrant: the kind that torch recommends, and that works with frozen inputs, FSDP2 and compilation."""
    forward, options = block.forward, {"use_reentrant": False}
    # Compiled, the recomputation is part of the backward graph, which updates no statistics.
    normed = not plan.compile_blocks and any(isinstance(module, _BatchNorm) for module in block.modules())
    if plan.checkpointing == SELECTIVE:
        products = functools.partial(create_selective_checkpoint_contexts, _policy)
        options["context_fn"] = functools.partial(_both, products, block) if normed else products
    elif normed:
        options["context_fn"] = functools.partial(frozen_statistics, block)

    def checkpointed(*args, **kwargs):
        return checkpoint(forward, *args, **options, **kwargs)

    block.forward = checkpointed


def _policy(context, operator: torch._ops.OpOverload, *args, **kwargs) -> CheckpointPolicy:
    product = operator._schema.name.startswith(_PRODUCTS)
    return CheckpointPolicy.MUST_SAVE if product else CheckpointPolicy.PREFER_RECOMPUTE


def _both(products: functools.partial, block: nn.Module) -> Contexts:
    return tuple(_entered(*pair) for pair in zip(frozen_statistics(block), products(), strict=True))


@contextlib.contextmanager
def _entered(first: AbstractContextManager, second: AbstractContextManager) -> Iterator[None]:
    with first, second:
        yield
