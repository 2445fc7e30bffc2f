"""Linear layers with quantised weights. Each scheme knows the size of a weight in bytes and a bound on its error.

A format stores each weight as an integer or a short code. Several weights share a scale. The error of a weight is at most half
the distance between two neighbouring values of the format. This gives a bound on the error of each element of a layer's output.

Shape suffixes: N outputs, K inputs, M rows of the input, G groups of inputs that share a scale.
"""

import importlib
import importlib.util
import logging
import math
from abc import ABC, abstractmethod
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hyperion.errors import HyperionError
from hyperion.hardware import Device, fp8_format
from hyperion.measure import FORMATS

GROUP = 32  # number of inputs that share a scale in the int4 format
NF4_BLOCK, NESTED_BLOCK = 64, 256  # number of weights, and of scales, that share a scale in bitsandbytes
LARGEST_INT8, LARGEST_INT4 = 127.0, 7.0
_TINY = torch.finfo(torch.float32).tiny  # smallest scale, used for a group of zeros
_CODE_BYTES, _NESTED_CODE_BYTES, _OFFSET_BYTES = 16 * 4, 256 * 4, 4  # sizes of bitsandbytes' float32 tables


def pack_int4(values_NK: Tensor) -> Tensor:
    """Pack two 4-bit integers into each byte. The first value of a pair is in the upper four bits, as in bitsandbytes.

    Args:
        values_NK: integers from -8 to 7. K is even.

    Returns:
        uint8 tensor of shape [N, K / 2].
    """
    codes = (values_NK + 8).to(torch.uint8)
    return codes[:, 0::2] << 4 | codes[:, 1::2]


def unpack_int4(packed: Tensor) -> Tensor:
    """Return the integers that `pack_int4` packed, as an int8 tensor of shape [N, K]."""
    codes = torch.stack([packed >> 4, packed & 15], dim=-1).flatten(-2)
    return codes.to(torch.int8) - 8


class Int8Linear(nn.Module):
    """Linear layer with int8 weights and one scale for each output: y = (x Q^T) * scale."""

    q_NK: Tensor
    scale_N: Tensor

    def __init__(self, weight_NK: Tensor):
        super().__init__()
        weight_NK = weight_NK.float()  # a 16-bit division by the scale would add another rounding error
        scale_N = weight_NK.abs().amax(1).clamp_min(_TINY) / LARGEST_INT8
        self.register_buffer("q_NK", (weight_NK / scale_N[:, None]).round().clamp(-LARGEST_INT8, LARGEST_INT8).to(torch.int8))
        self.register_buffer("scale_N", scale_N)

    def forward(self, x: Tensor) -> Tensor:
        """Return the outputs in the dtype of x. The scale multiplies the product, so the weights need no float32 copy."""
        return (F.linear(x, self.q_NK.to(x.dtype)) * self.scale_N).to(x.dtype)

    def weight(self) -> Tensor:
        """Return the weights that the stored values represent, in float64."""
        return self.q_NK.double() * self.scale_N.double()[:, None]


class Int4Linear(nn.Module):
    """Linear layer with packed 4-bit weights. For each output, every `GROUP` consecutive inputs share a scale."""

    packed: Tensor
    scale_NG: Tensor

    def __init__(self, weight_NK: Tensor):
        super().__init__()
        weight_NK = weight_NK.float()
        groups = weight_NK.unflatten(1, (-1, GROUP))
        scale_NG = groups.abs().amax(2).clamp_min(_TINY) / LARGEST_INT4
        values = (groups / scale_NG[..., None]).round().clamp(-LARGEST_INT4, LARGEST_INT4).flatten(1)
        self.register_buffer("packed", pack_int4(values))
        self.register_buffer("scale_NG", scale_NG)

    def forward(self, x: Tensor) -> Tensor:
        """Return the outputs in the dtype of x."""
        groups = unpack_int4(self.packed).unflatten(1, (-1, GROUP)).to(x.dtype)
        return F.linear(x, (groups * self.scale_NG[..., None].to(x.dtype)).flatten(1))

    def weight(self) -> Tensor:
        """Return the weights that the stored values represent, in float64."""
        return (unpack_int4(self.packed).double().unflatten(1, (-1, GROUP)) * self.scale_NG.double()[..., None]).flatten(1)


