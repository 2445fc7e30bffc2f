"""The matrix products in PyTorch's operators, forward and backward, from the shapes of their tensors; and the roofline.

A convolution is an implicit product over unfolded patches, one for each group. Forward: M = images x output pixels, N = output
channels, K = input channels x kernel size. Attention consists of its products of queries, keys and values for each head. Masks
are ignored, and the backward pass recomputes the scores.

Every product counts 2·M·N·K FLOPs. The sums equal those of torch.utils.flop_counter with these exceptions: torch lacks
attention on CPUs and integer products, and for the weight gradient of a grouped convolution it counts the input channels of all
groups instead of one.
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
        batch: number of independent products of the same size in one call: of `bmm`, groups, or heads.
        dtype: dtype of the operands, such as "bf16".
        transposes: memory layout of A and B: "N" row-major, "T" column-major; "" for convolutions, whose patches are not
            stored.
        bytes: minimum bytes that the call reads and writes for this product. Attention scores stay on the chip.
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
        """2·batch·M·N·K."""
        return 2 * self.batch * self.m * self.n * self.k

    @property
    def intensity(self) -> float:
        """Arithmetic intensity in FLOP per byte of memory traffic."""
        return self.flops / self.bytes

    def __str__(self) -> str:
        size = " x ".join(str(side) for side in (self.m, self.n, self.k))
        batched = f"{self.batch} of " if self.batch > 1 else ""
        return f"{self.kind} {batched}{size} {self.dtype} {self.transposes}".rstrip()


def products_of(call: Call) -> list[Product] | None:
    """Return the products of an operator (empty if no output is requested), or None if there is no formula."""
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
    image = call.arguments["input" if "input" in call.arguments else "self"]  # library operators name it `self`
    forward, _, _ = _unfolded(call, image, call.outputs[0])
    yield _implicit(call, image, forward, call.bytes)


def _convolution_backward(call: Call) -> Iterator[Product]:
    gradient, image, kernel = (call.arguments[name] for name in ("grad_output", "input", "weight"))
    _, of_image, of_kernel = _unfolded(call, image, gradient)
    # Each product reads two of gradient, image and kernel, and writes a tensor of the size of the third.
    traffic = gradient.bytes + image.bytes + kernel.bytes
    for size, requested in zip((of_image, of_kernel), call.arguments["output_mask"], strict=False):
        if requested:
            yield _implicit(call, image, size, traffic)


def _unfolded(call: Call, image: TensorShape, output: TensorShape) -> tuple[tuple[int, int, int], ...]:
    """Return (M, N, K) of a convolution, of its image gradient, and of its kernel gradient.

    A transposed convolution is the image gradient of another convolution, so the first two are swapped.
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
    yield Product(*shared, queries, keys, width, dtype, "NT", query.bytes + key.bytes)  # recomputed scores
    yield Product(*shared, queries, keys, out, dtype, "NT", gradient.bytes + value.bytes)  # gradient of the attention weights
    yield Product(*shared, keys, out, queries, dtype, "TN", value.bytes)  # gradient of the values
    yield Product(*shared, queries, width, keys, dtype, "NN", query.bytes)  # gradient of the queries
    yield Product(*shared, keys, width, queries, dtype, "TN", key.bytes)  # gradient of the keys


def _backward_operands(call: Call) -> tuple[TensorShape, ...]:
    gradient = next(call.arguments[name] for name in ("grad_out", "grad_out_") if name in call.arguments)
    return gradient, *(call.arguments[name] for name in ("query", "key", "value"))


def _sizes(query: TensorShape, key: TensorShape, value: TensorShape) -> tuple[int, int, int, int, int]:
    """Return (batch x heads, queries, keys, query width, value width) of tensors [batch, heads, positions, width]."""
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
    """The roofline of a device: its arithmetic and memory ceilings, from a data sheet or measured.

    Args:
        tflops: arithmetic ceiling in 10¹² FLOP/s.
        bandwidth_gb_s: memory ceiling in 10⁹ bytes/s; None if unknown.
        source: source of both.

    Source: Williams, Waterman, Patterson, Roofline: an insightful visual performance model, CACM 52 (2009) 65-76.
    """

    tflops: float
    bandwidth_gb_s: float | None
    source: str

    @property
    def ridge_flop_per_byte(self) -> float | None:
        """Arithmetic intensity in FLOP per byte above which work is bound by arithmetic; None without a bandwidth."""
        return self.tflops * 1e3 / self.bandwidth_gb_s if self.bandwidth_gb_s else None

    def least_time_s(self, flops: float, traffic_bytes: float) -> float:
        """Return the larger of arithmetic time and memory time in seconds; arithmetic time alone without a bandwidth."""
        arithmetic = flops / (self.tflops * 1e12)
        traffic = traffic_bytes / (self.bandwidth_gb_s * 1e9) if self.bandwidth_gb_s else 0.0
        return max(arithmetic, traffic)
