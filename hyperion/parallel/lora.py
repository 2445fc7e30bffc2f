"""LoRA: a trainable low-rank update added to each frozen target layer (Hu et al. 2021, arXiv 2106.09685)."""

import warnings
from collections.abc import Sequence
from typing import Any

from torch import nn

from hyperion.errors import HyperionError

ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")  # attention's projections in transformers' Llama


def add_lora(
    model: nn.Module, rank: int = 16, alpha: float = 32, targets: Sequence[str] = ATTENTION, dropout: float = 0.0
) -> nn.Module:
    """Add LoRA adapters from peft to the model and freeze everything else. Call it before `parallelize`.

    A target layer W of shape [d_out, d_in] computes W x + (alpha / r) B A x, with A [r, d_in] random and B [d_out, r]
    zero, so that before the first step the outputs are those of the base model. Only A and B are trainable:

        sum over target layers of r (d_in + d_out)

    parameters. Adapters of a 16-bit base are float32, because AdamW's updates are too small for 16 bits.

    Args:
        model: contains the target layers, as nn.Linear; it is modified in place.
        rank: r; at most the smaller side of every target layer.
        alpha: numerator of the scale alpha / r.
        targets: last parts of the names of the target layers.
        dropout: probability of zeroing an input of A while training.

    Returns:
        The peft model around `model`.

    Raises:
        HyperionError: a target names no layer, the rank does not fit, or the number of trainable parameters differs from
            the formula.
    """
    expected = expected_lora_parameters(model, rank, targets)
    from peft import LoraConfig, get_peft_model  # slow to import, and used only here

    # peft's class for causal language models adds generate(), and needs the methods of a transformers model.
    task = "CAUSAL_LM" if hasattr(model, "prepare_inputs_for_generation") else None
    scale: Any = alpha  # peft annotates int, and computes with any number
    config = LoraConfig(r=rank, lora_alpha=scale, target_modules=list(targets), lora_dropout=dropout, task_type=task)
    with warnings.catch_warnings():
        # peft uses a property of transformers by its deprecated name; users cannot fix that.
        warnings.filterwarnings("ignore", message=".*is_gradient_checkpointing", category=FutureWarning)
        adapted = get_peft_model(model, config)
    trainable = trainable_parameter_count(adapted)
    if trainable != expected:
        raise HyperionError(
            f"{trainable:,} parameters are trainable, but sum r (d_in + d_out) is {expected:,}",
            where=f"add_lora, rank {rank} on {', '.join(targets)}",
            next_step="freeze all other parameters, or name targets that are nn.Linear layers only",
        )
    return adapted


def expected_lora_parameters(model: nn.Module, rank: int, targets: Sequence[str] = ATTENTION) -> int:
    """Return LoRA's number of trainable parameters: the sum over target layers of r (d_in + d_out).

    Args:
        model: a base model, or one that already has adapters.

    Raises:
        HyperionError: a target names no layer, or a layer is smaller than the rank.
    """
    # peft's LoRA layers are not nn.Linear, but have the same attributes.
    layers: dict[str, Any] = {
        name: module
        for name, module in model.named_modules()
        if name.rpartition(".")[2] in targets and hasattr(module, "in_features")
    }
    if missing := [target for target in targets if not any(name.rpartition(".")[2] == target for name in layers)]:
        raise HyperionError(
            f"no linear layer is named {', '.join(missing)}",
            where=f"LoRA targets in {type(model).__name__}",
            next_step="name layers of this model; print(model) lists them",
        )
    for name, layer in layers.items():
        if not 1 <= rank <= min(layer.in_features, layer.out_features):
            raise HyperionError(
                f"rank {rank} does not fit the layer of {layer.out_features} x {layer.in_features}",
                where=name,
                next_step="choose a rank from 1 to the smaller side of every target layer",
            )
    return sum(rank * (layer.in_features + layer.out_features) for layer in layers.values())


def trainable_parameter_count(model: nn.Module) -> int:
    """Return the number of trainable parameters; sharded parameters count in full."""
    return sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
