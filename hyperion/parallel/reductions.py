"""Collectives of a model's ranks: gradient exchange, norms, sums that the host does not wait for, BatchNorm statistics."""

import contextlib
from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parallel import DistributedDataParallel


def is_sharded(model: nn.Module) -> bool:
    """Return True if FSDP2 has sharded the parameters, so that each rank holds a part of the gradients."""
    return isinstance(model, FSDPModule)


def is_replicated(model: nn.Module) -> bool:
    """Return True if the model is wrapped in DDP, so that each rank holds the whole model."""
    return isinstance(model, DistributedDataParallel)


def ranks_of(model: nn.Module) -> int:
    """Return the number of ranks that `parallelize` distributed the model over; 1 for an undistributed model."""
    if isinstance(model, DistributedDataParallel):
        return dist.get_world_size(model.process_group)
    if not is_sharded(model):
        return 1
    shards = (parameter for parameter in model.parameters() if isinstance(parameter, DTensor))
    return next((shard.device_mesh.size() for shard in shards), dist.get_world_size())


@contextlib.contextmanager
def without_exchange(model: nn.Module) -> Iterator[None]:
    """Accumulate gradients on each rank without communication; the next backward pass outside exchanges the sums.

    FSDP2 keeps the gradients unsharded until then.
    """
    if isinstance(model, DistributedDataParallel):
        with model.no_sync():
            yield
    elif isinstance(model, FSDPModule):
        model.set_requires_gradient_sync(False)
        try:
            yield
        finally:
            model.set_requires_gradient_sync(True)
    else:
        yield


def start_sum(values: Tensor, ranks: int) -> Callable[[], Tensor]:
    """Start summing `values` over all ranks, asynchronously to the work that follows on the device.

    Args:
        ranks: 1 to return `values` unchanged.

    Returns:
        A function that returns the sum. The device waits for it there; the host does not.
    """
    if ranks == 1:
        return lambda: values
    total = values.clone()
    work = dist.all_reduce(total, async_op=True)
    assert work is not None, "this process belongs to the default group"

    def finish() -> Tensor:
        work.wait()
        return total

    return finish


def local_gradient_norm(model: nn.Module) -> Tensor:
    """Return the L2 norm (scalar on the device) of this rank's gradients; with FSDP2 that of its shards."""
    return nn.utils.get_total_norm(_local_gradients(model))


@torch.no_grad()
def clip_gradients(model: nn.Module, limit: float, norm: Tensor) -> None:
    """Scale the gradients so that their L2 norm over all ranks is at most `limit`.

    Computes the same as nn.utils.clip_grads_with_norm_, which dispatches sharded gradients one by one through DTensor and
    so costs milliseconds of host time in every step.

    Args:
        norm: current L2 norm over all ranks, scalar on the device.
    """
    factor = (limit / (norm + 1e-6)).clamp(max=1.0)
    torch._foreach_mul_(_local_gradients(model), factor)  # pyright: ignore[reportPrivateImportUsage] - no public name


@torch.no_grad()  # with gradients enabled, autograd would record DTensor.to_local
def _local_gradients(model: nn.Module) -> list[Tensor]:
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    return [gradient.to_local() if isinstance(gradient, DTensor) else gradient for gradient in gradients]


def reshard(model: nn.Module) -> None:
    """Free the parameters that FSDP2 leaves gathered after a forward pass without a backward pass."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


@torch.no_grad()
def average_statistics(model: nn.Module) -> None:
    """Replace BatchNorm's running means and variances by their mean over all ranks. All ranks call it.

    Call it before the statistics are used or saved. A running statistic is a weighted sum over batches, so averaging over
    ranks earlier or more often changes the result by rounding only. The result is not that of one device with the whole
    batch: as always with DDP, each rank normalises by its own part of the batch, so the variance between parts is missing.
    """
    if (ranks := ranks_of(model)) == 1:
        return
    norms = [module for module in model.modules() if isinstance(module, _BatchNorm) and module.track_running_stats]
    statistics = [s for norm in norms for s in (norm.running_mean, norm.running_var) if s is not None]
    if not statistics:
        return
    packed = torch.cat(statistics)
    dist.all_reduce(packed)
    packed /= ranks
    for statistic, mean in zip(statistics, packed.split([len(statistic) for statistic in statistics]), strict=True):
        statistic.copy_(mean)
