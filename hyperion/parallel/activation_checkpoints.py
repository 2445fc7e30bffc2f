"""Activation checkpointing: wrap the forward pass of each block as the plan's policy says.

A recomputation that differs from the forward pass gives wrong gradients without an error: torch's GRU modifies its products
in place without changing their version counters, a block may modify its input, or count its calls. So the first forward
pass of each kind of block compares gradients and buffers with and without recomputation, on the block's real inputs. This
costs two forward and backward passes of one block, once, and no more memory than the backward pass needs later.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from hyperion.errors import HyperionError

# Relative L2 norm of the difference of a gradient: above the noise of kernels that sum in any order, far below the effect of
# a tensor that was modified in place.
_TOLERANCE, _TOLERANCE_16_BIT = 1e-3, 2e-2
_ATTEMPTS = 3  # per kind of block while its gradients are not finite, as with a loss scale that is still too large
Contexts = tuple[AbstractContextManager, AbstractContextManager]

# Operators that take nearly all of a block's time, without their overload names; each attention kernel has its own suffix.
_PRODUCTS = ("aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm", "aten::convolution", "aten::_scaled_dot_product_")


def apply_checkpointing(model: nn.Module, blocks: list[nn.Module], policy: str, *, selective: bool, compiled: bool) -> None:
    """Replace the forward pass of some blocks of a model; parameters keep their names.

    Args:
        blocks: the blocks to checkpoint.
        policy: name of the policy, for errors.
        selective: also save the results of matrix products, convolutions and attention, not only the inputs.
        compiled: the blocks are compiled afterwards.
    """
    for module in model.modules():
        # A transformers model that caches keys and values would append to the cache again in the recomputation.
        config: Any = getattr(module, "config", None)
        if getattr(config, "use_cache", False):
            config.use_cache = False
    attempts: dict[tuple, int] = {}
    for block in blocks:
        _checkpoint_block(block, policy, selective, compiled, attempts)


def _checkpoint_block(block: nn.Module, policy: str, selective: bool, compiled: bool, attempts: dict[tuple, int]) -> None:
    """Checkpoint one block without reentrant autograd, as FSDP2, compilation and frozen inputs require."""
    forward = block.forward
    options: dict[str, Any] = {"use_reentrant": False}
    # In a compiled block the recomputation is part of the backward graph, which does not update statistics.
    has_statistics = not compiled and any(isinstance(module, _BatchNorm) for module in block.modules())
    if selective:
        contexts = functools.partial(create_selective_checkpoint_contexts, _policy)
        options["context_fn"] = functools.partial(_combined, contexts, block) if has_statistics else contexts
    elif has_statistics:
        options["context_fn"] = functools.partial(frozen_statistics, block)

    def checkpointed(*args: Any, **kwargs: Any) -> Any:
        return checkpoint(forward, *args, **options, **kwargs)

    kind = tuple((name, type(module)) for name, module in block.named_modules())

    def compared_then_checkpointed(*args: Any, **kwargs: Any) -> Any:
        # A compiler plans the recomputation itself, on a graph without in-place changes.
        pending = attempts.get(kind, 0) < _ATTEMPTS and not torch.compiler.is_compiling() and torch.is_grad_enabled()
        # During graph capture no value can be read back.
        if pending and not (torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()):
            conclusive = _compare(block, policy, forward, checkpointed, args, kwargs)
            attempts[kind] = _ATTEMPTS if conclusive else attempts.get(kind, 0) + 1
        return checkpointed(*args, **kwargs)

    block.forward = compared_then_checkpointed


def frozen_statistics(block: nn.Module) -> Contexts:
    """Return the contexts of a block's forward pass and of its recomputation, for torch.utils.checkpoint's context_fn.

    The recomputation would otherwise add the same batch to BatchNorm's running statistics a second time.
    """
    norms = [module for module in block.modules() if isinstance(module, _BatchNorm)]
    return contextlib.nullcontext(), _without_momentum(norms)


@contextlib.contextmanager
def _without_momentum(norms: list[_BatchNorm]) -> Iterator[None]:
    # The same operator must run as in the forward pass, or it would save other tensors; only its momentum is set to 0.
    before = [(norm.momentum, norm.num_batches_tracked) for norm in norms]
    for norm in norms:
        norm.momentum, norm.num_batches_tracked = 0.0, None
    try:
        yield
    finally:
        for norm, (momentum, batches) in zip(norms, before, strict=True):
            norm.momentum, norm.num_batches_tracked = momentum, batches


def _policy(context: object, operator: torch._ops.OpOverload, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    product = operator._schema.name.startswith(_PRODUCTS)
    return CheckpointPolicy.MUST_SAVE if product else CheckpointPolicy.PREFER_RECOMPUTE


def _combined(selective: Callable[[], Contexts], block: nn.Module) -> Contexts:
    (frozen_forward, frozen_again), (save, reuse) = frozen_statistics(block), selective()
    return _both(frozen_forward, save), _both(frozen_again, reuse)


@contextlib.contextmanager
def _both(first: AbstractContextManager, second: AbstractContextManager) -> Iterator[None]:
    with first, second:
        yield


def _compare(block: nn.Module, policy: str, forward: Callable, checkpointed: Callable, args: tuple, kwargs: dict) -> bool:
    """Compare gradients and buffers of a block with and without recomputation, and leave the block unchanged.

    Returns:
        False if the comparison is inconclusive: inputs are fake, nothing needs a gradient, or a gradient is not finite.

    Raises:
        HyperionError: they differ.
    """
    tensors = [leaf for leaf in [*tree_leaves((args, kwargs)), *block.parameters()] if isinstance(leaf, Tensor)]
    if any(isinstance(tensor, FakeTensor) for tensor in tensors) or not any(t.requires_grad for t in tensors):
        return False
    # Modes that count the operations or bytes of a step must not count the comparison.
    with _disable_current_modes(), _without_autocast_cache():
        plain = _gradients(block, forward, args, kwargs)
        try:
            recomputed = _gradients(block, checkpointed, args, kwargs)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:  # torch detects some in-place changes, and tensors whose shapes differ
            raise _refusal(block, f"checkpointing {policy!r} cannot recompute a block: {error}") from error
    if not plain or not all(bool(tensor.isfinite().all()) for tensor in plain.values()):
        return False
    half = torch.is_autocast_enabled(tensors[0].device.type) or any(t.element_size() < 4 for t in plain.values())
    tolerance = _TOLERANCE_16_BIT if half else _TOLERANCE
    norms = {name: float(tensor.double().norm()) for name, tensor in plain.items()}
    # The relative error of a gradient that is zero up to rounding is meaningless.
    smallest = 1e-2 * max(norms.values())
    for name, tensor in plain.items():
        difference = float((recomputed[name].double() - tensor.double()).norm()) if name in recomputed else norms[name]
        if not difference <= tolerance * max(norms[name], smallest):
            raise _refusal(
                block,
                f"with checkpointing {policy!r} {name} of {type(block).__name__} is wrong: its L2 norm is {norms[name]:.6g} "
                f"without recomputation, and the L2 norm of the difference is {difference:.3g}",
            )
    return True


@contextlib.contextmanager
def _without_autocast_cache() -> Iterator[None]:
    """Cast each weight anew: the recomputation runs without the casts that the forward pass has cached."""
    before = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(before)


def _refusal(block: nn.Module, what: str) -> HyperionError:
    return HyperionError(
        what,
        where=f"a block of {', '.join(sorted({type(module).__name__ for module in block.modules()}))}",
        next_step="choose another policy of ParallelPlan.checkpointing, or 'none'; layers that modify their results in place "
        "or hold a state cannot be recomputed",
    )


def _gradients(block: nn.Module, forward: Callable, args: tuple, kwargs: dict) -> dict[str, Tensor]:
    """Return the gradients of a block's inputs and parameters for random output gradients, and its buffers afterwards.

    Every call uses the same random numbers. Buffers are restored.
    """
    buffers = [(buffer, buffer.clone()) for buffer in block.buffers()]
    leaves: dict[str, Tensor] = {}

    def copied(tensor: Tensor) -> Tensor:
        leaf = tensor.detach()
        if tensor.requires_grad:
            leaves[f"the gradient of input {len(leaves)}"] = leaf.requires_grad_()
        return leaf.clone()  # a block that modifies its input in place must not modify this one

    device = next((t.device for t in [*block.parameters(), *tree_leaves(args)] if isinstance(t, Tensor)), None)
    with torch.random.fork_rng([] if device is None or device.type == "cpu" else [device]):
        _seed(device, 0)
        args, kwargs = tree_map_only(Tensor, copied, (args, kwargs))
        leaves |= {f"the gradient of {name}": p for name, p in block.named_parameters() if p.requires_grad}
        outputs = [out for out in tree_leaves(forward(*args, **kwargs)) if isinstance(out, Tensor) and out.requires_grad]
        _seed(device, 1)
        directions = [torch.randn_like(output) for output in outputs]
        values = torch.autograd.grad(outputs, list(leaves.values()), directions, allow_unused=True) if outputs else ()
    gradients = {name: gradient for name, gradient in zip(leaves, values, strict=bool(outputs)) if gradient is not None}
    with torch.no_grad():
        for index, (buffer, before) in enumerate(buffers):
            if buffer.is_floating_point():
                gradients[f"buffer {index} afterwards"] = buffer.clone()
            if not torch.equal(buffer, before):  # an expanded buffer cannot be written to, and has not changed
                buffer.copy_(before)
    return gradients


def _seed(device: torch.device | None, seed: int) -> None:
    """Seed the generators of the CPU and of one device; torch.manual_seed would also seed GPUs that fork_rng does not restore."""
    torch.default_generator.manual_seed(seed)
    if device is not None and device.type == "cuda":
        with torch.cuda.device(device):
            torch.cuda.manual_seed(seed)
