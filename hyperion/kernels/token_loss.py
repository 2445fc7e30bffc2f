"""Negative log-likelihood of each token, computed without a float32 copy of the logits.

The functions take the input and the weight of the head, the linear layer that computes the logits.

The logits are by far the largest tensor of a language model. The cross-entropy of PyTorch converts them to float32. The copy is
twice as large as bfloat16 logits, and its gradient has the same size as the copy. On a GPU, a Triton kernel computes sums in
float32. It then overwrites the logits with S = softmax(logits) - one_hot(targets). The backward pass needs no other tensor of
this size.

Let g_M be the gradient of the loss of each token, x the input of the head, and W its weight. The gradient of x is g·(S·W), and
the gradient of W is Sᵀ·(g·x). With these formulas, the large tensor S does not have to be multiplied by g. On a CPU or without
Triton, the cross-entropy of PyTorch is used.

Shape suffixes: M tokens, D width, V classes, P classes after padding (P >= V), so that rows are aligned.
"""

import importlib.util

import torch
import torch.nn.functional as F
from torch import Tensor

from hyperion.data.packing import IGNORE_INDEX

# Matrix units are fast only if rows start at multiples of 128 bytes. Rows of 50257 columns do not.
_ALIGNMENT = 64
# Number of float32 logits in 16 MiB. Logits of this size stay in the cache of a server CPU, and the loss is computed twice as
# fast as with 200 MiB of logits.
_CPU_LOGITS = (16 << 20) // 4
# The GPU builds of PyTorch contain Triton.
HAS_TRITON = importlib.util.find_spec("triton") is not None


def padded_classes(classes: int) -> int:
    """Return the number of classes after padding, P, so that the rows of the logits are aligned."""
    return -(-classes // _ALIGNMENT) * _ALIGNMENT


def _reference_loss(x_MD: Tensor, weight_VD: Tensor, targets_M: Tensor) -> Tensor:
    logits_MV = F.linear(x_MD, weight_VD).float()
    return F.cross_entropy(logits_MV, targets_M, ignore_index=IGNORE_INDEX, reduction="none")


def token_loss(x_MD: Tensor, weight_VD: Tensor, targets_M: Tensor) -> Tensor:
    """Return the negative log-likelihood of each token, nll_M, for the logits x·weightᵀ.

    The result is in nats and has the dtype float32. It is 0 for tokens whose target is IGNORE_INDEX.

    Args:
        x_MD, weight_VD: floating-point tensors. Under autocast the matrix product is computed in the dtype of autocast.
        targets_M: int64 class of each token, below V. For an invalid class the result is NaN on a GPU; on a CPU PyTorch
            raises an error.

    In float16, the kernel on a GPU needs a loss scale, as training in float16 does: the gradients of the logits are stored in
    units of gradient_M / 1024, which is 0 in float16 for a mean over 32,768 tokens without a scale.
    """
    if not (x_MD.is_cuda and HAS_TRITON):
        if torch.is_grad_enabled() or x_MD.is_cuda:
            return _reference_loss(x_MD, weight_VD, targets_M)
        # Without gradients, no logits are saved, so compute the logits of a few rows at a time, which fit into the CPU cache.
        rows = max(1, _CPU_LOGITS // len(weight_VD))
        chunks = zip(x_MD.split(rows), targets_M.split(rows), strict=True)
        return torch.cat([_reference_loss(x, weight_VD, targets) for x, targets in chunks])
    from hyperion.kernels.token_loss_triton import head_loss

    dtype = torch.get_autocast_dtype("cuda") if torch.is_autocast_enabled("cuda") else x_MD.dtype
    # F.pad counts from the last dimension: no columns, and P - V rows of zeros at the end. The kernel ignores their logits.
    weight_PD = F.pad(weight_VD.to(dtype), (0, 0, 0, padded_classes(len(weight_VD)) - len(weight_VD)))
    return head_loss(x_MD.to(dtype), weight_PD, targets_M, len(weight_VD), IGNORE_INDEX, torch.is_grad_enabled())[0]
