"""What a training step of one of our models dispatches, operator by operator, without computing any of it."""

import functools

import torch

from hyperion.errors import HyperionError
from hyperion.experiments.steps.reference_steps import update_of
from hyperion.experiments.steps.step_variants import has_layout
from hyperion.measure import shapes_only, training_calls
from hyperion.measure.products.dispatch import Call
from hyperion.models import REFERENCE_MODELS, ReferenceModel, TransformerLM, named_config, reference_model
from hyperion.training import adamw

_AUTOCAST = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}


@functools.cache
def captured_step(name: str, batch: int, dtype: str) -> tuple[Call, ...]:
    """Forward with loss, backward and update, the same step that chapter 1.2 times; some seconds of a slow core.

    Args:
        name: a reference model's, or a Transformer LM's configuration ("gpt2_124m"), trained at its whole context.
        batch: samples, sequences of an LM.
        dtype: fp32, or what autocast takes: bf16, fp16.

    Raises:
        HyperionError: no model has that name, or autocast takes no such dtype: a step in tf32 is captured as one in fp32.
    """
    if dtype not in _AUTOCAST:
        raise HyperionError(
            f"{dtype} is nothing that a step is captured in",
            where=f"captured_step of {name}",
            next_step=f"use one of {', '.join(_AUTOCAST)}",
        )
    if name in REFERENCE_MODELS:
        return tuple(_reference_step(reference_model(name), batch, dtype))
    return tuple(_language_step(name, batch, dtype))


def _reference_step(model: ReferenceModel, batch: int, dtype: str) -> list[Call]:
    with torch.device("meta"):
        module = model.build()
    layout = torch.channels_last if has_layout(model) else torch.preserve_format
    if has_layout(model):
        module.to(memory_format=layout)
    with shapes_only(module):
        inputs = torch.empty(batch, *model.sample_shape).contiguous(memory_format=layout)
        targets = model.targets(inputs, torch.Generator())

        def loss() -> torch.Tensor:
            with _autocast(dtype):
                return model.loss(module(inputs), targets)

        return training_calls(loss, update_of(model).make(module))


def _language_step(name: str, batch: int, dtype: str) -> list[Call]:
    config = named_config(name)
    with torch.device("meta"):
        module = TransformerLM(config)
    with shapes_only(module):
        inputs = torch.zeros(batch, config.context, dtype=torch.int64)

        def loss() -> torch.Tensor:
            with _autocast(dtype):
                return module.loss(inputs, inputs)

        return training_calls(loss, adamw(module, 1e-4))


def _autocast(dtype: str):
    # Tensors without values pass for those of a CPU, whatever device the step is meant for.
    return torch.autocast("cpu", _AUTOCAST[dtype], enabled=dtype != "fp32")
