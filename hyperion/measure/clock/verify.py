"""Define number formats with their tolerances, and check outputs against float64 results."""

import contextlib
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from hyperion.errors import HyperionError
from hyperion.hardware import Device, fp8_format

_CHUNK = 1 << 22
# A matrix product with at most this many multiplications is checked completely, which is fast on any host.
_PRODUCTS_OF_A_CHECK = 1 << 28
# The tolerance of a single element is this factor times the tolerance of the product, which is three to five times the expected
# Frobenius error. Among a million elements, the worst one has about five times the expected error.
_DEVIATIONS = 4
# Minimum number of checked rows, and of checked columns, of a matrix product.
_LEAST_CHECKED = 128


@dataclass(frozen=True)
class NumberFormat:
    """A number format.

    Args:
        name: name of the format in result rows: fp64, fp32, tf32, fp16, bf16, fp8_e4m3fn (OCP), fp8_e4m3fnuz (CDNA 3) or int8.
        storage: PyTorch dtype of the operands of a matrix product.
        output: PyTorch dtype of the result.
        gemm_tolerance: largest allowed relative Frobenius error of a matrix product against float64.

            - fp64, fp32: about sqrt(K) unit roundoffs at K = 8192. Libraries sum in blocks, so their error is much smaller.
            - fp16, bf16: three to five times the error of rounding the output. The reference uses the same rounded operands, and
              sums are accumulated in float32.
            - tf32: three to five times the error of rounding the operands to 11 significant bits (a 10-bit mantissa).
            - fp8: three to five times the error of rounding the output to bf16. The reference uses the same fp8 operands.
              If all terms are summed with 14 bits (`use_fast_accum`), the error exceeds the tolerance at K = 8192.
            - int8: 0, because sums are exact in int32 up to K = 133,000.
    """

    name: str
    storage: torch.dtype
    output: torch.dtype
    gemm_tolerance: float

    @property
    def bytes(self) -> int:
        """Size of one element of an operand in bytes."""
        return self.storage.itemsize

    @property
    def scaled(self) -> bool:
        """Whether operands are divided by a scale before they are stored.

        8-bit formats need this, because their range is too small for the original values.
        """
        return self.bytes == 1

    @property
    def largest(self) -> float:
        """Largest finite value of the format, for example 127 for int8. It is the maximum absolute value of scaled operands."""
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
    """Return the number format with this name.

    Args:
        dtype: a key of `FORMATS`, or 'fp8' for the fp8 format that the device supports.
        device: the device.

    Raises:
        HyperionError: there is no format with this name, or the name is 'fp8' and the device has no fp8 units.
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
    """Context manager that sets the precision of matrix products and convolutions on a GPU.

    Within the context, float32 matrix products and convolutions use TF32 units only if the format is tf32. (By default, PyTorch
    uses TF32 units for convolutions.) Matrix products of 16-bit formats accumulate in float32.
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


class OutputMismatchError(HyperionError):
    """Raised when outputs cannot be compared: they differ in structure, shape or kind of number."""


@dataclass(frozen=True)
class Verification:
    """The result of checking an output.

    Args:
        name: name of the check.
        error: relative error (dimensionless).
        tolerance: largest allowed relative error (dimensionless).
    """

    name: str
    error: float
    tolerance: float

    @property
    def passed(self) -> bool:
        """Whether the error is within the tolerance."""
        # Written with <= because a NaN must fail.
        return self.error <= self.tolerance

    def worse(self, other: "Verification") -> "Verification":
        """Return the one of two checks that is further from passing, for a value that depends on both outputs."""
        if not (self.passed and other.passed):
            return other if self.passed else self
        return other if other.error * self.tolerance > self.error * other.tolerance else self


def relative_error(output: torch.Tensor, reference: torch.Tensor) -> float:
    """Return the relative Frobenius error |output - reference| / |reference|, computed in float64 or complex128.

    If the reference is 0, return |output - reference|. The result is NaN if the output contains NaN.

    Raises:
        OutputMismatchError: the tensors have different shapes, or one of the arguments is no tensor.
    """
    output, reference = _in_double(output, reference)
    scale = reference.norm().item()
    difference = (output - reference).norm().item()
    return difference / scale if scale else difference


