"""Create operands of products from named distributions in a number format, and check how distinct their values are.

The speed of a product depends on its data: repeated bits switch fewer transistors, draw less power, and cause less throttling.
Source: Bhalachandra et al., Understanding the Impact of Input Entropy on FPU, CPU, and GPU Power, 2022. AMD's acceptance targets
for one shape (ROCm Validation Suite, rvs/conf/MI3*/gst_single.conf) differ by a factor of 1.05 to 1.46 between two kinds of data.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from hyperion.errors import HyperionError
from hyperion.hardware import Device
from hyperion.measure.clock.dtypes import NumberFormat
from hyperion.measure.clock.verify import Verification

_SAMPLED = 4096
# 8-bit activations of real layers have dozens of different values among 4096 samples; a constant has one.
_LEAST_DISTINCT = 0.005

DISTRIBUTIONS: dict[str, Callable[..., torch.Tensor]] = {
    "zeros": lambda shape, generator, **options: torch.zeros(shape, **options),
    "constant": lambda shape, generator, **options: torch.ones(shape, **options),
    "uniform": lambda shape, generator, **options: torch.rand(shape, generator=generator, **options).mul_(2).sub_(1),
    "normal": lambda shape, generator, **options: torch.randn(shape, generator=generator, **options),
}
SAME_EVERYWHERE = ("zeros", "constant")
# Name of the data of operands that the caller passes.
ACTIVATIONS = "activations"


@dataclass(frozen=True)
class Operand:
    """A stored matrix: `values` [rows, columns] in the storage dtype of the format, times `scale` (float32 scalar)."""

    values: torch.Tensor
    scale: torch.Tensor

    @property
    def transposed(self) -> "Operand":
        """The transposed matrix, a view."""
        return Operand(self.values.T, self.scale)


def made_up(data: str, shape: tuple[int, ...], number_format: NumberFormat, device: Device, generator) -> Operand:
    """Return a matrix drawn from a named distribution.

    Args:
        data: "zeros", "constant" (all 1), "uniform" in [-1, 1), or "normal" (standard).
        generator: random generator of the device; None if the distribution needs none.

    Raises:
        HyperionError: the name is unknown.
    """
    if data not in DISTRIBUTIONS:
        raise HyperionError(
            f"{data!r} is not a distribution of operands.",
            next_step=f"Use one of {', '.join(DISTRIBUTIONS)}; pass the activations of a real layer to Gemm.of(a_MK, b_KN, …).",
        )
    # A float64 operand drawn in float32 would end in 29 zero bits.
    drawn = torch.float64 if number_format.storage == torch.float64 else torch.float32
    return stored(DISTRIBUTIONS[data](shape, generator, device=device.torch_device, dtype=drawn), number_format)


def stored(matrix: torch.Tensor, number_format: NumberFormat) -> Operand:
    """Round a floating-point matrix to a format; for 8-bit formats, divide it by max|x| / largest first, as layers do."""
    one = torch.ones((), dtype=torch.float32, device=matrix.device)
    if not number_format.scaled:
        return Operand(matrix.to(number_format.storage), one)
    matrix = matrix.float()
    furthest = torch.maximum(-matrix.amin(), matrix.amax())
    scale = torch.where(furthest > 0, furthest / number_format.largest, one)
    scaled = (matrix / scale).clamp_(-number_format.largest, number_format.largest)
    whole = scaled if number_format.storage.is_floating_point else scaled.round_()
    return Operand(whole.to(number_format.storage), scale)


def distinct_share(values: torch.Tensor, seed: int = 0) -> float:
    """Return the share of distinct values: 0 if all values are equal, 1 if as many differ as possible.

    Uses at most 4096 elements at random places: (distinct − 1) / (min(elements, codes of the dtype) − 1).
    """
    flat = (values if values.is_contiguous() else values.T).reshape(-1)
    if len(flat) > _SAMPLED:
        places = torch.randint(len(flat), (_SAMPLED,), generator=torch.Generator().manual_seed(seed))
        flat = flat[places.to(flat.device)]
    most = min(len(flat), 2 ** (8 * values.element_size()))
    return (len(np.unique(flat.double().cpu().numpy())) - 1) / (most - 1) if most > 1 else 1.0


def verify_data(data: str, *operands: torch.Tensor) -> Verification:
    """Check that operands match the name of their distribution: many distinct values, or one for zeros and constant.

    The error is 1 − the smallest `distinct_share`; for zeros and constant it is the largest `distinct_share`.
    """
    shares = [distinct_share(values) for values in operands]
    if data in SAME_EVERYWHERE:
        return Verification(f"operands are {data}", max(shares), 0.0)
    return Verification(f"operands are {data}", 1 - min(shares), 1 - _LEAST_DISTINCT)
