"""Where the blocks of a model are: its own layout, or that of the libraries' models that Hyperion trains."""

from dataclasses import replace

from torch import nn

from hyperion.errors import HyperionError
from hyperion.models import Layout


def layout_of(model: nn.Module) -> Layout:
    """Names of the stem, the blocks and the head of a model.

    Known are models with a `layout()` of their own, transformers' LlamaForCausalLM (its decoder layers), torchvision's
    ResNet (the residual blocks of its four stages), and each of them inside a peft model.

    Raises:
        HyperionError: another model.
    """
    if hasattr(model, "get_base_model"):  # first, because a peft model passes unknown attributes on to its base
        return _below("base_model.model.", layout_of(model.base_model.model))
    if hasattr(model, "layout"):
        return model.layout()
    # By name, so that no library is imported for the question.
    classes = {cls.__name__ for cls in type(model).__mro__}
    if "LlamaForCausalLM" in classes:
        return _llama(model)
    if "ResNet" in classes:
        return _torchvision_resnet(model)
    raise HyperionError(
        f"the blocks of a {type(model).__name__} are not known",
        where="layout_of",
        next_step="give the model a method layout() that returns a hyperion.models.Layout",
    )


def _llama(model: nn.Module) -> Layout:
    return Layout(
        stem=("model.embed_tokens",),
        blocks=tuple(f"model.layers.{i}" for i in range(len(model.model.layers))),
        head=("model.norm", "lm_head"),
        tied=(("lm_head", "model.embed_tokens"),) if model.config.tie_word_embeddings else (),
    )


def _torchvision_resnet(model: nn.Module) -> Layout:
    stages = ("layer1", "layer2", "layer3", "layer4")
    return Layout(
        stem=("conv1", "bn1"),
        blocks=tuple(f"{stage}.{i}" for stage in stages for i in range(len(model.get_submodule(stage)))),
        head=("fc",),
    )


def _below(prefix: str, layout: Layout) -> Layout:
    return replace(
        layout,
        **{part: tuple(prefix + name for name in getattr(layout, part)) for part in ("stem", "blocks", "head")},
        tied=tuple((prefix + user, prefix + owner) for user, owner in layout.tied),
    )
