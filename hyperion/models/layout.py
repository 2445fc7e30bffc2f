"""What a model tells others about its own structure: names, as data, so that nobody has to guess from types."""

from dataclasses import dataclass

from torch import nn


@dataclass(frozen=True)
class Layout:
    """Submodule names of a model, in the order of the forward pass.

    Attributes:
        stem: modules that run before the repeated blocks.
        blocks: the repeated blocks: the units of sharding, activation checkpointing and per-block compilation.
        head: modules that run after the blocks.
        tied: pairs (user, owner): the module `user` computes with the weight that the module `owner` holds.
    """

    stem: tuple[str, ...]
    blocks: tuple[str, ...]
    head: tuple[str, ...]
    tied: tuple[tuple[str, str], ...] = ()


def parameter_count(model: nn.Module) -> int:
    """Number of parameters, each tied one counted once; buffers (BatchNorm's running statistics) are not parameters."""
    return sum(parameter.numel() for parameter in model.parameters())


@dataclass(frozen=True)
class ModelFlops:
    """Floating-point operations of matrix products and convolutions (a multiply-add is 2), without recomputation."""

    forward: int
    forward_backward: int
