"""What a model's ranks have in common, and sums over them that the host does not wait for."""

import contextlib
from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel


def is_sharded(model: nn.Module) -> bool:
    """Whether FSDP2 has sharded the parameters: each rank then holds a part of the gradients."""
    return isinstance(model, FSDPModule)


def is_replicated(model: nn.Module) -> bool:
    """Whether DDP keeps a whole model on each rank."""
    return isinstance(model, DistributedDataParallel)


def ranks_of(model: nn.Module) -> int:
    """Ranks that `parallelize` laid the model over; 1 for a model of one device, also beside other ranks."""
    if is_replicated(model):
        return dist.get_world_size(model.process_group)
    shards = (parameter for parameter in model.parameters() if isinstance(parameter, DTensor))
    return next((shard.device_mesh.size() for shard in shards), dist.get_world_size()) if is_sharded(model) else 1


@contextlib.contextmanager
def without_exchange(model: nn.Module) -> Iterator[None]:
    """Gradients of forward and backward passes inside are added up on each rank; the next backward pass outside exchanges
    the sums. FSDP2 keeps them unsharded until then.
    """
    if is_replicated(model):
        with model.no_sync():
            yield
    elif is_sharded(model):
        model.set_requires_gradient_sync(False)
        try:
            yield
        finally:
            model.set_requires_gradient_sync(True)
    else:
        yield


def start_sum(values: Tensor, ranks: int) -> Callable[[], Tensor]:
    """Begin to sum `values` over all ranks, beside whatever the device does next.

    Args:
        ranks: 1 for values of one device alone, which are their own sum.

    Returns:
        A function that gives the sum: the device waits for it there, the host does not.
    """
    if ranks == 1:
        return lambda: values
    total = values.clone()
    work = dist.all_reduce(total, async_op=True)

    def finish() -> Tensor:
        work.wait()
        return total

    return finish


def local_gradient_norm(model: nn.Module) -> Tensor:
    """L2 norm (scalar on the device) of this rank's gradients: of its shards where they are sharded."""
    return nn.utils.get_total_norm(_local_gradients(model))


@torch.no_grad()
def clip_gradients(model: nn.Module, limit: float, norm: Tensor) -> None:
    """Scale the gradients down so that their L2 norm over all ranks, which is `norm`, becomes at most `limit`.

    It computes what nn.utils.clip_grads_with_norm_ does, but that takes sharded gradients one by one, each through the
    dispatch of DTensor: milliseconds of the host in every step.
    """
    factor = (limit / (norm + 1e-6)).clamp(max=1.0)
    torch._foreach_mul_(_local_gradients(model), factor)


@torch.no_grad()  # with gradients enabled DTensor.to_local would record itself
def _local_gradients(model: nn.Module) -> list[Tensor]:
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    return [gradient.to_local() if isinstance(gradient, DTensor) else gradient for gradient in gradients]


def reshard(model: nn.Module) -> None:
    """Free what FSDP2 keeps gathered after a forward pass without a backward pass."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
