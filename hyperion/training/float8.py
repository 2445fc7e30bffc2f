"""Training in 8 bits: linear layers whose three products take fp8 operands, each with one scale made from its own largest number.

Going forward, numbers need resolution: e4m3, up to 448 (240 in the fnuz form of CDNA 3). Gradients need range: e5m2, up to
57344. Neither has the range of a tensor, so each operand is divided by a scale s = max|x| / largest that brings its largest
number to the format's, and the product is multiplied by both scales again:

    y = s_x s_w · (x/s_x)(w/s_w)ᵀ

The scale is made anew at each use from the tensor itself ("dynamic", one a tensor): a pass over memory more, and no history
that a checkpoint would have to hold. Sums are formed in float32; weights, their gradients and the optimizer stay float32.
What is kept for the backward pass is the 8-bit operand: half of what bf16 keeps. Source: Micikevicius et al., FP8 Formats for
Deep Learning, 2022. The head, embeddings and norms stay as they are.

Shape suffixes: M tokens, K inputs, N outputs of a layer.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hyperion.errors import HyperionError
from hyperion.hardware import Device, fp8_format
from hyperion.parallel import layout_of

MULTIPLE = 16  # torch._scaled_mm takes no other sizes: rows of operands begin at multiples of 16 bytes


@dataclass(frozen=True)
class Formats:
    """The two 8-bit types that a device multiplies: `forward` for inputs and weights, `gradient` for gradients."""

    forward: torch.dtype
    gradient: torch.dtype


OCP = Formats(torch.float8_e4m3fn, torch.float8_e5m2)
FNUZ = Formats(torch.float8_e4m3fnuz, torch.float8_e5m2fnuz)


def float8_formats(device: Device) -> Formats:
    """The fp8 types of the device's matrix units.

    Raises:
        HyperionError: it has none; the reason is named.
    """
    name = fp8_format(device)
    if name is None:
        _, why = device.supports("fp8")
        raise HyperionError(f"{device.name} cannot train in fp8: {why}", where="precision", next_step="choose bf16")
    return FNUZ if name.endswith("fnuz") else OCP


def to_float8(model: nn.Module, formats: Formats) -> nn.Module:
    """Replace each linear layer inside the model's blocks by one that multiplies in fp8; parameters and their names stay.

    Raises:
        HyperionError: a layer's sizes are no multiples of 16, or there is none to replace.
    """
    found = [
        (parent, name, layer)
        for block in layout_of(model).blocks
        for parent in model.get_submodule(block).modules()
        for name, layer in parent.named_children()
        if type(layer) is nn.Linear
    ]
    if not found:
        raise HyperionError(
            f"the blocks of {type(model).__name__} hold no linear layer", where="to_float8", next_step="choose bf16"
        )
    for parent, name, layer in found:
        setattr(parent, name, Float8Linear(layer, formats))
    return model


class Float8Linear(nn.Linear):
    """y_*N = x_*K · weight_NKᵀ + bias_N in fp8, with the parameters of the layer that it replaces. Returns bfloat16.

    Raises:
        HyperionError: K or N, or in a call the number of tokens, is no multiple of 16.
    """

    def __init__(self, layer: nn.Linear, formats: Formats):
        super().__init__(layer.in_features, layer.out_features, bias=False, device="meta")
        self.weight, self.bias, self.formats = layer.weight, layer.bias, formats
        _require_multiples("a linear layer", self.in_features, self.out_features)

    def forward(self, x: Tensor) -> Tensor:
        x_MK = x.reshape(-1, self.in_features)
        _require_multiples("a batch in tokens", len(x_MK))
        y_MN = Float8Product.apply(x_MK, self.weight, self.formats.forward, self.formats.gradient)
        y_MN = y_MN if self.bias is None else y_MN + self.bias.to(y_MN.dtype)
        return y_MN.view(*x.shape[:-1], self.out_features)


class Float8Product(torch.autograd.Function):
    """x_MK · w_NKᵀ in bfloat16, and in the backward pass g·w and gᵀ·x, all three of fp8 operands."""

    @staticmethod
    def forward(ctx, x_MK: Tensor, w_NK: Tensor, dtype: torch.dtype, gradient_dtype: torch.dtype) -> Tensor:
        x8_MK, x_scale = quantized(x_MK, dtype)
        w8_NK, w_scale = quantized(w_NK, dtype)
        ctx.save_for_backward(x8_MK, x_scale, w8_NK, w_scale)
        ctx.gradient_dtype, ctx.x_dtype, ctx.w_dtype = gradient_dtype, x_MK.dtype, w_NK.dtype
        return torch._scaled_mm(x8_MK, w8_NK.t(), x_scale, w_scale, out_dtype=torch.bfloat16)

    @staticmethod
    def backward(ctx, g_MN: Tensor) -> tuple[Tensor, Tensor, None, None]:
        x8_MK, x_scale, w8_NK, w_scale = ctx.saved_tensors
        g8_MN, g_scale = quantized(g_MN, ctx.gradient_dtype)
        # The second operand must lie column by column: both are turned around in memory, a quarter of float32's bytes.
        w8_turned, x8_turned = _turned(w8_NK), _turned(x8_MK)
        dx_MK = torch._scaled_mm(g8_MN, w8_turned, g_scale, w_scale, out_dtype=torch.bfloat16)
        dw_NK = torch._scaled_mm(g8_MN.t().contiguous(), x8_turned, g_scale, x_scale, out_dtype=torch.bfloat16)
        return dx_MK.to(ctx.x_dtype), dw_NK.to(ctx.w_dtype), None, None


def quantized(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """(x divided by its scale, in fp8, row by row in memory; the scale that gives it back, float32 scalar).

    A tensor of zeros has the smallest normal scale. What is infinite or no number leaves a scale that is, and so a product
    that is: the step's gradient norm shows it.
    """
    largest = torch.finfo(dtype).max
    scale = (x.detach().abs().amax().float() / largest).clamp(min=torch.finfo(torch.float32).tiny)
    # Rounding may lead past the largest number, which e4m3 would answer with NaN.
    return (x.float() / scale).clamp(-largest, largest).to(dtype).contiguous(), scale


def reference_product(x_MK: Tensor, w_NK: Tensor, x_dtype: torch.dtype, w_dtype: torch.dtype) -> Tensor:
    """x·wᵀ of the same quantised operands, multiplied and summed in float64."""
    (x8, x_scale), (w8, w_scale) = quantized(x_MK, x_dtype), quantized(w_NK, w_dtype)
    return F.linear(x8.double() * x_scale.double(), w8.double() * w_scale.double())


def _turned(x8_RC: Tensor) -> Tensor:
    """The same matrix, lying column by column in memory."""
    return x8_RC.t().contiguous().t()


def _require_multiples(what: str, *sizes: int) -> None:
    if any(size % MULTIPLE for size in sizes):
        raise HyperionError(
            f"fp8 products take multiples of {MULTIPLE}: {what} has {' x '.join(map(str, sizes))}",
            where="Float8Linear",
            next_step="choose such a width and batch, or bf16",
        )
