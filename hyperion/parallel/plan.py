"""How a model is to be laid over the ranks: one frozen, JSON-able choice."""

from dataclasses import dataclass

from hyperion.errors import HyperionError

STRATEGIES = ("single", "ddp", "fsdp")
PARAM_DTYPES = (None, "bf16")


@dataclass(frozen=True)
class ParallelPlan:
    """What `parallelize` does to a model.

    Attributes:
        strategy: 'single' (one device), 'ddp' (each rank holds the whole model, gradients are averaged) or 'fsdp'
            (parameters, gradients and optimizer state are sharded over the ranks, gathered block by block).
        param_dtype: FSDP only: the type that parameters are gathered and used in. None keeps their own; 'bf16' halves
            the traffic, while the shards that the optimizer updates and the sum of gradients stay float32. A
            `Precision` of bf16 (autocast) is another thing and goes with every strategy.
        checkpoint_blocks: keep only the inputs of each block for the backward pass and compute the rest again.
        compile_blocks: compile each block by itself; blocks that are alike share one compilation.
        reshard_after_forward: FSDP only: free a gathered block after its forward pass and gather it again in the
            backward pass. False keeps it: more memory, less traffic.
    """

    strategy: str = "single"
    param_dtype: str | None = None
    checkpoint_blocks: bool = False
    compile_blocks: bool = False
    reshard_after_forward: bool = True

    def __post_init__(self):
        for name, choices in (("strategy", STRATEGIES), ("param_dtype", PARAM_DTYPES)):
            if (value := getattr(self, name)) not in choices:
                raise HyperionError(
                    f"{name} is {value!r}",
                    where="ParallelPlan",
                    next_step=f"choose one of {', '.join(map(repr, choices))}",
                )
        if self.strategy != "fsdp" and (self.param_dtype is not None or not self.reshard_after_forward):
            raise HyperionError(
                f"param_dtype and reshard_after_forward belong to strategy 'fsdp', not to {self.strategy!r}",
                where="ParallelPlan",
                next_step="leave them out; for bf16 with every strategy give the engine a Precision of bf16",
            )
