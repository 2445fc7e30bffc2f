"""Triton kernel of `token_loss`, wrapped as a custom operator for torch.compile and autograd.

Each program processes the row of logits of one token. The first pass computes the maximum and the sum of exponentials in one
loop: when the maximum grows, the sum is rescaled. The second pass overwrites the row with softmax - one-hot. The rows of all
running programs together are larger than the cache, so after the first pass, only the end of each row is still in the cache.
Therefore, the second pass runs from the end of the row to its start.

Source: Milakov and Gimelshein, Online normalizer calculation for softmax, 2018.
"""

from typing import Any

import torch
import triton  # pyright: ignore[reportMissingImports] - only PyTorch's GPU builds contain it
import triton.language as tl  # pyright: ignore[reportMissingImports]
from torch import Tensor
from torch.library import triton_op, wrap_triton

# Elements per iteration, warps, and pipeline stages. These values were the fastest of about forty combinations on an H200, with
# bfloat16 rows of 50304 elements.
BLOCK, WARPS, STAGES = 2048, 4, 3


@triton.jit
def nll_and_slope(
    logits,
    targets,
    nll,
    ignored,
    columns: tl.constexpr,
    classes: tl.constexpr,
    slope: tl.constexpr,
    BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Write the negative log-likelihood of one token. If `slope` > 0, overwrite its logits with slope · (softmax - one-hot)."""
    LOG2_E: tl.constexpr = 1.4426950408889634  # GPUs have a hardware unit for powers of 2, but not for exp
    row = tl.program_id(0).to(tl.int64)
    start = logits + row * columns
    target = tl.load(targets + row)
    inside = (target >= 0) & (target < classes)
    # A kernel cannot raise an error, so an invalid class gives a loss of NaN.
    of_target = tl.load(start + target, mask=inside, other=float("nan")).to(tl.float32)
    # Finite, so that a whole block of logits of minus infinity adds 0, and not NaN, to the sum.
    largest = -3.0e38
    # A vector of sums, one for each place in a block. The reduction over the block happens once after the loop.
    total = tl.zeros([BLOCK], tl.float32)
    for first in tl.range(0, classes, BLOCK, num_stages=STAGES):
        place = first + tl.arange(0, BLOCK)
        # Use the aligned number of columns in the mask, because vector loads are not possible with an unaligned bound.
        x = tl.load(start + place, mask=place < columns, other=float("-inf"), eviction_policy="evict_last")
        # The padding has logits of 0, which must not be in the sum.
        x = tl.where(place < classes, x.to(tl.float32) * LOG2_E, float("-inf"))
        larger = tl.maximum(largest, tl.max(x, 0))
        total = total * tl.exp2(largest - larger) + tl.exp2(x - larger)
        largest = larger
    # Base 2 until here; the division by log2(e) below gives nats.
    log_sum = largest + tl.log2(tl.sum(total, 0))
    counts = target != ignored
    tl.store(nll + row, tl.where(counts, log_sum / LOG2_E - of_target, 0.0))
    if slope > 0:
        for back in tl.range(0, columns, BLOCK, num_stages=STAGES):
            # `back` counts from the last block to the first one. Nothing reads the row again, so evict it first.
            place = (columns - 1) // BLOCK * BLOCK - back + tl.arange(0, BLOCK)
            x = tl.load(start + place, mask=place < columns, other=float("-inf"), eviction_policy="evict_first")
            softmax = tl.where((place < classes) & counts, tl.exp2(x.to(tl.float32) * LOG2_E - log_sum), 0.0)
            value = slope * tl.where((place == target) & counts, softmax - 1.0, softmax)
            value = value.to(logits.dtype.element_ty)
            tl.store(start + place, value, mask=place < columns, eviction_policy="evict_first")


# The kernel overwrites only the logits, which this function allocates, so no argument is mutated.
@triton_op("hyperion::head_loss", mutates_args={})
def head_loss(
    x_MD: Tensor, weight_PD: Tensor, targets_M: Tensor, classes: int, ignored: int, slope: bool
) -> tuple[Tensor, Tensor]:
    """Return the negative log-likelihood nll_M in float32, and a matrix S_MP.

    Args:
        classes: number of classes V. The other columns are padding.
        ignored: target of the tokens that have no loss.
        slope: if True, S is (softmax - one-hot) times `_slope`. If False, S contains the logits.
    """
    logits_MP = x_MD @ weight_PD.T
    nll_M = torch.empty(len(x_MD), dtype=torch.float32, device=x_MD.device)
    wrap_triton(nll_and_slope)[(len(x_MD),)](
        logits_MP,
        targets_M,
        nll_M,
        ignored,
        columns=len(weight_PD),
        classes=classes,
        slope=_slope(logits_MP.dtype) if slope else 0.0,
        BLOCK=BLOCK,
        STAGES=STAGES,
        num_warps=WARPS,
    )
    return nll_M, logits_MP


def _slope(dtype: torch.dtype) -> float:
    """Return the factor by which S = softmax - one_hot is multiplied before it is stored in this dtype.

    In float16 the factor is 1024. With 50,000 classes, many values of softmax would otherwise be subnormal in float16, and some
    matrix units replace subnormal numbers by zero.
    """
    return 1024.0 if dtype == torch.float16 else 1.0


def _save_for_backward(ctx: Any, inputs: tuple, output: tuple) -> None:
    ctx.save_for_backward(inputs[0], inputs[1], output[1])
    # S is an output only because autograd can save outputs. It has no gradient of its own.
    ctx.mark_non_differentiable(output[1])


def _backward(ctx: Any, gradient_M: Tensor, _: Tensor) -> tuple:
    x_MD, weight_PD, slope_MP = ctx.saved_tensors
    # S contains the factor `_slope`; divide by it where the tensor is small.
    g_M1 = (gradient_M / _slope(x_MD.dtype))[:, None].to(x_MD.dtype)
    # A frozen head, as in a training of adapters, needs no gradient of its weight.
    of_weight_PD = slope_MP.T @ (g_M1 * x_MD) if ctx.needs_input_grad[1] else None
    return g_M1 * (slope_MP @ weight_PD), of_weight_PD, None, None, None, None


head_loss.register_autograd(_backward, setup_context=_save_for_backward)
