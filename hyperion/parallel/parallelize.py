"""`parallelize`: one function that lays a model over the ranks, in one fixed order.

1. The device, and rank 0's values on every rank: from here on all ranks hold the same model.
2. Activation checkpointing, innermost: what a block keeps is decided before anything looks at the block's forward pass.
3. Compilation, block by block: it sees the recomputation and can plan it, and must not see the communication, which
   would break its graphs.
4. FSDP2 or DDP, outermost: their hooks gather parameters before the compiled, checkpointed block and reduce gradients
   after it.

Steps 2 and 3 replace the `forward` of the block and nothing else, so that parameters keep the names of the plain model.
"""

import inspect
import warnings

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parallel import DistributedDataParallel

from hyperion.errors import HyperionError
from hyperion.parallel.activation_checkpoints import apply_checkpointing
from hyperion.parallel.invariants import assert_same_shapes
from hyperion.parallel.layouts import layout_of
from hyperion.parallel.plan import ParallelPlan
from hyperion.processes import World


def parallelize(model: nn.Module, plan: ParallelPlan, world: World) -> nn.Module:
    """The model on this rank's device, checkpointed, compiled and sharded or replicated as planned.

    Every rank calls it, with a model of the same shapes; rank 0's values are the ones that count. Build the optimizer
    from what it returns. State dicts of torch.distributed.checkpoint.state_dict name the parameters of each strategy
    as the plain model does.

    Args:
        model: its blocks are those of `layout_of(model)`; it is changed in place.
        world: of this process: hyperion.processes.world().

    Returns:
        The model itself ('single', 'fsdp') or DDP around it.

    Raises:
        HyperionError: the plan does not suit the ranks or the model, or would shard nothing.
    """
    _require_ranks(plan, world)
    blocks = [model.get_submodule(name) for name in layout_of(model).blocks]
    model.to(world.device.torch_device)
    if world.size > 1:
        _take_from_rank_0(model)
    apply_checkpointing(model, blocks, plan)
    if plan.compile_blocks:
        for block in blocks:
            block.forward = torch.compile(block.forward)
    if plan.strategy == "fsdp":
        return _shard(model, blocks, plan, world)
    return _replicate(model, world) if plan.strategy == "ddp" else model


def _require_ranks(plan: ParallelPlan, world: World) -> None:
    if plan.strategy == "single" and world.size > 1:
        raise HyperionError(
            f"strategy 'single' on {world.size} ranks would train {world.size} models that know nothing of each other",
            where="parallelize",
            next_step="choose 'ddp' or 'fsdp', or start one process",
        )
    present = dist.get_world_size(world.group) if dist.is_initialized() else 0
    if plan.strategy != "single" and present != world.size:
        raise HyperionError(
            f"strategy {plan.strategy!r} needs a process group of {world.size}, and this process is in one of {present}",
            where="parallelize",
            next_step="start with run_ranks, or with torchrun inside hyperion.processes.process_group(), and give its world",
        )


@torch.no_grad()
def _take_from_rank_0(model: nn.Module) -> None:
    """DDP does this itself; FSDP2 does not, and would put together a model of pieces of different ones."""
    assert_same_shapes(model)
    for tensor in [*model.parameters(), *model.buffers()]:
        whole = tensor.detach().contiguous()  # a copy where the layout is another, such as channels-last
        dist.broadcast(whole, src=0)
        tensor.copy_(whole)


def _shard(model: nn.Module, blocks: list[nn.Module], plan: ParallelPlan, world: World) -> nn.Module:
    """FSDP2 with one unit per block, and one of the rest at the root."""
    if not blocks or not all(list(block.parameters()) for block in blocks):
        raise HyperionError(
            f"FSDP over the {len(blocks)} blocks of {type(model).__name__} would shard nothing block by block",
            where="parallelize",
            next_step="name blocks that hold parameters in the model's layout()",
        )
    policy = MixedPrecisionPolicy()
    if plan.param_dtype == "bf16":
        _require_no_batch_norm(model)
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    # It warns of in-place operations on what the model returns: engines read it and change nothing.
    warnings.filterwarnings("ignore", message=r"FSDP2-wrapped module .* returned a view tensor")
    model.to(memory_format=torch.contiguous_format)  # FSDP2 shards no other
    kind = torch.device(world.device.torch_device).type
    mesh = init_device_mesh(kind, (world.size,)) if world.group is None else DeviceMesh.from_group(world.group, kind)
    for block in blocks:
        # The backward pass begins with the last block: it would be gathered again as soon as it is freed.
        free = plan.reshard_after_forward and block is not blocks[-1]
        fully_shard(block, mesh=mesh, mp_policy=policy, reshard_after_forward=free)
    # The same goes for the root, which holds what is in no block: the token embedding and the head among it, so that a
    # weight tied between the two is one parameter of one unit.
    fully_shard(model, mesh=mesh, mp_policy=policy, reshard_after_forward=False)
    return model


def _require_no_batch_norm(model: nn.Module) -> None:
    if any(isinstance(module, _BatchNorm) for module in model.modules()):
        raise HyperionError(
            "param_dtype 'bf16' would give BatchNorm weights in bf16 beside running statistics in float32",
            where=f"parallelize, {type(model).__name__}",
            next_step="leave param_dtype out and give the engine a Precision of bf16 (autocast)",
        )


def _replicate(model: nn.Module, world: World) -> nn.Module:
    device = torch.device(world.device.torch_device)
    # A gradient takes the memory layout of its parameter, and DDP lays out its buckets by it: kernels (4-d weights) get
    # the channels-last layout of ImageEngine before that, not after.
    model.to(memory_format=torch.channels_last)
    # Each rank normalises by its own part of the batch. Running statistics are averaged when they are used, in
    # evaluation and in checkpoints (average_statistics), not broadcast from rank 0 in every step. The option's name is
    # another since torch 2.13.
    renamed = "forward_sync_buffers" in inspect.signature(DistributedDataParallel).parameters
    no_broadcast = {"forward_sync_buffers" if renamed else "broadcast_buffers": False}
    return DistributedDataParallel(
        model,
        device_ids=None if device.type == "cpu" else [device.index],
        process_group=world.group,
        gradient_as_bucket_view=True,  # gradients live in the buckets: no second copy of them
        # find_unused_parameters and static_graph stay False: every parameter is used in every step, and non-reentrant
        # checkpointing needs neither.
        **no_broadcast,
    )
