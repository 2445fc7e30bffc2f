"""Number formats with their tolerances, and verification of outputs against float64."""

import contextlib
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from hyperion.errors import HyperionError
from hyperion.hardware import Device, fp8_format

_CHUNK = 1 << 22
# Products of at most this many multiplications are checked completely; that is fast on any host.
_PRODUCTS_OF_A_CHECK = 1 << 28
# The tolerance is two to three times the expected Frobenius error; the worst of a million elements has five times the expected
# error.
_DEVIATIONS = 4


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


@dataclass(frozen=True)
class Verification:
    """A named check with its error and its tolerance (both relative, dimensionless)."""

    name: str
    error: float
    tolerance: float

    @property
    def passed(self) -> bool:
        """Whether the error is within the tolerance."""
        # Not `error > tolerance`: a NaN must fail.
        return self.error <= self.tolerance


def relative_error(output: torch.Tensor, reference: torch.Tensor) -> float:
    """Return the relative Frobenius error in float64; NaN if the output contains NaN."""
    reference = reference.double()
    scale = reference.norm().item()
    difference = (output.double() - reference).norm().item()
    return difference / scale if scale else difference


def verify_product(
    a_MK: torch.Tensor, b_KN: torch.Tensor, c_MN: torch.Tensor, tolerance: float, size: int = 128, scale: float = 1.0
) -> Verification:
    """Check C = scale·A·B against a float64 product.

    Small products are checked completely, others on at least `size` rows and columns, spread over the whole output. Each element
    must also be within four tolerances times |a_i|·|b_j|, the norms of its row of A and its column of B: this is the size of
    its sum if the terms have random signs. A single wrong element fails this, but would vanish in the Frobenius norm.

    Args:
        a_MK, b_KN, c_MN: operands and output, any dtype and device.
        tolerance: largest relative Frobenius error.
        size: least number of checked rows and columns.
        scale: product of the scales by which the stored operands were divided.
    """
    size = max(size, math.isqrt(_PRODUCTS_OF_A_CHECK // max(1, a_MK.shape[1])))
    rows, columns = _spread(c_MN.shape[0], size, c_MN.device), _spread(c_MN.shape[1], size, c_MN.device)
    a, b = a_MK[rows].double().cpu() * scale, b_KN[:, columns].double().cpu()
    picked, reference = c_MN[rows][:, columns].cpu(), a @ b
    error = float("nan") if _unwritten(c_MN) else relative_error(picked, reference)
    terms = a.norm(dim=1)[:, None] * b.norm(dim=0)[None, :]
    worst = _worst_element((picked.double() - reference).abs(), terms)
    return Verification("float64 slice", max(error, worst) if worst > _DEVIATIONS * tolerance else error, tolerance)


def verify_elementwise(output: torch.Tensor, operation, inputs: tuple[torch.Tensor, ...], tolerance: float) -> Verification:
    """Check every element of an element-wise operation against float64.

    Args:
        operation: the operation on float64 tensors; a sum of terms with positive factors, so that its value for the inputs'
            magnitudes is the size to which rounding errors of an element are relative.
        inputs: inputs of the operation.
        tolerance: largest relative Frobenius error, and largest error of an element relative to its size. One step of the
            subnormal numbers is subtracted first, because tiny results are rounded to it. 0 requires equality.
    """
    step = torch.finfo(output.dtype).tiny * torch.finfo(output.dtype).eps if tolerance else 0.0
    squares = scale = worst = 0.0
    for pieces in zip(*(tensor.flatten().split(_CHUNK) for tensor in (output, *inputs)), strict=True):
        actual, *operands = (piece.double() for piece in pieces)
        reference = operation(*operands)
        difference = (actual - reference).abs()
        squares += difference.square().sum().item()
        scale += reference.square().sum().item()
        difference = torch.where(difference <= step, 0.0, difference - step)
        worst = max(worst, _worst_element(difference, operation(*(piece.abs() for piece in operands))))
    error = float("nan") if _unwritten(output) else math.sqrt(squares) / (math.sqrt(scale) or 1.0)
    return Verification("float64 slice", max(error, worst) if worst > tolerance else error, tolerance)


def _worst_element(difference: torch.Tensor, size: torch.Tensor) -> float:
    """Return the largest difference relative to the size of its element; a difference at size 0 is infinite."""
    relative = torch.where(difference == 0, 0.0, difference / size)
    return relative.max().item() if relative.numel() else 0.0


def poison(output: torch.Tensor) -> None:
    """Fill an output with a value that no operation here writes: NaN, or the smallest integer."""
    output.fill_(float("nan") if output.is_floating_point() else torch.iinfo(output.dtype).min)


def _unwritten(output: torch.Tensor) -> bool:
    """Return whether any element still has the value of `poison`."""
    if output.is_floating_point():
        return bool(torch.isnan(output).any())
    return bool((output == torch.iinfo(output.dtype).min).any())


def _spread(length: int, size: int, device: torch.device) -> torch.Tensor:
    """Return evenly spaced indices from the first to the last."""
    return torch.linspace(0, length - 1, min(size, length), dtype=torch.float64, device=device).round().long()


def verify_sum(total: torch.Tensor, factors: tuple[torch.Tensor, ...], number_format: NumberFormat) -> Verification:
    """Check a sum of products over all elements against float64.

    The error is relative to q, the root of the sum of the squared terms. With random signs the sum is about as large as q, and
    omitting m of the n terms changes it by about q·sqrt(m/n). The tolerance is sqrt(n) spacings of the accumulation format
    (float32 for 16-bit formats), which is four times the expected error of one running sum with independent roundings, plus
    the rounding of a sum of up to 4·q to the output format. A library that accumulates in 16 bits fails.

    Args:
        total: the sum, poisoned with NaN before the timed calls; if it has several elements, each must be the sum.
        factors: one tensor (a sum) or two (a dot product) of n elements; their products have random signs.

    Source: Higham, Accuracy and Stability of Numerical Algorithms, 2nd edition, sections 2.8 and 3.1.
    """
    exact, squares = _float64_sums(factors)
    scale = squares**0.5
    difference = (total.double() - exact).abs().max().item()  # NaN if any element is NaN
    storage = torch.finfo(number_format.storage)
    accumulated = min(storage.eps, torch.finfo(torch.float32).eps)
    tolerance = factors[0].numel() ** 0.5 * accumulated + _DEVIATIONS * storage.eps / 2
    return Verification("float64 sum", difference / scale if scale else difference, tolerance)


def _float64_sums(factors: tuple[torch.Tensor, ...]) -> tuple[float, float]:
    """Return the sums of the terms and of their squares, in chunks: a float64 copy of everything might not fit."""
    exact = squares = 0.0
    for pieces in zip(*(factor.split(_CHUNK) for factor in factors), strict=True):
        terms = pieces[0].double()
        for piece in pieces[1:]:
            terms *= piece.double()
        exact += terms.sum().item()
        squares += terms.square_().sum().item()
    return exact, squares


def poison_bits(destination: torch.Tensor, source: torch.Tensor) -> None:
    """Fill the destination of a copy with the inverted bits of the source, so that a byte that is not written is detected.

    Args:
        destination, source: uint8 tensors of the same length, on any devices.
    """
    destination.copy_(source)
    destination.bitwise_not_()


def verify_bits(destination: torch.Tensor, source: torch.Tensor) -> Verification:
    """Check a copy bit for bit; the error is the share of different bytes, the tolerance is 0.

    Args:
        destination, source: uint8 tensors of the same length, on any devices.
    """
    pairs = zip(destination.split(_CHUNK), source.split(_CHUNK), strict=True)
    wrong = sum(int(torch.count_nonzero(copied.cpu() != original.cpu())) for copied, original in pairs)
    return Verification("bit for bit", wrong / source.numel(), 0.0)
