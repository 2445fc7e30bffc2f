"""Operations of a Transformer block whose backward passes read each gradient only once.

The gradient of the bias of a layer is the sum of the gradient of the layer's output over all tokens (the rows of a matrix). Code
from torch.compile reads the gradient of the output a second time to compute this sum, because it does not join this sum with the
kernel that writes the gradient. For the large tensors in the MLP and before attention, the second read takes about one
percent of a training step. In this module, the Triton kernel that writes a gradient also sums the columns of this gradient:

- The GELU projection, and the joint projection to query, key and value: the kernel sums the gradient of the bias.
- The norm: the kernel sums the gradients of the norm's weight and bias, and adds the gradient of the residual stream in the same
  pass. It also computes the bias gradients of two other layers. The layer before the norm is the output projection of
  attention: its bias gradient is the sum of the gradient that the kernel writes. The layer after the norm is the output
  projection of the MLP: its bias gradient is the sum of the gradient that the kernel reads from the residual stream.

These functions replace the layers of a block only in code that torch.compile compiles for a GPU, in bfloat16 (see `applies_to`).

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
    """Return True if a block with input x must use the functions of this module instead of its layers.

    This is the case in compiled code on a GPU with Triton, if x has the given dtype.
    """
    return torch.compiler.is_compiling() and x.is_cuda and HAS_TRITON and x.dtype == dtype


def gelu(x: Tensor) -> Tensor:
    """Return GELU in the tanh form, as in GPT-2.

    Compiled code computes the equivalent x · sigmoid(2 √(2/π) (x + 0.044715 x³)), because (1 + tanh z) / 2 = sigmoid(2 z). The
    sigmoid needs the exponential function, for which GPUs have a hardware unit.
    """
    if torch.compiler.is_compiling():
        return x * torch.sigmoid(2 * math.sqrt(2 / math.pi) * (x + 0.044715 * x * x * x))
    return F.gelu(x, approximate="tanh")


def layer_norm(x_BTD: Tensor, norm: nn.LayerNorm) -> Tensor:
    """Return LayerNorm(x) in the dtype of x, computed in float32, with weights rounded to the dtype of x.

    This function avoids the float32 copies that the layer norm of PyTorch needs under autocast on a GPU. There, PyTorch converts
    the input of the norm to float32. Autograd saves this copy, which needs twice the memory. The output of the norm is also
    float32. Each of the query, key and value layers converts this output back to the dtype of autocast, and saves the result.
    """
    weight_D, bias_D = norm.weight.to(x_BTD.dtype), norm.bias.to(x_BTD.dtype)
    # In compiled code the casts of autocast are fused with reads and writes, so they take no extra time.
    if torch.compiler.is_compiling() or not _autocast_enabled(x_BTD.device.type):
        return F.layer_norm(x_BTD, norm.normalized_shape, weight_D, bias_D, norm.eps).to(x_BTD.dtype)
    with torch.autocast(x_BTD.device.type, enabled=False):
        return F.layer_norm(x_BTD, norm.normalized_shape, weight_D, bias_D, norm.eps)


def add_positions(x_BTD: Tensor, positions_TD: Tensor) -> Tensor:
    """Return x + positions in the dtype of the residual stream.

    Under autocast to bfloat16, this dtype is bfloat16. Otherwise, it is the dtype of the sum. Without the conversion to bfloat16,
    adding the float32 positions to x would promote the whole residual stream to float32. Every read of the residual stream would
    then move twice as many bytes. Under autocast to float16, the residual stream stays in float32, because the range of float16
    is too small for it.
    """
    to_bf16 = _autocasts_to_bf16(x_BTD.device.type)
    if to_bf16 and applies_to(x_BTD, torch.float32):
        return _AddPositions.apply(x_BTD, positions_TD)
    sum_BTD = x_BTD + positions_TD
    return sum_BTD.bfloat16() if to_bf16 else sum_BTD


def gelu_projection(x_BTD: Tensor, layer: nn.Linear) -> Tensor:
    """Return GELU(x·weightᵀ + bias) with shape [B, T, E], with GELU in the tanh form."""
    return _GeluProjection.apply(x_BTD, layer.weight, layer.bias)


def joint_projection(x_BTD: Tensor, weight_ED: Tensor, bias_E: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Compute x·weightᵀ + bias, and return its three parts of shape [B, T, E/3]."""
    return _JointProjection.apply(x_BTD, weight_ED, bias_E)