class Fp8Linear(nn.Module):
    """Linear layer with fp8 weights and inputs, multiplied by `torch._scaled_mm` on the device's fp8 units.

    Args:
        weight_NK: the weights. N and K are multiples of 16.
        storage: the fp8 format of the device.
        by_row: if True, each output and each row of the input has its own scale. Otherwise, each tensor has a single scale.
    """

    q_NK: Tensor
    scale: Tensor

    def __init__(self, weight_NK: Tensor, storage: torch.dtype, by_row: bool):
        super().__init__()
        self.by_row = by_row
        q_NK, scale = self._quantise(weight_NK, storage)
        self.register_buffer("q_NK", q_NK)
        self.register_buffer("scale", scale)

    def _quantise(self, values: Tensor, storage: torch.dtype) -> tuple[Tensor, Tensor]:
        largest, values = torch.finfo(storage).max, values.float()
        absmax = values.abs().amax(1, keepdim=True) if self.by_row else values.abs().amax()
        scale = (absmax / largest).clamp_min(_TINY)
        return (values / scale).clamp(-largest, largest).to(storage), scale

    def forward(self, x: Tensor) -> Tensor:
        """Return the outputs, rounded to bf16 and converted to the dtype of x."""
        rows, scale = self._quantise(x.flatten(0, -2), self.q_NK.dtype)
        scale_b = self.scale.T if self.by_row else self.scale
        multiply: Any = torch._scaled_mm  # pyright: ignore[reportPrivateImportUsage]
        y = multiply(rows, self.q_NK.T, scale_a=scale, scale_b=scale_b, out_dtype=torch.bfloat16)
        return y.view(*x.shape[:-1], -1).to(x.dtype)

    def weight(self) -> Tensor:
        """Return the weights that the stored values represent, in float64."""
        return self.q_NK.double() * self.scale.double()


class Scheme(ABC):
    """A way to quantise linear layers.

    Attributes:
        name: name of the variant in rows.
        dtype: number format of the stored weights in rows.
    """

    name: str
    dtype: str

    def why_absent(self, device: Device) -> str:
        """Return the reason why the scheme cannot run on a device, or an empty string if it can."""
        return ""

    @abstractmethod
    def convert(self, weight_NK: Tensor, device: Device) -> nn.Module:
        """Return the quantised layer, on the device of the weight."""

    @abstractmethod
    def weight_bytes(self, n: int, k: int) -> int:
        """Return the bytes of a stored weight of shape [N, K] and its scales, computed from the format alone."""

    @abstractmethod
    def weight_error(self, weight_NK: Tensor) -> Tensor:
        """Return a bound on the error of each stored weight, in float64, with the shape of the weight."""

    def input_error(self, x_MK: Tensor) -> Tensor:
        """Return a bound on the error of each input to the product. It is 0 if the inputs are not quantised."""
        return torch.zeros_like(x_MK, dtype=torch.float64)

    def roundoff(self, k: int, dtype: torch.dtype) -> float:
        """Return a bound on the rounding errors of a dot product of K terms, relative to the sum of the terms' magnitudes.

        The bound has two parts: 1.5 eps of `dtype`, because inputs, weights and output are each rounded once, and K eps of
        float32 for the sum.
        """
        return 1.5 * torch.finfo(dtype).eps + k * torch.finfo(torch.float32).eps


class Int8WeightOnly(Scheme):
    """int8 weights with a scale for each output. Inputs are not quantised."""

    name, dtype = "int8 weight-only", "int8"

    def convert(self, weight_NK: Tensor, device: Device) -> nn.Module:
        return Int8Linear(weight_NK)

    def weight_bytes(self, n: int, k: int) -> int:
        return n * k + 4 * n

    def weight_error(self, weight_NK: Tensor) -> Tensor:
        return (weight_NK.double().abs().amax(1, keepdim=True) / LARGEST_INT8 / 2).expand(weight_NK.shape)


class Int4WeightOnly(Scheme):
    """Packed 4-bit integers with a scale for each group of inputs. Inputs are not quantised."""

    name, dtype = "int4 weight-only", "int4"

    def convert(self, weight_NK: Tensor, device: Device) -> nn.Module:
        return Int4Linear(weight_NK)

    def weight_bytes(self, n: int, k: int) -> int:
        return n * k // 2 + 4 * (n * k // GROUP)

    def weight_error(self, weight_NK: Tensor) -> Tensor:
        groups = weight_NK.double().unflatten(1, (-1, GROUP))
        return (groups.abs().amax(2, keepdim=True) / LARGEST_INT4 / 2).expand(groups.shape).flatten(1)


