"""Triton kernels for the matrix product on AMD and NVIDIA GPUs.

`matmul_blocks` runs on every GPU. Each program computes one block of the output. Programs with consecutive numbers compute blocks
in a narrow band of rows, so that their operands are still in the cache. Loads and stores are masked at the edges.

`matmul_persistent` runs on NVIDIA GPUs of compute capability 9.0, for elements of 2 bytes. It starts one program for each
multiprocessor, and each program computes several blocks. So the loads of the next block overlap with the stores of the previous
one. Blocks are read and written through tensor descriptors, which return zero beyond the edges. Rows must start at multiples of
16 bytes.

For each combination of M, N and K, the settings are chosen by timing (`triton.autotune`).

Shape suffixes: M rows and N columns of the output, K the dimension that is summed.
"""

from dataclasses import dataclass
from typing import Any

import torch
import triton  # pyright: ignore[reportMissingImports] - only PyTorch's GPU builds contain it
import triton.language as tl  # pyright: ignore[reportMissingImports]
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor  # pyright: ignore[reportMissingImports]

from hyperion.kernels.typed_triton import autotune, jit

# If K is a multiple of this number, it is a multiple of every BLOCK_K, and the loop over K needs no mask.
_EVEN = 128


@dataclass(frozen=True)
class MatmulTile:
    """Launch settings of a matrix product.

    Args:
        rows, columns, depth: sizes of a block in M, N and K.
        warps: number of warps of a program.
        stages: number of pipeline stages of the loads.
        group: number of block rows in a band.
    """

    rows: int
    columns: int
    depth: int
    warps: int
    stages: int
    group: int = 8

    @property
    def constants(self) -> dict[str, int]:
        """The compile-time constants of the kernels."""
        return {"BLOCK_M": self.rows, "BLOCK_N": self.columns, "BLOCK_K": self.depth, "GROUP": self.group}


# These tiles were chosen by timing on an H200, for elements of 2 bytes. The rows of the chapter on kernels show their speed.
HOPPER: tuple[MatmulTile, ...] = (
    MatmulTile(128, 256, 64, 8, 3),
    MatmulTile(128, 256, 64, 8, 3, 16),
    MatmulTile(256, 128, 64, 8, 4),
)
# These tiles compile without spills for their architectures. They were not timed.
CDNA: tuple[MatmulTile, ...] = (MatmulTile(128, 128, 32, 8, 2), MatmulTile(128, 64, 32, 4, 2), MatmulTile(256, 128, 32, 8, 2))
SMALL: tuple[MatmulTile, ...] = (MatmulTile(128, 128, 32, 8, 3), MatmulTile(128, 64, 32, 4, 3), MatmulTile(64, 64, 32, 4, 3))


@jit
def _block_of(number, M, N, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, GROUP: tl.constexpr):
    """Return the block row and block column of an output block. Blocks are numbered by bands. A band has GROUP block rows."""
    across = tl.cdiv(N, BLOCK_N)
    band = number // (GROUP * across) * GROUP
    # The last band may have fewer block rows.
    height = tl.minimum(tl.cdiv(M, BLOCK_M) - band, GROUP)
    inside = number % (GROUP * across)
    # Within a band, count down a column first, so that consecutive programs read the same columns of B and few rows of A.
    return band + inside % height, inside // height


