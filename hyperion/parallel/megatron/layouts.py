"""Layouts of ranks in megatron-core, and the bytes that a layout needs on each rank. This module needs no megatron-core."""

from dataclasses import dataclass


@dataclass(frozen=True)
class MegatronLayout:
    """How megatron-core divides a training among ranks. Ranks that remain form replicas (data parallelism).

    Args:
        tensor: number of ranks that share each matrix.
        pipeline: number of stages, each with an equal part of the layers.
        sequence: whether the ranks that share matrices also divide the norms and residuals along the sequence.
        distributed_optimizer: whether replicas divide the state of the optimizer.
        micro_batches: number of micro-batches of a step on each replica.
    """

    tensor: int = 1
    pipeline: int = 1
    sequence: bool = False
    distributed_optimizer: bool = False
    micro_batches: int = 1

    def name(self, ranks: int) -> str:
        """Return a short name, such as "TP 2 + SP", for a training on `ranks` ranks."""
        parts = [f"{letter} {size}" for letter, size in (("TP", self.tensor), ("PP", self.pipeline)) if size > 1]
        replicas = ranks // (self.tensor * self.pipeline)
        parts += [f"DP {replicas}"] * (replicas > 1)
        parts += ["SP"] * self.sequence + ["distributed optimizer"] * self.distributed_optimizer
        return " + ".join(parts) or "one rank"
