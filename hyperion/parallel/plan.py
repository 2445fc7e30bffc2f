"""How a model is to be laid over the ranks: one frozen, JSON-able choice."""

from dataclasses import dataclass

from hyperion.errors import HyperionError

STRATEGIES = ("single", "ddp", "fsdp")
PARAM_DTYPES = (None, "bf16")
NONE, EVERY_BLOCK, SELECTIVE, BUDGET = CHECKPOINTING = ("none", "every block", "selective", "budget")


@dataclass(frozen=True)
class ParallelPlan:
    """What `parallelize` does to a model.

    Attributes:
        strategy: 'single' (one device), 'ddp' (each rank holds the whole model, gradients are averaged) or 'fsdp'
            (parameters, gradients and optimizer state are sharded over the ranks, gathered block by block).
        param_dtype: FSDP only: the type that parameters are gathered and used in. None keeps their own; 'bf16' halves
            the traffic, while the shards that the optimizer updates and the sum of gradients stay float32. A
            `Precision` of bf16 (autocast) is another thing and goes with every strategy.
        checkpointing: what the forward pass keeps for the backward pass, which computes the rest again. 'none': all that
            autograd asks for. 'every block': the inputs of blocks alone. 'selective': beside them the results of matrix
            products, convolutions and attention, so that only cheap operations are done twice. 'budget': of the first
            `checkpointed_blocks` blocks their inputs alone, of the others all.
        checkpointed_blocks: 'budget' only: how many. hyperion.training.fewest_checkpointed finds the fewest that a memory
            asks for. The first ones, because they are computed again last, when all others have given back their memory.
        compile_blocks: compile each block by itself; blocks that are alike share one compilation.
        reshard_after_forward: FSDP only: free a gathered block after its forward pass and gather it again in the
            backward pass. False keeps it: more memory, less traffic.
    """

    strategy: str = "single"
    param_dtype: str | None = None
    checkpointing: str = NONE
    checkpointed_blocks: int | None = None
    compile_blocks: bool = False
    reshard_after_forward: bool = True

    def __post_init__(self):
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
                next_step="leave them out; for bf16 with every strategy give the engine a Precision of bf16",
            )
        blocks = self.checkpointed_blocks
        is_count = isinstance(blocks, int) and not isinstance(blocks, bool) and blocks >= 0
        if not (is_count if self.checkpointing == BUDGET else blocks is None):
            raise HyperionError(
                f"checkpointing {self.checkpointing!r} with checkpointed_blocks {blocks!r}",
                where="ParallelPlan",
                next_step=f"give a number from 0 with {BUDGET!r}, and none with the others",
            )
