"""The kernels of `block_gradients`, the same for AMD and NVIDIA, and operators around them that torch.compile knows.

Each program has a strip of rows: it writes the gradient that goes on, and keeps sums over its rows, which it writes once,
in float32. (Where few warps hold whole rows, a thread has the same columns of several and adds them without the others.) The
strips' sums are added afterwards, always in the same order.

Shape suffixes: M rows (tokens), D and E columns, S strips; B sequences of T positions.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.library import triton_op, wrap_triton

STRIP = 64  # rows


@dataclass(frozen=True)
class Tile:
    """How a program goes through its strip: rows and columns at once, warps, and turns whose loads are under way."""

    rows: int
    columns: int
    warps: int
    stages: int


# The fastest of some twenty each on an H200, with 65536 rows of GPT-2's width.
GELU, JOINED, POSITIONS = Tile(8, 512, 2, 3), Tile(8, 128, 2, 3), Tile(4, 128, 4, 1)


def norm_tile(width: int) -> Tile:
    """Of a LayerNorm, which needs whole rows: as many at once as registers hold, and one where a row alone is long."""
    columns = triton.next_power_of_2(width)
    return Tile(max(1, min(4, 4096 // columns)), columns, max(1, min(8, columns // 512)), 2 if columns <= 2048 else 1)


@triton.jit
def gelu_strip(
    of_y,
    products,
    gradient,
    sums,
    rows,
    columns: tl.constexpr,
    STRIP: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Of y = GELU(x) in the tanh form: the gradient of x, and its sums over a strip's rows."""
    strip, column = tl.program_id(1), tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)[None, :]
    inside = column < columns
    total = tl.zeros([BLOCK], tl.float32)
    for first in tl.range(0, STRIP, ROWS, num_stages=STAGES):
        row = strip.to(tl.int64) * STRIP + first + tl.arange(0, ROWS)[:, None]
        there, at = inside & (row < rows), row * columns + column
        x = tl.load(products + at, mask=there, other=0.0).to(tl.float32)
        g = tl.load(of_y + at, mask=there, other=0.0).to(tl.float32)
        # x·sigmoid(z) with z = 2 √(2/π) (x + 0.044715 x³), and z' = 2 √(2/π) (1 + 3·0.044715 x²)
        share = 1 / (1 + tl.exp(-1.5957691216057308 * (x + 0.044715 * x * x * x)))
        of_x = g * (share + x * share * (1 - share) * 1.5957691216057308 * (1 + 0.134145 * x * x))
        tl.store(gradient + at, of_x.to(gradient.dtype.element_ty), mask=there)
        total += tl.sum(of_x, 0)
    column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(sums + strip * columns + column, total, mask=column < columns)


@triton_op("hyperion::gelu_gradient", mutates_args={})
def gelu_gradient(of_y_ME: Tensor, x_ME: Tensor) -> tuple[Tensor, Tensor]:
    """The gradient of x_ME for y = GELU(x), and the sum of all its rows in float32."""
    (M, E), of_x_ME = x_ME.shape, torch.empty_like(x_ME, memory_format=torch.contiguous_format)
    grid = triton.cdiv(E, GELU.columns), triton.cdiv(M, STRIP)
    sums_SE = torch.empty(grid[1], E, dtype=torch.float32, device=x_ME.device)
    wrap_triton(gelu_strip)[grid](
        of_y_ME.contiguous(),
        x_ME.contiguous(),
        of_x_ME,
        sums_SE,
        M,
        columns=E,
        STRIP=STRIP,
        ROWS=GELU.rows,
        BLOCK=GELU.columns,
        STAGES=GELU.stages,
        num_warps=GELU.warps,
    )
    return of_x_ME, sums_SE.sum(0)


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
    """Three matrices side by side, and the sums of a strip's rows."""
    part, strip = tl.program_id(2), tl.program_id(1)
    source = first_part if part == 0 else (second_part if part == 1 else third_part)
    column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)[None, :]
    inside = column < columns
    total = tl.zeros([ROWS, BLOCK], tl.float32)
    for first in tl.range(0, STRIP, ROWS, num_stages=STAGES):
        row = strip.to(tl.int64) * STRIP + first + tl.arange(0, ROWS)[:, None]
        there = inside & (row < rows)
        x = tl.load(source + row * columns + column, mask=there, other=0.0)
        tl.store(joined + (3 * row + part) * columns + column, x, mask=there)
        total += x.to(tl.float32)
    column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(sums + (3 * strip + part) * columns + column, tl.sum(total, 0), mask=column < columns)