def _in_double(output: torch.Tensor, reference: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return both tensors in float64, or in complex128 if one of them is complex."""
    for name, one in (("output", output), ("reference", reference)):
        if not isinstance(one, torch.Tensor):
            raise OutputMismatchError(
                f"the {name} is a {type(one).__name__} and no tensor", where=f"{name}=", next_step="pass torch.as_tensor(…)"
            )
    if output.shape != reference.shape:
        # Broadcasting would compare each element with several others.
        raise OutputMismatchError(
            f"the output has the shape {list(output.shape)}, and the reference {list(reference.shape)}",
            where="output=, reference=",
            next_step="reshape one of them, or compare the same elements of both",
        )
    dtype = torch.complex128 if output.is_complex() or reference.is_complex() else torch.float64
    return output.to(dtype), reference.to(dtype)


def largest_error(errors: Iterable[float]) -> float:
    """Return the largest of the errors, or NaN if one of them is NaN. (The function `max` can ignore a NaN.)"""
    return torch.tensor(list(errors), dtype=torch.float64).max().item()


def error_of_rows(output: torch.Tensor, reference: torch.Tensor, tolerance: float, size: torch.Tensor | None = None) -> float:
    """Return the relative error of an output, such that a single wrong row exceeds the tolerance.

    The result is the relative Frobenius error. If the error of the worst row is above four times the tolerance, the result is the
    larger of the two errors. The rows are checked because a single wrong row hardly changes the Frobenius norm.

    Args:
        output, reference: tensors of the same shape. Their rows are vectors along the last dimension.
        tolerance: largest allowed relative Frobenius error.
        size: norms by which the errors of the rows are divided. None means the norms of the rows of the reference.

    Raises:
        OutputMismatchError: the tensors have different shapes, or one of the arguments is no tensor.
    """
    output, reference = _in_double(output, reference)
    size = reference.norm(dim=-1) if size is None else size
    error, worst = relative_error(output, reference), _worst_element((output - reference).norm(dim=-1), size)
    return max(error, worst) if worst > _DEVIATIONS * tolerance else error


def verify_product(
    a_MK: torch.Tensor, b_KN: torch.Tensor, c_MN: torch.Tensor, tolerance: float, scale: float = 1.0
) -> Verification:
    """Check the output of a matrix product, C = scale·A·B, against a product computed in float64.

    A small product is checked completely. For a larger product, the elements at the intersections of at least 128 rows and
    128 columns, spread over the whole output, are checked.

    Two errors are checked. The relative Frobenius error must be within the tolerance. The error of each element, divided by
    |a_i|·|b_j|, must be within four times the tolerance. |a_i| and |b_j| are the norms of the row of A and of the column of B.
    |a_i|·|b_j| is the largest possible magnitude of the element. If the terms have random signs, the element is about sqrt(K)
    times smaller. The second check is needed because a single wrong element hardly changes the Frobenius norm.

    Args:
        a_MK, b_KN, c_MN: operands and output, of any dtype and on any device.
        tolerance: largest allowed relative Frobenius error.
        scale: product of the two scales by which the stored operands were divided.
    """
    # Check as many elements (size², with K multiplications each) as the limit of a complete check allows.
    size = max(_LEAST_CHECKED, math.isqrt(_PRODUCTS_OF_A_CHECK // max(1, a_MK.shape[1])))
    rows, columns = _spread(c_MN.shape[0], size, c_MN.device), _spread(c_MN.shape[1], size, c_MN.device)
    a, b = a_MK[rows].double().cpu() * scale, b_KN[:, columns].double().cpu()
    # Compute the reference on the host, so that it does not come from the device that is checked.
    picked, reference = c_MN[rows][:, columns].cpu(), a @ b
    error = float("nan") if _unwritten(c_MN) else relative_error(picked, reference)
    terms = a.norm(dim=1)[:, None] * b.norm(dim=0)[None, :]
    worst = _worst_element((picked.double() - reference).abs(), terms)
    return Verification("float64 slice", max(error, worst) if worst > _DEVIATIONS * tolerance else error, tolerance)


def verify_elementwise(
    output: torch.Tensor, operation: Callable[..., torch.Tensor], inputs: tuple[torch.Tensor, ...], tolerance: float
) -> Verification:
    """Check every element of the output of an element-wise operation against float64.

    The error of an element is relative to its size, which is the result of the operation on the absolute values of the inputs.
    Rounding errors are proportional to this size, even if the element itself is close to 0 by cancellation.

    Args:
        output: the output to check.
        operation: function that computes the operation on float64 tensors. It must be a sum of the inputs with positive factors.
        inputs: inputs of the operation.
        tolerance: largest allowed relative Frobenius error, and largest allowed error of an element relative to its size. The
            smallest subnormal number is first subtracted from the error of each element, because tiny results are rounded to a
            multiple of this number. With a tolerance of 0, all elements must be equal.
    """
    # tiny·eps is the smallest subnormal number.
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
    """Return the largest value of difference / size. It is infinite if the size of an element is 0 and its difference is not."""
    # An exact element of size 0 is correct, but 0 / 0 would be NaN.
    relative = torch.where(difference == 0, 0.0, difference / size)
    return relative.max().item() if relative.numel() else 0.0


def poison(output: torch.Tensor) -> None:
    """Fill an output with NaN, or with the smallest integer of the dtype. The measured operations never write these values."""
    output.fill_(float("nan") if output.is_floating_point() else torch.iinfo(output.dtype).min)


def _unwritten(output: torch.Tensor) -> bool:
    """Return True if at least one element still has the value that `poison` wrote."""
    if output.is_floating_point():
        return bool(torch.isnan(output).any())
    return bool((output == torch.iinfo(output.dtype).min).any())


def _spread(length: int, size: int, device: torch.device) -> torch.Tensor:
    """Return at most `size` evenly spaced indices from 0 to `length` - 1."""
    return torch.linspace(0, length - 1, min(size, length), dtype=torch.float64, device=device).round().long()


def verify_sum(total: torch.Tensor, factors: tuple[torch.Tensor, ...], number_format: NumberFormat) -> Verification:
    """Check a sum or a dot product over all elements against float64.

    The error is divided by q, the square root of the sum of the squared terms. If the terms have random signs, the sum is about
    as large as q. If a library left out m of the n terms, the sum would change by about q·sqrt(m/n).

    The tolerance is the sum of two parts. The first part is sqrt(n) times the machine epsilon of the format in which the terms
    are accumulated (float32 for 16-bit formats). It is four times the expected error of one running sum with independent rounding
    errors. The second part is the error of rounding a sum of up to 4·q to the output format. If a library accumulates in 16 bits,
    the error exceeds the tolerance.

    Args:
        total: the computed sum. The caller must have filled it with NaN before the timed calls. If it has several elements, each
            of them must be the sum.
        factors: one tensor of n elements for a sum, or two tensors of n elements for a dot product. The terms must have random
            signs.
        number_format: number format of the tensors.

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
    """Return the sum of the terms and the sum of their squares.

    The sums are computed in chunks, because a float64 copy of all elements might not fit in memory.
    """
    exact = squares = 0.0
    for pieces in zip(*(factor.split(_CHUNK) for factor in factors), strict=True):
        terms = pieces[0].double()
        for piece in pieces[1:]:
            terms *= piece.double()
        exact += terms.sum().item()
        squares += terms.square_().sum().item()
    return exact, squares


def poison_bits(destination: torch.Tensor, source: torch.Tensor) -> None:
    """Fill the destination of a copy with the inverted bits of the source.

    `verify_bits` then detects any byte that a copy does not write.

    Args:
        destination, source: uint8 tensors of the same length, on any devices.
    """
    destination.copy_(source)
    destination.bitwise_not_()


def verify_bits(destination: torch.Tensor, source: torch.Tensor) -> Verification:
    """Check that two tensors are equal bit for bit. The error is the share of bytes that differ, and the tolerance is 0.

    Args:
        destination, source: uint8 tensors of the same length, on any devices.
    """
    pairs = zip(destination.split(_CHUNK), source.split(_CHUNK), strict=True)
    wrong = sum(int(torch.count_nonzero(copied.cpu() != original.cpu())) for copied, original in pairs)
    return Verification("bit for bit", wrong / source.numel(), 0.0)
