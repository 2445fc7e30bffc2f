"""The number formats we measure by name, and the context a GEMM of each needs."""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from hyperion.errors import HyperionError
from hyperion.hardware import Device, fp8_format


@dataclass(frozen=True)
class NumberFormat:
    """A number format as a row names it.

    Args:
        name: fp64, fp32, tf32, fp16, bf16, fp8_e4m3fn (OCP), fp8_e4m3fnuz (CDNA 3) or int8.
        storage: the torch dtype of a product's operands.
        output: the torch dtype of its result.
        gemm_tolerance: largest relative Frobenius error of a product against float64. For fp64 and fp32 about
            sqrt(K) unit roundoffs at K = 8192, far above what blocked accumulation leaves; for the 16-bit formats, whose
            inputs are exact and which accumulate in float32, two to three times the rounding of the output; for tf32
            two to three times that of its inputs to 11 bits. For fp8, whose operands are what the reference multiplies,
            again the rounding of the bf16 output: sums kept in 14 bits and added up in float32 every 128 terms, as Hopper
            does it, add a tenth of that, and sums kept in 14 bits all along (`use_fast_accum`) do not pass at K = 8192. int8
            sums are exact in int32 up to K = 133,000: no error at all.
    """

    name: str
    storage: torch.dtype
    output: torch.dtype
    gemm_tolerance: float

    @property
    def bytes(self) -> int:
        """Bytes of one element of an operand."""
        return self.storage.itemsize

    @property
    def scaled(self) -> bool:
        """Whether its operands are stored divided by a scale: the 8-bit formats have too little range for raw values."""
        return self.bytes == 1

    @property
    def largest(self) -> float:
        """The largest value that operands are scaled to; for int8 127, so that a value and its negative both exist."""
        return float((torch.finfo if self.storage.is_floating_point else torch.iinfo)(self.storage).max)


FORMATS = {
    f.name: f
    for f in (
        NumberFormat("fp64", torch.float64, torch.float64, 1e-14),
        NumberFormat("fp32", torch.float32, torch.float32, 1e-5),
        NumberFormat("tf32", torch.float32, torch.float32, 1e-3),
        NumberFormat("fp16", torch.float16, torch.float16, 1e-3),
        NumberFormat("bf16", torch.bfloat16, torch.bfloat16, 6e-3),
        NumberFormat("fp8_e4m3fn", torch.float8_e4m3fn, torch.bfloat16, 6e-3),
        NumberFormat("fp8_e4m3fnuz", torch.float8_e4m3fnuz, torch.bfloat16, 6e-3),
        NumberFormat("int8", torch.int8, torch.int32, 0.0),
    )
}


def format_of(dtype: str, device: Device) -> NumberFormat:
    """The format of a name on a device: a name of `FORMATS`, or 'fp8' for the fp8 format that the device multiplies.

    Raises:
        HyperionError: 'fp8' on a device that multiplies none (with the reason), or a name we do not measure.
    """
    name = fp8_format(device) if dtype == "fp8" else dtype
    if name in FORMATS:
        return FORMATS[name]
    if dtype == "fp8":
        raise HyperionError(
            f"unsupported: {device.supports('fp8')[1]}",
            where=f"fp8 on {device.name}",
            next_step="Ask device.supports('fp8') first.",
        )
    raise HyperionError(
        f"{dtype!r} is no number format that products are measured in.", next_step=f"Use fp8 or one of {', '.join(FORMATS)}."
    )


@contextlib.contextmanager
def matmul_precision(number_format: NumberFormat) -> Iterator[None]:
    """Let float32 products and convolutions use TF32 units only where the format says so, and 16-bit products accumulate
    in float32. (PyTorch leaves TF32 on for convolutions, unless told otherwise.)
    """
    matmul, convolution = torch.backends.cuda.matmul, torch.backends.cudnn.conv
    before = (
        matmul.fp32_precision,
        convolution.fp32_precision,
        matmul.allow_fp16_reduced_precision_reduction,
        matmul.allow_bf16_reduced_precision_reduction,
    )
    matmul.fp32_precision = convolution.fp32_precision = "tf32" if number_format.name == "tf32" else "ieee"
    matmul.allow_fp16_reduced_precision_reduction = False
    matmul.allow_bf16_reduced_precision_reduction = False
    try:
        yield
    finally:
        (
            matmul.fp32_precision,
            convolution.fp32_precision,
            matmul.allow_fp16_reduced_precision_reduction,
            matmul.allow_bf16_reduced_precision_reduction,
        ) = before
