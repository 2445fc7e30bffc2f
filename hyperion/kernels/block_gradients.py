"""Operations of a Transformer block whose backward passes read each gradient once.

The gradient of a bias is the column sum of a gradient. A compiler makes a separate pass over the tensor for it, because a
kernel that reduces rows does not reduce columns too. Where the tensor is large, in the MLP and before attention, this pass
takes about one percent of a step. Here the Triton kernel that writes the gradient also sums its columns:

- A GELU projection and the joint query, key and value projection sum the gradient of their bias.
- A norm sums the gradients of its weight and bias, and adds the gradient of the residual stream in the same pass. The
  gradient that it writes is also the gradient of the bias of the layer before (attention's output); the gradient that it
  reads from the residual stream is that of the layer after (the MLP's output). It sums both for these two layers.

These functions replace a block's own layers only in torch.compile on a GPU in bfloat16 (`applies_to`).

Shape suffixes as in hyperion.models.transformer; E is the number of columns of a layer's output.
"""

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import Function

from hyperion.kernels.token_loss import HAS_TRITON


def applies_to(x: Tensor, dtype: torch.dtype = torch.bfloat16) -> bool:
    """Return True if these functions replace the layers that read x: compiled, on a GPU with Triton, with x of `dtype`."""
    return torch.compiler.is_compiling() and x.is_cuda and HAS_TRITON and x.dtype == dtype


def gelu(x: Tensor) -> Tensor:
    """Return GELU in the tanh form, as in GPT-2.

    Compiled, it is the equivalent x · sigmoid(2 √(2/π) (x + 0.044715 x³)), since (1 + tanh z) / 2 = sigmoid(2 z): GPUs have a
    hardware unit for the exponential, not for tanh.
    """
    if torch.compiler.is_compiling():
        return x * torch.sigmoid(2 * math.sqrt(2 / math.pi) * (x + 0.044715 * x * x * x))
    return F.gelu(x, approximate="tanh")


def layer_norm(x_BTD: Tensor, norm: nn.LayerNorm) -> Tensor:
    """Return LayerNorm(x) in the dtype of x, computed in float32, with weights rounded to the dtype of x.

    Under autocast on a GPU PyTorch's own layer norm reads and writes float32: its input is copied and saved in twice the
    bytes, and the query, key and value layers each convert its output and save the copy.
    """
    weight_D, bias_D = norm.weight.to(x_BTD.dtype), norm.bias.to(x_BTD.dtype)
    # In compiled code autocast's casts are fused with the reads and writes, so they cost nothing.
    if torch.compiler.is_compiling() or not _autocast_enabled(x_BTD.device.type):
        return F.layer_norm(x_BTD, norm.normalized_shape, weight_D, bias_D, norm.eps).to(x_BTD.dtype)
    with torch.autocast(x_BTD.device.type, enabled=False):
        return F.layer_norm(x_BTD, norm.normalized_shape, weight_D, bias_D, norm.eps)


def add_positions(x_BTD: Tensor, positions_TD: Tensor) -> Tensor:
    """Return x + positions in the dtype of the residual stream: bfloat16 under autocast to bfloat16, else that of the sum.

    Sums with a float32 tensor would keep the whole residual stream in float32, with twice the bytes of every read. float16
    has too little range for it.
    """
    to_bf16 = _autocasts_to_bf16(x_BTD.device.type)
    if to_bf16 and applies_to(x_BTD, torch.float32):
        return _AddPositions.apply(x_BTD, positions_TD)
    sum_BTD = x_BTD + positions_TD
    return sum_BTD.bfloat16() if to_bf16 else sum_BTD


def gelu_projection(x_BTD: Tensor, layer: nn.Linear) -> Tensor:
    """Return GELU(x·weightᵀ + bias) in the tanh form, [B, T, E]."""
    return _GeluProjection.apply(x_BTD, layer.weight, layer.bias)


