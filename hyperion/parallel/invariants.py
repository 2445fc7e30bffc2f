"""What must hold on ranks at any time, checked: replicas are equal, shards are shards."""

import hashlib

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from hyperion.errors import HyperionError
from hyperion.parallel.reductions import is_replicated


class DesyncError(HyperionError):
    """Ranks that should hold the same values do not."""


def assert_ranks_agree(model: nn.Module) -> None:
    """Check that every replicated parameter has the same bits on every rank as on rank 0.

    Called by all ranks; see `differing_parameters`.

    Raises:
        DesyncError: on every rank alike; names the ranks that differ from rank 0 and the first differing parameter.
    """
    differing = differing_parameters(model)
    if not differing:
        return
    first = next(iter(differing))
    raise DesyncError(
        f"parameter {first} of rank {', '.join(map(str, differing[first]))} is not that of rank 0; {len(differing)} of "
        f"{len(_replicated(model))} parameters differ",
        where=f"{type(_unwrapped(model)).__name__} on {dist.get_world_size()} ranks",
        next_step="look for an update that not every rank makes: a step outside DDP, a seed or an input of the rank's own",
    )


@torch.no_grad()
def differing_parameters(model: nn.Module) -> dict[str, list[int]]:
    """Replicated parameters that have other bits on some ranks than on rank 0, by name, with these ranks.

    Called by all ranks; it costs one broadcast of the replicated parameters, and no memory beyond one of them. Sharded
    parameters have no second copy to compare. Alone there is nothing to compare.

    Raises:
        DesyncError: on every rank alike; the parameters have other names, shapes or types.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return {}
    assert_same_shapes(_unwrapped(model))
    replicated = _replicated(model)
    if not replicated:
        return {}
    differing = torch.stack([_differs_from_rank_0(value) for value in replicated.values()])  # bool [parameters]
    everyones = [torch.empty_like(differing) for _ in range(dist.get_world_size())]
    dist.all_gather(everyones, differing)
    by_parameter = torch.stack(everyones, dim=1).cpu()  # bool [parameters, ranks]
    found = zip(replicated, by_parameter, strict=True)
    return {name: ranks.nonzero().flatten().tolist() for name, ranks in found if ranks.any()}


def _unwrapped(model: nn.Module) -> nn.Module:
    """The module whose names are without DDP's own prefix."""
    return model.module if is_replicated(model) else model


def _replicated(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.detach() for name, p in _unwrapped(model).named_parameters() if not isinstance(p, DTensor)}


def _differs_from_rank_0(value: Tensor) -> Tensor:
    """bool scalar on the device. Compares bits: a NaN equals itself."""
    # Flat, because a kernel of one pixel counts as contiguous whatever the strides of its sides of length 1 are.
    mine = value.contiguous().flatten()
    reference = mine.clone()
    dist.broadcast(reference, src=0)
    return (reference.view(torch.uint8) != mine.view(torch.uint8)).any()


def assert_same_shapes(model: nn.Module) -> None:
    """Check, on all ranks, that their models have the same parameters by name, shape and type.

    Raises:
        DesyncError: on every rank alike. Without the check a collective over different shapes would hang.
    """
    text = "\n".join(f"{name} {tuple(p.shape)} {p.dtype}" for name, p in model.named_parameters())
    digests: list = [None] * dist.get_world_size()
    dist.all_gather_object(digests, hashlib.sha256(text.encode()).hexdigest())
    if others := [rank for rank, digest in enumerate(digests) if digest != digests[0]]:
        raise DesyncError(
            f"the model of rank {', '.join(map(str, others))} has parameters of other names, shapes or types than that of rank 0",
            where=f"{type(model).__name__} on {dist.get_world_size()} ranks",
            next_step="build the same model on every rank",
        )


@torch.no_grad()
def local_parameter_bytes(model: nn.Module) -> int:
    """Bytes of parameters that this rank holds: its shards, and the whole of what is not sharded."""
    held = [p.to_local() if isinstance(p, DTensor) else p for p in model.parameters()]
    return sum(value.numel() * value.element_size() for value in held)


def full_parameter_bytes(model: nn.Module) -> int:
    """Bytes of all parameters of the model, on however many ranks they lie."""
    return sum(p.numel() * p.element_size() for p in model.parameters())


def fsdp_units(model: nn.Module) -> list[str]:
    """Names of the modules that FSDP2 gathers and frees as one, in order; '' is the root. Empty without FSDP."""
    return [name for name, module in model.named_modules() if isinstance(module, FSDPModule)]