class Fp8(Scheme):
    """fp8 weights and inputs with 3 mantissa bits (e4m3).

    Args:
        by_row: if True, each row has its own scale.
    """

    dtype = "fp8"

    def __init__(self, by_row: bool):
        self.by_row = by_row
        self.name = "fp8, a scale for each row" if by_row else "fp8, a scale for each tensor"

    def why_absent(self, device: Device) -> str:
        supported, reason = device.supports("fp8")
        return "" if supported else f"unsupported: {reason}"

    def convert(self, weight_NK: Tensor, device: Device) -> nn.Module:
        return Fp8Linear(weight_NK, FORMATS[str(fp8_format(device))].storage, self.by_row)

    def weight_bytes(self, n: int, k: int) -> int:
        return n * k + 4 * (n if self.by_row else 1)

    def weight_error(self, weight_NK: Tensor) -> Tensor:
        # Half the distance between neighbouring fp8 values. For normal numbers this distance is proportional to the number. For
        # subnormal numbers it is constant. The bound is computed for the OCP format and also holds for the fnuz format. Both have
        # 3 mantissa bits. Relative to its maximum, the smallest number of the OCP format is larger, so its bound is larger, too.
        magnitudes, info = weight_NK.double().abs(), torch.finfo(torch.float8_e4m3fn)
        absmax = magnitudes.amax(1, keepdim=True) if self.by_row else magnitudes.amax()
        smallest = info.tiny * info.eps / 2 * absmax / info.max
        return torch.maximum(magnitudes * info.eps / 2, smallest)

    def input_error(self, x_MK: Tensor) -> Tensor:
        return self.weight_error(x_MK)

    def roundoff(self, k: int, dtype: torch.dtype) -> float:
        # 2^-8 allows for rounding the output to bf16. On Hopper, the fp8 units add blocks of 128 terms with 14 bits. This causes
        # an error of at most 2^-9 of the sum of magnitudes.
        return 2.0**-8 + 2.0**-9 + super().roundoff(k, torch.float32)


def why_no_bitsandbytes(device: Device) -> str:
    """Return the reason why bitsandbytes cannot be used here, or an empty string if it can."""
    if importlib.util.find_spec("bitsandbytes") is None:
        return "unavailable: bitsandbytes is not installed; next step: pip install bitsandbytes"
    try:
        library = bitsandbytes_library()
    except Exception as error:  # the import loads the native library, which can raise errors of several types
        return f"unavailable: bitsandbytes cannot be imported: {error}"
    if type(library.cextension.lib).__name__ == "ErrorHandlerMockBNBNativeLibrary":
        return f"unavailable: bitsandbytes has no native library for {device.name}"
    return ""


def bitsandbytes_library() -> Any:
    """Import and return the optional package bitsandbytes. The import takes seconds.

    The return type is Any, because the type stubs of bitsandbytes do not contain its layers.
    """
    # For each product, bitsandbytes warns that it rounds the inputs to float16. `LlmInt8.roundoff` accounts for this rounding.
    logging.getLogger("bitsandbytes.autograd._functions").setLevel(logging.ERROR)
    return importlib.import_module("bitsandbytes")


class LlmInt8(Scheme):
    """LLM.int8() of bitsandbytes: int8 weights and inputs with a scale for each row.

    Inputs with a magnitude above 6 are not quantised but multiplied in 16 bits.

    Source: Dettmers et al. 2022, arXiv 2208.07339.
    """

    name, dtype = "LLM.int8()", "int8"
    _OUTLIER = 6.0

    def why_absent(self, device: Device) -> str:
        return why_no_bitsandbytes(device)

    def convert(self, weight_NK: Tensor, device: Device) -> nn.Module:
        bnb = bitsandbytes_library()
        n, k = weight_NK.shape
        layer = bnb.nn.Linear8bitLt(k, n, bias=False, has_fp16_weights=False, threshold=self._OUTLIER)
        # bitsandbytes quantises weights when `to` moves them to a device, even if they are on the CPU and stay there.
        layer.weight = bnb.nn.Int8Params(weight_NK.cpu(), requires_grad=False, has_fp16_weights=False)
        # In training mode on a CPU, bitsandbytes does not quantise the inputs.
        return layer.to(device.torch_device).eval()

    def weight_bytes(self, n: int, k: int) -> int:
        return n * k + 4 * n

    def weight_error(self, weight_NK: Tensor) -> Tensor:
        # bitsandbytes converts to fp16 before it quantises. This rounding adds a relative error of at most 2^-11.
        magnitudes = weight_NK.double().abs()
        return magnitudes.amax(1, keepdim=True) / LARGEST_INT8 / 2 * 1.001 + magnitudes * 2.0**-11

    def input_error(self, x_MK: Tensor) -> Tensor:
        return self.weight_error(x_MK)

    def roundoff(self, k: int, dtype: torch.dtype) -> float:
        return super().roundoff(k, torch.float16)


