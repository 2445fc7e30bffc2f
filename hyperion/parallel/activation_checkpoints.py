"""Activation checkpointing: wrap the forward pass of each block, according to the checkpointing policy of the plan.

If the recomputation differs from the forward pass, the gradients are wrong, and PyTorch often raises no error. This happens, for
example, if torch's GRU modifies matrix-product results in place without changing their version counters, or if a block modifies
its input or counts its calls. Therefore the first forward pass of each kind of block compares gradients and buffers with and
without recomputation, on the real inputs of the block. This takes two forward and two backward passes of one block, once per kind
of block. It uses no more memory than the later backward pass.
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

# Bounds on the relative L2 norm of a gradient's difference, in float32 and in 16-bit types. They exceed the differences caused by
# another order of summation, and are far below the effect of a tensor modified in place.
_TOLERANCE, _TOLERANCE_16_BIT = 1e-3, 2e-2
_ATTEMPTS = 3  # number of comparisons per kind of block; they are repeated if gradients are not finite (loss scale too large)
Contexts = tuple[AbstractContextManager, AbstractContextManager]

# Names of the operators that take nearly all of a block's time, without overload names. The last entry is a prefix, because each
# attention kernel has its own suffix.
_PRODUCTS = ("aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm", "aten::convolution", "aten::_scaled_dot_product_")


def apply_checkpointing(model: nn.Module, blocks: list[nn.Module], policy: str, *, selective: bool, compiled: bool) -> None:
    """Checkpoint the activations of some blocks of a model. Only `forward` is replaced, so parameters keep their names.

    Args:
        model: the model that contains the blocks.
        blocks: the blocks to checkpoint.
        policy: name of the policy, for error messages.
        selective: if True, save the inputs of blocks and the results of matrix products, convolutions and attention. If
            False, save only the inputs.
        compiled: True if the caller compiles the blocks afterwards.
    """
    for module in model.modules():
        # A transformers model that caches keys and values would append them to the cache again in the recomputation.
        config: Any = getattr(module, "config", None)
        if getattr(config, "use_cache", False):
            config.use_cache = False
    attempts: dict[tuple, int] = {}
    for block in blocks:
        _checkpoint_block(block, policy, selective, compiled, attempts)


def _checkpoint_block(block: nn.Module, policy: str, selective: bool, compiled: bool, attempts: dict[tuple, int]) -> None:
    """Checkpoint one block with non-reentrant autograd, which FSDP2, compilation and frozen inputs require."""
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

    # Blocks of the same structure are compared once.
    kind = tuple((name, type(module)) for name, module in block.named_modules())

    def compared_then_checkpointed(*args: Any, **kwargs: Any) -> Any:
        # A compiler plans the recomputation itself, on a graph without in-place operations: no comparison is needed.
        pending = attempts.get(kind, 0) < _ATTEMPTS and not torch.compiler.is_compiling() and torch.is_grad_enabled()
        # During the capture of a CUDA graph, the host cannot read values from the device.
        if pending and not (torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()):
            conclusive = _compare(block, policy, forward, checkpointed, args, kwargs)
            attempts[kind] = _ATTEMPTS if conclusive else attempts.get(kind, 0) + 1
        return checkpointed(*args, **kwargs)

    block.forward = compared_then_checkpointed


def frozen_statistics(block: nn.Module) -> Contexts:
    """Return the context managers for the forward pass and for the recomputation of a block with BatchNorm.

    They have the form that the argument `context_fn` of torch.utils.checkpoint requires. Without them, the recomputation would
    add the same batch to the running statistics of BatchNorm a second time.
    """
    norms = [module for module in block.modules() if isinstance(module, _BatchNorm)]
    return contextlib.nullcontext(), _without_momentum(norms)


@contextlib.contextmanager
def _without_momentum(norms: list[_BatchNorm]) -> Iterator[None]:
    # The recomputation must run the same operator as the forward pass, because another operator would save other tensors.
    # Therefore only the momentum is changed, to 0.
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
    """Compare gradients and buffers of a block with and without recomputation. The block is not changed.

    Returns:
        False if the comparison has no result, because inputs are fake tensors, no tensor requires a gradient, or a gradient
        is not finite. Otherwise True.

    Raises:
        HyperionError: a gradient or a buffer differs.
    """
    tensors = [leaf for leaf in [*tree_leaves((args, kwargs)), *block.parameters()] if isinstance(leaf, Tensor)]
    if any(isinstance(tensor, FakeTensor) for tensor in tensors) or not any(t.requires_grad for t in tensors):
        return False
    # Dispatch modes that count the operations or bytes of a step must not count this comparison.
    with _disable_current_modes(), _without_autocast_cache():
        plain = _gradients(block, forward, args, kwargs)
        try:
            recomputed = _gradients(block, checkpointed, args, kwargs)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:  # raised by torch after some in-place operations, and if shapes differ
            raise _refusal(block, f"checkpointing {policy!r} cannot recompute a block: {error}") from error
    if not plain or not all(bool(tensor.isfinite().all()) for tensor in plain.values()):
        return False
    half = torch.is_autocast_enabled(tensors[0].device.type) or any(t.element_size() < 4 for t in plain.values())
    tolerance = _TOLERANCE_16_BIT if half else _TOLERANCE
    norms = {name: float(tensor.double().norm()) for name, tensor in plain.items()}
    # If a gradient is zero except for rounding, its relative error has no meaning. Therefore divide by at least this norm.
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
    """Disable the cache of autocast, so that each weight is cast again.

    The recomputation does not use the casts that the forward pass has cached.
    """
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
        "or store a state between calls cannot be recomputed",
    )


def _gradients(block: nn.Module, forward: Callable, args: tuple, kwargs: dict) -> dict[str, Tensor]:
    """Run the forward and the backward pass of a block. Return the gradients of its inputs and parameters, and its buffers.

    The gradients of the outputs are random. Every call uses the same random numbers. After the call, the buffers of the block
    have their previous values.
    """
    buffers = [(buffer, buffer.clone()) for buffer in block.buffers()]
    leaves: dict[str, Tensor] = {}

    def copied(tensor: Tensor) -> Tensor:
        leaf = tensor.detach()
        if tensor.requires_grad:
            leaves[f"the gradient of input {len(leaves)}"] = leaf.requires_grad_()
        return leaf.clone()  # a copy, because the block may modify its input in place

    device = next((t.device for t in [*block.parameters(), *tree_leaves(args)] if isinstance(t, Tensor)), None)
    with torch.random.fork_rng([] if device is None or device.type == "cpu" else [device]):
        _seed(device, 0)
        args, kwargs = tree_map_only(Tensor, copied, (args, kwargs))
        leaves |= {f"the gradient of {name}": p for name, p in block.named_parameters() if p.requires_grad}
        outputs = [out for out in tree_leaves(forward(*args, **kwargs)) if isinstance(out, Tensor) and out.requires_grad]
        _seed(device, 1)
        # Random gradients of the outputs, so that errors of different elements do not cancel as they could in a sum.
        directions = [torch.randn_like(output) for output in outputs]
        # autograd.grad does not change the .grad of the parameters, so the training step is not disturbed.
        values = torch.autograd.grad(outputs, list(leaves.values()), directions, allow_unused=True) if outputs else ()
    gradients = {name: gradient for name, gradient in zip(leaves, values, strict=bool(outputs)) if gradient is not None}
    with torch.no_grad():
        for index, (buffer, before) in enumerate(buffers):
            if buffer.is_floating_point():
                gradients[f"buffer {index} afterwards"] = buffer.clone()
            if not torch.equal(buffer, before):  # an expanded buffer has not changed, and cannot be written to
                buffer.copy_(before)
    return gradients


def _seed(device: torch.device | None, seed: int) -> None:
    """Seed the random number generators of the CPU and of one device.

    torch.manual_seed would also seed other GPUs, whose generators fork_rng does not restore.
    """
    torch.default_generator.manual_seed(seed)
    if device is not None and device.type == "cuda":
        with torch.cuda.device(device):
            torch.cuda.manual_seed(seed)
