"""Triton kernels for attention, forward and backward. Their memory grows linearly with the sequence length.

A program of the forward pass holds one block of queries. It reads the keys and values block by block and keeps, for each query,
the largest score, the sum of exponentials, and the weighted sum of values. When the largest score grows, the sums are rescaled.
So the matrix of scores is never stored. In causal attention, only the blocks on the diagonal need a mask; earlier blocks of keys
need none, and later ones are not read. The scores are multiplied by log2(e), so that powers of 2 replace exponentials.

The backward pass has three kernels. `attention_delta` computes, for each query, the dot product of the output and its gradient.
`attention_key_gradient` holds a block of keys and values and reads the queries, and `attention_query_gradient` holds a block of
queries and reads the keys and values. Both recompute the probabilities from the scores and the stored logarithm of the sum. They
do not use atomic additions, so the result is deterministic.

On NVIDIA GPUs of compute capability 9.0, the kernels access blocks through tensor descriptors, whose copies are executed by the
copy engine of the multiprocessor. On other devices, they compute an address for each element.

Source: Dao, FlashAttention-2: Faster Attention with Better Parallelism and Work Partitioning, 2023. Milakov and Gimelshein,
Online normalizer calculation for softmax, 2018.

Shape suffixes: B sequences, H query heads, K key-value heads, T positions, D features of a head; N = B·H or B·K.
"""

import math
from dataclasses import dataclass, replace
from typing import Any

import torch
import triton  # pyright: ignore[reportMissingImports] - only PyTorch's GPU builds contain it
import triton.language as tl  # pyright: ignore[reportMissingImports]
from torch import Tensor
from torch.autograd.function import once_differentiable
from triton.tools.tensor_descriptor import TensorDescriptor  # pyright: ignore[reportMissingImports]

from hyperion.kernels.typed_triton import jit

# exp(x) = 2^(x·log2(e)).
LOG2_E = 1.4426950408889634


@dataclass(frozen=True)
class Tile:
    """Launch settings of an attention kernel.

    Args:
        held: number of rows of the block that a program holds: queries in the forward pass and for the query gradient, keys for
            the key gradient. It must be a multiple of `read`.
        read: number of rows of each block that a program reads in its loop.
        warps: number of warps of a program.
        stages: number of pipeline stages of the loads.
        descriptors: if True, read blocks through tensor descriptors.
    """

    held: int
    read: int
    warps: int
    stages: int
    descriptors: bool = True


@dataclass(frozen=True)
class Tiles:
    """Launch settings of the three attention kernels that multiply matrices."""

    forward: Tile
    keys: Tile
    queries: Tile

    def without_descriptors(self) -> "Tiles":
        """Return the same tiles for a device that has no tensor descriptors."""
        return Tiles(*(replace(tile, descriptors=False) for tile in (self.forward, self.keys, self.queries)))


# These tiles were chosen by timing on an H200. The rows of the chapter on kernels show their speed.
HOPPER = {
    64: Tiles(Tile(64, 64, 4, 3), Tile(64, 64, 4, 2), Tile(64, 64, 4, 2)),
    128: Tiles(Tile(64, 64, 4, 3), Tile(64, 64, 4, 2), Tile(128, 64, 8, 3)),
}
# These tiles compile without spills for gfx90a and gfx942, which allow 64 KiB of LDS per program. They were not timed.
CDNA = {
    64: Tiles(Tile(128, 64, 4, 1), Tile(64, 32, 4, 1), Tile(64, 32, 4, 1)).without_descriptors(),
    128: Tiles(Tile(128, 32, 4, 1), Tile(64, 32, 4, 1), Tile(64, 32, 4, 1)).without_descriptors(),
}
# These tiles fit into the 100 KiB of shared memory of small NVIDIA GPUs. They were not timed.
SMALL = {
    64: Tiles(Tile(128, 64, 8, 2), Tile(64, 32, 4, 2), Tile(64, 32, 4, 2)).without_descriptors(),
    128: Tiles(Tile(64, 32, 4, 2), Tile(64, 32, 4, 1), Tile(64, 32, 4, 1)).without_descriptors(),
}
HEAD_DIMS = tuple(HOPPER)


