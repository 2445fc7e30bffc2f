"""Checks of outputs that a slice cannot judge: a sum, to which every element adds, and a copy, right to the last bit."""

import torch

from hyperion.measure.clock.dtypes import NumberFormat
from hyperion.measure.clock.verify import Verification

_CHUNK = 1 << 22
_DEVIATIONS = 4


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
