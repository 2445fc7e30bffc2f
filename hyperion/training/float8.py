"""Train in fp8, with linear layers whose matrix products (forward, input gradient, weight gradient) have fp8 operands.

There are two fp8 formats. The forward pass needs a fine resolution, so it uses e4m3, with values up to 448 (240 in the fnuz
variant of CDNA 3). Gradients need a large range, so they use e5m2, with values up to 57344. Neither format covers the range of
values in a typical tensor. Therefore each operand is divided by a scale s = max|x| / (largest value of the format), and the
result is multiplied by both scales:

    y = s_x s_w · (x/s_x)(w/s_w)ᵀ

The scale is computed from the tensor at each use (dynamic scaling per tensor). This needs one more pass over the tensor,
but checkpoints need no history of scales. Matrix products accumulate in float32. Weights, their gradients and optimizer state
remain float32. The forward pass saves the 8-bit operands for the backward pass, which need half the bytes of bf16 operands. The
head, embeddings and norms are unchanged.

Source: Micikevicius et al., FP8 Formats for Deep Learning, 2022.

Shape suffixes: M tokens, K inputs, N outputs of a layer.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from hyperion.errors import HyperionError
from hyperion.hardware import Device, fp8_format
from hyperion.models import layout_of

MULTIPLE = 16  # torch._scaled_mm needs sizes that are multiples of 16, so that rows are aligned to 16 bytes


@dataclass(frozen=True)
class Formats:
    """The fp8 dtypes of the matrix units of a device: `forward` for inputs and weights, `gradient` for gradients."""

    forward: torch.dtype
    gradient: torch.dtype


OCP = Formats(torch.float8_e4m3fn, torch.float8_e5m2)
FNUZ = Formats(torch.float8_e4m3fnuz, torch.float8_e5m2fnuz)


def float8_formats(device: Device) -> Formats:
    """Return the fp8 dtypes of the matrix units of the device.

    Raises:
        HyperionError: the device does not support fp8. The message contains the reason.
    """
    name = fp8_format(device)
    if name is None:
        _, why = device.supports("fp8")
        raise HyperionError(f"{device.name} cannot train in fp8: {why}", where="precision", next_step="choose bf16")
    return FNUZ if name.endswith("fnuz") else OCP


def to_float8(model: nn.Module, formats: Formats) -> nn.Module:
    """Replace each linear layer in the blocks of the model by a Float8Linear. Parameters and their names do not change.

    Raises:
        HyperionError: a dimension of a layer is not a multiple of 16, or the blocks have no linear layer.
    """
    layers = [
        (parent, name, layer)
        for block in layout_of(model).blocks
        for parent in model.get_submodule(block).modules()
        for name, layer in parent.named_children()
        if type(layer) is nn.Linear
    ]
    if not layers:
        raise HyperionError(
            f"the blocks of {type(model).__name__} have no linear layer", where="to_float8", next_step="choose bf16"
        )
    for parent, name, layer in layers:
        setattr(parent, name, Float8Linear(layer, formats))
    return model


class Float8Linear(nn.Linear):
    """Linear layer y_*N = x_*K · weight_NKᵀ + bias_N whose matrix products have fp8 operands. The output is bfloat16.

    Args:
        layer: the linear layer to replace. The new layer uses its parameters.
        formats: the two fp8 dtypes: one for the operands of the forward pass, and one for the gradient of the output.

    Raises:
        HyperionError: K, N, or the number of tokens in a batch is not a multiple of 16.
    """

    def __init__(self, layer: nn.Linear, formats: Formats):
        # Build the layer on the meta device, because it takes over the parameters of the old layer and needs no memory of its
        # own.
        super().__init__(layer.in_features, layer.out_features, bias=False, device="meta")
        self.weight, self.bias, self.formats = layer.weight, layer.bias, formats
        _require_multiples("a linear layer", self.in_features, self.out_features)

    def forward(self, x: Tensor) -> Tensor:
        x_MK = x.reshape(-1, self.in_features)
        _require_multiples("a batch in tokens", len(x_MK))
        y_MN = Float8Product.apply(x_MK, self.weight, self.formats.forward, self.formats.gradient)
        y_MN = y_MN if self.bias is None else y_MN + self.bias.to(y_MN.dtype)
        return y_MN.view(*x.shape[:-1], self.out_features)


_scaled_mm = torch._scaled_mm  # pyright: ignore[reportPrivateImportUsage] - no public name in torch 2.9


class Float8Product(torch.autograd.Function):
    """Matrix product x_MK · w_NKᵀ with fp8 operands and a bfloat16 result.

    The backward pass computes g·w and gᵀ·x, also with fp8 operands.
    """

    @staticmethod
    def forward(ctx: Any, x_MK: Tensor, w_NK: Tensor, dtype: torch.dtype, gradient_dtype: torch.dtype) -> Tensor:
        x8_MK, x_scale = quantized(x_MK, dtype)
        w8_NK, w_scale = quantized(w_NK, dtype)
        ctx.save_for_backward(x8_MK, x_scale, w8_NK, w_scale)
        ctx.gradient_dtype, ctx.x_dtype, ctx.w_dtype = gradient_dtype, x_MK.dtype, w_NK.dtype
        # w is stored as [N, K] in row-major order, so w.t() is already the column-major operand that _scaled_mm needs.
        return _scaled_mm(x8_MK, w8_NK.t(), x_scale, w_scale, out_dtype=torch.bfloat16)

    @staticmethod
    def backward(ctx: Any, g_MN: Tensor) -> tuple[Tensor, Tensor, None, None]:
        x8_MK, x_scale, w8_NK, w_scale = ctx.saved_tensors
        g8_MN, g_scale = quantized(g_MN, ctx.gradient_dtype)
        # _scaled_mm needs a column-major second operand, so the 8-bit tensors are copied. A copy has a quarter of the bytes of
        # float32.
        dx_MK = _scaled_mm(g8_MN, _column_major(w8_NK), g_scale, w_scale, out_dtype=torch.bfloat16)
        dw_NK = _scaled_mm(g8_MN.t().contiguous(), _column_major(x8_MK), g_scale, x_scale, out_dtype=torch.bfloat16)
        return dx_MK.to(ctx.x_dtype), dw_NK.to(ctx.w_dtype), None, None


def quantized(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return x divided by its scale, as a row-major fp8 tensor, and the scale, as a float32 scalar.

    The scale of a tensor of zeros is the smallest normal number. If x contains an infinity or a NaN, the scale and the matrix
    product are not finite either. The gradient norm of the step is then not finite.
    """
    largest = torch.finfo(dtype).max
    scale = (x.detach().abs().amax().float() / largest).clamp(min=torch.finfo(torch.float32).tiny)
    # Clamp the values. By rounding, the division can give a value above the largest value of the format, which would become NaN
    # in e4m3.
    return (x.float() / scale).clamp(-largest, largest).to(dtype).contiguous(), scale


def _column_major(x8_RC: Tensor) -> Tensor:
    """Return the same matrix with a column-major memory layout."""
    return x8_RC.t().contiguous().t()


def _require_multiples(what: str, *sizes: int) -> None:
    if any(size % MULTIPLE for size in sizes):
        raise HyperionError(
            f"fp8 matrix products need sizes that are multiples of {MULTIPLE}, but {what} has {' x '.join(map(str, sizes))}",
            where="Float8Linear",
            next_step=f"choose a width and a number of tokens per batch that are multiples of {MULTIPLE}, or choose bf16",
        )
