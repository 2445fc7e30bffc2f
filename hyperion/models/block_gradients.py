"""Layers of a Transformer block with backward passes that read each gradient once.

The gradient of a bias is the sum of a gradient's rows. A compiler makes a pass of its own over the tensor for it, because a
kernel that goes along rows does not go along columns too; where the tensor is large, in the MLP and in front of the heads,
that is a percent of a step. Here the Triton kernel that writes the gradient keeps the sums. The same goes for a norm's weight
and bias, and its kernel adds what comes along the residual stream past the norm. The gradient that it writes is also that of
what attention's last layer has written, and the one that it reads along the stream that of what the MLP's will write: it sums
both, for the biases of those two layers. A block is made of these functions only within torch.compile on a GPU, in bfloat16
(`applies_to`); elsewhere it is made of its own layers.

Shape suffixes as in hyperion.models.transformer; E is the number of columns of a layer's output.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import Function

from hyperion.models.gelu import gelu
from hyperion.models.token_loss import HAS_TRITON


def applies_to(x: Tensor, dtype: torch.dtype = torch.bfloat16) -> bool:
    """Whether these functions stand for the layers that read x: compiled for a GPU, where x has that type."""
    return torch.compiler.is_compiling() and x.is_cuda and HAS_TRITON and x.dtype == dtype


def gelu_projection(x_BTD: Tensor, layer: nn.Linear) -> Tensor:
    """GELU(x·weightᵀ + bias) in the tanh form, [B, T, E]."""
    return _GeluProjection.apply(x_BTD, layer.weight, layer.bias)


def joint_projection(x_BTD: Tensor, weight_ED: Tensor, bias_E: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The three parts [B, T, E/3] of x·weightᵀ + bias."""
    return _JointProjection.apply(x_BTD, weight_ED, bias_E)


def forked_norm(
    x_BTD: Tensor, norm: nn.LayerNorm, before_D: Tensor | None = None, after_D: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """x itself and LayerNorm(x), whose gradients meet in one kernel.

    Args:
        before_D, after_D: biases of the layer whose result was added to x and of the one whose result will be added to it.
            Their values are not used, but they get their gradients here: the layers take them detached (`projection`).
    """
    return _ForkedNorm.apply(x_BTD, norm.weight, norm.bias, norm.eps, before_D, after_D)


def projection(x_BTD: Tensor, layer: nn.Linear) -> Tensor:
    """The layer's result; its bias gets no gradient from it, see `forked_norm`."""
    return F.linear(x_BTD, layer.weight, layer.bias.detach())


def with_positions(x_BTD: Tensor, positions_TD: Tensor) -> Tensor:
    """x + positions in bfloat16, both given in float32."""
    return _WithPositions.apply(x_BTD, positions_TD)


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
        normed = (values - mean) * inverse * rounded_D + bias_D.to(x_BTD.dtype)
        # An output must not be an input; the compiler leaves the copy out.
        return x_BTD.clone(), normed.to(x_BTD.dtype)

    @staticmethod
    def backward(ctx: Any, of_x_BTD: Tensor, of_y_BTD: Tensor) -> tuple[Tensor | None, ...]:
        from hyperion.models.block_gradient_kernels import norm_gradient

        x_BTD, mean, inverse, weight_D = ctx.saved_tensors
        gradient_BTD, sums_RD = norm_gradient(x_BTD, of_y_BTD, of_x_BTD, mean, inverse, weight_D, ctx.sums_biases)
        of_weight_D, of_bias_D, of_before_D, of_after_D = sums_RD if ctx.sums_biases else (*sums_RD, None, None)
        return gradient_BTD, of_weight_D, of_bias_D, None, of_before_D, of_after_D


class _WithPositions(Function):
    @staticmethod
    def forward(ctx: Any, x_BTD: Tensor, positions_TD: Tensor) -> Tensor:
        return (x_BTD + positions_TD).bfloat16()

    @staticmethod
    def backward(ctx: Any, gradient_BTD: Tensor) -> tuple[Tensor, Tensor]:
        from hyperion.models.block_gradient_kernels import position_gradient

        return gradient_BTD.float(), position_gradient(gradient_BTD)


def _of_linear(x_BTD: Tensor, weight_ED: Tensor, of_y_ME: Tensor, of_bias_E: Tensor) -> tuple[Tensor, ...]:
    """Gradients of input, weight and bias of a linear layer from that of its output."""
    return (of_y_ME @ weight_ED).view_as(x_BTD), of_y_ME.T @ x_BTD.flatten(0, 1), of_bias_E
