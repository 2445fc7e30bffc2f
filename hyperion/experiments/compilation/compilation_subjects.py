"""The models whose compilation is measured, each with a batch of inputs, in one dtype and one memory format for every mode."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from hyperion.compat import import_torchvision
from hyperion.errors import HyperionError
from hyperion.measure import FORMATS
from hyperion.models import TransformerLM, named_config, resnet18
from hyperion.models.resnet import IMAGE_SIZE

# torchvision's ResNet-18 with ten classes on images of 32 x 32 pixels: what the published measurement compiled.
IMAGENET_STEM = "resnet18_imagenet_stem"
CLASSES = 10


@dataclass(frozen=True)
class Subject:
    """A model in evaluation mode and the arguments of one call.

    Attributes:
        module, inputs: on one device, in the dtype and memory format of the specification.
        params: what rows say of it: model, batch, input, weights.
    """

    module: nn.Module
    inputs: tuple[Tensor, ...]
    params: dict

    @property
    def weight_bytes(self) -> int:
        """Bytes of parameters and buffers, each tied one counted once."""
        return sum(tensor.numel() * tensor.element_size() for tensor in (*self.module.parameters(), *self.module.buffers()))


def make_subject(spec: dict, device: str, seed: int, weights: Mapping[str, Tensor] | None = None) -> Subject:
    """The model of a specification on a device ("meta" gives shapes without storage).

    Args:
        spec: model, dtype, batch, and for a language model sequence_length and vocabulary (context, where it is longer
            than the sequence).
        weights: tensors by name instead of the initial ones; `spec["weights"]` says where they are from.

    Raises:
        HyperionError: no such model, or weights that are not its own.
    """
    torch.manual_seed(seed)
    with torch.device("meta" if device == "meta" else "cpu"):
        module = _build(spec)
        inputs = _inputs(spec, seed)
    if weights is not None:
        _load(module, spec["model"], weights)
    module = module.to(device, FORMATS[spec["dtype"]].storage).eval()
    if _is_image_model(spec):
        module = module.to(memory_format=torch.channels_last)
    return Subject(module, tuple(tensor.to(device) for tensor in inputs), subject_params(spec, seed))


def subject_params(spec: dict, seed: int) -> dict:
    """What a row says of the subject."""
    weights = spec.get("weights") or f"initial, seed {seed}"
    return {"model": spec["model"], "batch": spec["batch"], "input": _input_text(spec), "weights": weights}


def reference_output(spec: dict, subject: Subject) -> Tensor:
    """What the first samples of the batch give in float64 on the CPU, from the very weights of the subject: up to eight
    images, whose logits are few, or one sequence.
    """
    with torch.device("meta"):
        twin = _build(spec)  # no initial weights: drawing them takes longer than the call
    twin.load_state_dict({name: tensor.cpu() for name, tensor in subject.module.state_dict().items()}, assign=True)
    inputs = (tensor[: 8 if _is_image_model(spec) else 1].cpu() for tensor in subject.inputs)
    return twin.double().eval()(*(tensor.double() if tensor.is_floating_point() else tensor for tensor in inputs))


def fitted(spec: dict, weights: Mapping[str, Tensor]) -> dict:
    """The specification with the vocabulary and the context of these weights, where it is a language model's."""
    tables = [weights.get(f"{name}_embedding.weight") for name in ("token", "position")]
    if _is_image_model(spec) or any(table is None for table in tables):
        return spec
    vocabulary, context = (len(table) for table in tables)
    length = min(spec["sequence_length"], context)
    return spec | {"vocabulary": vocabulary, "context": context, "sequence_length": length}


def _is_image_model(spec: dict) -> bool:
    return spec["model"].startswith("resnet18")


def _build(spec: dict) -> nn.Module:
    name = spec["model"]
    if name == IMAGENET_STEM:
        return import_torchvision().models.resnet18(num_classes=CLASSES)
    if found := re.fullmatch(r"resnet18(?:_w(\d+))?", name):
        return resnet18(CLASSES, int(found[1] or 64))
    if _is_image_model(spec):
        remedy = f"use {IMAGENET_STEM}, resnet18 or, for a width of 8, resnet18_w8"
        raise HyperionError(f"no image model is named {name!r}", next_step=remedy)
    length = spec.get("context", spec["sequence_length"])
    return TransformerLM(named_config(name, vocab_size=spec["vocabulary"], context=length))


def _inputs(spec: dict, seed: int) -> tuple[Tensor, ...]:
    # A meta tensor takes no generator, and draws nothing.
    meta = torch.get_default_device().type == "meta"
    random = partial(torch.randn if _is_image_model(spec) else torch.randint, generator=None if meta else _seeded(seed))
    if _is_image_model(spec):
        images = random((spec["batch"], 3, IMAGE_SIZE, IMAGE_SIZE)).to(FORMATS[spec["dtype"]].storage)
        return (images.to(memory_format=torch.channels_last),)
    return (random(spec["vocabulary"], (spec["batch"], spec["sequence_length"])),)


def _seeded(seed: int) -> torch.Generator:
    return torch.Generator("cpu").manual_seed(seed)


def _input_text(spec: dict) -> str:
    if _is_image_model(spec):
        return f"3 × {IMAGE_SIZE} × {IMAGE_SIZE} pixels, channels_last"
    return f"{spec['sequence_length']} of {spec['vocabulary']:,} tokens"


def misfits(spec: dict, weights: Mapping[str, Tensor]) -> list[str]:
    """What keeps these weights from being those of the specified model, a line a tensor; none when they fit."""
    with torch.device("meta"):
        return _misfits(_build(spec), weights)


def _misfits(module: nn.Module, weights: Mapping[str, Tensor]) -> list[str]:
    wanted = module.state_dict()
    missing = [f"{key} is missing" for key in wanted if key not in weights]
    strange = [f"{key} is none of its tensors" for key in weights if key not in wanted]
    other = [
        f"{key} is {list(weights[key].shape)}, the model's {list(tensor.shape)}"
        for key, tensor in wanted.items()
        if key in weights and weights[key].shape != tensor.shape
    ]
    return missing + strange + other


def _load(module: nn.Module, name: str, weights: Mapping[str, Tensor]) -> None:
    if faults := _misfits(module, weights):
        more = f" (and {len(faults) - 1} more)" if len(faults) > 1 else ""
        raise HyperionError(
            f"these weights are not those of {name}: {faults[0]}{more}", next_step="name the model they were saved from"
        )
    module.load_state_dict(dict(weights))


def given_weights(spec: dict) -> dict[str, torch.Tensor] | None:
    """The weights of the file that `checkpoint` names, None where the description names none."""
    if "checkpoint" not in spec:
        return None
    from hyperion.checkpoints.weights import read_weights  # a second to import, which no other variant needs

    return read_weights(spec["checkpoint"]).tensors
