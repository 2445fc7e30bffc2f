"""Optimizers with the decay groups of common practice: weights decay, biases and norm parameters do not."""

import torch
from torch import nn

from hyperion.parallel import is_sharded


def adamw(
    model: nn.Module,
    learning_rate: float,
    weight_decay: float = 0.1,
    betas: tuple[float, float] = (0.9, 0.95),
    eps: float = 1e-8,
) -> torch.optim.AdamW:
    """AdamW (Loshchilov & Hutter 2019) as one fused kernel a step; betas as in GPT-3 (Brown et al. 2020)."""
    return torch.optim.AdamW(decay_groups(model, weight_decay), lr=learning_rate, betas=betas, eps=eps, fused=True)


def sgd_nesterov(
    model: nn.Module, learning_rate: float, weight_decay: float = 5e-4, momentum: float = 0.9
) -> torch.optim.SGD:
    """SGD with Nesterov momentum as one fused kernel a step; the weight decay is the L2 form of ResNet training."""
    # torch has no fused SGD for sharded parameters: those take a few kernels a step, over all of them at once.
    kernel = "foreach" if is_sharded(model) else "fused"
    return torch.optim.SGD(
        decay_groups(model, weight_decay), lr=learning_rate, momentum=momentum, nesterov=True, **{kernel: True}
    )


def decay_groups(model: nn.Module, weight_decay: float) -> list[dict]:
    """Two parameter groups: matrices, embeddings and kernels with weight_decay, one-dimensional parameters without."""
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return [
        {"params": [parameter for parameter in parameters if parameter.ndim >= 2], "weight_decay": weight_decay},
        {"params": [parameter for parameter in parameters if parameter.ndim < 2], "weight_decay": 0.0},
    ]
