"""Faulty ways to pack and to quantise weights, which checks and exercises must refuse."""

import torch
from torch import Tensor


def unpack_wrong_nibble(packed: Tensor) -> Tensor:
    """Take the first value of a pair from the lower four bits."""
    codes = torch.stack([packed & 15, packed >> 4], dim=-1).flatten(-2)
    return codes.to(torch.int8) - 8


def quantise_without_scale(weight_NK: Tensor) -> tuple[Tensor, Tensor]:
    """Round the weights themselves, and return scales of 1."""
    return weight_NK.round().clamp(-127, 127).to(torch.int8), torch.ones(len(weight_NK))


def quantise_wrong_axis(weight_NK: Tensor) -> tuple[Tensor, Tensor]:
    """Compute one scale for each input instead of each output, and use it as the scale of an output."""
    scales = weight_NK.abs().amax(0) / 127
    return (weight_NK / scales).round().clamp(-127, 127).to(torch.int8), scales
