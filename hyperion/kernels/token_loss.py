"""Negative log-likelihood of each token from the input of the head, without a float32 copy of the logits.

The logits are by far the largest tensor of a language model. PyTorch's cross-entropy converts them to float32: a copy twice
as large as bfloat16 logits, and a gradient of the same size. On a GPU, a Triton kernel sums in float32 and overwrites the
logits with softmax - one-hot, which is all that the backward pass needs. With S_MV that matrix and g_M the gradient of each
token's loss, the gradient is g·(S·W) for the input and Sᵀ·(g·x) for the weight, so S itself is never scaled. On a CPU, or
without Triton, PyTorch's own function is used.

Shape suffixes: M tokens, D width, V classes, P padded classes, so that rows are aligned (P >= V).
"""

import importlib.util

import torch
import torch.nn.functional as F
from torch import Tensor

from hyperion.data.packing import IGNORE_INDEX

# Matrix units need rows that start at multiples of 128 bytes; rows of 50257 columns do not.
_ALIGNMENT = 64
# Triton comes with PyTorch's GPU builds.
HAS_TRITON = importlib.util.find_spec("triton") is not None


def padded_classes(classes: int) -> int:
    """Return P: the number of classes padded so that rows of logits are aligned."""
    return -(-classes // _ALIGNMENT) * _ALIGNMENT


def token_loss(x_MD: Tensor, weight_VD: Tensor, targets_M: Tensor) -> Tensor:
    """Return nll_M in nats, float32, for the logits x·weightᵀ; zero where the target is IGNORE_INDEX.

    Args:
        x_MD, weight_VD: floating-point; the product is computed in autocast's dtype.
        targets_M: int64 classes below V. An invalid class gives NaN on a GPU and raises on a CPU.
    """
    if not (x_MD.is_cuda and HAS_TRITON):
        logits_MV = F.linear(x_MD, weight_VD).float()
        return F.cross_entropy(logits_MV, targets_M, ignore_index=IGNORE_INDEX, reduction="none")
    from hyperion.kernels.token_loss_triton import head_loss

    dtype = torch.get_autocast_dtype("cuda") if torch.is_autocast_enabled("cuda") else x_MD.dtype
    weight_PD = F.pad(weight_VD.to(dtype), (0, 0, 0, padded_classes(len(weight_VD)) - len(weight_VD)))
    return head_loss(x_MD.to(dtype), weight_PD, targets_M, len(weight_VD), IGNORE_INDEX, torch.is_grad_enabled())[0]