@jit
def matmul_blocks(
    a,
    b,
    c,
    M,
    N,
    K,
    EVEN: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Compute one block of C = A·B. All matrices are contiguous. If EVEN, K must be a multiple of BLOCK_K."""
    block_row, block_column = _block_of(tl.program_id(0), M, N, BLOCK_M, BLOCK_N, GROUP)
    # 64 bits, because offsets in a large matrix exceed 2^31.
    row = (block_row * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64)[:, None]
    column = (block_column * BLOCK_N + tl.arange(0, BLOCK_N)).to(tl.int64)[None, :]
    inner = tl.arange(0, BLOCK_K)
    a_place, b_place = a + row * K + inner[None, :], b + inner.to(tl.int64)[:, None] * N + column
    total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for first in tl.range(0, K, BLOCK_K, num_stages=STAGES):
        if EVEN:
            # Only the edges in M and N are masked. These masks do not change in the loop.
            a_block = tl.load(a_place, mask=row < M, other=0.0)
            b_block = tl.load(b_place, mask=column < N, other=0.0)
        else:
            a_block = tl.load(a_place, mask=(row < M) & (first + inner[None, :] < K), other=0.0)
            # Elements beyond K must be zero, because they enter the sum. Those beyond M and N affect no stored result.
            b_block = tl.load(b_place, mask=(column < N) & (first + inner[:, None] < K), other=0.0)
        total = tl.dot(a_block, b_block, total, input_precision="ieee")
        a_place += BLOCK_K
        b_place += BLOCK_K * N
    tl.store(c + row * N + column, total.to(c.dtype.element_ty), mask=(row < M) & (column < N))


@jit
def matmul_persistent(
    a,
    b,
    c,
    M,
    N,
    K,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP: tl.constexpr,
    STAGES: tl.constexpr,
    PROGRAMS: tl.constexpr,
):
    """Compute every PROGRAMS-th block of C = A·B. The matrices are tensor descriptors."""
    blocks = tl.cdiv(M, BLOCK_M) * tl.cdiv(N, BLOCK_N)
    steps = tl.cdiv(K, BLOCK_K)
    # `flatten` joins the loops over blocks and over K. A second counter for the stores lets the loads run ahead.
    stored = tl.program_id(0) - PROGRAMS
    for number in tl.range(tl.program_id(0), blocks, PROGRAMS, flatten=True, num_stages=STAGES):
        block_row, block_column = _block_of(number, M, N, BLOCK_M, BLOCK_N, GROUP)
        total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        # No mask over K: beyond the edges, descriptors read zeros, which do not change the sum.
        for step in range(steps):
            a_block = a.load([block_row * BLOCK_M, step * BLOCK_K])
            b_block = b.load([step * BLOCK_K, block_column * BLOCK_N])
            total = tl.dot(a_block, b_block, total, input_precision="ieee")
        stored += PROGRAMS
        block_row, block_column = _block_of(stored, M, N, BLOCK_M, BLOCK_N, GROUP)
        # Store in two halves: this halves the copy in shared memory, which leaves room for more pipeline stages. Triton cannot
        # slice a block, but `split` separates a last dimension of size 2, so move the halves there.
        left, right = total.reshape([BLOCK_M, 2, BLOCK_N // 2]).permute(0, 2, 1).split()
        c.store([block_row * BLOCK_M, block_column * BLOCK_N], left.to(c.dtype))
        c.store([block_row * BLOCK_M, block_column * BLOCK_N + BLOCK_N // 2], right.to(c.dtype))


def _set_blocks(arguments: dict[str, Any]) -> None:
    """Set the block shapes of the descriptors before a launch. They depend on the settings that the search tries."""
    rows, columns, depth = (arguments[name] for name in ("BLOCK_M", "BLOCK_N", "BLOCK_K"))
    arguments["a"].block_shape, arguments["b"].block_shape = [rows, depth], [depth, columns]
    arguments["c"].block_shape = [rows, columns // 2]


def _configurations(tiles: tuple[MatmulTile, ...], hook: Any = None) -> list:
    return [
        triton.Config(tile.constants | {"STAGES": tile.stages}, num_warps=tile.warps, num_stages=tile.stages, pre_hook=hook)
        for tile in tiles
    ]


_KEY = ["M", "N", "K"]
_searched_persistent = autotune(_configurations(HOPPER, _set_blocks), key=_KEY)(matmul_persistent)
_searched_blocks: dict[tuple[MatmulTile, ...], Any] = {
    tiles: autotune(_configurations(tiles), key=_KEY)(matmul_blocks) for tiles in dict.fromkeys((CDNA, SMALL))
}


def tiles_for(backend: str, architecture: int | str) -> tuple[MatmulTile, ...]:
    """Return the settings that the search tries. With HOPPER the persistent kernel runs, otherwise `matmul_blocks`."""
    if backend == "hip":
        return CDNA
    return HOPPER if architecture == 90 else SMALL


def has_descriptors(tensor: Tensor) -> bool:
    """Return True if the persistent kernel can read or write this contiguous matrix.

    Its rows must start at multiples of 16 bytes. Its elements must have 2 bytes: blocks of larger elements do not fit into shared
    memory.
    """
    return tensor.itemsize == 2 and tensor.data_ptr() % 16 == 0 and tensor.shape[1] * tensor.itemsize % 16 == 0


def run_matmul(a_MK: Tensor, b_KN: Tensor, tiles: tuple[MatmulTile, ...]) -> tuple[Tensor, MatmulTile]:
    """Return A·B in the dtype of A, and the settings that the search chose. The operands must be contiguous."""
    (M, K), N = a_MK.shape, b_KN.shape[1]
    c_MN = torch.empty(M, N, dtype=a_MK.dtype, device=a_MK.device)
    if tiles == HOPPER and all(has_descriptors(one) for one in (a_MK, b_KN, c_MN)):
        search, processors = _searched_persistent, torch.cuda.get_device_properties(a_MK.device).multi_processor_count
        # The block shapes are placeholders: the pre_hook of each configuration sets them before the launch.
        blocks = [TensorDescriptor.from_tensor(one, [16, 16]) for one in (a_MK, b_KN, c_MN)]
        # The grid is a function, because the number of blocks depends on the settings that the search tries.
        search[lambda chosen: (min(processors, _count(M, N, chosen)),)](*blocks, M, N, K, PROGRAMS=processors)
    else:
        search = _searched_blocks[SMALL if tiles == HOPPER else tiles]
        search[lambda chosen: (_count(M, N, chosen),)](a_MK, b_KN, c_MN, M, N, K, EVEN=K % _EVEN == 0)
    best = search.best_config
    rows, columns, depth, stages, group = (best.kwargs[name] for name in ("BLOCK_M", "BLOCK_N", "BLOCK_K", "STAGES", "GROUP"))
    return c_MN, MatmulTile(rows, columns, depth, best.num_warps, stages, group)


def _count(M: int, N: int, chosen: dict[str, int]) -> int:
    """Return the number of blocks of the output."""
    return triton.cdiv(M, chosen["BLOCK_M"]) * triton.cdiv(N, chosen["BLOCK_N"])
