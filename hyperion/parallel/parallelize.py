"""`parallelize`: distribute a model over the ranks, in a fixed order.

1. Device: move the model, and copy rank 0's values to every rank, so that all ranks hold the same model.
2. Activation checkpointing, innermost: it wraps the plain forward pass of each block.
3. Compilation, block by block: the compiler must see the recomputation, to plan it, and must not see the communication,
   which would break its graphs.
4. FSDP2 or DDP, outermost: their hooks gather parameters before the compiled, checkpointed block and reduce gradients
   after it.

Steps 2 and 3 replace only the `forward` of a block, so that parameters keep the names of the plain model.
"""

import inspect
import warnings
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parallel import DistributedDataParallel

from hyperion.errors import HyperionError
from hyperion.models.layout import layout_of
from hyperion.parallel.activation_checkpoints import apply_checkpointing
from hyperion.parallel.collectives import assert_same_shapes
from hyperion.processes import World

STRATEGIES = ("single", "ddp", "fsdp")
PARAM_DTYPES = (None, "bf16")
NONE, EVERY_BLOCK, SELECTIVE, BUDGET = CHECKPOINTING = ("none", "every block", "selective", "budget")


@dataclass(frozen=True)
class ParallelPlan:
    """Options of `parallelize`.

    Attributes:
        strategy: 'single' (one device), 'ddp' (each rank holds the whole model, gradients are averaged) or 'fsdp'
            (parameters, gradients and optimizer state are sharded over the ranks and gathered block by block).
        param_dtype: FSDP only: dtype in which parameters are gathered and used. None keeps their own dtype; 'bf16' halves
            the traffic, while the optimizer's shards and the sum of gradients stay float32. Independent of a `Precision`
            of bf16 (autocast), which works with every strategy.
        checkpointing: what the forward pass saves; the backward pass recomputes the rest. 'none': everything. 'every
            block': only the inputs of blocks. 'selective': also the results of matrix products, convolutions and
            attention, so that only cheap operations are repeated. 'budget': only the inputs for the first
            `checkpointed_blocks` blocks, everything for the others.
        checkpointed_blocks: 'budget' only: number of checkpointed blocks; hyperion.training.fewest_checkpointed computes
            the smallest that fits a memory. The first blocks are chosen because they are recomputed last, when all others
            have freed their memory.
        compile_blocks: compile each block separately; blocks of the same structure share one compilation.
        reshard_after_forward: FSDP only: free a gathered block after its forward pass and gather it again in the
            backward pass. False uses more memory and less traffic.
    """

    strategy: str = "single"
    param_dtype: str | None = None
    checkpointing: str = NONE
    checkpointed_blocks: int | None = None
    compile_blocks: bool = False
    reshard_after_forward: bool = True

    def __post_init__(self) -> None:
        for name, choices in (("strategy", STRATEGIES), ("param_dtype", PARAM_DTYPES), ("checkpointing", CHECKPOINTING)):
            if (value := getattr(self, name)) not in choices:
                raise HyperionError(
                    f"{name} is {value!r}", where="ParallelPlan", next_step=f"choose one of {', '.join(map(repr, choices))}"
                )
        for name in ("compile_blocks", "reshard_after_forward"):
            if not isinstance(value := getattr(self, name), bool):
                raise HyperionError(f"{name} is {value!r}", where="ParallelPlan", next_step="give True or False")
        if self.strategy != "fsdp" and (self.param_dtype is not None or not self.reshard_after_forward):
            raise HyperionError(
                f"param_dtype and reshard_after_forward belong to strategy 'fsdp', not to {self.strategy!r}",
                where="ParallelPlan",
                next_step="remove them; for bf16 with any strategy give the engine a Precision of bf16",
            )
        blocks = self.checkpointed_blocks
        is_count = isinstance(blocks, int) and not isinstance(blocks, bool) and blocks >= 0
        if not (is_count if self.checkpointing == BUDGET else blocks is None):
            raise HyperionError(
                f"checkpointing {self.checkpointing!r} with checkpointed_blocks {blocks!r}",
                where="ParallelPlan",
                next_step=f"give a number of 0 or more with {BUDGET!r}, and None with the other policies",
            )


def parallelize(model: nn.Module, plan: ParallelPlan, world: World) -> nn.Module:
    """Move the model to this rank's device, and checkpoint, compile and shard or replicate it as planned.

    All ranks call it with models of the same shapes; rank 0's values are used. Build the optimizer from the result. With
    every strategy, state dicts of torch.distributed.checkpoint.state_dict have the parameter names of the plain model.

    Args:
        model: its blocks are those of `layout_of(model)`; it is modified in place.
        world: this process's world: hyperion.processes.world().

    Returns:
        The model itself ('single', 'fsdp') or DDP around it.

    Raises:
        HyperionError: the plan does not suit the ranks or the model, or FSDP would shard nothing.
    """
    _require_ranks(plan, world)
    blocks = [model.get_submodule(name) for name in layout_of(model).blocks]
    model.to(world.device.torch_device)
    if world.size > 1:
        _broadcast_from_rank_0(model)
    if plan.checkpointing != NONE:
        chosen = blocks[: plan.checkpointed_blocks] if plan.checkpointing == BUDGET else blocks
        selective = plan.checkpointing == SELECTIVE
        apply_checkpointing(model, chosen, plan.checkpointing, selective=selective, compiled=plan.compile_blocks)
    if plan.compile_blocks:
        for block in blocks:
            block.forward = torch.compile(block.forward)
    if plan.strategy == "fsdp":
        return _shard(model, blocks, plan, world)
    return _replicate(model, world) if plan.strategy == "ddp" else model


