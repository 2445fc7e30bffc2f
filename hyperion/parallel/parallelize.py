"""Distribute a model over ranks. `parallelize` does this in four steps, always in this order:

1. Device: move the model to the device, and copy the values of rank 0 to every rank, so that all ranks hold the same model.
2. Activation checkpointing: wrap the forward pass of each block. This is the innermost step.
3. Compilation: compile each block separately. The compiler must see the recomputation of step 2 to plan it. It must not see the
   communication of step 4, which would cause graph breaks.
4. FSDP2 or DDP: this is the outermost step. Hooks gather parameters before each compiled, checkpointed block and reduce
   gradients after it.

Steps 2 and 3 replace only the `forward` of a block. Therefore parameters keep the names that they have in the original model.
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
from hyperion.parallel.memory_format import image_memory_format
from hyperion.processes import World

STRATEGIES = ("single", "ddp", "fsdp")
PARAM_DTYPES = (None, "bf16")
NONE, EVERY_BLOCK, SELECTIVE, BUDGET = CHECKPOINTING = ("none", "every block", "selective", "budget")


@dataclass(frozen=True)
class ParallelPlan:
    """Options of `parallelize`.

    Attributes:
        strategy: 'single', 'ddp' or 'fsdp'. With 'single' the model is on one device. With 'ddp' each rank holds the whole
            model, and gradients are averaged. With 'fsdp' parameters, gradients and optimizer state are sharded over the
            ranks, and parameters are gathered block by block.
        param_dtype: dtype in which FSDP gathers and uses parameters; only for 'fsdp'. None keeps the dtype of the
            parameters. 'bf16' halves the communication; the parameters of the optimizer and the sum of gradients remain
            float32. This option does not depend on a `Precision` of bf16 (autocast), which works with every strategy.
        checkpointing: which activations the forward pass saves; the backward pass recomputes the others. 'none' saves all
            activations. 'every block' saves only the inputs of blocks. 'selective' also saves the results of matrix
            products, convolutions and attention, so that only cheap operations are recomputed. 'budget' saves only the
            inputs of the first `checkpointed_blocks` blocks, and all activations of the other blocks.
        checkpointed_blocks: number of checkpointed blocks; only for 'budget'. hyperion.training.fewest_checkpointed computes
            the smallest number for a given memory. The first blocks are checkpointed, because the backward pass recomputes
            them last, after the other blocks have freed their activations.
        compile_blocks: compile each block separately. Blocks with the same structure share one compilation.
        reshard_after_forward: free the gathered parameters of a block after its forward pass, and gather them again in the
            backward pass; only for 'fsdp'. With False, FSDP uses more memory and less communication.
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
                    f"{name} is {value!r}, which is not a possible value",
                    where="ParallelPlan",
                    next_step=f"choose one of {', '.join(map(repr, choices))}",
                )
        for name in ("compile_blocks", "reshard_after_forward"):
            if not isinstance(value := getattr(self, name), bool):
                raise HyperionError(
                    f"{name} is {value!r}, which is neither True nor False", where="ParallelPlan", next_step="give True or False"
                )
        if self.strategy != "fsdp" and (self.param_dtype is not None or not self.reshard_after_forward):
            raise HyperionError(
                f"param_dtype and reshard_after_forward belong to strategy 'fsdp', not to {self.strategy!r}",
                where="ParallelPlan",
                next_step="omit them; for bf16 with every strategy, pass a Precision of bf16 to the engine",
            )
        blocks = self.checkpointed_blocks
        is_count = isinstance(blocks, int) and not isinstance(blocks, bool) and blocks >= 0
        if not (is_count if self.checkpointing == BUDGET else blocks is None):
            raise HyperionError(
                f"checkpointed_blocks is {blocks!r}, which is not possible with checkpointing {self.checkpointing!r}",
                where="ParallelPlan",
                next_step=f"set checkpointed_blocks to a number of at least 0 if checkpointing is {BUDGET!r}, else to None",
            )


