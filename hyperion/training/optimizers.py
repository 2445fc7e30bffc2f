"""Optimizers, in which weights decay and biases and norm parameters do not, and the learning-rate schedule."""

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from hyperion.errors import HyperionError, require_number
from hyperion.parallel import is_sharded


def adamw(
    model: nn.Module, learning_rate: float, weight_decay: float = 0.1, betas: tuple[float, float] = (0.9, 0.95), eps: float = 1e-8
) -> torch.optim.AdamW:
    """Return AdamW (Loshchilov & Hutter 2019) as one fused kernel per step; betas as in GPT-3 (Brown et al. 2020).

    Raises:
        HyperionError: a rate, decay or eps is negative or not finite, a beta is outside 0 .. 1, or no parameter is trainable.
    """
    require_number("learning_rate", learning_rate, "adamw", at_least=0)
    require_number("eps", eps, "adamw", at_least=0)
    for beta in betas:
        require_number("beta", beta, "adamw", at_least=0, below=1)
    return torch.optim.AdamW(decay_groups(model, weight_decay), lr=learning_rate, betas=betas, eps=eps, fused=True)


def sgd_nesterov(model: nn.Module, learning_rate: float, weight_decay: float = 5e-4, momentum: float = 0.9) -> torch.optim.SGD:
    """Return SGD with Nesterov momentum as one fused kernel per step; weight decay is the L2 form of ResNet training.

    Raises:
        HyperionError: a rate or decay is negative or not finite, momentum is outside 0 .. 1, or no parameter is trainable.
    """
    require_number("learning_rate", learning_rate, "sgd_nesterov", at_least=0)
    require_number("momentum", momentum, "sgd_nesterov", above=0, below=1)
    # torch has no fused SGD for sharded parameters; "foreach" needs a few kernels per step over all parameters at once.
    kernel: dict[str, Any] = {"foreach" if is_sharded(model) else "fused": True}
    return torch.optim.SGD(decay_groups(model, weight_decay), lr=learning_rate, momentum=momentum, nesterov=True, **kernel)


def decay_groups(model: nn.Module, weight_decay: float) -> list[dict]:
    """Return two parameter groups: matrices, embeddings and convolution kernels with decay, 1-d parameters without.

    Raises:
        HyperionError: the decay is negative or not finite, or no parameter requires a gradient.
    """
    require_number("weight_decay", weight_decay, "optimizer", at_least=0)
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if not parameters:
        raise HyperionError(
            f"no parameter of {type(model).__name__} requires a gradient",
            where="optimizer",
            next_step="set requires_grad of the trainable parameters before building the optimizer",
        )
    return [
        {"params": [parameter for parameter in parameters if parameter.ndim >= 2], "weight_decay": weight_decay},
        {"params": [parameter for parameter in parameters if parameter.ndim < 2], "weight_decay": 0.0},
    ]


@dataclass(frozen=True)
class WarmupCosine:
    """Learning rate: linear warm-up to the peak, half a cosine down to a fraction of it, then constant.

    A pure function of the step, so a resumed run needs no scheduler state.

    Attributes:
        peak: highest learning rate, reached at step warmup_steps (steps count from 1).
        warmup_steps: 0 starts at the peak.
        total_steps: step at which the rate reaches peak * final_fraction.
        final_fraction: 1 keeps the rate constant after the warm-up.
    """

    peak: float
    warmup_steps: int
    total_steps: int
    final_fraction: float = 0.1

    def __post_init__(self) -> None:
        for name in ("warmup_steps", "total_steps"):
            require_number(name, getattr(self, name), "WarmupCosine", whole=True)
        require_number("peak", self.peak, "WarmupCosine", at_least=0)
        require_number("final_fraction", self.final_fraction, "WarmupCosine", at_least=0, at_most=1)
        if not 0 <= self.warmup_steps < self.total_steps:
            raise HyperionError(
                f"warmup_steps {self.warmup_steps} is not from 0 to total_steps {self.total_steps} - 1",
                where="WarmupCosine",
                next_step="shorten the warm-up or train longer",
            )

    def __call__(self, step: int) -> float:
        """Return the learning rate of optimizer step `step`, counted from 1.

        Raises:
            HyperionError: the step is below 1.
        """
        if step < 1:
            raise HyperionError(f"step is {step}", where="WarmupCosine", next_step="count steps from 1")
        if step < self.warmup_steps:
            return self.peak * step / self.warmup_steps
        done = min(1.0, (step - self.warmup_steps) / (self.total_steps - self.warmup_steps))
        return self.peak * (self.final_fraction + (1 - self.final_fraction) * 0.5 * (1 + math.cos(math.pi * done)))