@triton_op("hyperion::joined_gradient", mutates_args={})
def joined_gradient(first_MD: Tensor, second_MD: Tensor, third_MD: Tensor) -> tuple[Tensor, Tensor]:
    """The three side by side, [M, 3 D], and the sum of all rows, [3 D] in float32."""
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
    of_y,
    of_x,
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
    """Of y = LayerNorm(x), beside x itself: the gradient of x, and a strip's sums of those of weight and bias; where SUMS is
    4, also of x's gradient and of the part that comes past the norm."""
    strip, column = tl.program_id(0), tl.arange(0, BLOCK)[None, :]
    inside = column < columns
    w = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    of_weight, of_bias = tl.zeros([BLOCK], tl.float32), tl.zeros([BLOCK], tl.float32)
    before, after = tl.zeros([BLOCK], tl.float32), tl.zeros([BLOCK], tl.float32)
    for first in tl.range(0, STRIP, ROWS, num_stages=STAGES):
        row = strip.to(tl.int64) * STRIP + first + tl.arange(0, ROWS)[:, None]
        there, at = inside & (row < rows), row * columns + column
        mean = tl.load(means + row, mask=row < rows, other=0.0)
        inverse = tl.load(inverses + row, mask=row < rows, other=0.0)
        x = tl.load(values + at, mask=there, other=0.0).to(tl.float32)
        g = tl.load(of_y + at, mask=there, other=0.0).to(tl.float32)
        beside = tl.load(of_x + at, mask=there, other=0.0).to(tl.float32)
        normed = tl.where(there, (x - mean) * inverse, 0.0)
        weighed = g * w
        shared = tl.sum(weighed, 1)[:, None] / columns
        along = tl.sum(weighed * normed, 1)[:, None] / columns
        whole = inverse * (weighed - shared - normed * along) + beside
        tl.store(gradient + at, whole.to(gradient.dtype.element_ty), mask=there)
        of_weight += tl.sum(g * normed, 0)
        of_bias += tl.sum(g, 0)
        if SUMS == 4:
            before += tl.sum(tl.where(there, whole, 0.0), 0)
            after += tl.sum(beside, 0)
    column = tl.arange(0, BLOCK)
    place, inside = sums + SUMS * strip * columns + column, column < columns
    tl.store(place, of_weight, mask=inside)
    tl.store(place + columns, of_bias, mask=inside)
    if SUMS == 4:
        tl.store(place + 2 * columns, before, mask=inside)
        tl.store(place + 3 * columns, after, mask=inside)


@triton_op("hyperion::norm_gradient", mutates_args={})
def norm_gradient(
    x_BTD: Tensor, of_y_BTD: Tensor, of_x_BTD: Tensor, mean_BT1: Tensor, inverse_BT1: Tensor, weight_D: Tensor, biases: bool
) -> tuple[Tensor, Tensor]:
    """For y = LayerNorm(x), x itself used too: the gradient of x, and [2, D] float32: those of weight and bias.

    Args:
        x_BTD: as it was saved: of a view of it the compiler would make x twice, once for the view.
        of_y_BTD: gradient of y.
        of_x_BTD: gradient of x from where it was used itself.
        mean_BT1, inverse_BT1: of each row its mean and one over its standard deviation, in float32.
        biases: two more rows of sums, [4, D]: of the gradient of x, and of of_x_BTD.
    """
    D, gradient_BTD = x_BTD.shape[-1], torch.empty_like(x_BTD, memory_format=torch.contiguous_format)
    M, tile = x_BTD.numel() // D, norm_tile(D)
    strips = triton.cdiv(M, STRIP)
    sums_SRD = torch.empty(strips, 4 if biases else 2, D, dtype=torch.float32, device=x_BTD.device)
    wrap_triton(norm_strip)[(strips,)](
        x_BTD.contiguous(),
        of_y_BTD.contiguous(),
        of_x_BTD.contiguous(),
        mean_BT1,
        inverse_BT1,
        weight_D,
        gradient_BTD,
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
    return gradient_BTD, sums_SRD.sum(0)


@triton.jit
def position_sum(
    values, sums, sequences, rows, columns: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr
):
    """The sum over all sequences, for some positions and columns."""
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)[:, None]
    column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)[None, :]
    there, total = (row < rows) & (column < columns), tl.zeros([ROWS, BLOCK], tl.float32)
    here = values + row * columns + column
    for _ in tl.range(0, sequences, num_stages=STAGES):
        total += tl.load(here, mask=there, other=0.0).to(tl.float32)
        here += rows * columns  # a step of the pointer: an offset in 32 bits does not reach through a large batch
    tl.store(sums + row * columns + column, total, mask=there)


@triton_op("hyperion::position_gradient", mutates_args={})
def position_gradient(of_x_BTD: Tensor) -> Tensor:
    """The sum over the sequences, [T, D] in float32."""
    B, T, D = of_x_BTD.shape
    sums_TD = torch.empty(T, D, dtype=torch.float32, device=of_x_BTD.device)
    wrap_triton(position_sum)[triton.cdiv(D, POSITIONS.columns), triton.cdiv(T, POSITIONS.rows)](
        of_x_BTD.contiguous(),
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
