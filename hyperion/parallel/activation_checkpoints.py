"""What blocks keep for their backward pass: the policies of a plan, put around the forward pass of each block.

A recomputation that differs from the forward pass gives wrong gradients without an error: torch's GRU changes its products
in place where the version counters do not see it, a block may change its input, or count its calls. So the first forward
pass of each kind of block compares: gradients and buffers with and without recomputation, on the block's real inputs. It
costs two forward and backward passes of one block, once, and no more memory than the backward pass needs later.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from hyperion.errors import HyperionError
from hyperion.parallel.batch_norm import frozen_statistics
from hyperion.parallel.plan import BUDGET, NONE, SELECTIVE, ParallelPlan

# Relative L2 norm of the difference of a gradient: above the scatter of kernels that add up in any order, far below the
# effect of a tensor that was changed in place.
_TOLERANCE, _TOLERANCE_16_BIT = 1e-3, 2e-2
_ATTEMPTS = 3  # of a kind of block whose gradients are not finite yet, as at a loss scale that is still too large
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
    compared: dict[tuple, int] = {}
    for block in blocks[: plan.checkpointed_blocks] if plan.checkpointing == BUDGET else blocks:
        _checkpoint_block(block, plan, compared)


def _checkpoint_block(block: nn.Module, plan: ParallelPlan, compared: dict[tuple, int]) -> None:
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

    kind = tuple((name, type(module)) for name, module in block.named_modules())

    def checkpointed_once_compared(*args, **kwargs):
        # A compiler plans the recomputation itself, on a graph without changes in place.
        unknown = compared.get(kind, 0) < _ATTEMPTS and not torch.compiler.is_compiling() and torch.is_grad_enabled()
        # While a graph is recorded nothing may be read back.
        if unknown and not (torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()):
            said = _compare(block, plan.checkpointing, forward, checkpointed, args, kwargs)
            compared[kind] = _ATTEMPTS if said else compared.get(kind, 0) + 1
        return checkpointed(*args, **kwargs)

    block.forward = checkpointed_once_compared


def _compare(block: nn.Module, policy: str, forward: Callable, checkpointed: Callable, args: tuple, kwargs: dict) -> bool:
    """Compare gradients and buffers of a block with and without recomputation; nothing is changed by it.

    Returns:
        False if the inputs say nothing: they are fake, nothing needs a gradient, or a gradient is not finite.

    Raises:
        HyperionError: they differ.
    """
    tensors = [leaf for leaf in [*tree_leaves((args, kwargs)), *block.parameters()] if isinstance(leaf, Tensor)]
    if any(isinstance(tensor, FakeTensor) for tensor in tensors) or not any(t.requires_grad for t in tensors):
        return False
    # What counts operations or bytes of a step must not see these.
    with _disable_current_modes(), _without_cached_casts():
        plain = _gradients(block, forward, args, kwargs)
        try:
            recomputed = _gradients(block, checkpointed, args, kwargs)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:  # torch notices some changes in place, and tensors of other shapes
            raise _refused(block, f"checkpointing {policy!r} cannot compute a block again: {error}") from error
    if not plain or not all(bool(tensor.isfinite().all()) for tensor in plain.values()):
        return False
    half = torch.is_autocast_enabled(tensors[0].device.type) or any(t.element_size() < 4 for t in plain.values())
    tolerance = _TOLERANCE_16_BIT if half else _TOLERANCE
    norms = {name: float(tensor.double().norm()) for name, tensor in plain.items()}
    # A gradient that is zero but for rounding has no relative error of its own.
    least = 1e-2 * max(norms.values())
    for name, tensor in plain.items():
        difference = float((recomputed[name].double() - tensor.double()).norm()) if name in recomputed else norms[name]
        if not difference <= tolerance * max(norms[name], least):
            raise _refused(
                block,
                f"with checkpointing {policy!r} {name} of {type(block).__name__} is wrong: its L2 norm is "
                f"{norms[name]:.6g}, and the difference to that without recomputation is {difference:.3g}",
            )
    return True


@contextlib.contextmanager
def _without_cached_casts() -> Iterator[None]:
    """Autocast casts each weight anew: what it has cast already, the recomputation would cast again."""
    before = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(before)


def _refused(block: nn.Module, what: str) -> HyperionError:
    return HyperionError(
        what,
        where=f"a block of {', '.join(sorted({type(module).__name__ for module in block.modules()}))}",
        next_step="choose another policy of ParallelPlan.checkpointing, or 'none'; layers that change their results in "
        "place or hold a state cannot be computed again",
    )


def _gradients(block: nn.Module, forward: Callable, args: tuple, kwargs: dict) -> dict[str, Tensor]:
    """Gradients of the block's inputs and parameters for a random gradient of its outputs, and its buffers afterwards;
    all the same numbers are drawn in each call.
    """
    buffers = [(buffer, buffer.clone()) for buffer in block.buffers()]
    leaves: dict[str, Tensor] = {}

    def copied(tensor: Tensor) -> Tensor:
        leaf = tensor.detach()
        if tensor.requires_grad:
            leaves[f"the gradient of input {len(leaves)}"] = leaf.requires_grad_()
        return leaf.clone()  # a block that changes its input in place must not change this one

    device = next((t.device for t in [*block.parameters(), *tree_leaves(args)] if isinstance(t, Tensor)), None)
    with torch.random.fork_rng([] if device is None or device.type == "cpu" else [device]):
        _seed(device, 0)
        args, kwargs = tree_map_only(Tensor, copied, (args, kwargs))
        leaves |= {f"the gradient of {name}": p for name, p in block.named_parameters() if p.requires_grad}
        outputs = [out for out in tree_leaves(forward(*args, **kwargs)) if isinstance(out, Tensor) and out.requires_grad]
        _seed(device, 1)
        directions = [torch.randn_like(output) for output in outputs]
        found = torch.autograd.grad(outputs, list(leaves.values()), directions, allow_unused=True) if outputs else ()
    gradients = {name: gradient for name, gradient in zip(leaves, found, strict=bool(outputs)) if gradient is not None}
    with torch.no_grad():
        for index, (buffer, before) in enumerate(buffers):
            if buffer.is_floating_point():
                gradients[f"buffer {index} afterwards"] = buffer.clone()
            if not torch.equal(buffer, before):  # one that is expanded cannot be written to, and has not changed
                buffer.copy_(before)
    return gradients


def _seed(device: torch.device | None, seed: int) -> None:
    """Seed the generators of the CPU and of one device; torch.manual_seed would seed GPUs that nobody restores."""
    torch.default_generator.manual_seed(seed)
    if device is not None and device.type == "cuda":
        with torch.cuda.device(device):
            torch.cuda.manual_seed(seed)


def _policy(context, operator: torch._ops.OpOverload, *args, **kwargs) -> CheckpointPolicy:
    product = operator._schema.name.startswith(_PRODUCTS)
    return CheckpointPolicy.MUST_SAVE if product else CheckpointPolicy.PREFER_RECOMPUTE


def _both(products: functools.partial, block: nn.Module) -> Contexts:
    return tuple(_entered(*pair) for pair in zip(frozen_statistics(block), products(), strict=True))


@contextlib.contextmanager
def _entered(first: AbstractContextManager, second: AbstractContextManager) -> Iterator[None]:
    with first, second:
        yield