def parallelize(model: nn.Module, plan: ParallelPlan, world: World) -> nn.Module:
    """Move a model to the device of this rank, then checkpoint, compile, and shard or replicate it according to the plan.

    All ranks must call this function with models of the same shapes. The parameter values of rank 0 are used. Create the
    optimizer from the returned model. With every strategy, state dicts of torch.distributed.checkpoint.state_dict have the
    parameter names of the original model.

    Args:
        model: a model whose blocks are known to `layout_of(model)`. It is modified in place.
        plan: options of the four steps.
        world: the result of hyperion.processes.world().

    Returns:
        The model itself for 'single' and 'fsdp'; DistributedDataParallel with the model for 'ddp'.

    Raises:
        HyperionError: the plan is not possible with these ranks or this model, or FSDP would shard nothing.
    """
    _require_ranks(plan, world)
    blocks = [model.get_submodule(name) for name in layout_of(model).blocks]
    # Before the broadcast, because NCCL transfers only tensors on a GPU.
    model.to(world.device.torch_device)
    if world.size > 1:
        _broadcast_from_rank_0(model)
    if plan.checkpointing != NONE:
        chosen = blocks[: plan.checkpointed_blocks] if plan.checkpointing == BUDGET else blocks
        selective = plan.checkpointing == SELECTIVE
        apply_checkpointing(model, chosen, plan.checkpointing, selective=selective, compiled=plan.compile_blocks)
    if plan.compile_blocks:
        for block in blocks:
            # Replace `forward` and not the module, so that hooks of the outer steps stay outside of the compiled code.
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
    if world.group is not None and world.size > 1:
        raise HyperionError(
            f"the world is a process group of {world.size} of {dist.get_world_size()} ranks, whose gradients would be divided by "
            "the items of all ranks",
            where="parallelize",
            next_step="pass the world of all ranks, or world.alone() for training without communication",
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
    """Copy the values of rank 0 to all ranks.

    FSDP2 does not copy values. Without this function, FSDP2 would combine shards of different models.
    """
    assert_same_shapes(model)
    for tensor in [*model.parameters(), *model.buffers()]:
        values = tensor.detach().contiguous()  # a copy if the memory format differs, such as channels-last
        dist.broadcast(values, src=0)
        tensor.copy_(values)


def _shard(model: nn.Module, blocks: list[nn.Module], plan: ParallelPlan, world: World) -> nn.Module:
    """Apply FSDP2 with one unit per block, and one unit for the other parameters at the root."""
    if not blocks or not all(list(block.parameters()) for block in blocks):
        raise HyperionError(
            f"FSDP over the {len(blocks)} blocks of {type(model).__name__} would shard nothing block by block",
            where="parallelize",
            next_step="name blocks that have parameters in the model's layout()",
        )
    _require_separate_units(model, blocks)
    policy = MixedPrecisionPolicy()
    if plan.param_dtype == "bf16":
        _require_no_batch_norm(model)
        # Gradients are summed in float32, because a sum over many ranks would lose bits in bf16.
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    # FSDP2 warns that the views that it returns must not be modified in place. The engines only read these views.
    warnings.filterwarnings("ignore", message=r"FSDP2-wrapped module .* returned a view tensor")
    # FSDP2 shards contiguous parameters only. pyright: the overload is private in torch.
    model.to(memory_format=torch.contiguous_format)  # pyright: ignore[reportCallIssue]
    kind = torch.device(world.device.torch_device).type
    mesh = init_device_mesh(kind, (world.size,)) if world.group is None else DeviceMesh.from_group(world.group, kind)
    for block in blocks:
        # Do not free the last block after the forward pass: the backward pass starts with it and would gather it again at once.
        free = plan.reshard_after_forward and block is not blocks[-1]
        fully_shard(block, mesh=mesh, mp_policy=policy, reshard_after_forward=free)
    # Do not free the root either, for the same reason. The root unit contains all parameters outside of blocks, such as the
    # token embedding and the head. Therefore a weight that the two share belongs to one unit.
    fully_shard(model, mesh=mesh, mp_policy=policy, reshard_after_forward=False)
    return model


def _require_separate_units(model: nn.Module, blocks: list[nn.Module]) -> None:
    """Check that no parameter belongs to two blocks, or to a block and to the rest of the model."""
    unit_of = {id(module): number for number, block in enumerate(blocks) for module in block.modules()}
    first_with: dict[int, tuple[str, int | None]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        owner = model.get_submodule(name.rpartition(".")[0])
        unit = unit_of.get(id(owner))
        other, unit_of_other = first_with.setdefault(id(parameter), (name, unit))
        if unit != unit_of_other:
            raise HyperionError(
                f"{other} and {name} are the same parameter, but belong to different units of FSDP",
                where=f"parallelize, {type(model).__name__}",
                next_step="tie only weights outside of the blocks or inside of one block, or choose the strategy 'ddp'",
            )


def _require_no_batch_norm(model: nn.Module) -> None:
    if any(isinstance(module, _BatchNorm) for module in model.modules()):
        raise HyperionError(
            "with param_dtype 'bf16' BatchNorm weights would be bf16, but its running statistics float32",
            where=f"parallelize, {type(model).__name__}",
            next_step="omit param_dtype and pass a Precision of bf16 (autocast) to the engine",
        )


def _replicate(model: nn.Module, world: World) -> nn.Module:
    device = torch.device(world.device.torch_device)
    # A gradient has the memory format of its parameter, and the buckets of DDP depend on this format. Therefore convert 4-d
    # weights to the format of ImageEngine before DDP and not after it.
    model.to(memory_format=image_memory_format(model))  # pyright: ignore[reportCallIssue]
    # By default DDP broadcasts the running statistics of rank 0 in every step. Here average_statistics averages them over
    # ranks before they are used, in evaluation and in checkpoints. torch 2.13 renamed the option.
    renamed = "forward_sync_buffers" in inspect.signature(DistributedDataParallel).parameters
    no_broadcast: dict[str, Any] = {"forward_sync_buffers" if renamed else "broadcast_buffers": False}
    return DistributedDataParallel(
        model,
        device_ids=None if device.type == "cpu" else [device.index],
        process_group=world.group,
        gradient_as_bucket_view=True,  # gradients are views of the communication buckets, not copies
        # find_unused_parameters and static_graph keep the default False: every parameter is used in every step, and non-reentrant
        # checkpointing needs neither option.
        **no_broadcast,
    )
