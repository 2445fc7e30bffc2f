"""Models for the `compilation` experiment, each with a batch of inputs.

A model has the same dtype and the same memory format in all compiler modes.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

import torch
from pydantic import BaseModel, ConfigDict
from torch import Tensor, nn

from hyperion.compat import import_torchvision
from hyperion.errors import HyperionError
from hyperion.measure import FORMATS
from hyperion.models import TransformerLM, named_config, resnet18
from hyperion.models.resnet import IMAGE_SIZE

# torchvision's ResNet-18 with ten classes for images of 32 x 32 pixels, as in the published measurement.
IMAGENET_STEM = "resnet18_imagenet_stem"
CLASSES = 10


class ModelSpec(BaseModel):
    """Specification of a model, its inputs, and the compiler modes to measure.

    Args:
        model: "resnet18_imagenet_stem", "resnet18", "resnet18_w8" (a ResNet-18 of width 8), or the name of a TransformerLM
            configuration.
        dtype: dtype of weights and inputs.
        batch: number of images or sequences in one call.
        modes: compiler modes to measure. "eager" comes first.
        sequence_length: number of tokens in a sequence (language models only).
        vocabulary: number of tokens in the vocabulary (language models only).
        context: largest sequence length of the model (language models only). 0 uses `sequence_length`.
        checkpoint: path of a file with weights. An empty string keeps the initial weights.
        weights: name of the weights in the rows. An empty string means initial weights.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    model: str
    dtype: Literal["fp32", "bf16", "fp16"]
    batch: int
    modes: tuple[str, ...] = ()
    sequence_length: int = 0
    vocabulary: int = 0
    context: int = 0
    checkpoint: str = ""
    weights: str = ""

    @property
    def is_image_model(self) -> bool:
        """True if the inputs are images."""
        return self.model.startswith("resnet18")


@dataclass(frozen=True)
class CompiledModel:
    """A model in evaluation mode and the arguments of one call.

    Attributes:
        module: the model, on its device, in the dtype and memory format of the specification.
        inputs: arguments of one call, on the same device and in the same format.
        params: params for the rows of this model, with the keys "model", "batch", "input" and "weights".
    """

    module: nn.Module
    inputs: tuple[Tensor, ...]
    params: dict

    @property
    def weight_bytes(self) -> int:
        """Number of bytes of all parameters and buffers. A tensor that several layers share counts once."""
        return sum(tensor.numel() * tensor.element_size() for tensor in (*self.module.parameters(), *self.module.buffers()))


def make_model(spec: ModelSpec, device: str, seed: int, weights: Mapping[str, Tensor] | None = None) -> CompiledModel:
    """Return the model of a specification on a device.

    Args:
        spec: specification of the model.
        device: name of the device. On "meta", tensors have shapes but no storage.
        seed: seed of the initial weights and of the inputs.
        weights: a state dict whose tensors replace the initial weights. None keeps the initial weights.

    Raises:
        HyperionError: no model has this name, or the weights belong to another model.
    """
    torch.manual_seed(seed)
    # Draw weights and inputs on the CPU, so that every device gets the same values.
    with torch.device("meta" if device == "meta" else "cpu"):
        module = _build(spec)
        inputs = _inputs(spec, seed)
    if weights is not None:
        _load(module, spec.model, weights)
    module = module.to(device, FORMATS[spec.dtype].storage).eval()
    if spec.is_image_model:
        module.to(memory_format=torch.channels_last)  # pyright: ignore[reportCallIssue]  # missing in torch's overloads
    return CompiledModel(module, tuple(tensor.to(device) for tensor in inputs), model_params(spec, seed))


def model_params(spec: ModelSpec, seed: int) -> dict:
    """Return the row params that describe the model: model, batch, input and weights."""
    weights = spec.weights or f"initial, seed {seed}"
    return {"model": spec.model, "batch": spec.batch, "input": _input_text(spec), "weights": weights}


