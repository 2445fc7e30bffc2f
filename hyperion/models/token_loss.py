"""Negative log-likelihood of each token from its logits, without a float32 copy of them.

A vocabulary makes logits the largest tensor of a language model, by far. PyTorch's cross-entropy reads them as float32:
a copy twice as large as bfloat16 logits, and a gradient as large again. On a GPU two Triton kernels, the same for AMD and
NVIDIA, read each logit once on the way forward and once on the way back, and sum in float32. Elsewhere, and where there is
no Triton, it is PyTorch's own function.

Shape suffixes: M tokens, V classes, P columns of the logits (P >= V, filled up so that rows are aligned).
"""

import functools
import importlib.util

import torch.nn.functional as F
from torch import Tensor

from hyperion.data.packing import IGNORE_INDEX

# Matrix units want rows that begin at multiples of 128 bytes; 50257 columns do not.
_ALIGNMENT = 64


def padded_classes(classes: int) -> int:
    """P: the columns of logits whose rows are aligned."""
    return -(-classes // _ALIGNMENT) * _ALIGNMENT


def token_loss(x_MD: Tensor, weight_VD: Tensor, targets_M: Tensor) -> Tensor:
    """nll_M in nats, float32, of the logits x·weightᵀ; zero where the target is IGNORE_INDEX.

    Args:
        x_MD, weight_VD: floating-point; products are made in the type that autocast says.
        targets_M: int64 classes below V. On a GPU another one gives NaN, on a CPU an error.
    """
    classes = len(weight_VD)
    if not (x_MD.is_cuda and has_triton()):
        return F.cross_entropy(
            F.linear(x_MD, weight_VD).float(), targets_M, ignore_index=IGNORE_INDEX, reduction="none"
        )
    from hyperion.models.token_loss_kernels import token_nll

    weight_PD = F.pad(weight_VD, (0, 0, 0, padded_classes(classes) - classes))
    return token_nll(F.linear(x_MD, weight_PD), targets_M, classes, IGNORE_INDEX)[0]


@functools.cache
def has_triton() -> bool:
    """Whether the compiler of the kernels is installed; it comes with PyTorch's builds for GPUs."""
    return importlib.util.find_spec("triton") is not None
