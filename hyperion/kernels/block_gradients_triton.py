"""Triton kernels for `block_gradients` on AMD and NVIDIA GPUs, wrapped as custom operators for torch.compile.

Each program of a kernel processes one strip, which is a group of `STRIP` consecutive rows. It writes the gradient of each row,
sums each column over the rows of the strip in float32, and at the end stores these column sums. The column sums of all strips are
then added in a fixed order, so the result is deterministic. With few warps, a thread holds the same columns of several rows, and
adds these rows without exchanging data with other threads.

Shape suffixes: M rows (tokens), D and E columns, S strips; B sequences of T positions.
"""

from dataclasses import dataclass

import torch
import triton  # pyright: ignore[reportMissingImports] - only PyTorch's GPU builds contain it
import triton.language as tl  # pyright: ignore[reportMissingImports]
from torch import Tensor
from torch.library import triton_op, wrap_triton

STRIP = 64  # number of rows of a strip


@dataclass(frozen=True)
class Tile:
    """The launch settings of a Triton kernel.

    Args:
        rows, columns: numbers of rows and columns that a program processes per iteration.
        warps: number of warps of a program.
        stages: number of pipeline stages of the loads.
    """

    rows: int
    columns: int
    warps: int
    stages: int


# The fastest of about twenty tiles for each kernel, measured on an H200 with 65,536 rows of GPT-2's width.
GELU, JOINED, POSITIONS = Tile(8, 512, 2, 3), Tile(8, 128, 2, 3), Tile(4, 128, 4, 1)