def _require_ranks(plan: ParallelPlan, world: World) -> None:
    if plan.strategy == "single" and world.size > 1:
        raise HyperionError(
            f"strategy 'single' on {world.size} ranks would train {world.size} independent models",
            where="parallelize",
            next_step="choose 'ddp' or 'fsdp', or start one process",
        )
    present = dist.get_world_size(world.group) if dist.is_initialized() else 0
    if plan.strategy != "single" and present != world.size:
        raise HyperionError(
            f"strategy {plan.strategy!r} needs a process group of size {world.size}, but this process is in a group of {present}",
            where="parallelize",
            next_step="start with run_ranks, or with torchrun inside hyperion.processes.process_group(), and pass its world",
        )


@torch.no_grad()
def _broadcast_from_rank_0(model: nn.Module) -> None:
    """Copy rank 0's values to all ranks. FSDP2 does not do this itself: it would combine shards of different models."""
    assert_same_shapes(model)
    for tensor in [*model.parameters(), *model.buffers()]:
        values = tensor.detach().contiguous()  # a copy if the memory format differs, such as channels-last
        dist.broadcast(values, src=0)
        tensor.copy_(values)


def _shard(model: nn.Module, blocks: list[nn.Module], plan: ParallelPlan, world: World) -> nn.Module:
    """Apply FSDP2 with one unit per block, and one unit for the rest at the root."""
    if not blocks or not all(list(block.parameters()) for block in blocks):
        raise HyperionError(
            f"FSDP over the {len(blocks)} blocks of {type(model).__name__} would shard nothing block by block",
            where="parallelize",
            next_step="name blocks that have parameters in the model's layout()",
        )
    policy = MixedPrecisionPolicy()
    if plan.param_dtype == "bf16":
        _require_no_batch_norm(model)
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    # FSDP2 warns that views it returns must not be modified in place; engines only read them.
    warnings.filterwarnings("ignore", message=r"FSDP2-wrapped module .* returned a view tensor")
    # FSDP2 shards contiguous parameters only. pyright: the overload is private in torch.
    model.to(memory_format=torch.contiguous_format)  # pyright: ignore[reportCallIssue]
    kind = torch.device(world.device.torch_device).type
    mesh = init_device_mesh(kind, (world.size,)) if world.group is None else DeviceMesh.from_group(world.group, kind)
    for block in blocks:
        # The backward pass starts with the last block: freed after the forward pass, it would be gathered again at once.
        free = plan.reshard_after_forward and block is not blocks[-1]
        fully_shard(block, mesh=mesh, mp_policy=policy, reshard_after_forward=free)
    # The same holds for the root. It contains everything outside of blocks, such as the token embedding and the head, so a
    # weight tied between the two belongs to one unit.
    fully_shard(model, mesh=mesh, mp_policy=policy, reshard_after_forward=False)
    return model


def _require_no_batch_norm(model: nn.Module) -> None:
    if any(isinstance(module, _BatchNorm) for module in model.modules()):
        raise HyperionError(
            "param_dtype 'bf16' would use BatchNorm weights in bf16 with running statistics in float32",
            where=f"parallelize, {type(model).__name__}",
            next_step="remove param_dtype and give the engine a Precision of bf16 (autocast)",
        )


def _replicate(model: nn.Module, world: World) -> nn.Module:
    device = torch.device(world.device.torch_device)
    # A gradient has the memory format of its parameter, and DDP's buckets depend on it: convert 4-d weights to the
    # channels-last format of ImageEngine before DDP, not after.
    model.to(memory_format=torch.channels_last)  # pyright: ignore[reportCallIssue]
    # Running statistics are averaged over ranks when they are used, in evaluation and in checkpoints
    # (average_statistics), instead of being broadcast from rank 0 in every step. torch 2.13 renamed the option.
    renamed = "forward_sync_buffers" in inspect.signature(DistributedDataParallel).parameters
    no_broadcast: dict[str, Any] = {"forward_sync_buffers" if renamed else "broadcast_buffers": False}
    return DistributedDataParallel(
        model,
        device_ids=None if device.type == "cpu" else [device.index],
        process_group=world.group,
        gradient_as_bucket_view=True,  # gradients are views of the buckets, not copies
        # find_unused_parameters and static_graph stay False: every parameter is used in every step, and non-reentrant
        # checkpointing needs neither option.
        **no_broadcast,
    )
