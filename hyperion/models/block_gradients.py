"""Layers of a Transformer block with backward passes that read each gradient once.

The gradient of a bias is the sum of a gradient's rows. A compiler makes a pass of its own over the tensor for it, because a
kernel that goes along rows does not go along columns too; where the tensor is large, in the MLP and in front of the heads,
that is a percent of a step. Here the Triton kernel that writes the gradient keeps the sums. (The biases of the two layers
that write to the residual stream still cost a pass, over a quarter of the bytes.) A block is made of these functions only
within torch.compile on a GPU, in bfloat16 (`applies_to`); elsewhere it is made of its own layers.

Shape suffixes as in hyperion.models.transformer; E is the number of columns of a layer's output.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import Function

from hyperion.models.gelu import gelu
from hyperion.models.token_loss import HAS_TRITON


def applies_to(x: Tensor) -> bool:
    """Whether layers with this input are made of these functions."""
    return torch.compiler.is_compiling() and x.is_cuda and HAS_TRITON and x.dtype == torch.bfloat16


def gelu_projection(x_BTD: Tensor, layer: nn.Linear) -> Tensor:
    """GELU(x·weightᵀ + bias) in the tanh form, [B, T, E]."""
    return _GeluProjection.apply(x_BTD, layer.weight, layer.bias)


def joint_projection(x_BTD: Tensor, weight_ED: Tensor, bias_E: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The three parts [B, T, E/3] of x·weightᵀ + bias."""
    return _JointProjection.apply(x_BTD, weight_ED, bias_E)


class _GeluProjection(Function):
    @staticmethod
    def forward(ctx: Any, x_BTD: Tensor, weight_ED: Tensor, bias_E: Tensor) -> Tensor:
        rounded_ED = weight_ED.to(x_BTD.dtype)
        y_BTE = F.linear(x_BTD, rounded_ED, bias_E.to(x_BTD.dtype))
        ctx.save_for_backward(x_BTD, rounded_ED, y_BTE)
        return gelu(y_BTE)

    @staticmethod
    def backward(ctx: Any, gradient_BTE: Tensor) -> tuple[Tensor, ...]:
        from hyperion.models.block_gradient_kernels import gelu_gradient

        x_BTD, weight_ED, y_BTE = ctx.saved_tensors
        of_y_ME, of_bias_E = gelu_gradient(gradient_BTE.flatten(0, 1), y_BTE.flatten(0, 1))
        return _of_linear(x_BTD, weight_ED, of_y_ME, of_bias_E)


class _JointProjection(Function):
    @staticmethod
    def forward(ctx: Any, x_BTD: Tensor, weight_ED: Tensor, bias_E: Tensor) -> tuple[Tensor, ...]:
        rounded_ED = weight_ED.to(x_BTD.dtype)
        ctx.save_for_backward(x_BTD, rounded_ED)
        return F.linear(x_BTD, rounded_ED, bias_E.to(x_BTD.dtype)).chunk(3, -1)

    @staticmethod
    def backward(ctx: Any, *of_parts_BTD: Tensor) -> tuple[Tensor, ...]:
        from hyperion.models.block_gradient_kernels import joined_gradient

        x_BTD, weight_ED = ctx.saved_tensors
        of_y_ME, of_bias_E = joined_gradient(*(part.flatten(0, 1) for part in of_parts_BTD))
        return _of_linear(x_BTD, weight_ED, of_y_ME, of_bias_E)


def _of_linear(x_BTD: Tensor, weight_ED: Tensor, of_y_ME: Tensor, of_bias_E: Tensor) -> tuple[Tensor, ...]:
    """Gradients of input, weight and bias of a linear layer from that of its output."""
    return (of_y_ME @ weight_ED).view_as(x_BTD), of_y_ME.T @ x_BTD.flatten(0, 1), of_bias_E