def joint_projection(x_BTD: Tensor, weight_ED: Tensor, bias_E: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the three parts [B, T, E/3] of x·weightᵀ + bias."""
    return _JointProjection.apply(x_BTD, weight_ED, bias_E)


def forked_norm(
    x_BTD: Tensor, norm: nn.LayerNorm, before_D: Tensor | None = None, after_D: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return x itself and LayerNorm(x); one kernel adds their gradients.

    Args:
        before_D, after_D: biases of the layer whose result was added to x, and of the layer whose result will be added to x.
            Their values are not used; they receive their gradients here, so those layers use them detached (see
            `projection`).
    """
    return _ForkedNorm.apply(x_BTD, norm.weight, norm.bias, norm.eps, before_D, after_D)


def projection(x_BTD: Tensor, layer: nn.Linear) -> Tensor:
    """Return the layer's result; its bias receives its gradient from `forked_norm` instead."""
    return F.linear(x_BTD, layer.weight, layer.bias.detach())


class _GeluProjection(Function):
    @staticmethod
    def forward(ctx: Any, x_BTD: Tensor, weight_ED: Tensor, bias_E: Tensor) -> Tensor:
        rounded_ED = weight_ED.to(x_BTD.dtype)
        y_BTE = F.linear(x_BTD, rounded_ED, bias_E.to(x_BTD.dtype))
        ctx.save_for_backward(x_BTD, rounded_ED, y_BTE)
        return gelu(y_BTE)

    @staticmethod
    def backward(ctx: Any, grad_BTE: Tensor) -> tuple[Tensor, ...]:
        from hyperion.kernels.block_gradients_triton import gelu_gradient

        x_BTD, weight_ED, y_BTE = ctx.saved_tensors
        grad_y_ME, grad_bias_E = gelu_gradient(grad_BTE.flatten(0, 1), y_BTE.flatten(0, 1))
        return _linear_gradients(x_BTD, weight_ED, grad_y_ME, grad_bias_E)


class _JointProjection(Function):
    @staticmethod
    def forward(ctx: Any, x_BTD: Tensor, weight_ED: Tensor, bias_E: Tensor) -> tuple[Tensor, ...]:
        rounded_ED = weight_ED.to(x_BTD.dtype)
        ctx.save_for_backward(x_BTD, rounded_ED)
        return F.linear(x_BTD, rounded_ED, bias_E.to(x_BTD.dtype)).chunk(3, -1)

    @staticmethod
    def backward(ctx: Any, *grad_parts_BTD: Tensor) -> tuple[Tensor, ...]:
        from hyperion.kernels.block_gradients_triton import joined_gradient

        x_BTD, weight_ED = ctx.saved_tensors
        grad_y_ME, grad_bias_E = joined_gradient(*(part.flatten(0, 1) for part in grad_parts_BTD))
        return _linear_gradients(x_BTD, weight_ED, grad_y_ME, grad_bias_E)


class _ForkedNorm(Function):
    @staticmethod
    def forward(
        ctx: Any, x_BTD: Tensor, weight_D: Tensor, bias_D: Tensor, eps: float, before_D: Tensor | None, after_D: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        ctx.sums_biases = before_D is not None
        rounded_D, values = weight_D.to(x_BTD.dtype), x_BTD.float()
        variance, mean = torch.var_mean(values, -1, correction=0, keepdim=True)
        inverse = torch.rsqrt(variance + eps)
        ctx.save_for_backward(x_BTD, mean, inverse, rounded_D)
        normalized = (values - mean) * inverse * rounded_D + bias_D.to(x_BTD.dtype)
        # An output must not be an input of the Function; the compiler removes the copy.
        return x_BTD.clone(), normalized.to(x_BTD.dtype)

    @staticmethod
    def backward(ctx: Any, grad_residual_BTD: Tensor, grad_y_BTD: Tensor) -> tuple[Tensor | None, ...]:
        from hyperion.kernels.block_gradients_triton import norm_gradient

        x_BTD, mean, inverse, weight_D = ctx.saved_tensors
        grad_x_BTD, sums_RD = norm_gradient(x_BTD, grad_y_BTD, grad_residual_BTD, mean, inverse, weight_D, ctx.sums_biases)
        grad_weight_D, grad_bias_D, grad_before_D, grad_after_D = sums_RD if ctx.sums_biases else (*sums_RD, None, None)
        return grad_x_BTD, grad_weight_D, grad_bias_D, None, grad_before_D, grad_after_D


class _AddPositions(Function):
    @staticmethod
    def forward(ctx: Any, x_BTD: Tensor, positions_TD: Tensor) -> Tensor:
        return (x_BTD + positions_TD).bfloat16()

    @staticmethod
    def backward(ctx: Any, grad_x_BTD: Tensor) -> tuple[Tensor, Tensor]:
        from hyperion.kernels.block_gradients_triton import position_gradient

        return grad_x_BTD.float(), position_gradient(grad_x_BTD)


def _linear_gradients(x_BTD: Tensor, weight_ED: Tensor, grad_y_ME: Tensor, grad_bias_E: Tensor) -> tuple[Tensor, ...]:
    """Return the gradients of input, weight and bias of a linear layer."""
    return (grad_y_ME @ weight_ED).view_as(x_BTD), grad_y_ME.T @ x_BTD.flatten(0, 1), grad_bias_E


def _autocasts_to_bf16(device_type: str) -> bool:
    return _autocast_enabled(device_type) and torch.get_autocast_dtype(device_type) == torch.bfloat16


def _autocast_enabled(device_type: str) -> bool:
    return device_type != "meta" and torch.is_autocast_enabled(device_type)
