"""Collectives for a distributed model.

The functions exchange gradients, compute gradient norms, sum values without blocking the host, and average BatchNorm statistics.
Other functions check that replicated parameters are equal on all ranks, and report how parameters are sharded.
"""

import contextlib
import hashlib
from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parallel import DistributedDataParallel

from hyperion.errors import HyperionError


def is_sharded(model: nn.Module) -> bool:
    """Return True if FSDP2 has sharded the parameters. Each rank then holds only a part of the parameters and gradients."""
    return isinstance(model, FSDPModule)


def is_replicated(model: nn.Module) -> bool:
    """Return True if the model is wrapped in DDP. Each rank then holds the whole model."""
    return isinstance(model, DistributedDataParallel)


def ranks_of(model: nn.Module) -> int:
    """Return the number of ranks over which `parallelize` distributed the model; 1 for a model that is not distributed."""
    if isinstance(model, DistributedDataParallel):
        return dist.get_world_size(model.process_group)
    if not is_sharded(model):
        return 1
    shards = (parameter for parameter in model.parameters() if isinstance(parameter, DTensor))
    return next((shard.device_mesh.size() for shard in shards), dist.get_world_size())


@contextlib.contextmanager
def without_exchange(model: nn.Module) -> Iterator[None]:
    """Context manager: accumulate gradients on each rank without communication.

    The next backward pass outside the block exchanges the sums of the gradients. Until then FSDP2 keeps the gradients unsharded.
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
    """Start to sum `values` over all ranks. The next operations on the device do not wait for the sum.

    Args:
        values: tensor of this rank. All ranks need the same shape and dtype.
        ranks: number of ranks. With 1 the result is `values` itself.

    Returns:
        A function that returns the sum. Calling it makes the device wait for the sum, but not the host.
    """
    if ranks == 1:
        return lambda: values
    # all_reduce works in place, and the caller still needs the values of this rank.
    total = values.clone()
    work = dist.all_reduce(total, async_op=True)
    assert work is not None, "this process belongs to the default group"

    def finish() -> Tensor:
        work.wait()
        return total

    return finish


def local_gradient_norm(model: nn.Module) -> Tensor:
    """Return the L2 norm of the gradients of this rank, as a scalar on the device. With FSDP2 these are only its shards."""
    return nn.utils.get_total_norm(_local_gradients(model))


@torch.no_grad()
def clip_gradients(model: nn.Module, limit: float, norm: Tensor) -> None:
    """Scale the gradients so that their L2 norm over all ranks is at most `limit`.

    The result is that of nn.utils.clip_grads_with_norm_. That function processes sharded gradients one by one through DTensor,
    which takes milliseconds of host time in every step.

    Args:
        model: model with gradients. Each rank scales its own gradients or shards.
        limit: upper bound on the L2 norm of the gradients after scaling.
        norm: current L2 norm of the gradients over all ranks, as a scalar on the device.
    """
    # The same 1e-6 as in torch.nn.utils, so that the results agree. The factor is a tensor, not a number, so that the host does
    # not wait for the norm.
    factor = (limit / (norm + 1e-6)).clamp(max=1.0)
    torch._foreach_mul_(_local_gradients(model), factor)  # pyright: ignore[reportPrivateImportUsage] - no public name


@torch.no_grad()  # otherwise autograd would record DTensor.to_local
def _local_gradients(model: nn.Module) -> list[Tensor]:
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    return [gradient.to_local() if isinstance(gradient, DTensor) else gradient for gradient in gradients]


def reshard(model: nn.Module) -> None:
    """Free the gathered parameters of FSDP2.

    After a forward pass without a backward pass, FSDP2 does not free all of them itself.
    """
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


@torch.no_grad()
def average_statistics(model: nn.Module) -> None:
    """Replace the running means and variances of BatchNorm by their averages over all ranks. All ranks must call this function.

    Call it before the statistics are used or saved. A running statistic is a weighted sum over batches. Therefore, calling
    this function earlier or more often changes the result only by rounding.

    The averages differ from the statistics of a single device that gets the whole batch. With DDP, each rank normalises by the
    statistics of its own part of the batch. Therefore the average does not contain the variance between the parts.
    """
    if (ranks := ranks_of(model)) == 1:
        return
    norms = [module for module in model.modules() if isinstance(module, _BatchNorm) and module.track_running_stats]
    statistics = [s for norm in norms for s in (norm.running_mean, norm.running_var) if s is not None]
    if not statistics:
        return
    # One collective for all statistics: they are small, so its latency dominates.
    packed = torch.cat(statistics)
    dist.all_reduce(packed)
    packed /= ranks
    for statistic, mean in zip(statistics, packed.split([len(statistic) for statistic in statistics]), strict=True):
        statistic.copy_(mean)


class DesyncError(HyperionError):
    """Raised when values that must be equal on all ranks differ."""


def assert_ranks_agree(model: nn.Module) -> None:
    """Check that every replicated parameter is bitwise equal on all ranks. All ranks must call this function.

    See `differing_parameters` for the cost.

    Raises:
        DesyncError: a parameter differs. The error is raised on every rank. It names the first parameter that differs, and
            the ranks on which this parameter differs from that of rank 0.
    """
    differing = differing_parameters(model)
    if not differing:
        return
    first = next(iter(differing))
    raise DesyncError(
        f"parameter {first} of rank {', '.join(map(str, differing[first]))} differs from that of rank 0; {len(differing)} of "
        f"{len(_replicated(model))} parameters differ",
        where=f"{type(_unwrapped(model)).__name__} on {dist.get_world_size()} ranks",
        next_step="look for an update that only some ranks make: a step outside DDP, or a seed or input that differs by rank",
    )


@torch.no_grad()
def differing_parameters(model: nn.Module) -> dict[str, list[int]]:
    """Return the replicated parameters that are not bitwise equal on all ranks. All ranks must call this function.

    The function broadcasts the replicated parameters one by one, so it needs additional memory for one parameter. Sharded
    parameters are not compared, because they exist only once.

    Returns:
        A dict that maps each differing parameter's name to the ranks whose values differ from those of rank 0. Empty in a single
        process.

    Raises:
        DesyncError: names, shapes or dtypes of the parameters differ. The error is raised on every rank.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return {}
    assert_same_shapes(_unwrapped(model))
    replicated = _replicated(model)
    if not replicated:
        return {}
    differing = torch.stack([_differs_from_rank_0(value) for value in replicated.values()])  # bool [parameters]
    of_all_ranks = [torch.empty_like(differing) for _ in range(dist.get_world_size())]
    dist.all_gather(of_all_ranks, differing)
    by_parameter = torch.stack(of_all_ranks, dim=1).cpu()  # bool [parameters, ranks]
    pairs = zip(replicated, by_parameter, strict=True)
    return {name: ranks.nonzero().flatten().tolist() for name, ranks in pairs if ranks.any()}