def reference_output(spec: ModelSpec, model: CompiledModel) -> Tensor:
    """Return the output of the model for the first samples, computed in float64 on the CPU with the same weights.

    The first samples are eight images or one sequence.
    """
    with torch.device("meta"):
        twin = _build(spec)  # on the meta device, because drawing initial weights takes longer than the call
    # `assign` replaces the meta tensors by these tensors. Meta tensors have no memory, so nothing can be copied into them.
    twin.load_state_dict({name: tensor.cpu() for name, tensor in model.module.state_dict().items()}, assign=True)
    inputs = (tensor[: 8 if spec.is_image_model else 1].cpu() for tensor in model.inputs)
    return twin.double().eval()(*(tensor.double() if tensor.is_floating_point() else tensor for tensor in inputs))


def fit_to_weights(spec: ModelSpec, weights: Mapping[str, Tensor]) -> ModelSpec:
    """Return the specification of a language model with the vocabulary and context of the given weights.

    The specification of an image model is returned unchanged.
    """
    tokens, positions = (weights.get(f"{name}_embedding.weight") for name in ("token", "position"))
    if spec.is_image_model or tokens is None or positions is None:
        return spec
    length = min(spec.sequence_length, len(positions))
    return spec.model_copy(update={"vocabulary": len(tokens), "context": len(positions), "sequence_length": length})


def _build(spec: ModelSpec) -> nn.Module:
    name = spec.model
    if name == IMAGENET_STEM:
        return import_torchvision().models.resnet18(num_classes=CLASSES)
    if found := re.fullmatch(r"resnet18(?:_w(\d+))?", name):
        return resnet18(CLASSES, int(found[1] or 64))
    if spec.is_image_model:
        remedy = f"use {IMAGENET_STEM}, resnet18 or, for a width of 8, resnet18_w8"
        raise HyperionError(f"no image model is named {name!r}", next_step=remedy)
    length = spec.context or spec.sequence_length
    return TransformerLM(named_config(name, vocab_size=spec.vocabulary, context=length))


def _inputs(spec: ModelSpec, seed: int) -> tuple[Tensor, ...]:
    # Meta tensors have no values. The functions that create them on this device accept no generator.
    meta = torch.get_default_device().type == "meta"
    random = partial(torch.randn if spec.is_image_model else torch.randint, generator=None if meta else _seeded(seed))
    if spec.is_image_model:
        images = random((spec.batch, 3, IMAGE_SIZE, IMAGE_SIZE)).to(FORMATS[spec.dtype].storage)
        return (images.to(memory_format=torch.channels_last),)
    return (random(spec.vocabulary, (spec.batch, spec.sequence_length)),)


def _seeded(seed: int) -> torch.Generator:
    return torch.Generator("cpu").manual_seed(seed)


def _input_text(spec: ModelSpec) -> str:
    if spec.is_image_model:
        return f"3 × {IMAGE_SIZE} × {IMAGE_SIZE} pixels, channels_last"
    return f"{spec.sequence_length} of {spec.vocabulary:,} tokens"


def weight_faults(spec: ModelSpec, weights: Mapping[str, Tensor]) -> list[str]:
    """Return one sentence for each tensor that does not match the model. The list is empty if the weights fit the model."""
    with torch.device("meta"):
        return _weight_faults(_build(spec), weights)


def _weight_faults(module: nn.Module, weights: Mapping[str, Tensor]) -> list[str]:
    wanted = module.state_dict()
    missing = [f"{key} is missing" for key in wanted if key not in weights]
    strange = [f"{key} is not a tensor of the model" for key in weights if key not in wanted]
    other = [
        f"{key} is {list(weights[key].shape)}, the model's {list(tensor.shape)}"
        for key, tensor in wanted.items()
        if key in weights and weights[key].shape != tensor.shape
    ]
    return missing + strange + other


def _load(module: nn.Module, name: str, weights: Mapping[str, Tensor]) -> None:
    if faults := _weight_faults(module, weights):
        more = f" (and {len(faults) - 1} more)" if len(faults) > 1 else ""
        raise HyperionError(
            f"these weights do not fit {name}: {faults[0]}{more}",
            next_step="use the name of the model that the weights were saved from",
        )
    module.load_state_dict(dict(weights))


def checkpoint_weights(spec: ModelSpec) -> dict[str, torch.Tensor] | None:
    """Return the weights in the checkpoint that the specification names, or None if it names no checkpoint."""
    if not spec.checkpoint:
        return None
    from hyperion.checkpoints.weights import read_weights  # import here, because it takes a second and few variants need it

    return read_weights(Path(spec.checkpoint)).tensors
