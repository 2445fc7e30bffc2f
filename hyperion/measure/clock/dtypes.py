"""Number formats by name, and the PyTorch settings for products in each of them."""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from hyperion.errors import HyperionError
from hyperion.hardware import Device, fp8_format


@dataclass(frozen=True)
class NumberFormat:
    """A number format.

    Args:
        name: name in rows: fp64, fp32, tf32, fp16, bf16, fp8_e4m3fn (OCP), fp8_e4m3fnuz (CDNA 3) or int8.
        storage: torch dtype of the operands of a product.
        output: torch dtype of the result.
        gemm_tolerance: largest relative Frobenius error of a product against float64.

            - fp64, fp32: about sqrt(K) unit roundoffs at K = 8192, far above the error of blocked accumulation.
            - fp16, bf16: two to three times the rounding of the output; inputs are exact and accumulation is in float32.
            - tf32: two to three times the rounding of the inputs to 11 bits.
            - fp8: the rounding of the bf16 output; the reference uses the same fp8 operands. Hopper adds 14-bit sums to
              float32 every 128 terms, which adds a tenth of it. Sums of 14 bits throughout (`use_fast_accum`) fail at K = 8192.
            - int8: 0; sums are exact in int32 up to K = 133,000.
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
        """Whether operands are stored divided by a scale, as in 8-bit formats, whose range is too small for raw values."""
        return self.bytes == 1

    @property
    def largest(self) -> float:
        """Largest value to which operands are scaled; 127 for int8."""
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
    """Return the format with this name on a device: a name of `FORMATS`, or 'fp8' for the fp8 format of the device.

    Raises:
        HyperionError: the device has no fp8 units, or the name is unknown.
    """
    name = fp8_format(device) if dtype == "fp8" else dtype
    if name in FORMATS:
        return FORMATS[name]
    if dtype == "fp8":
        raise HyperionError(
            f"unsupported: {device.supports('fp8')[1]}",
            where=f"fp8 on {device.name}",
            next_step="Call device.supports('fp8') first.",
        )
    raise HyperionError(f"{dtype!r} is not a supported number format.", next_step=f"Use fp8 or one of {', '.join(FORMATS)}.")


@contextlib.contextmanager
def matmul_precision(number_format: NumberFormat) -> Iterator[None]:
    """Use TF32 units for float32 products and convolutions only if the format is tf32, and accumulate 16-bit products in
    float32, within this context. (PyTorch's default uses TF32 for convolutions.)
    """
    matmul: Any = torch.backends.cuda.matmul
    convolution: Any = torch.backends.cudnn.conv  # pyright: ignore[reportAttributeAccessIssue]  # torch adds it at run time
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
