"""Optimizers with the decay groups of common practice: weights decay, biases and norm parameters do not."""

import torch
from torch import nn

from hyperion.errors import HyperionError, require_number
from hyperion.parallel import is_sharded


def adamw(
    model: nn.Module, learning_rate: float, weight_decay: float = 0.1, betas: tuple[float, float] = (0.9, 0.95), eps: float = 1e-8
) -> torch.optim.AdamW:
    """AdamW (Loshchilov & Hutter 2019) as one fused kernel a step; betas as in GPT-3 (Brown et al. 2020).

    Raises:
        HyperionError: a rate, decay or eps that is negative or not finite, a beta outside 0 .. 1, or nothing to train.
    """
    require_number("learning_rate", learning_rate, "adamw", at_least=0)
    require_number("eps", eps, "adamw", at_least=0)
    for beta in betas:
        require_number("beta", beta, "adamw", at_least=0, below=1)
    return torch.optim.AdamW(decay_groups(model, weight_decay), lr=learning_rate, betas=betas, eps=eps, fused=True)


def sgd_nesterov(model: nn.Module, learning_rate: float, weight_decay: float = 5e-4, momentum: float = 0.9) -> torch.optim.SGD:
    """SGD with Nesterov momentum as one fused kernel a step; the weight decay is the L2 form of ResNet training.

    Raises:
        HyperionError: a rate or decay that is negative or not finite, a momentum outside 0 .. 1, or nothing to train.
    """
    require_number("learning_rate", learning_rate, "sgd_nesterov", at_least=0)
    require_number("momentum", momentum, "sgd_nesterov", above=0, below=1)
    # torch has no fused SGD for sharded parameters: those take a few kernels a step, over all of them at once.
    kernel = "foreach" if is_sharded(model) else "fused"
    return torch.optim.SGD(
        decay_groups(model, weight_decay), lr=learning_rate, momentum=momentum, nesterov=True, **{kernel: True}
    )


def decay_groups(model: nn.Module, weight_decay: float) -> list[dict]:
    """Two parameter groups: matrices, embeddings and kernels with weight_decay, one-dimensional parameters without.

    Raises:
        HyperionError: a decay that is negative or not finite, or no parameter requires a gradient.
    """
    require_number("weight_decay", weight_decay, "optimizer", at_least=0)
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if not parameters:
        raise HyperionError(
            f"no parameter of {type(model).__name__} requires a gradient",
            where="optimizer",
            next_step="set requires_grad of the parameters to train before the optimizer is built",
        )
    return [
        {"params": [parameter for parameter in parameters if parameter.ndim >= 2], "weight_decay": weight_decay},
        {"params": [parameter for parameter in parameters if parameter.ndim < 2], "weight_decay": 0.0},
    ]