def _unwrapped(model: nn.Module) -> nn.Module:
    """Return the module inside DDP. Its parameter names do not have the prefix of DDP."""
    return model.module if isinstance(model, DistributedDataParallel) else model


def _replicated(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.detach() for name, p in _unwrapped(model).named_parameters() if not isinstance(p, DTensor)}


def _differs_from_rank_0(value: Tensor) -> Tensor:
    """Return True, as a scalar on the device, if the value differs from that of rank 0. Bits are compared, so NaN equals NaN."""
    # Flatten the tensor: in contiguous tensors the strides of dimensions of size 1 may differ between ranks.
    mine = value.contiguous().flatten()
    reference = mine.clone()
    dist.broadcast(reference, src=0)
    return (reference.view(torch.uint8) != mine.view(torch.uint8)).any()


def assert_same_shapes(model: nn.Module) -> None:
    """Check that the parameters have the same names, shapes and dtypes on all ranks. All ranks must call this function.

    Without this check, a collective over tensors of different shapes would hang.

    Raises:
        DesyncError: parameters differ. The error is raised on every rank and names the ranks that differ from rank 0.
    """
    text = "\n".join(f"{name} {tuple(p.shape)} {p.dtype}" for name, p in model.named_parameters())
    # Gather Python objects: a collective over tensors would already need equal shapes.
    digests: list = [None] * dist.get_world_size()
    dist.all_gather_object(digests, hashlib.sha256(text.encode()).hexdigest())
    if others := [rank for rank, digest in enumerate(digests) if digest != digests[0]]:
        raise DesyncError(
            f"parameter names, shapes or dtypes of rank {', '.join(map(str, others))} differ from those of rank 0",
            where=f"{type(model).__name__} on {dist.get_world_size()} ranks",
            next_step="build the same model on every rank",
        )


@torch.no_grad()
def local_parameter_bytes(model: nn.Module) -> int:
    """Return the size of the parameters on this rank in bytes: its shards, and all parameters that are not sharded."""
    local = [p.to_local() if isinstance(p, DTensor) else p for p in model.parameters()]
    return sum(value.numel() * value.element_size() for value in local)


def full_parameter_bytes(model: nn.Module) -> int:
    """Return the size of all parameters of the model in bytes, summed over all shards."""
    return sum(p.numel() * p.element_size() for p in model.parameters())


def fsdp_units(model: nn.Module) -> list[str]:
    """Return the names of the FSDP2 units in order: modules whose parameters are gathered and freed together.

    The name of the root is ''. Without FSDP2 the list is empty.
    """
    return [name for name, module in model.named_modules() if isinstance(module, FSDPModule)]
