"""GELU as GPT-2 has it."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor


def gelu(x: Tensor) -> Tensor:
    """GELU in the tanh form, as in GPT-2. Compiled as the same function of an exponential, which GPUs have a unit for: x ·
    sigmoid(2 √(2/π) (x + 0.044715 x³)), since (1 + tanh z) / 2 = sigmoid(2 z).
    """
    if torch.compiler.is_compiling():
        return x * torch.sigmoid(2 * math.sqrt(2 / math.pi) * (x + 0.044715 * x * x * x))
    return F.gelu(x, approximate="tanh")
