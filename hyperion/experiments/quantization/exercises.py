"""Self-marking exercises on quantised weights, and functions with a common mistake."""

from collections.abc import Callable

import pandas as pd
import torch
from torch import Tensor

from hyperion.chapter.exercises import Question, explains_errors
from hyperion.experiments.quantization.quantized_linears import pack_int4

NF4_BITS = Question(
    4 + 8 / 64 + 32 / (64 * 256),
    "4 bits of the code, 8 bits of the block's scale over 64 weights, 32 bits of the scale of 256 scales over 64 x 256 weights",
)
DECODE_MS = Question(
    6.607e9 * 2 / 4.2e12 * 1e3, "bytes of the weights that a token reads, divided by the bytes that the memory moves in a second"
)


@explains_errors
def judge_packing(my_unpack: Callable[[Tensor], Tensor]) -> pd.DataFrame:
    """Test a function that unpacks 4-bit integers. The first value of each pair is in the upper four bits of a byte.

    Args:
        my_unpack: function that takes packed values, uint8 of shape [N, K / 2]. It returns integers of shape [N, K] from -8 to 7.

    Returns:
        A table with one line per matrix, which says whether it was unpacked correctly, and what the function returned or raised.
    """
    generator = torch.Generator().manual_seed(0)
    matrices = {
        "equal pairs": torch.tensor([[3, 3, -5, -5]]),
        "different pairs": torch.tensor([[1, -2, 3, -4]]),
        "the smallest and the largest value": torch.tensor([[-8, 7]]),
        "a random matrix": torch.randint(-8, 8, (6, 10), generator=generator),
    }
    lines = []
    for name, values in matrices.items():
        seen = my_unpack(pack_int4(values)).long()
        right = seen.shape == values.shape and bool((seen == values).all())
        lines.append({"matrix": name, "right": right, "seen": f"{seen[0, :4].tolist()} for {values[0, :4].tolist()}"})
    return pd.DataFrame(lines)


@explains_errors
def judge_int8(my_quantise: Callable[[Tensor], tuple[Tensor, Tensor]]) -> pd.DataFrame:
    """Test a function that quantises a weight to int8 with one scale for each output.

    Args:
        my_quantise: function that takes a float32 weight [N, K]. It returns (int8 values [N, K], float32 scales [N]). The product
            values * scales[:, None] must equal the weight up to half a step, which is half the scale of the output.

    Returns:
        A table with one line for each weight: the largest error in units of half a step, and whether it is at most 1.
    """
    generator = torch.Generator().manual_seed(0)
    plain = torch.randn(8, 8, generator=generator)
    weights = {
        "all outputs of one size": plain,
        "one output a hundred times larger": plain * torch.where(torch.arange(8) == 3, 100.0, 1.0)[:, None],
        "one input a hundred times larger": plain * torch.where(torch.arange(8) == 3, 100.0, 1.0),
        "more outputs than inputs": torch.randn(12, 4, generator=generator),
        "an output of zeros": plain * (torch.arange(8) != 2)[:, None],
    }
    lines = []
    for name, weight in weights.items():
        try:
            values, scales = my_quantise(weight.clone())
            half_step = (weight.abs().amax(1, keepdim=True) / 127 / 2).double().clamp_min(1e-12)
            represented = values.double() * scales.double()[:, None]
            worst = ((represented - weight.double()).abs() / half_step).max().item()
            right = values.dtype == torch.int8 and worst <= 1 + 1e-4
            seen = f"{values.dtype}, {worst:.3g} half steps"
        except (RuntimeError, IndexError) as error:
            right, seen = False, str(error).splitlines()[0]
        lines.append({"weight": name, "right": right, "seen": seen})
    return pd.DataFrame(lines)