def tiles_for(backend: str, architecture: int | str, features: int) -> Tiles:
    """Return the tiles for a device.

    Args:
        backend: "cuda" or "hip".
        architecture: compute capability such as 90, or the name of an AMD architecture such as "gfx90a".
        features: number of features of a head, 64 or 128.
    """
    if backend == "hip":
        return CDNA[features]
    return HOPPER[features] if architecture == 90 else SMALL[features]


@jit
def _load_rows(source, head, first, rows, ROWS: tl.constexpr, D: tl.constexpr, DESCRIPTORS: tl.constexpr):
    """Load a block of shape [ROWS, D] from one head. Rows with an index of `rows` or more are zero."""
    if DESCRIPTORS:
        # The block of the descriptor is [1, ROWS, D]. It ends at row T of its head and never reaches into the next head.
        block = source.load([head, first, 0]).reshape([ROWS, D])
    else:
        row = first + tl.arange(0, ROWS)
        # 64 bits, because N·T·D can exceed 2^31 elements.
        offsets = (head.to(tl.int64) * rows + row)[:, None] * D + tl.arange(0, D)[None, :]
        block = tl.load(source + offsets, mask=row[:, None] < rows, other=0.0)
    return block


@jit
def _store_rows(target, values, head, first, rows, ROWS: tl.constexpr, D: tl.constexpr, DESCRIPTORS: tl.constexpr):
    """Store a block of shape [ROWS, D] in one head. Rows with an index of `rows` or more are not stored."""
    if DESCRIPTORS:
        target.store([head, first, 0], values.reshape([1, ROWS, D]))
    else:
        row = first + tl.arange(0, ROWS)
        offsets = (head.to(tl.int64) * rows + row)[:, None] * D + tl.arange(0, D)[None, :]
        tl.store(target + offsets, values, mask=row[:, None] < rows)


@jit
def _keys_of(first_query, rows, HELD: tl.constexpr, READ: tl.constexpr, CAUSAL: tl.constexpr):
    """Return (unmasked, last) for a block of queries.

    The block reads keys 0 to `unmasked` - 1 without a mask, and keys `unmasked` to `last` - 1 with a mask.
    """
    if CAUSAL:
        # `held` is a multiple of `read`, so the keys before the first query form whole blocks that all queries see.
        unmasked, last = first_query, tl.minimum(first_query + HELD, rows)
    else:
        # Without causality, only the last, incomplete block of keys needs a mask.
        unmasked, last = rows // READ * READ, rows
    return unmasked, last


