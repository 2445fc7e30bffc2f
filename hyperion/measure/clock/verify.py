"""Is the output right? A slice of it against float64, before any time is believed."""

import math
from dataclasses import dataclass

import torch

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
