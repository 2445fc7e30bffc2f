"""What a product is fed: operands by the name of their distribution, in a number format, and how distinct their values are.

The same shape in the same format runs at another speed with other numbers: multipliers that see the same bits again switch
fewer transistors, draw less power and are throttled less. Source: Bhalachandra et al., Understanding the Impact of Input
Entropy on FPU, CPU, and GPU Power, 2022. AMD's acceptance targets for the same shape (ROCm Validation Suite,
rvs/conf/MI3*/gst_single.conf) lie 1.05 to 1.46 times apart for two kinds of data.
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
# Real layers' activations in 8 bits have dozens of values among 4096 sampled ones, and a constant has exactly one.
_LEAST_DISTINCT = 0.005

DISTRIBUTIONS: dict[str, Callable[..., torch.Tensor]] = {
    "zeros": lambda shape, generator, **options: torch.zeros(shape, **options),
    "constant": lambda shape, generator, **options: torch.ones(shape, **options),
    "uniform": lambda shape, generator, **options: torch.rand(shape, generator=generator, **options).mul_(2).sub_(1),
    "normal": lambda shape, generator, **options: torch.randn(shape, generator=generator, **options),
}
SAME_EVERYWHERE = ("zeros", "constant")
# Operands that the caller brings along are named so; no distribution of ours looks like a trained layer's.
ACTIVATIONS = "activations"


@dataclass(frozen=True)
class Operand:
    """A matrix as a product reads it: `values` [rows, columns] in the format's storage, times `scale` (float32, no axis)."""

    values: torch.Tensor
    scale: torch.Tensor

    @property
    def transposed(self) -> "Operand":
        return Operand(self.values.T, self.scale)


def made_up(data: str, shape: tuple[int, ...], number_format: NumberFormat, device: Device, generator) -> Operand:
    """A matrix of a named distribution.

    Args:
        data: zeros; constant (all 1); uniform in [-1, 1); normal (standard).
        generator: the device's, or None where the distribution needs none.

    Raises:
        HyperionError: no distribution has this name.
    """
    if data not in DISTRIBUTIONS:
        raise HyperionError(
            f"{data!r} is no distribution of operands.",
            next_step=f"Use one of {', '.join(DISTRIBUTIONS)}; Gemm.of(a_MK, b_KN, …) takes the activations of a real layer.",
        )
    # A float64 operand made from a float32 number would end in 29 zero bits.
    drawn = torch.float64 if number_format.storage == torch.float64 else torch.float32
    return stored(DISTRIBUTIONS[data](shape, generator, device=device.torch_device, dtype=drawn), number_format)


def stored(matrix: torch.Tensor, number_format: NumberFormat) -> Operand:
    """A floating-point matrix rounded to a format; for an 8-bit one divided by max|x| / largest first, as a layer does it."""
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
    """How many values differ, of those that could: 0 when all are equal, 1 when none repeats before the format runs out.

    Asked of at most 4096 elements at random places: (distinct − 1) / (the lesser of elements asked and codes of the dtype − 1).
    """
    flat = (values if values.is_contiguous() else values.T).reshape(-1)
    if len(flat) > _SAMPLED:
        places = torch.randint(len(flat), (_SAMPLED,), generator=torch.Generator().manual_seed(seed))
        flat = flat[places.to(flat.device)]
    most = min(len(flat), 2 ** (8 * values.element_size()))
    return (len(np.unique(flat.double().cpu().numpy())) - 1) / (most - 1) if most > 1 else 1.0


def verify_data(data: str, *operands: torch.Tensor) -> Verification:
    """Are the operands what their name says? Equal values under the name of a distribution are caught, and the reverse.

    The error is 1 − the smallest `distinct_share` (for zeros and constant: the largest one).
    """
    shares = [distinct_share(values) for values in operands]
    if data in SAME_EVERYWHERE:
        return Verification(f"operands are {data}", max(shares), 0.0)
    return Verification(f"operands are {data}", 1 - min(shares), 1 - _LEAST_DISTINCT)
