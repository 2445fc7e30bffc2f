"""The matrix products inside of PyTorch's operators: sizes of each, forward and backward, from the shapes of its tensors.

A convolution is the product that computes it implicitly over unfolded patches: forward M = images x output pixels,
N = output channels, K = input channels x kernel size, one for each group. Attention is its products of queries, keys and
values for each head; no mask is subtracted, and its backward works the scores out anew. Every product counts 2·M·N·K, by
which the sums are those of torch.utils.flop_counter, but for what that lacks (attention on CPUs, integer products) and for
the weights' gradient of a convolution in groups: torch counts every group's input channels for all groups, the product has
those of its own group.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import prod

from hyperion.measure.products.dispatch import Call, TensorShape


@dataclass(frozen=True)
class Product:
    """C[b,M,N] = A[b,M,K]·B[b,K,N] for every b of `batch`.

    Args:
        kind: "matmul", "convolution" or "attention".
        batch: independent products of the same sizes done by one call: of `bmm`, of groups, of heads.
        dtype: of the operands: "bf16".
        transposes: how A and B lie in memory, "N" row after row, "T" column after column; "" for the implicit product of a
            convolution, whose patches lie nowhere.
        bytes: what the call reads and writes for it at least. Scores of attention stay on the chip.
    """

    kind: str
    batch: int
    m: int
    n: int
    k: int
    dtype: str
    transposes: str
    bytes: int

    @property
    def flops(self) -> int:
        return 2 * self.batch * self.m * self.n * self.k

    @property
    def intensity(self) -> float:
        """FLOP per byte of memory traffic."""
        return self.flops / self.bytes

    def __str__(self) -> str:
        size = " x ".join(str(side) for side in (self.m, self.n, self.k))
        batched = f"{self.batch} of " if self.batch > 1 else ""
        return f"{self.kind} {batched}{size} {self.dtype} {self.transposes}".rstrip()


def products_of(call: Call) -> list[Product] | None:
    """The products of an operator, none for one whose result nobody asked for; None when there is no formula for it."""
    formula = _FORMULAS.get(call.name)
    return None if formula is None else list(formula(call))


def _matrix_product(call: Call) -> Iterator[Product]:
    a, b = (call.arguments[name] for name in _OPERANDS[call.name])
    batch = a.shape[0] if len(a.shape) == 3 else 1
    (m, k), n = a.shape[-2:], b.shape[-1]
    yield Product("matmul", batch, m, n, k, _dtype(call, a), _lies(a) + _lies(b), call.bytes)


_OPERANDS = {
    "mm": ("self", "mat2"),
    "addmm": ("mat1", "mat2"),
    "bmm": ("self", "mat2"),
    "baddbmm": ("batch1", "batch2"),
    "_scaled_mm": ("self", "mat2"),
    "_int_mm": ("self", "mat2"),
    "_addmm_activation": ("mat1", "mat2"),
}


def _lies(matrix: TensorShape) -> str:
    rows, columns = matrix.stride[-2:]
    return "T" if rows == 1 and columns != 1 and matrix.shape[-1] > 1 else "N"


def _convolution(call: Call) -> Iterator[Product]:
    image = call.arguments.get("input", call.arguments.get("self"))  # the libraries' own operators call it self
    forward, _, _ = _unfolded(call, image, call.outputs[0])
    yield _implicit(call, image, forward, call.bytes)


def _convolution_backward(call: Call) -> Iterator[Product]:
    gradient, image, kernel = (call.arguments[name] for name in ("grad_output", "input", "weight"))
    _, of_image, of_kernel = _unfolded(call, image, gradient)
    # Each product reads two of gradient, image and kernel, and writes what has the size of the third.
    traffic = gradient.bytes + image.bytes + kernel.bytes
    for size, asked in zip((of_image, of_kernel), call.arguments["output_mask"], strict=False):
        if asked:
            yield _implicit(call, image, size, traffic)


def _unfolded(call: Call, image: TensorShape, output: TensorShape) -> tuple[tuple[int, int, int], ...]:
    """(M, N, K) of a convolution, of the gradient of its image and of the gradient of its kernel.

    A transposed convolution is the gradient of another one's image, so that these two change places.
    """
    kernel, transposed = call.arguments["weight"], bool(call.arguments.get("transposed", False))
    pixels = image if transposed else output
    positions = pixels.shape[0] * prod(pixels.shape[2:])
    channels, patch = kernel.shape[0] // call.arguments.get("groups", 1), prod(kernel.shape[1:])
    to_channels, to_patches = (positions, channels, patch), (positions, patch, channels)
    of_kernel = channels, patch, positions
    return (to_patches, to_channels, of_kernel) if transposed else (to_channels, to_patches, of_kernel)


def _implicit(call: Call, image: TensorShape, size: tuple[int, int, int], traffic: int) -> Product:
    return Product("convolution", call.arguments.get("groups", 1), *size, _dtype(call, image), "", traffic)


def _attention(call: Call) -> Iterator[Product]:
    query, key, value = (call.arguments[name] for name in ("query", "key", "value"))
    heads, queries, keys, width, out = _sizes(query, key, value)
    shared, dtype = ("attention", heads), _dtype(call, query)
    yield Product(*shared, queries, keys, width, dtype, "NT", query.bytes + key.bytes)
    yield Product(*shared, queries, out, keys, dtype, "NN", value.bytes + call.outputs[0].bytes)


def _attention_backward(call: Call) -> Iterator[Product]:
    gradient, query, key, value = _backward_operands(call)
    heads, queries, keys, width, out = _sizes(query, key, value)
    shared, dtype = ("attention", heads), _dtype(call, query)
    yield Product(*shared, queries, keys, width, dtype, "NT", query.bytes + key.bytes)  # the scores anew
    yield Product(*shared, queries, keys, out, dtype, "NT", gradient.bytes + value.bytes)  # gradient of their weights
    yield Product(*shared, keys, out, queries, dtype, "TN", value.bytes)  # of the values
    yield Product(*shared, queries, width, keys, dtype, "NN", query.bytes)  # of the queries
    yield Product(*shared, keys, width, queries, dtype, "TN", key.bytes)  # of the keys


def _backward_operands(call: Call) -> tuple[TensorShape, ...]:
    gradient = next(call.arguments[name] for name in ("grad_out", "grad_out_") if name in call.arguments)
    return gradient, *(call.arguments[name] for name in ("query", "key", "value"))


def _sizes(query: TensorShape, key: TensorShape, value: TensorShape) -> tuple[int, int, int, int, int]:
    """(heads of all samples, queries, keys, width of a query, width of a value) of tensors [batch, heads, positions, width]."""
    batch, heads, queries, width = query.shape
    return batch * heads, queries, key.shape[2], width, value.shape[3]


def _dtype(call: Call, operand: TensorShape) -> str:
    return "tf32" if operand.dtype == "fp32" and call.tf32 else operand.dtype


_ATTENTION = (
    "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_cudnn_attention",
    "_scaled_dot_product_flash_attention_for_cpu",
)
_FORMULAS: dict[str, Callable[[Call], Iterator[Product]]] = {
    **dict.fromkeys(_OPERANDS, _matrix_product),
    **dict.fromkeys(("convolution", "_convolution", "cudnn_convolution", "miopen_convolution"), _convolution),
    "convolution_backward": _convolution_backward,
    **dict.fromkeys(_ATTENTION, _attention),
    **{f"{name}_backward": _attention_backward for name in _ATTENTION},
}


@dataclass(frozen=True)
class Ceilings:
    """What a device can do at best, either from its datasheet or measured.

    Args:
        tflops: arithmetic ceiling in 10¹² FLOP/s.
        bandwidth_gb_s: memory ceiling in 10⁹ bytes/s, None when unknown.
        source: where both come from.
    """

    tflops: float
    bandwidth_gb_s: float | None
    source: str

    @property
    def ridge_flop_per_byte(self) -> float | None:
        """Arithmetic intensity above which work is bound by arithmetic."""
        return self.tflops * 1e3 / self.bandwidth_gb_s if self.bandwidth_gb_s else None

    def least_time_s(self, flops: float, traffic_bytes: float) -> float:
        """The larger of arithmetic time and traffic time; with the bandwidth unknown, arithmetic time alone."""
        arithmetic = flops / (self.tflops * 1e12)
        traffic = traffic_bytes / (self.bandwidth_gb_s * 1e9) if self.bandwidth_gb_s else 0.0
        return max(arithmetic, traffic)
