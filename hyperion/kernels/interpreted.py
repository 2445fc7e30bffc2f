"""Run the kernels of this package in Triton's interpreter, and compare them with float64.

The interpreter runs a kernel as Python code on a CPU. So it finds wrong indices, masks and formulas without a GPU. It does not
find compiler errors, and its times are meaningless. All tensors are float32, because the interpreter's bfloat16 arithmetic is
wrong. The environment variable TRITON_INTERPRET must be 1 before this module is imported.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F
from triton.tools.tensor_descriptor import TensorDescriptor  # pyright: ignore[reportMissingImports]

from hyperion.kernels import attention_triton, matmul_triton, rows_triton
from hyperion.kernels.attention_float64 import exact_attention
from hyperion.measure import relative_error

TOLERANCE = 1e-5  # for float32 results with sums of at most a few hundred terms


@dataclass(frozen=True)
class Comparison:
    """Relative error of one tensor that a kernel computed in one case, compared with float64."""

    kernel: str
    case: str
    tensor: str
    error: float


def compare_all(seed: int = 0) -> Iterator[Comparison]:
    """Run each kernel on sizes with incomplete blocks, and compare each result with float64."""
    for name in GROUPS:
        yield from compare_group(name, seed)


def compare_group(name: str, seed: int = 0) -> Iterator[Comparison]:
    """Run and compare the kernels of one module, given by a key of `GROUPS`.

    As a side effect, PyTorch fills all new tensors of this process with NaN after this call. So an element that a kernel does not
    write is always wrong. Without this, the element could contain a correct old value by chance.
    """
    torch.use_deterministic_algorithms(True)
    torch.manual_seed(seed)
    yield from GROUPS[name]()


def _rows() -> Iterator[Comparison]:
    x, y = torch.randn(5001), torch.randn(5001)
    yield Comparison("vector_add", "5001 elements", "sum", relative_error(rows_triton.run_add(x, y), x.double() + y.double()))
    x = 30 * torch.randn(5, 100)
    # Without subtracting the maximum, exp(1e4) overflows, and all exponentials of the row near -200 underflow to 0.
    x[2, 3], x[3] = 1e4, -200 + torch.randn(100)
    yield Comparison("softmax", "rows of 100", "output", relative_error(rows_triton.run_softmax(x), torch.softmax(x.double(), 1)))
    M, D = 7, 100
    # A nonzero mean tests the subtraction of the mean.
    x, grad = torch.randn(M, D) + 3, torch.randn(M, D)
    weight, bias = torch.randn(D), torch.randn(D)
    exact = [tensor.double().requires_grad_() for tensor in (x, weight, bias)]
    exact_y = F.layer_norm(exact[0], (D,), exact[1], exact[2], 1e-5)
    exact_y.backward(grad.double())
    y, means, inverses = rows_triton.run_layer_norm(x, weight, bias, 1e-5)
    # With 3 programs for 7 rows, the programs process different numbers of rows.
    grads = rows_triton.run_layer_norm_gradient(grad, x, weight, means, inverses, programs=3)
    yield Comparison("layer_norm", "rows of 100", "output", relative_error(y, exact_y))
    for name, found, tensor in zip(("x", "weight", "bias"), grads, exact, strict=True):
        assert tensor.grad is not None
        yield Comparison("layer_norm backward", "rows of 100", f"gradient of {name}", relative_error(found, tensor.grad))


def _products() -> Iterator[Comparison]:
    # In the first case, no size is a multiple of its block. In the second, K is, which selects the loop without a mask over K.
    for M, N, K in ((70, 48, 40), (33, 128, 64)):
        a, b, c = torch.randn(M, K), torch.randn(K, N), torch.empty(M, N)
        exact, case, blocks = a.double() @ b.double(), f"{M}x{N}x{K}", -(-M // 32) * -(-N // 32)
        sizes = {"BLOCK_M": 32, "BLOCK_N": 32, "GROUP": 2, "STAGES": 1}
        matmul_triton.matmul_blocks[(blocks,)](a, b, c, M, N, K, EVEN=K % 32 == 0, BLOCK_K=32, **sizes)
        yield Comparison("matmul", case, "product", relative_error(c, exact))
        c = torch.empty(M, N)
        shapes = ([32, 16], [16, 32], [32, 16])
        descriptors = [TensorDescriptor.from_tensor(one, shape) for one, shape in zip((a, b, c), shapes, strict=True)]
        # 3 programs, so that a program computes several blocks.
        matmul_triton.matmul_persistent[(3,)](*descriptors, M, N, K, BLOCK_K=16, PROGRAMS=3, **sizes)
        yield Comparison("matmul with descriptors", case, "product", relative_error(c, exact))


def _attentions() -> Iterator[Comparison]:
    for features in attention_triton.HEAD_DIMS:
        for descriptors in (False, True):
            yield from _attention(features, heads=2, key_heads=2, rows=48, causal=True, descriptors=descriptors)
            yield from _attention(features, heads=4, key_heads=2, rows=37, causal=True, descriptors=descriptors)
        yield from _attention(features, heads=1, key_heads=1, rows=37, causal=False, descriptors=True)
    for descriptors in (False, True):
        yield from _attention(64, heads=1, key_heads=1, rows=37, causal=False, descriptors=descriptors, low=True)


def _attention(
    features: int, heads: int, key_heads: int, rows: int, causal: bool, descriptors: bool, low: bool = False
) -> Iterator[Comparison]:
    """Run attention in one case, and compare its output and its gradients with float64.

    If `low` is True, all scores are about -100. The probability of a key with score 0 then overflows.
    """
    tile = attention_triton.Tile(held=32, read=16, warps=4, stages=1, descriptors=descriptors)
    q, grad = torch.randn(heads, rows, features), torch.randn(heads, rows, features)
    k, v = torch.randn(key_heads, rows, features), torch.randn(key_heads, rows, features)
    if low:  # products of these numbers are exact, so large scores have no larger error than small ones
        q, k = (q * 4).round() / 4, (k * 4).round() / 4
        q[..., 0], k[..., 0] = 800.0, -1.0
    tiles, scale = attention_triton.Tiles(tile, tile, tile), 1 / math.sqrt(features)
    output, log_sums = attention_triton.run_forward(q, k, v, scale, causal, tiles)
    found = output, *attention_triton.run_backward(grad, q, k, v, output, log_sums, scale, causal, tiles)
    name = "attention with descriptors" if descriptors else "attention"
    case = f"{features} features, {heads} heads, {key_heads} of keys, {rows} positions, {'causal' if causal else 'all'}"
    case += ", low scores" * low
    names = ("output", "gradient of q", "gradient of k", "gradient of v")
    for tensor, one, exact in zip(names, found, _exact(q, k, v, grad, causal), strict=True):
        yield Comparison(name, case, tensor, relative_error(one, exact))


def _exact(q: Tensor, k: Tensor, v: Tensor, grad: Tensor, causal: bool) -> list[Tensor]:
    """Return the output and the gradients of all heads in float64."""
    group = len(q) // len(k)
    heads = [
        exact_attention(q[head * group :][:group], k[head], v[head], grad[head * group :][:group], causal)
        for head in range(len(k))
    ]
    joined = [torch.cat([one.output for one in heads]), torch.cat([one.grad_q for one in heads])]
    return [*joined, torch.stack([one.grad_k for one in heads]), torch.stack([one.grad_v for one in heads])]


# Maps the name of each kernel module to its comparisons.
GROUPS = {"rows_triton": _rows, "matmul_triton": _products, "attention_triton": _attentions}
