"""The structure of a model as data: names of its stem, blocks and head, so that no caller guesses them from types."""

from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from hyperion.errors import HyperionError


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


@dataclass(frozen=True)
class ModelFlops:
    """Floating-point operations of matrix products and convolutions (a multiply-add is 2), without recomputation."""

    forward: int
    forward_backward: int


def parameter_count(model: nn.Module) -> int:
    """Return the number of parameters, each tied one counted once; buffers (BatchNorm's running statistics) do not count."""
    return sum(parameter.numel() for parameter in model.parameters())


def layout_of(model: nn.Module) -> Layout:
    """Return the layout of a model.

    Supported are models with a `layout()` method, transformers' LlamaForCausalLM (its decoder layers), torchvision's ResNet
    (the residual blocks of its four stages), and each of them inside a peft model.

    Raises:
        HyperionError: another model.
    """
    unchecked: Any = model  # the attributes below belong to optional libraries
    if hasattr(model, "get_base_model"):  # first, because a peft model forwards unknown attributes to its base model
        return _prefixed("base_model.model.", layout_of(unchecked.base_model.model))
    if hasattr(model, "layout"):
        return unchecked.layout()
    # Compare class names, so that no library is imported here.
    classes = {cls.__name__ for cls in type(model).__mro__}
    if "LlamaForCausalLM" in classes:
        return Layout(
            stem=("model.embed_tokens",),
            blocks=tuple(f"model.layers.{i}" for i in range(len(unchecked.model.layers))),
            head=("model.norm", "lm_head"),
            tied=(("lm_head", "model.embed_tokens"),) if unchecked.config.tie_word_embeddings else (),
        )
    if "ResNet" in classes:
        stages = ("layer1", "layer2", "layer3", "layer4")
        return Layout(
            stem=("conv1", "bn1"),
            blocks=tuple(f"{stage}.{i}" for stage in stages for i in range(len(getattr(unchecked, stage)))),
            head=("fc",),
        )
    raise HyperionError(
        f"the blocks of a {type(model).__name__} are not known",
        where="layout_of",
        next_step="give the model a method layout() that returns a hyperion.models.Layout",
    )


def _prefixed(prefix: str, layout: Layout) -> Layout:
    return replace(
        layout,
        **{part: tuple(prefix + name for name in getattr(layout, part)) for part in ("stem", "blocks", "head")},
        tied=tuple((prefix + user, prefix + owner) for user, owner in layout.tied),
    )
