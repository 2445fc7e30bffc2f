"""The two kernels of `token_loss`, forward and backward, as operators that torch.compile and autograd know.

Each row of logits_MP belongs to one token. Forward finds the largest logit and the sum of exponentials in one pass (the sum
is scaled anew whenever the largest grows; Milakov and Gimelshein, Online normalizer calculation for softmax, 2018) and keeps
their logarithm. Backward writes (softmax - one-hot) · gradient, and zero in the columns that only fill up.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.library import triton_op, wrap_triton

BLOCK, WARPS = 8192, 16


@triton.jit
def nll_forward(
    logits, targets, nll, log_sum, ignored, columns: tl.constexpr, classes: tl.constexpr, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    start = logits + row * columns
    largest = float("-inf")
    total = tl.zeros([BLOCK], tl.float32)
    for first in range(0, classes, BLOCK):
        place = first + tl.arange(0, BLOCK)
        # Masked by the aligned number of columns: another would be loaded value by value.
        x = tl.load(start + place, mask=place < columns, other=float("-inf")).to(tl.float32)
        x = tl.where(place < classes, x, float("-inf"))
        larger = tl.maximum(largest, tl.max(x, 0))
        total = total * tl.exp(largest - larger) + tl.exp(x - larger)
        largest = larger
    value = largest + tl.log(tl.sum(total, 0))
    target = tl.load(targets + row)
    inside = (target >= 0) & (target < classes)
    of_target = tl.load(start + target, mask=inside, other=float("nan")).to(tl.float32)
    tl.store(log_sum + row, value)
    tl.store(nll + row, tl.where(target == ignored, 0.0, value - of_target))


@triton.jit
def nll_backward(
    gradient, logits, targets, log_sum, grad_logits, ignored,
    columns: tl.constexpr, classes: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    place = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    target = tl.load(targets + row)
    scale = tl.where(target == ignored, 0.0, tl.load(gradient + row))
    x = tl.load(logits + row * columns + place, mask=place < columns, other=float("-inf")).to(tl.float32)
    softmax = tl.where(place < classes, tl.exp(x - tl.load(log_sum + row)), 0.0)
    value = tl.where(place == target, softmax - 1.0, softmax) * scale
    tl.store(grad_logits + row * columns + place, value.to(grad_logits.dtype.element_ty), mask=place < columns)


@triton_op("hyperion::token_nll", mutates_args={})
def token_nll(logits_MP: Tensor, targets_M: Tensor, classes: int, ignored: int) -> tuple[Tensor, Tensor]:
    """(nll_M, logarithm of the sum of exponentials_M), float32, over the first `classes` columns of contiguous logits."""
    rows, columns = logits_MP.shape
    nll, log_sum = (torch.empty(rows, dtype=torch.float32, device=logits_MP.device) for _ in range(2))
    wrap_triton(nll_forward)[(rows,)](
        logits_MP, targets_M, nll, log_sum, ignored, columns, classes, BLOCK=BLOCK, num_warps=WARPS
    )
    return nll, log_sum


@triton_op("hyperion::token_nll_backward", mutates_args={})
def token_nll_backward(
    gradient_M: Tensor, logits_MP: Tensor, targets_M: Tensor, log_sum_M: Tensor, classes: int, ignored: int
) -> Tensor:
    """Gradient of the logits, in their type."""
    rows, columns = logits_MP.shape
    grad_logits = torch.empty_like(logits_MP)
    wrap_triton(nll_backward)[(rows, triton.cdiv(columns, BLOCK))](
        gradient_M, logits_MP, targets_M, log_sum_M, grad_logits, ignored, columns, classes, BLOCK=BLOCK, num_warps=WARPS
    )
    return grad_logits


def _keep(ctx, inputs, output) -> None:
    logits_MP, targets_M, ctx.classes, ctx.ignored = inputs
    ctx.save_for_backward(logits_MP, targets_M, output[1])
    ctx.mark_non_differentiable(output[1])


def _backward(ctx, gradient_M: Tensor, _) -> tuple:
    logits_MP, targets_M, log_sum_M = ctx.saved_tensors
    gradient = token_nll_backward(gradient_M.contiguous(), logits_MP, targets_M, log_sum_M, ctx.classes, ctx.ignored)
    return gradient, None, None, None


token_nll.register_autograd(_backward, setup_context=_keep)