def forked_norm(
    x_BTD: Tensor, norm: nn.LayerNorm, before_D: Tensor | None = None, after_D: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return x and LayerNorm(x). In the backward pass one kernel adds the gradients of the two results.

    The values of `before_D` and `after_D` are not used, but the two biases receive their gradients here. Therefore the two
    layers must use their biases detached (see `projection`).

    Args:
        before_D: bias of the layer whose output was added to x before the norm.
        after_D: bias of the layer whose output is added to x after the norm.
    """
    return _ForkedNorm.apply(x_BTD, norm.weight, norm.bias, norm.eps, before_D, after_D)


def projection(x_BTD: Tensor, layer: nn.Linear) -> Tensor:
    """Return the output of a linear layer, without a gradient for its bias. `forked_norm` computes the bias gradient."""
    return F.linear(x_BTD, layer.weight, layer.bias.detach())


class _GeluProjection(Function):
    @staticmethod
    def forward(ctx: Any, x_BTD: Tensor, weight_ED: Tensor, bias_E: Tensor) -> Tensor:
        rounded_ED = weight_ED.to(x_BTD.dtype)
        y_BTE = F.linear(x_BTD, rounded_ED, bias_E.to(x_BTD.dtype))
        # Save y, the input of GELU, because the gradient of GELU is a function of its input.
        ctx.save_for_backward(x_BTD, rounded_ED, y_BTE)
        return gelu(y_BTE)

    @staticmethod
    def backward(ctx: Any, grad_BTE: Tensor) -> tuple[Tensor, ...]:
        # Imported here, because the module needs Triton, which not every build of PyTorch contains.
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
        # correction=0, because LayerNorm divides by D and not by D - 1.
        variance, mean = torch.var_mean(values, -1, correction=0, keepdim=True)
        inverse = torch.rsqrt(variance + eps)
        ctx.save_for_backward(x_BTD, mean, inverse, rounded_D)
        normalized = (values - mean) * inverse * rounded_D + bias_D.to(x_BTD.dtype)
        # An output of a Function must not be one of its inputs, so x is copied. The compiler removes the copy.
        return x_BTD.clone(), normalized.to(x_BTD.dtype)

    @staticmethod
    def backward(ctx: Any, grad_residual_BTD: Tensor, grad_y_BTD: Tensor) -> tuple[Tensor | None, ...]:
        from hyperion.kernels.block_gradients_triton import norm_gradient

        x_BTD, mean, inverse, weight_D = ctx.saved_tensors
        grad_x_BTD, sums_RD = norm_gradient(x_BTD, grad_y_BTD, grad_residual_BTD, mean, inverse, weight_D, ctx.sums_biases)
        # R is 4 if the gradients of the biases of the two neighbouring layers are included. Otherwise, R is 2.
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
    """Return the gradients of the input, the weight and the bias of a linear layer."""
    # For y = x·Wᵀ + b: dx = dy·W, dW = dyᵀ·x, db = sum of dy over the rows.
    return (grad_y_ME @ weight_ED).view_as(x_BTD), grad_y_ME.T @ x_BTD.flatten(0, 1), grad_bias_E


def _autocasts_to_bf16(device_type: str) -> bool:
    return _autocast_enabled(device_type) and torch.get_autocast_dtype(device_type) == torch.bfloat16


def _autocast_enabled(device_type: str) -> bool:
    # PyTorch raises an error for the autocast state of the meta device, which has none.
    return device_type != "meta" and torch.is_autocast_enabled(device_type)
