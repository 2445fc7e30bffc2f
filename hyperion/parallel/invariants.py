"""Checks that must hold on all ranks at any time: replicated parameters are equal, sharded parameters are sharded."""

import hashlib

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from hyperion.errors import HyperionError


class DesyncError(HyperionError):
    """Ranks hold different values where they must be equal."""


def assert_ranks_agree(model: nn.Module) -> None:
    """Check that every replicated parameter is bitwise equal on all ranks. All ranks call it; see `differing_parameters`.

    Raises:
        DesyncError: on every rank; names the ranks that differ from rank 0 and the first differing parameter.
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
    """Return the replicated parameters that are not bitwise equal on all ranks: name to the ranks that differ from rank 0.

    All ranks call it. It costs one broadcast of the replicated parameters, and the memory of one of them. Sharded parameters
    have no second copy to compare. A single process returns an empty dict.

    Raises:
        DesyncError: on every rank; names, shapes or dtypes of the parameters differ.
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
    """Return the module inside DDP, whose parameter names lack DDP's prefix."""
    return model.module if isinstance(model, DistributedDataParallel) else model


def _replicated(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.detach() for name, p in _unwrapped(model).named_parameters() if not isinstance(p, DTensor)}


def _differs_from_rank_0(value: Tensor) -> Tensor:
    """Return a bool scalar on the device. Compares bits, so a NaN equals itself."""
    # Flattened, because strides of dimensions of size 1 may differ between ranks in tensors that count as contiguous.
    mine = value.contiguous().flatten()
    reference = mine.clone()
    dist.broadcast(reference, src=0)
    return (reference.view(torch.uint8) != mine.view(torch.uint8)).any()


def assert_same_shapes(model: nn.Module) -> None:
    """Check that all ranks have the same parameters by name, shape and dtype. All ranks call it.

    Without this check, a collective over different shapes would hang.

    Raises:
        DesyncError: on every rank; names the ranks that differ from rank 0.
    """
    text = "\n".join(f"{name} {tuple(p.shape)} {p.dtype}" for name, p in model.named_parameters())
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
    """Return the bytes of parameters on this rank: its shards, and all parameters that are not sharded."""
    local = [p.to_local() if isinstance(p, DTensor) else p for p in model.parameters()]
    return sum(value.numel() * value.element_size() for value in local)


def full_parameter_bytes(model: nn.Module) -> int:
    """Return the bytes of all parameters of the model, summed over all shards."""
    return sum(p.numel() * p.element_size() for p in model.parameters())


def fsdp_units(model: nn.Module) -> list[str]:
    """Return the names of the modules that FSDP2 gathers and frees as a unit, in order; '' is the root. Empty without FSDP."""
    return [name for name, module in model.named_modules() if isinstance(module, FSDPModule)]