@jit
def _attend(
    total,
    weight,
    largest,
    q,
    keys,
    values,
    key_head,
    first_query,
    first,
    last,
    rows,
    scale,
    HELD: tl.constexpr,
    READ: tl.constexpr,
    D: tl.constexpr,
    STAGES: tl.constexpr,
    DESCRIPTORS: tl.constexpr,
    CAUSAL: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Process keys `first` to `last` - 1 for a block of queries, and return the updated state of the softmax.

    The state of each query consists of `total`, the weighted sum of the values; `weight`, the sum of the exponentials; and
    `largest`, the largest score.
    """
    query = first_query + tl.arange(0, HELD)[:, None]
    for start in tl.range(first, last, READ, num_stages=STAGES):
        k = _load_rows(keys, key_head, start, rows, READ, D, DESCRIPTORS)
        # Scores of shape [HELD, READ]. "ieee" affects float32 operands only: they are not rounded to TF32.
        scores = tl.dot(q, k.T, input_precision="ieee")
        if MASKED:
            key = start + tl.arange(0, READ)[None, :]
            visible = key <= query if CAUSAL else key < rows
            # Every query sees a key in its first masked block or before it, so `larger` is finite and -inf - (-inf) does not
            # occur.
            scores = tl.where(visible, scores * scale, float("-inf"))
            larger = tl.maximum(largest, tl.max(scores, 1))
            p = tl.exp2(scores - larger[:, None])
        else:
            # The scale is positive, so the maximum can be scaled after the reduction: once per row instead of once per score.
            larger = tl.maximum(largest, tl.max(scores, 1) * scale)
            p = tl.exp2(scores * scale - larger[:, None])
        # In the first iteration, `largest` is -inf, so `shrink` is 2^-inf = 0 and the empty state adds nothing.
        shrink = tl.exp2(largest - larger)
        weight = weight * shrink + tl.sum(p, 1)
        total = total * shrink[:, None]
        v = _load_rows(values, key_head, start, rows, READ, D, DESCRIPTORS)
        # The operands of a matrix unit have the same dtype, so the probabilities are rounded to that of the values. The sum is
        # accumulated in float32.
        total = tl.dot(p.to(v.dtype), v, total, input_precision="ieee")
        largest = larger
    return total, weight, largest


@jit
def attention_forward(
    queries,
    keys,
    values,
    output,
    log_sums,
    scale,
    rows,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    CAUSAL: tl.constexpr,
    HELD: tl.constexpr,
    READ: tl.constexpr,
    STAGES: tl.constexpr,
    DESCRIPTORS: tl.constexpr,
):
    """Write the output of one block of queries, and log2 of the sum of exponentials of each query.

    `scale` is log2(e) times the scale of the scores. GROUP query heads share one key-value head.
    """
    # Later blocks of queries read more keys. They start first, so that no long program runs alone at the end.
    block, head = tl.num_programs(0) - 1 - tl.program_id(0), tl.program_id(1)
    first_query, key_head = block * HELD, head // GROUP
    q = _load_rows(queries, head, first_query, rows, HELD, D, DESCRIPTORS)
    total = tl.zeros([HELD, D], tl.float32)
    weight = tl.zeros([HELD], tl.float32)
    largest = tl.full([HELD], float("-inf"), tl.float32)
    unmasked, last = _keys_of(first_query, rows, HELD, READ, CAUSAL)
    # Process first the keys that need no mask, then those that need one. static_range compiles a separate loop for each.
    for masked in tl.static_range(2):
        total, weight, largest = _attend(
            total,
            weight,
            largest,
            q,
            keys,
            values,
            key_head,
            first_query,
            unmasked if masked else 0,
            last if masked else unmasked,
            rows,
            scale,
            HELD,
            READ,
            D,
            STAGES,
            DESCRIPTORS,
            CAUSAL,
            masked,
        )
    row = first_query + tl.arange(0, HELD)
    # The backward pass recomputes each probability as 2^(scale·score - log_sum). It needs this number per query, but no scores.
    tl.store(log_sums + head.to(tl.int64) * rows + row, largest + tl.log2(weight), mask=row < rows)
    result = (total / weight[:, None]).to(output.dtype if DESCRIPTORS else output.dtype.element_ty)
    _store_rows(output, result, head, first_query, rows, HELD, D, DESCRIPTORS)


@jit
def attention_delta(output, gradient, delta, rows, D: tl.constexpr, ROWS: tl.constexpr):
    """Write the dot product of output and gradient for each row. The rows are numbered across all heads."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    offsets = row[:, None] * D + tl.arange(0, D)[None, :]
    o = tl.load(output + offsets, mask=row[:, None] < rows, other=0.0).to(tl.float32)
    g = tl.load(gradient + offsets, mask=row[:, None] < rows, other=0.0).to(tl.float32)
    tl.store(delta + row, tl.sum(o * g, 1), mask=row < rows)


@jit
def attention_key_gradient(
    queries,
    keys,
    values,
    grad_output,
    log_sums,
    delta,
    grad_keys,
    grad_values,
    scale,
    natural_scale,
    rows,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    CAUSAL: tl.constexpr,
    HELD: tl.constexpr,
    READ: tl.constexpr,
    STAGES: tl.constexpr,
    DESCRIPTORS: tl.constexpr,
):
    """Write the gradients of one block of keys and values, summed over the query heads that share them.

    All score matrices are transposed, with shape [HELD, READ]. Every block is masked, although only those on the diagonal need
    it: a second loop for the other blocks would need more registers than a thread has.
    """
    first_key, key_head = tl.program_id(0) * HELD, tl.program_id(1)
    key = first_key + tl.arange(0, HELD)[:, None]
    k = _load_rows(keys, key_head, first_key, rows, HELD, D, DESCRIPTORS)
    v = _load_rows(values, key_head, first_key, rows, HELD, D, DESCRIPTORS)
    grad_k, grad_v = tl.zeros([HELD, D], tl.float32), tl.zeros([HELD, D], tl.float32)
    # With P = softmax and δ from `attention_delta`: dV += Pᵀ·dO, dS = P∘(dO·Vᵀ - δ), dK += dSᵀ·Q. Here all are transposed.
    for member in range(GROUP):
        head = key_head * GROUP + member
        first_row = head.to(tl.int64) * rows
        # In causal attention, no query before the first key of this block sees the block.
        for start in tl.range(first_key if CAUSAL else 0, rows, READ, num_stages=STAGES):
            query = start + tl.arange(0, READ)
            q = _load_rows(queries, head, start, rows, READ, D, DESCRIPTORS)
            # Beyond the last query, log_sum is infinite, so that the probability is 2^-inf = 0.
            log_sum = tl.load(log_sums + first_row + query, mask=query < rows, other=float("inf"))
            p = tl.exp2(tl.dot(k, q.T, input_precision="ieee") * scale - log_sum[None, :])
            if CAUSAL:
                p = tl.where(key <= query[None, :], p, 0.0)
            g = _load_rows(grad_output, head, start, rows, READ, D, DESCRIPTORS)
            grad_v = tl.dot(p.to(g.dtype), g, grad_v, input_precision="ieee")
            row_delta = tl.load(delta + first_row + query, mask=query < rows, other=0.0)
            # The sum starts at minus delta. A subtraction after it would need more registers than a thread has.
            start_values = tl.zeros([HELD, READ], tl.float32) - row_delta[None, :]
            grad_scores = p * tl.dot(v, g.T, start_values, input_precision="ieee")
            grad_k = tl.dot(grad_scores.to(q.dtype), q, grad_k, input_precision="ieee")
    # `scale` contains log2(e) for exp2. The gradient needs the scale without it, which is applied once, after the loop.
    grad_k = (grad_k * natural_scale).to(k.dtype)
    _store_rows(grad_keys, grad_k, key_head, first_key, rows, HELD, D, DESCRIPTORS)
    _store_rows(grad_values, grad_v.to(v.dtype), key_head, first_key, rows, HELD, D, DESCRIPTORS)


@jit
def _add_query_gradients(
    grad_q,
    q,
    g,
    log_sum,
    row_delta,
    keys,
    values,
    key_head,
    first_query,
    first,
    last,
    rows,
    scale,
    HELD: tl.constexpr,
    READ: tl.constexpr,
    D: tl.constexpr,
    STAGES: tl.constexpr,
    DESCRIPTORS: tl.constexpr,
    CAUSAL: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Add the gradients from keys `first` to `last` - 1 to `grad_q`.

    Keys beyond the last one are read as zero. Their score is 0, so their probability may be infinite and must be masked.
    """
    query = first_query + tl.arange(0, HELD)[:, None]
    for start in tl.range(first, last, READ, num_stages=STAGES):
        k = _load_rows(keys, key_head, start, rows, READ, D, DESCRIPTORS)
        p = tl.exp2(tl.dot(q, k.T, input_precision="ieee") * scale - log_sum[:, None])
        if MASKED:
            key = start + tl.arange(0, READ)[None, :]
            p = tl.where(key <= query if CAUSAL else key < rows, p, 0.0)
        v = _load_rows(values, key_head, start, rows, READ, D, DESCRIPTORS)
        grad_scores = p * (tl.dot(g, v.T, input_precision="ieee") - row_delta[:, None])
        grad_q = tl.dot(grad_scores.to(k.dtype), k, grad_q, input_precision="ieee")
    return grad_q


@jit
def attention_query_gradient(
    queries,
    keys,
    values,
    grad_output,
    log_sums,
    delta,
    grad_queries,
    scale,
    natural_scale,
    rows,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    CAUSAL: tl.constexpr,
    HELD: tl.constexpr,
    READ: tl.constexpr,
    STAGES: tl.constexpr,
    DESCRIPTORS: tl.constexpr,
):
    """Write the gradient of one block of queries."""
    block, head = tl.num_programs(0) - 1 - tl.program_id(0), tl.program_id(1)
    first_query, key_head = block * HELD, head // GROUP
    q = _load_rows(queries, head, first_query, rows, HELD, D, DESCRIPTORS)
    g = _load_rows(grad_output, head, first_query, rows, HELD, D, DESCRIPTORS)
    row = first_query + tl.arange(0, HELD)
    here = head.to(tl.int64) * rows + row
    log_sum = tl.load(log_sums + here, mask=row < rows, other=float("inf"))
    row_delta = tl.load(delta + here, mask=row < rows, other=0.0)
    grad_q = tl.zeros([HELD, D], tl.float32)
    unmasked, last = _keys_of(first_query, rows, HELD, READ, CAUSAL)
    for masked in tl.static_range(2):
        grad_q = _add_query_gradients(
            grad_q,
            q,
            g,
            log_sum,
            row_delta,
            keys,
            values,
            key_head,
            first_query,
            unmasked if masked else 0,
            last if masked else unmasked,
            rows,
            scale,
            HELD,
            READ,
            D,
            STAGES,
            DESCRIPTORS,
            CAUSAL,
            masked,
        )
    _store_rows(grad_queries, (grad_q * natural_scale).to(q.dtype), head, first_query, rows, HELD, D, DESCRIPTORS)


# Number of rows that a program of `attention_delta` processes.
DELTA_ROWS = 32


def _block(tensor_NTD: Tensor, rows: int, tile: Tile) -> Any:
    """Return the kernel argument for blocks of `rows` rows: a tensor descriptor, or the tensor, which is passed as a pointer."""
    if not tile.descriptors:
        return tensor_NTD
    return TensorDescriptor.from_tensor(tensor_NTD, [1, rows, tensor_NTD.shape[2]])


def constants_of(tile: Tile, group: int, features: int, causal: bool) -> dict[str, Any]:
    """Return the compile-time constants of an attention kernel."""
    return {
        "GROUP": group,
        "D": features,
        "CAUSAL": causal,
        "HELD": tile.held,
        "READ": tile.read,
        "STAGES": tile.stages,
        "DESCRIPTORS": tile.descriptors,
    }


def run_forward(q_NTD: Tensor, k_NTD: Tensor, v_NTD: Tensor, scale: float, causal: bool, tiles: Tiles) -> tuple[Tensor, Tensor]:
    """Run the forward pass of attention.

    Args:
        q_NTD, k_NTD, v_NTD: contiguous tensors. The number of query heads is a multiple of the number of key-value heads.

    Returns:
        The output, and for each query the log2 of its sum of exponentials, in float32.
    """
    (heads, rows, features), tile = q_NTD.shape, tiles.forward
    output_NTD = torch.empty_like(q_NTD)
    log_sums_NT = torch.empty(heads, rows, dtype=torch.float32, device=q_NTD.device)
    attention_forward[triton.cdiv(rows, tile.held), heads](
        _block(q_NTD, tile.held, tile),
        _block(k_NTD, tile.read, tile),
        _block(v_NTD, tile.read, tile),
        _block(output_NTD, tile.held, tile),
        log_sums_NT,
        scale * LOG2_E,
        rows,
        # N is B·H for queries and B·K for keys, so the quotient is H / K, and head // GROUP stays in the same sequence.
        **constants_of(tile, heads // len(k_NTD), features, causal),
        num_warps=tile.warps,
    )
    return output_NTD, log_sums_NT


def run_backward(
    grad_NTD: Tensor,
    q_NTD: Tensor,
    k_NTD: Tensor,
    v_NTD: Tensor,
    output_NTD: Tensor,
    log_sums_NT: Tensor,
    scale: float,
    causal: bool,
    tiles: Tiles,
) -> tuple[Tensor, Tensor, Tensor]:
    """Run the backward pass of attention. Return the gradients of queries, keys and values. All tensors must be contiguous."""
    heads, rows, features = q_NTD.shape
    group = heads // len(k_NTD)
    delta_NT = torch.empty_like(log_sums_NT)
    attention_delta[(triton.cdiv(heads * rows, DELTA_ROWS),)](
        output_NTD, grad_NTD, delta_NT, heads * rows, D=features, ROWS=DELTA_ROWS, num_warps=4
    )
    grads = [torch.empty_like(tensor) for tensor in (q_NTD, k_NTD, v_NTD)]
    tile = tiles.keys
    attention_key_gradient[triton.cdiv(rows, tile.held), len(k_NTD)](
        _block(q_NTD, tile.read, tile),
        _block(k_NTD, tile.held, tile),
        _block(v_NTD, tile.held, tile),
        _block(grad_NTD, tile.read, tile),
        log_sums_NT,
        delta_NT,
        _block(grads[1], tile.held, tile),
        _block(grads[2], tile.held, tile),
        scale * LOG2_E,
        scale,
        rows,
        **constants_of(tile, group, features, causal),
        num_warps=tile.warps,
    )
    tile = tiles.queries
    attention_query_gradient[triton.cdiv(rows, tile.held), heads](
        _block(q_NTD, tile.held, tile),
        _block(k_NTD, tile.read, tile),
        _block(v_NTD, tile.read, tile),
        _block(grad_NTD, tile.held, tile),
        log_sums_NT,
        delta_NT,
        _block(grads[0], tile.held, tile),
        scale * LOG2_E,
        scale,
        rows,
        **constants_of(tile, group, features, causal),
        num_warps=tile.warps,
    )
    return grads[0], grads[1], grads[2]


def _heads(tensor_BHTD: Tensor) -> Tensor:
    """Return all heads as a contiguous tensor [N, T, D] whose address is a multiple of 16, as tensor descriptors require."""
    tensor_BHTD = tensor_BHTD.contiguous()
    return (tensor_BHTD if tensor_BHTD.data_ptr() % 16 == 0 else tensor_BHTD.clone()).flatten(0, 1)


class Attention(torch.autograd.Function):
    """Autograd function that runs the Triton kernels for the forward and the backward pass of attention."""

    @staticmethod
    def forward(ctx: Any, q_BHTD: Tensor, k_BKTD: Tensor, v_BKTD: Tensor, causal: bool, tiles: Tiles) -> Tensor:
        scale = 1 / math.sqrt(q_BHTD.shape[-1])
        q_NTD, k_NTD, v_NTD = (_heads(tensor) for tensor in (q_BHTD, k_BKTD, v_BKTD))
        output_NTD, log_sums_NT = run_forward(q_NTD, k_NTD, v_NTD, scale, causal, tiles)
        ctx.save_for_backward(q_NTD, k_NTD, v_NTD, output_NTD, log_sums_NT)
        ctx.scale, ctx.causal, ctx.tiles, ctx.key_shape = scale, causal, tiles, k_BKTD.shape
        return output_NTD.view(q_BHTD.shape)

    @staticmethod
    # The kernels have no second derivative. Differentiating twice raises an error instead of returning a wrong result.
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (grad_BHTD,) = grads
        grad_NTD = _heads(grad_BHTD)
        q_NTD, k_NTD, v_NTD, output_NTD, log_sums_NT = ctx.saved_tensors
        of_q, of_k, of_v = run_backward(grad_NTD, q_NTD, k_NTD, v_NTD, output_NTD, log_sums_NT, ctx.scale, ctx.causal, ctx.tiles)
        return of_q.view(grad_BHTD.shape), of_k.view(ctx.key_shape), of_v.view(ctx.key_shape), None, None
