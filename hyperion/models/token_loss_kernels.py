"""The kernel of `token_loss` and the operator around it, which torch.compile and autograd know.

A program has one token's row of logits. It finds the largest and the sum of exponentials in one pass (the sum is scaled
anew whenever the largest grows; Milakov and Gimelshein, Online normalizer calculation for softmax, 2018), and in a second
one writes softmax - one-hot over it. The rows of all programs at work are more than a cache holds, so the second pass goes
backwards: what was read last is what it still finds there.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.library import triton_op, wrap_triton

# The fastest of some forty ways on an H200, with bfloat16 rows of 50304: numbers and threads at once, loads under way.
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
    """`slope`: what softmax - one-hot is multiplied by where it takes the logits' place; 0 leaves them."""
    LOG2_E: tl.constexpr = 1.4426950408889634  # powers of 2 are what devices have a unit for
    row = tl.program_id(0).to(tl.int64)
    start = logits + row * columns
    target = tl.load(targets + row)
    inside = (target >= 0) & (target < classes)
    of_target = tl.load(start + target, mask=inside, other=float("nan")).to(tl.float32)
    largest = float("-inf")
    total = tl.zeros([BLOCK], tl.float32)
    for first in tl.range(0, classes, BLOCK, num_stages=STAGES):
        place = first + tl.arange(0, BLOCK)
        # Masked by the aligned number of columns: by another one, values would be loaded one by one.
        x = tl.load(start + place, mask=place < columns, other=float("-inf"), eviction_policy="evict_last")
        x = tl.where(place < classes, x.to(tl.float32) * LOG2_E, float("-inf"))
        larger = tl.maximum(largest, tl.max(x, 0))
        total = total * tl.exp2(largest - larger) + tl.exp2(x - larger)
        largest = larger
    log_sum = largest + tl.log2(tl.sum(total, 0))
    counts = target != ignored
    tl.store(nll + row, tl.where(counts, log_sum / LOG2_E - of_target, 0.0))
    if slope > 0:
        for back in tl.range(0, columns, BLOCK, num_stages=STAGES):
            place = (columns - 1) // BLOCK * BLOCK - back + tl.arange(0, BLOCK)
            x = tl.load(start + place, mask=place < columns, other=float("-inf"), eviction_policy="evict_first")
            softmax = tl.where((place < classes) & counts, tl.exp2(x.to(tl.float32) * LOG2_E - log_sum), 0.0)
            value = slope * tl.where((place == target) & counts, softmax - 1.0, softmax)
            value = value.to(logits.dtype.element_ty)
            tl.store(start + place, value, mask=place < columns, eviction_policy="evict_first")


@triton_op("hyperion::head_loss", mutates_args={})
def head_loss(
    x_MD: Tensor, weight_PD: Tensor, targets_M: Tensor, classes: int, ignored: int, slope: bool
) -> tuple[Tensor, Tensor]:
    """(nll_M in float32, S_MP = softmax - one-hot times `_slope`) over the first `classes` columns; without `slope` S is the
    logits.
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
    """One class of fifty thousand has a softmax below the normal numbers of float16, which some matrix units take for 0."""
    return 1024.0 if dtype == torch.float16 else 1.0


def _keep(ctx, inputs, output) -> None:
    ctx.save_for_backward(inputs[0], inputs[1], output[1])
    ctx.mark_non_differentiable(output[1])


def _backward(ctx, gradient_M: Tensor, _) -> tuple:
    x_MD, weight_PD, slope_MP = ctx.saved_tensors
    g_M1 = (gradient_M / _slope(x_MD.dtype))[:, None].to(x_MD.dtype)
    return g_M1 * (slope_MP @ weight_PD), slope_MP.T @ (g_M1 * x_MD), None, None, None, None


head_loss.register_autograd(_backward, setup_context=_keep)