class Nf4(Scheme):
    """NF4 of bitsandbytes: 16 values at the quantiles of a normal distribution, with a scale for each block of 64 weights.

    With double quantisation, the scales themselves are stored with 8 bits, in blocks of 256.
    Source: Dettmers et al. 2023, arXiv 2305.14314.

    Args:
        double: if True, the scales are quantised too.
    """

    dtype = "nf4"

    def __init__(self, double: bool):
        self.double = double
        self.name = "NF4, double quantisation" if double else "NF4"

    def why_absent(self, device: Device) -> str:
        return why_no_bitsandbytes(device)

    def convert(self, weight_NK: Tensor, device: Device) -> nn.Module:
        bnb = bitsandbytes_library()
        n, k = weight_NK.shape
        layer = bnb.nn.Linear4bit(
            k, n, bias=False, compute_dtype=weight_NK.dtype, compress_statistics=self.double, quant_type="nf4"
        )
        layer.weight = bnb.nn.Params4bit(weight_NK, requires_grad=False, compress_statistics=self.double, quant_type="nf4")
        return layer.to(device.torch_device)

    def weight_bytes(self, n: int, k: int) -> int:
        blocks = math.ceil(n * k / NF4_BLOCK)
        nested = math.ceil(blocks / NESTED_BLOCK)
        scales = blocks + 4 * nested + _NESTED_CODE_BYTES + _OFFSET_BYTES if self.double else 4 * blocks
        return n * k // 2 + scales + _CODE_BYTES

    def weight_error(self, weight_NK: Tensor) -> Tensor:
        tables = bitsandbytes_library().functional
        absmax = weight_NK.double().flatten().unflatten(0, (-1, NF4_BLOCK)).abs().amax(1)
        error = absmax * _largest_gap(tables.get_4bit_type("nf4", device="cpu").double()) / 2
        if self.double:
            # The mean of the scales is subtracted, and the difference is stored as an index into an 8-bit table. The error of a
            # scale is multiplied by an NF4 value, whose magnitude is at most 1.
            centred = absmax - absmax.mean()
            nested = F.pad(centred, (0, -len(centred) % NESTED_BLOCK)).unflatten(0, (-1, NESTED_BLOCK)).abs().amax(1)
            gaps = nested * _largest_gap(tables.create_dynamic_map().double()) / 2
            error = error + 1.001 * gaps.repeat_interleave(NESTED_BLOCK)[: len(absmax)]
        return error.repeat_interleave(NF4_BLOCK).view(weight_NK.shape)


SCHEMES: tuple[Scheme, ...] = (
    Int8WeightOnly(),
    Int4WeightOnly(),
    LlmInt8(),
    Nf4(double=False),
    Nf4(double=True),
    Fp8(by_row=False),
    Fp8(by_row=True),
)


def _largest_gap(code: Tensor) -> float:
    """Return the largest distance between neighbouring values of a table, including the distances to the ends of [-1, 1]."""
    values = code.sort().values
    # If a table does not reach -1 or 1, these are rounded to its first or last value. The error is then the whole distance and
    # not half of it, so count this distance twice.
    ends = 2 * (1 - min(abs(values[0].item()), values[-1].item()))
    return max(values.diff().max().item(), ends)


def block_linears(model: nn.Module) -> dict[str, nn.Linear]:
    """Return the linear layers in the blocks (`layers`) of a model by their names, without the head."""
    return {name: module for name, module in model.named_modules() if isinstance(module, nn.Linear) and ".layers." in name}


def replace_linears(model: nn.Module, scheme: Scheme, device: Device) -> dict[str, Tensor]:
    """Quantise the linear layers in the blocks (`layers`) of a model in place. The embedding and the head are not changed.

    Args:
        model: the model.
        scheme: quantisation scheme.
        device: device of the model.

    Returns:
        The original weights, by the names of their layers.

    Raises:
        HyperionError: the blocks contain no linear layer, or a layer has a bias.
    """
    linears = block_linears(model)
    if not linears or any(module.bias is not None for module in linears.values()):
        raise HyperionError(
            f"{len(linears)} linear layers in 'layers', or a layer with a bias",
            where=f"replace_linears in {type(model).__name__}",
            next_step="pass a Llama, whose blocks are in `layers` and whose linear layers have no bias",
        )
    for name, linear in linears.items():
        model.set_submodule(name, scheme.convert(linear.weight.detach(), device))
    return {name: linear.weight.detach() for name, linear in linears.items()}
