"""The kernels of `block_gradients`, the same for AMD and NVIDIA, and operators around them that torch.compile knows.

Each program has a strip of rows: it writes the gradient that goes on, and keeps sums over its rows, which it writes once,
in float32. The strips' sums are added afterwards, always in the same order.

Shape suffixes: M rows (tokens), D and E columns, S strips.
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
GELU, JOINED = Tile(2, 1024, 4, 1), Tile(8, 128, 2, 3)


@triton.jit
def gelu_strip(
    of_y, products, gradient, sums, rows,
    columns: tl.constexpr, STRIP: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Of y = GELU(x) in the tanh form: the gradient of x, and its sums over a strip's rows."""
    strip, column = tl.program_id(1), tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)[None, :]
    inside = column < columns
    total = tl.zeros([ROWS, BLOCK], tl.float32)
    for first in tl.range(0, STRIP, ROWS, num_stages=STAGES):
        row = strip.to(tl.int64) * STRIP + first + tl.arange(0, ROWS)[:, None]
        there, at = inside & (row < rows), row * columns + column
        x = tl.load(products + at, mask=there, other=0.0).to(tl.float32)
        g = tl.load(of_y + at, mask=there, other=0.0).to(tl.float32)
        # x·sigmoid(z) with z = 2 √(2/π) (x + 0.044715 x³), and z' = 2 √(2/π) (1 + 3·0.044715 x²)
        share = 1 / (1 + tl.exp(-1.5957691216057308 * (x + 0.044715 * x * x * x)))
        of_x = g * (share + x * share * (1 - share) * 1.5957691216057308 * (1 + 0.134145 * x * x))
        tl.store(gradient + at, of_x.to(gradient.dtype.element_ty), mask=there)
        total += of_x
    column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(sums + strip * columns + column, tl.sum(total, 0), mask=column < columns)


@triton_op("hyperion::gelu_gradient", mutates_args={})
def gelu_gradient(of_y_ME: Tensor, x_ME: Tensor) -> tuple[Tensor, Tensor]:
    """The gradient of x_ME for y = GELU(x), and the sum of all its rows in float32."""
    (M, E), of_x_ME = x_ME.shape, torch.empty_like(x_ME, memory_format=torch.contiguous_format)
    grid = triton.cdiv(E, GELU.columns), triton.cdiv(M, STRIP)
    sums_SE = torch.empty(grid[1], E, dtype=torch.float32, device=x_ME.device)
    wrap_triton(gelu_strip)[grid](
        of_y_ME.contiguous(), x_ME.contiguous(), of_x_ME, sums_SE, M,
        columns=E, STRIP=STRIP, ROWS=GELU.rows, BLOCK=GELU.columns, STAGES=GELU.stages, num_warps=GELU.warps,
    )  # fmt: skip
    return of_x_ME, sums_SE.sum(0)


@triton.jit
def joined_strip(
    first_part, second_part, third_part, joined, sums, rows,
    columns: tl.constexpr, STRIP: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
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
        first_MD.contiguous(), second_MD.contiguous(), third_MD.contiguous(), joined_ME, sums_SE, M,
        columns=D, STRIP=STRIP, ROWS=JOINED.rows, BLOCK=JOINED.columns, STAGES=JOINED.stages, num_warps=JOINED.warps,
    )  # fmt: skip
    return joined_ME, sums_SE.sum(0)
