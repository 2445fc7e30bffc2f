"""The number formats we measure by name, and the context a GEMM of each needs."""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class NumberFormat:
    """A number format as a row names it.

    Args:
        name: fp64, fp32, tf32, fp16 or bf16.
        storage: the torch dtype of the operands.
        gemm_tolerance: largest relative Frobenius error of a product against float64. For fp64 and fp32 about
            sqrt(K) unit roundoffs at K = 8192, far above what blocked accumulation leaves; for the 16-bit formats, whose
            inputs are exact and which accumulate in float32, two to three times the rounding of the output; for tf32
            two to three times that of its inputs to 11 bits.
    """

    name: str
    storage: torch.dtype
    gemm_tolerance: float

    @property
    def bytes(self) -> int:
        return self.storage.itemsize


FORMATS = {
    f.name: f
    for f in (
        NumberFormat("fp64", torch.float64, 1e-14),
        NumberFormat("fp32", torch.float32, 1e-5),
        NumberFormat("tf32", torch.float32, 1e-3),
        NumberFormat("fp16", torch.float16, 1e-3),
        NumberFormat("bf16", torch.bfloat16, 6e-3),
    )
}


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