def norm_tile(width: int) -> Tile:
    """Return the tile of a LayerNorm of this width.

    A LayerNorm needs whole rows. The tile has as many rows as fit into registers, at least one. With half as many warps, the
    kernel spills registers on GPUs of compute capability 9.0.
    """
    columns = triton.next_power_of_2(width)
    return Tile(max(1, min(4, 4096 // columns)), columns, max(1, min(8, columns // 256)), 2 if columns <= 2048 else 1)


@triton.jit
def gelu_strip(
    grad_y,
    x_values,
    gradient,
    sums,
    rows,
    columns: tl.constexpr,
    STRIP: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Compute the backward pass of y = GELU(x) in the tanh form for one strip of rows.

    Write the gradient of x. Also sum each column of this gradient over the rows of the strip, and store the sums.
    """
    strip, column = tl.program_id(1), tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)[None, :]
    inside = column < columns
    total = tl.zeros([BLOCK], tl.float32)
    for first in tl.range(0, STRIP, ROWS, num_stages=STAGES):
        row = strip.to(tl.int64) * STRIP + first + tl.arange(0, ROWS)[:, None]
        mask, offsets = inside & (row < rows), row * columns + column
        x = tl.load(x_values + offsets, mask=mask, other=0.0).to(tl.float32)
        g = tl.load(grad_y + offsets, mask=mask, other=0.0).to(tl.float32)
        # x·sigmoid(z) with z = 2 √(2/π) (x + 0.044715 x³), and z' = 2 √(2/π) (1 + 3·0.044715 x²)
        sigmoid = 1 / (1 + tl.exp(-1.5957691216057308 * (x + 0.044715 * x * x * x)))
        # Rows beyond the last one have g = 0, so they add nothing to the column sums.
        grad_x = g * (sigmoid + x * sigmoid * (1 - sigmoid) * 1.5957691216057308 * (1 + 0.134145 * x * x))
        tl.store(gradient + offsets, grad_x.to(gradient.dtype.element_ty), mask=mask)
        total += tl.sum(grad_x, 0)
    column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(sums + strip * columns + column, total, mask=column < columns)


# triton_op and wrap_triton let torch.compile trace the launch as an operator, without a graph break.
@triton_op("hyperion::gelu_gradient", mutates_args={})
def gelu_gradient(grad_y_ME: Tensor, x_ME: Tensor) -> tuple[Tensor, Tensor]:
    """Return the gradient of x_ME for y = GELU(x), and the sums of the columns of this gradient, of shape [E] in float32.

    Args:
        grad_y_ME: gradient of y.
        x_ME: input of GELU.
    """
    (M, E), grad_x_ME = x_ME.shape, torch.empty_like(x_ME, memory_format=torch.contiguous_format)
    grid = triton.cdiv(E, GELU.columns), triton.cdiv(M, STRIP)
    # One row of column sums for each strip. They are added after the kernel, because atomic additions have no fixed order.
    sums_SE = torch.empty(grid[1], E, dtype=torch.float32, device=x_ME.device)
    wrap_triton(gelu_strip)[grid](
        grad_y_ME.contiguous(),
        x_ME.contiguous(),
        grad_x_ME,
        sums_SE,
        M,
        columns=E,
        STRIP=STRIP,
        ROWS=GELU.rows,
        BLOCK=GELU.columns,
        STAGES=GELU.stages,
        num_warps=GELU.warps,
    )
    return grad_x_ME, sums_SE.sum(0)


@triton.jit
def joined_strip(
    first_part,
    second_part,
    third_part,
    joined,
    sums,
    rows,
    columns: tl.constexpr,
    STRIP: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Concatenate three matrices along their columns, for one strip of rows.

    Also sum each column over the rows of the strip, and store the sums.
    """
    part, strip = tl.program_id(2), tl.program_id(1)
    # The third dimension of the grid chooses the matrix. A kernel cannot index several pointers with a number known only at run
    # time.
    source = first_part if part == 0 else (second_part if part == 1 else third_part)
    column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)[None, :]
    inside = column < columns
    total = tl.zeros([ROWS, BLOCK], tl.float32)
    for first in tl.range(0, STRIP, ROWS, num_stages=STAGES):
        row = strip.to(tl.int64) * STRIP + first + tl.arange(0, ROWS)[:, None]
        mask = inside & (row < rows)
        x = tl.load(source + row * columns + column, mask=mask, other=0.0)
        # A row of the result [M, 3·D] consists of three rows of D columns.
        tl.store(joined + (3 * row + part) * columns + column, x, mask=mask)
        total += x.to(tl.float32)
    column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(sums + (3 * strip + part) * columns + column, tl.sum(total, 0), mask=column < columns)


@triton_op("hyperion::joined_gradient", mutates_args={})
def joined_gradient(first_MD: Tensor, second_MD: Tensor, third_MD: Tensor) -> tuple[Tensor, Tensor]:
    """Concatenate three matrices along their columns. Return the result, [M, 3 D], and its column sums, [3 D] in float32."""
    M, D = first_MD.shape
    grid = triton.cdiv(D, JOINED.columns), triton.cdiv(M, STRIP), 3
    joined_ME = torch.empty(M, 3 * D, dtype=first_MD.dtype, device=first_MD.device)
    sums_SE = torch.empty(grid[1], 3 * D, dtype=torch.float32, device=first_MD.device)
    wrap_triton(joined_strip)[grid](
        first_MD.contiguous(),
        second_MD.contiguous(),
        third_MD.contiguous(),
        joined_ME,
        sums_SE,
        M,
        columns=D,
        STRIP=STRIP,
        ROWS=JOINED.rows,
        BLOCK=JOINED.columns,
        STAGES=JOINED.stages,
        num_warps=JOINED.warps,
    )
    return joined_ME, sums_SE.sum(0)


@triton.jit
def norm_strip(
    values,
    grad_y,
    grad_residual,
    means,
    inverses,
    weight,
    gradient,
    sums,
    rows,
    columns: tl.constexpr,
    SUMS: tl.constexpr,
    STRIP: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Compute the backward pass of a function with the two outputs x and LayerNorm(x), for one strip of rows.

    Write the gradient of x. Also store sums over the rows of the strip, which are parts of the gradients of the norm's weight and
    bias. If SUMS is 4, also store the column sums of the gradient of x, and of the gradient from the residual stream.
    """
    strip, column = tl.program_id(0), tl.arange(0, BLOCK)[None, :]
    inside = column < columns
    w = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    grad_weight, grad_bias = tl.zeros([BLOCK], tl.float32), tl.zeros([BLOCK], tl.float32)
    before, after = tl.zeros([BLOCK], tl.float32), tl.zeros([BLOCK], tl.float32)
    for first in tl.range(0, STRIP, ROWS, num_stages=STAGES):
        row = strip.to(tl.int64) * STRIP + first + tl.arange(0, ROWS)[:, None]
        # A program needs whole rows here, so `inside` only masks the padding of the width to a power of 2.
        mask, offsets = inside & (row < rows), row * columns + column
        mean = tl.load(means + row, mask=row < rows, other=0.0)
        inverse = tl.load(inverses + row, mask=row < rows, other=0.0)
        x = tl.load(values + offsets, mask=mask, other=0.0).to(tl.float32)
        g = tl.load(grad_y + offsets, mask=mask, other=0.0).to(tl.float32)
        residual = tl.load(grad_residual + offsets, mask=mask, other=0.0).to(tl.float32)
        # Padding is read as x = 0, so x - mean would be -mean there.
        normalized = tl.where(mask, (x - mean) * inverse, 0.0)
        weighted = g * w
        mean_weighted = tl.sum(weighted, 1)[:, None] / columns
        mean_product = tl.sum(weighted * normalized, 1)[:, None] / columns
        # With x̂ the normalized row: dx = (g·w - mean(g·w) - x̂·mean(g·w·x̂)) / σ, plus the gradient that bypasses the norm.
        grad_x = inverse * (weighted - mean_weighted - normalized * mean_product) + residual
        tl.store(gradient + offsets, grad_x.to(gradient.dtype.element_ty), mask=mask)
        grad_weight += tl.sum(g * normalized, 0)
        grad_bias += tl.sum(g, 0)
        if SUMS == 4:
            # In the padding, grad_x contains a mean, so unlike the loaded gradients it is not 0.
            before += tl.sum(tl.where(mask, grad_x, 0.0), 0)
            after += tl.sum(residual, 0)
    column = tl.arange(0, BLOCK)
    # `sums` has the shape [S, SUMS, D].
    place, inside = sums + SUMS * strip * columns + column, column < columns
    tl.store(place, grad_weight, mask=inside)
    tl.store(place + columns, grad_bias, mask=inside)
    if SUMS == 4:
        tl.store(place + 2 * columns, before, mask=inside)
        tl.store(place + 3 * columns, after, mask=inside)


@triton_op("hyperion::norm_gradient", mutates_args={})
def norm_gradient(
    x_BTD: Tensor,
    grad_y_BTD: Tensor,
    grad_residual_BTD: Tensor,
    mean_BT1: Tensor,
    inverse_BT1: Tensor,
    weight_D: Tensor,
    biases: bool,
) -> tuple[Tensor, Tensor]:
    """Return the gradient of x, where x feeds both the residual stream and y = LayerNorm(x).

    Also return the gradients of the weight and the bias of the norm. These are sums over the rows, computed in the same pass.

    Args:
        x_BTD: the saved tensor x. It must not be a view, because the compiler would compute x a second time for a view.
        grad_y_BTD: gradient of y.
        grad_residual_BTD: gradient of x from the residual stream, which bypasses the norm.
        mean_BT1, inverse_BT1: mean and reciprocal standard deviation of each row, in float32.
        biases: also return the column sums of the gradient of x and of grad_residual_BTD. They are the gradients of the biases of
            the two layers that write to the residual stream.

    Returns:
        The gradient of x, and the sums in float32. The sums have shape [2, D] with the gradients of weight and bias. With
        `biases` their shape is [4, D], and rows 2 and 3 are the column sums of the gradient of x and of grad_residual_BTD.
    """
    D, grad_x_BTD = x_BTD.shape[-1], torch.empty_like(x_BTD, memory_format=torch.contiguous_format)
    M, tile = x_BTD.numel() // D, norm_tile(D)
    strips = triton.cdiv(M, STRIP)
    sums_SRD = torch.empty(strips, 4 if biases else 2, D, dtype=torch.float32, device=x_BTD.device)
    wrap_triton(norm_strip)[(strips,)](
        x_BTD.contiguous(),
        grad_y_BTD.contiguous(),
        grad_residual_BTD.contiguous(),
        mean_BT1,
        inverse_BT1,
        weight_D,
        grad_x_BTD,
        sums_SRD,
        M,
        columns=D,
        SUMS=sums_SRD.shape[1],
        STRIP=STRIP,
        ROWS=tile.rows,
        BLOCK=tile.columns,
        STAGES=tile.stages,
        num_warps=tile.warps,
    )
    return grad_x_BTD, sums_SRD.sum(0)


@triton.jit
def position_sum(
    values, sums, sequences, rows, columns: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr
):
    """Sum `values` of shape [sequences, positions, columns] over the sequences, for one tile of positions and columns."""
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)[:, None]
    column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)[None, :]
    mask, total = (row < rows) & (column < columns), tl.zeros([ROWS, BLOCK], tl.float32)
    here = values + row * columns + column
    for _ in tl.range(0, sequences, num_stages=STAGES):
        total += tl.load(here, mask=mask, other=0.0).to(tl.float32)
        here += rows * columns  # advance the pointer, because a 32-bit offset from the start would overflow for a large batch
    tl.store(sums + row * columns + column, total, mask=mask)


@triton_op("hyperion::position_gradient", mutates_args={})
def position_gradient(grad_x_BTD: Tensor) -> Tensor:
    """Return the gradient of the positions: the sum of grad_x_BTD over the sequences, [T, D] in float32."""
    B, T, D = grad_x_BTD.shape
    sums_TD = torch.empty(T, D, dtype=torch.float32, device=grad_x_BTD.device)
    wrap_triton(position_sum)[triton.cdiv(D, POSITIONS.columns), triton.cdiv(T, POSITIONS.rows)](
        grad_x_BTD.contiguous(),
        sums_TD,
        B,
        T,
        columns=D,
        ROWS=POSITIONS.rows,
        BLOCK=POSITIONS.columns,
        STAGES=POSITIONS.stages,
        num_warps=POSITIONS.warps,
    )
    return sums_TD
