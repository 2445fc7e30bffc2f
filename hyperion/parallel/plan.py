"""How a model is distributed over ranks: one frozen, JSON-able set of options."""

from dataclasses import dataclass

from hyperion.errors import HyperionError

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
