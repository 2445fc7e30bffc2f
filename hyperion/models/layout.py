"""Layout of a model: the names of the submodules of its stem, its blocks and its head.

With these names, the code for sharding and compilation does not depend on the model's class.
"""

from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from hyperion.errors import HyperionError


@dataclass(frozen=True)
class Layout:
    """Submodule names of a model, in the order of the forward pass.

    Attributes:
        stem: modules that run before the repeated blocks.
        blocks: the repeated blocks. They are the units of sharding, activation checkpointing and per-block compilation.
        head: modules that run after the blocks.
        tied: pairs (user, owner) of names. `user` computes with the weight of the module `owner`, and need not be a module.
            FSDP can only tie weights of modules outside of the blocks, or inside of one block.
    """

    stem: tuple[str, ...]
    blocks: tuple[str, ...]
    head: tuple[str, ...]
    tied: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True)
class ModelFlops:
    """Floating-point operations (FLOPs) of matrix products and convolutions.

    A multiply-add counts as 2. Operations that activation checkpointing repeats are not counted.

    Attributes:
        forward: FLOPs of the forward pass.
        forward_backward: FLOPs of the forward and the backward pass together.
    """

    forward: int
    forward_backward: int


def parameter_count(model: nn.Module) -> int:
    """Return the number of parameters of a model.

    A tied parameter is counted once. Buffers, such as BatchNorm's running statistics, are not counted.
    """
    return sum(parameter.numel() for parameter in model.parameters())


def layout_of(model: nn.Module) -> Layout:
    """Return the layout of a model.

    Supported models:

    - a model with a method `layout()`
    - transformers' LlamaForCausalLM; the blocks are its decoder layers
    - torchvision's ResNet; the blocks are the residual blocks of its four stages
    - a peft model around one of these models

    Raises:
        HyperionError: the model is not supported, or a name in its layout is no submodule.
    """
    layout = _layout_of(model)
    for name in (*layout.stem, *layout.blocks, *layout.head, *(owner for _, owner in layout.tied)):
        try:
            model.get_submodule(name)
        except AttributeError:
            raise HyperionError(
                f"the layout names {name!r}, but the {type(model).__name__} has no such submodule",
                where="layout_of",
                next_step="return names from model.named_modules() in layout(); its children are "
                + ", ".join(name for name, _ in model.named_children()),
            ) from None
    return layout


def _layout_of(model: nn.Module) -> Layout:
    unchecked: Any = model  # typed as Any, because the attributes used below belong to classes of optional libraries
    # Test for peft first, because a peft model forwards unknown attributes to its base model.
    if hasattr(model, "get_base_model"):
        return _prefixed("base_model.model.", layout_of(unchecked.base_model.model))
    if hasattr(model, "layout"):
        return unchecked.layout()
    # Compare class names, so that the optional libraries need not be imported here.
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
        f"the names of the blocks of a {type(model).__name__} are not known",
        where="layout_of",
        next_step="give the model a method layout() that returns a hyperion.models.Layout",
    )


def _prefixed(prefix: str, layout: Layout) -> Layout:
    return replace(
        layout,
        **{part: tuple(prefix + name for name in getattr(layout, part)) for part in ("stem", "blocks", "head")},
        tied=tuple((prefix + user, prefix + owner) for user, owner in layout.tied),
    )
