"""Triton kernels that read each element once: vector addition, softmax, and layer norm with its backward pass.

Memory bandwidth limits the speed of these kernels. Therefore, a kernel that needs whole rows reads each row once, keeps it in
registers, computes in float32, and writes the result.

Shape suffixes: M rows, D columns, P programs.
"""

import torch
import triton  # pyright: ignore[reportMissingImports] - only PyTorch's GPU builds contain it
import triton.language as tl  # pyright: ignore[reportMissingImports]
from torch import Tensor

from hyperion.kernels.typed_triton import jit

ADD_BLOCK, ADD_WARPS = 4096, 8
# Largest number of row elements that fit into the registers of 16 warps: in general, and in the backward pass of layer norm.
WIDEST, WIDEST_GRADIENT = 1 << 15, 1 << 13


def row_warps(width: int) -> int:
    """Return the number of warps for a row: one for every 512 elements, at least 4 and at most 16."""
    return max(4, min(16, triton.next_power_of_2(width) // 512))


# Row elements per warp, and pipeline stages of the loop over the rows, in the backward pass of layer norm. These values were the
# fastest on an H200 for rows of 4096 bf16 elements.
_GRADIENT_WARP_ELEMENTS, GRADIENT_STAGES = 1024, 3


def gradient_warps(width: int) -> int:
    """Return the number of warps for a row in the backward pass of layer norm: at least 4 and at most 16."""
    return max(4, min(16, triton.next_power_of_2(width) // _GRADIENT_WARP_ELEMENTS))


@jit
def vector_add(x, y, total, elements, BLOCK: tl.constexpr):
    """Write x + y for one block of elements."""
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = place < elements
    tl.store(total + place, tl.load(x + place, mask=inside) + tl.load(y + place, mask=inside), mask=inside)


@jit
def softmax_row(x, y, columns, BLOCK: tl.constexpr):
    """Write the softmax of one row. The maximum is subtracted first, so that no exponential overflows."""
    LOG2: tl.constexpr = 1.4426950408889634  # GPUs have a hardware unit for powers of 2, but not for exp
    start = tl.program_id(0).to(tl.int64) * columns
    column = tl.arange(0, BLOCK)
    inside = column < columns
    values = tl.load(x + start + column, mask=inside, other=float("-inf")).to(tl.float32)
    # Padding is -inf, so its power is 0 and adds nothing to the sum.
    powers = tl.exp2((values - tl.max(values, 0)) * LOG2)
    tl.store(y + start + column, (powers / tl.sum(powers, 0)).to(y.dtype.element_ty), mask=inside)


@jit
def layer_norm_row(x, weight, bias, y, means, inverses, columns, eps, BLOCK: tl.constexpr):
    """Write the layer norm of one row, its mean, and the reciprocal of its standard deviation."""
    row = tl.program_id(0)
    start = row.to(tl.int64) * columns
    column = tl.arange(0, BLOCK)
    inside = column < columns
    values = tl.load(x + start + column, mask=inside, other=0.0).to(tl.float32)
    mean = tl.sum(values, 0) / columns
    # The row is in registers, so a second pass for the variance reads nothing. E[x²] - E[x]² would cancel for large means.
    centered = tl.where(inside, values - mean, 0.0)
    inverse = 1 / tl.sqrt(tl.sum(centered * centered, 0) / columns + eps)
    w = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    b = tl.load(bias + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(y + start + column, (centered * inverse * w + b).to(y.dtype.element_ty), mask=inside)
    tl.store(means + row, mean)
    tl.store(inverses + row, inverse)


@jit
def layer_norm_gradient(
    x,
    grad_y,
    weight,
    means,
    inverses,
    grad_x,
    sums,
    rows,
    columns,
    PROGRAMS: tl.constexpr,
    BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Write the gradient of x for every PROGRAMS-th row, and the sums of the gradients of weight and bias over these rows."""
    program = tl.program_id(0)
    column = tl.arange(0, BLOCK)
    inside = column < columns
    width = tl.cast(columns, tl.int64)  # the offset of a row may exceed 32 bits
    w = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    grad_weight, grad_bias = tl.zeros([BLOCK], tl.float32), tl.zeros([BLOCK], tl.float32)
    for row in tl.range(program, rows, PROGRAMS, num_stages=STAGES):
        place = row * width + column
        mean, inverse = tl.load(means + row), tl.load(inverses + row)
        values = tl.load(x + place, mask=inside, other=0.0).to(tl.float32)
        g = tl.load(grad_y + place, mask=inside, other=0.0).to(tl.float32)
        normalized = tl.where(inside, (values - mean) * inverse, 0.0)
        weighted = g * w
        along = tl.sum(weighted * normalized, 0) / columns
        # With x̂ the normalized row: dx = (g·w - mean(g·w) - x̂·mean(g·w·x̂)) / σ.
        of_x = inverse * (weighted - tl.sum(weighted, 0) / columns - normalized * along)
        tl.store(grad_x + place, of_x.to(grad_x.dtype.element_ty), mask=inside)
        grad_weight += g * normalized
        grad_bias += g
    place = sums + program * 2 * columns + column
    tl.store(place, grad_weight, mask=inside)
    tl.store(place + columns, grad_bias, mask=inside)


def run_add(x: Tensor, y: Tensor) -> Tensor:
    """Return x + y for contiguous tensors of the same shape and dtype."""
    total = torch.empty_like(x)
    vector_add[(triton.cdiv(x.numel(), ADD_BLOCK),)](x, y, total, x.numel(), BLOCK=ADD_BLOCK, num_warps=ADD_WARPS)
    return total


def run_softmax(x_MD: Tensor) -> Tensor:
    """Return the softmax of each row of a contiguous matrix."""
    (M, D), y_MD = x_MD.shape, torch.empty_like(x_MD)
    softmax_row[(M,)](x_MD, y_MD, D, BLOCK=triton.next_power_of_2(D), num_warps=row_warps(D))
    return y_MD


def run_layer_norm(x_MD: Tensor, weight_D: Tensor, bias_D: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """Return the layer norm of each row, and in float32 the mean and the reciprocal standard deviation of each row."""
    (M, D), y_MD = x_MD.shape, torch.empty_like(x_MD)
    means_M, inverses_M = (torch.empty(M, dtype=torch.float32, device=x_MD.device) for _ in range(2))
    layer_norm_row[(M,)](
        x_MD, weight_D, bias_D, y_MD, means_M, inverses_M, D, eps, BLOCK=triton.next_power_of_2(D), num_warps=row_warps(D)
    )
    return y_MD, means_M, inverses_M


def run_layer_norm_gradient(
    grad_MD: Tensor, x_MD: Tensor, weight_D: Tensor, means_M: Tensor, inverses_M: Tensor, programs: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of input, weight and bias. The last two are summed in float32 in a fixed order.

    Args:
        programs: largest number of programs. Each program sums the gradients of its rows.
    """
    (M, D), grad_x_MD = x_MD.shape, torch.empty_like(x_MD)
    # A program without rows would only add a row of zeros to the sums.
    programs = min(programs, M)
    sums_P2D = torch.empty(programs, 2, D, dtype=torch.float32, device=x_MD.device)
    layer_norm_gradient[(programs,)](
        x_MD,
        grad_MD,
        weight_D,
        means_M,
        inverses_M,
        grad_x_MD,
        sums_P2D,
        M,
        D,
        PROGRAMS=programs,
        BLOCK=triton.next_power_of_2(D),
        STAGES=GRADIENT_STAGES,
        num_warps=gradient_warps(D),
    )
    # Atomic additions would change the order of the sum from run to run.
    of_weight_D, of_bias_D = sums_P2D.sum(0)
    return grad_x_MD, of_weight_D, of_bias_D
