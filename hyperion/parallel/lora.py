"""LoRA: a low-rank, trainable change beside each frozen target layer (Hu et al. 2021, arXiv 2106.09685)."""

import warnings
from collections.abc import Sequence

from torch import nn

from hyperion.errors import HyperionError

ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")  # the projections of attention, as transformers' Llama names them


def add_lora(
    model: nn.Module, rank: int = 16, alpha: float = 32, targets: Sequence[str] = ATTENTION, dropout: float = 0.0
) -> nn.Module:
    """The model with LoRA adapters from peft in place, everything else frozen.

    A target layer W of shape [d_out, d_in] computes W x + (alpha / r) B A x, with A [r, d_in] random and B [d_out, r]
    zero: before the first step the outputs are those of the base model. Trainable parameters are A and B alone:

        sum over target layers of r (d_in + d_out)

    Adapters of a base in 16 bits are float32, as AdamW's small updates need. Call it before `parallelize`.

    Args:
        model: holds the target layers, as nn.Linear; it is changed in place.
        rank: r; at most the smaller side of every target layer.
        alpha: numerator of the scale alpha / r.
        targets: last parts of the names of the target layers.
        dropout: probability of zeroing an input of A while training.

    Returns:
        The peft model around `model`.

    Raises:
        HyperionError: no layer bears a target's name, the rank does not fit, or peft trains other parameters than the
            formula counts.
    """
    expected = expected_lora_parameters(model, rank, targets)
    from peft import LoraConfig, get_peft_model  # slow to import, and needed nowhere else

    # peft's class for causal language models adds generate(), and asks the model for what transformers' models have.
    task = "CAUSAL_LM" if hasattr(model, "prepare_inputs_for_generation") else None
    config = LoraConfig(r=rank, lora_alpha=alpha, target_modules=list(targets), lora_dropout=dropout, task_type=task)
    with warnings.catch_warnings():
        # peft asks transformers for a property by its old name: nothing that a reader could act on.
        warnings.filterwarnings("ignore", message=".*is_gradient_checkpointing", category=FutureWarning)
        adapted = get_peft_model(model, config)
    trainable = trainable_parameter_count(adapted)
    if trainable != expected:
        raise HyperionError(
            f"{trainable:,} parameters are trainable where sum r (d_in + d_out) is {expected:,}",
            where=f"add_lora, rank {rank} on {', '.join(targets)}",
            next_step="freeze what else is trainable, or give targets whose names belong to nn.Linear layers only",
        )
    return adapted


def expected_lora_parameters(model: nn.Module, rank: int, targets: Sequence[str] = ATTENTION) -> int:
    """Trainable parameters of LoRA: sum over target layers of r (d_in + d_out); A is [r, d_in], B is [d_out, r].

    Args:
        model: a base model, or one that has adapters already.

    Raises:
        HyperionError: a target's name is that of no layer, or a layer is narrower than the rank.
    """
    layers = {
        name: module
        for name, module in model.named_modules()
        if name.rpartition(".")[2] in targets and hasattr(module, "in_features")
    }
    if missing := [target for target in targets if not any(name.rpartition(".")[2] == target for name in layers)]:
        raise HyperionError(
            f"no linear layer is named {', '.join(missing)}",
            where=f"LoRA targets in {type(model).__name__}",
            next_step="name layers of this model; print(model) shows them",
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
    """Parameters that training changes, whole ones where they are sharded."""
    return sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
