"""Is the output right? A slice of it against float64, before any time is believed."""

from dataclasses import dataclass

import torch


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
    """Check C = scale·A·B on `size` rows and columns spread over the whole output against a float64 product.

    Args:
        a_MK, b_KN, c_MN: operands and output, any dtype and device.
        tolerance: largest relative Frobenius error.
        scale: what the stored operands were divided by, both together.
    """
    rows, columns = _spread(c_MN.shape[0], size, c_MN.device), _spread(c_MN.shape[1], size, c_MN.device)
    reference = a_MK[rows].double().cpu() @ b_KN[:, columns].double().cpu() * scale
    return _verified(c_MN, c_MN[rows][:, columns], reference, tolerance)


def verify_elementwise(
    output: torch.Tensor, operation, inputs: tuple[torch.Tensor, ...], tolerance: float
) -> Verification:
    """Check an element-wise operation on 65,536 elements spread over the whole output against float64.

    Args:
        operation: the same operation on float64 tensors.
    """
    picks = _spread(output.numel(), 65_536, output.device)
    reference = operation(*(tensor[picks].double().cpu() for tensor in inputs))
    return _verified(output, output[picks], reference, tolerance)


def poison(output: torch.Tensor) -> None:
    """Fill an output with what no operation here writes: NaN, or the lowest integer."""
    output.fill_(float("nan") if output.is_floating_point() else torch.iinfo(output.dtype).min)


def _verified(output: torch.Tensor, picked: torch.Tensor, reference: torch.Tensor, tolerance: float) -> Verification:
    # Outputs are poisoned before the timed calls: an element that was never written is found wherever it is.
    lowest = None if output.is_floating_point() else torch.iinfo(output.dtype).min
    unwritten = bool((torch.isnan(output) if lowest is None else output == lowest).any())
    error = float("nan") if unwritten else relative_error(picked.cpu(), reference)
    return Verification("float64 slice", error, tolerance)


def _spread(length: int, size: int, device: torch.device) -> torch.Tensor:
    """Indices from first to last, evenly spaced."""
    return torch.linspace(0, length - 1, min(size, length), dtype=torch.float64, device=device).round().long()
