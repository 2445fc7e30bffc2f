"""Is the output right? A slice of it against float64, before any time is believed."""

import math
from dataclasses import dataclass

import torch

from hyperion.measure.clock.dtypes import NumberFormat

_CHUNK = 1 << 22
# Multiplications of a product that is checked whole: a moment on any host.
_PRODUCTS_OF_A_CHECK = 1 << 28
# A tolerance is two to three times the error that is expected of all elements together; that of the worst of a million is five
# times the expected one.
_DEVIATIONS = 4


@dataclass(frozen=True)
class Verification:
    """A named check: how far off the output was, and how far it may be (both relative, dimensionless)."""

    name: str
    error: float
    tolerance: float

    @property
    def passed(self) -> bool:
        # Not `error > tolerance`: a NaN must fail.
        return self.error <= self.tolerance


def relative_error(output: torch.Tensor, reference: torch.Tensor) -> float:
    """Frobenius norm of the difference over that of the reference, in float64; NaN where the output holds one."""
    reference = reference.double()
    scale = reference.norm().item()
    difference = (output.double() - reference).norm().item()
    return difference / scale if scale else difference


def verify_product(
    a_MK: torch.Tensor, b_KN: torch.Tensor, c_MN: torch.Tensor, tolerance: float, size: int = 128, scale: float = 1.0
) -> Verification:
    """Check C = scale·A·B against a float64 product: on all rows and columns where that is a small product, else on `size` or
    more of each, spread over the whole output.

    Every element must be within four tolerances of |a_i|·|b_j|, the norms of its row of A and column of B, which is what the
    terms of its sum add up to when their signs are random. So one wrong element fails, which the norm of many would hide.

    Args:
        a_MK, b_KN, c_MN: operands and output, any dtype and device.
        tolerance: largest relative Frobenius error.
        scale: what the stored operands were divided by, both together.
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
        operation: the same operation on float64 tensors, of terms with positive factors: what it makes of the inputs' magnitudes
            is the size that an element's rounding errors are relative to.
        tolerance: largest relative Frobenius error, and largest error of an element relative to that size, beyond one step of
            the subnormal numbers, to which tiny results are rounded. 0 demands equality.
    """
    step = torch.finfo(output.dtype).tiny * torch.finfo(output.dtype).eps if tolerance else 0.0
    squares = scale = worst = 0.0
    for pieces in zip(*(tensor.flatten().split(_CHUNK) for tensor in (output, *inputs)), strict=True):
        found, *given = (piece.double() for piece in pieces)
        reference = operation(*given)
        difference = (found - reference).abs()
        squares += difference.square().sum().item()
        scale += reference.square().sum().item()
        difference = torch.where(difference <= step, 0.0, difference - step)
        worst = max(worst, _worst_element(difference, operation(*(piece.abs() for piece in given))))
    error = float("nan") if _unwritten(output) else math.sqrt(squares) / (math.sqrt(scale) or 1.0)
    return Verification("float64 slice", max(error, worst) if worst > tolerance else error, tolerance)


def _worst_element(difference: torch.Tensor, size: torch.Tensor) -> float:
    """Largest difference relative to the size of its element; that of no size is infinite, unless there is none."""
    relative = torch.where(difference == 0, 0.0, difference / size)
    return relative.max().item() if relative.numel() else 0.0


def poison(output: torch.Tensor) -> None:
    """Fill an output with what no operation here writes: NaN, or the lowest integer."""
    output.fill_(float("nan") if output.is_floating_point() else torch.iinfo(output.dtype).min)


def _unwritten(output: torch.Tensor) -> bool:
    """Whether any element still has its poison, which is filled in before the timed calls."""
    if output.is_floating_point():
        return bool(torch.isnan(output).any())
    return bool((output == torch.iinfo(output.dtype).min).any())


def _spread(length: int, size: int, device: torch.device) -> torch.Tensor:
    """Indices from first to last, evenly spaced."""
    return torch.linspace(0, length - 1, min(size, length), dtype=torch.float64, device=device).round().long()


def verify_sum(total: torch.Tensor, factors: tuple[torch.Tensor, ...], number_format: NumberFormat) -> Verification:
    """Check a sum of products against float64, over all elements.

    The error is relative to q, the root of the sum of the squared terms: for terms of random sign the sum itself is about
    as large as q, and leaving out m of the n terms changes it by about q·sqrt(m/n). The tolerance is what rounding leaves:
    sqrt(n) spacings of the format that accumulates (float32 for formats of 16 bits), four times more than one running sum
    whose roundings are independent is expected to lose, and the rounding of a sum of up to four q to the output's format.
    A library that accumulates in 16 bits fails.

    Args:
        total: the sum, poisoned with NaN before the timed calls; where it has several elements, each must be the sum.
        factors: one tensor (a sum) or two (a dot product) of n elements whose products have random signs.

    Source: Higham, Accuracy and Stability of Numerical Algorithms, 2nd edition, sections 2.8 and 3.1.
    """
    exact, squares = _float64_sums(factors)
    scale = squares**0.5
    difference = (total.double() - exact).abs().max().item()  # NaN where any element is
    storage = torch.finfo(number_format.storage)
    accumulated = min(storage.eps, torch.finfo(torch.float32).eps)
    tolerance = factors[0].numel() ** 0.5 * accumulated + _DEVIATIONS * storage.eps / 2
    return Verification("float64 sum", difference / scale if scale else difference, tolerance)


def _float64_sums(factors: tuple[torch.Tensor, ...]) -> tuple[float, float]:
    """The sum of the terms and that of their squares, in pieces: float64 copies of all of it might not fit."""
    exact = squares = 0.0
    for pieces in zip(*(factor.split(_CHUNK) for factor in factors), strict=True):
        terms = pieces[0].double()
        for piece in pieces[1:]:
            terms *= piece.double()
        exact += terms.sum().item()
        squares += terms.square_().sum().item()
    return exact, squares


def poison_bits(destination: torch.Tensor, source: torch.Tensor) -> None:
    """Fill the destination of a copy with the source's bits inverted, so that a byte which is never written is found.

    Args:
        destination, source: bytes (uint8) of one length, on any devices.
    """
    destination.copy_(source)
    destination.bitwise_not_()


def verify_bits(destination: torch.Tensor, source: torch.Tensor) -> Verification:
    """Check a copy bit for bit; the error is the share of bytes that differ, and none may.

    Args:
        destination, source: bytes (uint8) of one length, on any devices.
    """
    pairs = zip(destination.split(_CHUNK), source.split(_CHUNK), strict=True)
    wrong = sum(int(torch.count_nonzero(copied.cpu() != original.cpu())) for copied, original in pairs)
    return Verification("bit for bit", wrong / source.numel(), 0.0)
