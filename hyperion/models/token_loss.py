"""Negative log-likelihood of each token from the head's input, without a float32 copy of the logits.

A vocabulary makes logits the largest tensor of a language model, by far. PyTorch's cross-entropy reads them as float32:
a copy twice as large as bfloat16 logits, and a gradient as large again. On a GPU a Triton kernel, the same for AMD and
NVIDIA, sums in float32 and leaves what the backward pass needs, softmax - one-hot, in their place. The
gradient of each token's loss need not touch that matrix S_MV: with g_M it is g·(S·W) for the input and Sᵀ·(g·x) for the
weight. Elsewhere, and where there is no Triton, it is PyTorch's own function.

Shape suffixes: M tokens, D width, V classes, P classes filled up so that rows are aligned (P >= V).
"""

import importlib.util

import torch
import torch.nn.functional as F
from torch import Tensor

from hyperion.data.batches.packing import IGNORE_INDEX

# Matrix units want rows that begin at multiples of 128 bytes; those of 50257 columns do not.
_ALIGNMENT = 64
# It comes with PyTorch's builds for GPUs.
HAS_TRITON = importlib.util.find_spec("triton") is not None


def padded_classes(classes: int) -> int:
    """P: the columns of logits whose rows are aligned."""
    return -(-classes // _ALIGNMENT) * _ALIGNMENT


def token_loss(x_MD: Tensor, weight_VD: Tensor, targets_M: Tensor) -> Tensor:
    """nll_M in nats, float32, of the logits x·weightᵀ; zero where the target is IGNORE_INDEX.

    Args:
        x_MD, weight_VD: floating-point; products are made in the type that autocast says.
        targets_M: int64 classes below V. On a GPU another one gives NaN, on a CPU an error.
    """
    if not (x_MD.is_cuda and HAS_TRITON):
        logits_MV = F.linear(x_MD, weight_VD).float()
        return F.cross_entropy(logits_MV, targets_M, ignore_index=IGNORE_INDEX, reduction="none")
    from hyperion.models.token_loss_kernels import head_loss

    dtype = torch.get_autocast_dtype("cuda") if torch.is_autocast_enabled("cuda") else x_MD.dtype
    weight_PD = F.pad(weight_VD.to(dtype), (0, 0, 0, padded_classes(len(weight_VD)) - len(weight_VD)))
    return head_loss(x_MD.to(dtype), weight_PD, targets_M, len(weight_VD), IGNORE_INDEX, torch.is_grad_enabled())[0]
