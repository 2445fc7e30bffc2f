"""Record the operators that a function dispatches, run a function without computing values, and find matrix products.

PyTorch dispatches the operators of forward and backward passes one by one on every device. Each operator is recorded with the
shapes of its tensors, but without the tensors. `products_of` returns the matrix products (GEMMs) that an operator computes, in
the forward or in the backward pass. In this module, "product" always means a matrix product.

A convolution counts as one matrix product over unfolded patches for each group. In the forward pass, M is the number of images
times the number of output pixels, N is the number of output channels, and K is the number of input channels times the kernel
size. Attention counts as its products of queries, keys and values for each head. Masks are ignored. The backward pass of
attention includes the product that recomputes the scores.

Every product counts 2·M·N·K FLOPs. The sums equal those of torch.utils.flop_counter with these exceptions:

- torch.utils.flop_counter has no formula for attention on CPUs or for integer products. This module counts both.
- For the weight gradient of a grouped convolution, torch.utils.flop_counter counts the input channels of all groups. This module
  counts only the input channels of one group.
"""

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from math import prod
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from hyperion.errors import HyperionError
from hyperion.hardware import canonical_dtype

# These operators allocate or alias memory. They do not read or write the elements.
_MOVE_NOTHING = {
    "empty",
    "empty_like",
    "empty_strided",
    "new_empty",
    "new_empty_strided",
    "detach",
    "_unsafe_view",
    "lift_fresh",
    "_reshape_alias",
}


# Operators that multiply by weights. A causal mask cannot skip a part of these products, as it can in attention.
_WEIGHTED = ("mm", "addmm", "convolution")


@dataclass(frozen=True)
class TensorShape:
    """The description of a tensor without its values.

    Args:
        stride: stride of each dimension in elements.
        dtype: Hyperion's name for the dtype, such as "bf16". If Hyperion has none, PyTorch's name, such as "int64".
        itemsize: bytes per element.
        device: type of the device, such as "cpu" or "cuda".
    """

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: str
    itemsize: int
    device: str

    @property
    def bytes(self) -> int:
        """Size of the elements in memory in bytes. An element that is repeated by a stride of 0 counts once."""
        elements = 1
        for size, step in zip(self.shape, self.stride, strict=True):
            elements *= size if step or not size else 1
        return elements * self.itemsize


@dataclass(frozen=True)
class Call:
    """One dispatched operator.

    Args:
        name: name of the operator without its overload, such as "addmm". The names of PyTorch's own operators have no namespace.
        arguments: a dict that maps the name of an argument to its value. Each tensor is replaced by its `TensorShape`.
        inputs: tensors that the operator reads.
        outputs: tensors that the operator returns or overwrites.
        moves: whether the operator reads or writes memory. It is False for a view.
        tf32: whether the operator may compute float32 products on the TF32 units of a GPU.
    """

    name: str
    arguments: dict[str, Any]
    inputs: tuple[TensorShape, ...]
    outputs: tuple[TensorShape, ...]
    moves: bool
    tf32: bool = False

    @property
    def bytes(self) -> int:
        """Minimum memory traffic in bytes: each input is read once, and each output is written once. 0 for a view."""
        if not self.moves:
            return 0
        # An embedding reads only the rows that it returns, not the whole table.
        read = self.outputs if self.name == "embedding" else self.inputs
        return sum(tensor.bytes for tensor in (*read, *self.outputs))


def dispatched(function: Callable[[], object]) -> list[Call]:
    """Call a function once and return the operators that PyTorch dispatches, in order.

    The operators of a backward pass are included if the function runs one. A composite operator, such as `linear` in inference
    mode, is recorded as the operators that it consists of. Compiled functions run without compilation, because PyTorch does not
    dispatch fused operators.
    """
    recorder = _Recorder()
    with torch.compiler.set_stance("force_eager"), recorder:
        function()
    return recorder.calls


class _Recorder(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.calls: list[Call] = []

    def __torch_dispatch__(self, operation, types, arguments=(), named=None):
        named = named or {}
        if operation.namespace in ("prim", "profiler"):  # these read tensor properties, or mark regions for the profiler
            return operation(*arguments, **named)
        if _is_composite(operation):
            # A mode is disabled inside its own __torch_dispatch__. Enter it again, so that the parts are recorded.
            with self:
                return operation.decompose(*arguments, **named)
        output = operation(*arguments, **named)
        self.calls.append(_call(operation, arguments, named, output))
        return output


def _is_composite(operation) -> bool:
    # A composite operator reaches this dispatch mode only in inference mode. If it has its own kernels, PyTorch uses them.
    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
    return operation._can_decompose() and not any(has_kernel(operation.name(), key) for key in ("CPU", "CUDA", "Meta"))


def _call(operation, arguments, named, output) -> Call:
    schema = operation._schema
    passed = {declared.name: value for declared, value in zip(schema.arguments, arguments, strict=False)} | named
    name = schema.name.removeprefix("aten::")
    written = [passed[argument] for argument in _overwritten(schema, name) if argument in passed]
    # An operator often returns the tensor that it overwrites. Count such a tensor once.
    outputs = {id(leaf): leaf for leaf in tree_leaves((written, output)) if isinstance(leaf, Tensor)}
    inputs = tuple(_shape_of(leaf) for leaf in tree_leaves(passed) if isinstance(leaf, Tensor))
    return Call(
        name,
        tree_map_only(Tensor, _shape_of, passed),
        inputs,
        tuple(_shape_of(leaf) for leaf in outputs.values()),
        not is_view(operation) and name not in _MOVE_NOTHING,
        any(tensor.device == "cuda" for tensor in inputs) and _tf32_allowed(name),
    )


def is_view(operation: torch._ops.OpOverload) -> bool:
    """Return True if an operator only returns a view of its input."""
    aliases = [returned.alias_info for returned in operation._schema.returns]
    return any(alias is not None and not alias.is_write for alias in aliases)


def _overwritten(schema, name: str) -> list[str]:
    """Return the names of the arguments that an operator overwrites.

    According to its schema, a fused optimizer operator overwrites the gradients. It does so only with a gradient scaler, so the
    gradients are omitted.
    """
    written = [a.name for a in schema.arguments if a.alias_info is not None and a.alias_info.is_write]
    return [argument for argument in written if not (name.startswith("_fused_") and argument == "grads")]


def _tf32_allowed(name: str) -> bool:
    if "convolution" in name:
        return torch.backends.cudnn.conv.fp32_precision == "tf32"  # pyright: ignore[reportAttributeAccessIssue]  # added at run time
    return torch.backends.cuda.matmul.fp32_precision == "tf32"


def _shape_of(tensor: Tensor) -> TensorShape:
    return TensorShape(
        tuple(tensor.shape), tuple(tensor.stride()), dtype_name(tensor.dtype), tensor.element_size(), tensor.device.type
    )


def dtype_name(dtype: torch.dtype) -> str:
    """Return Hyperion's name for a PyTorch dtype, such as "bf16". If Hyperion has none, return PyTorch's name."""
    try:
        return canonical_dtype(str(dtype))
    except HyperionError:
        return str(dtype).removeprefix("torch.")


@contextlib.contextmanager
def shapes_only(*modules: nn.Module) -> Iterator[None]:
    """Context manager in which tensors have shapes but no values, so that nothing is computed or stored.

    This also applies to tensors that are created within the context. The tensors appear to be on a CPU, so that autocast and the
    choice of attention kernels work as on a real device. On the device `meta`, they would not.

    Args:
        modules: modules that were built on the device `meta`. They are converted in place and cannot be used after the context.
            Tensors that modules share stay shared.

    Raises:
        HyperionError: a parameter or buffer is not on `meta`.
    """
    mode = FakeTensorMode()
    known: dict[Tensor, Tensor] = {}
    for part in (part for module in modules for part in module.modules()):
        for tensors in (cast("dict[str, Any]", part._parameters), part._buffers):
            for name, tensor in tensors.items():
                if tensor is not None:
                    # A tied weight is one tensor in two modules, and must stay one tensor.
                    known[tensor] = known[tensor] if tensor in known else _without_values(mode, tensor, name)
                    tensors[name] = known[tensor]
    with mode:
        yield


def _without_values(mode: FakeTensorMode, tensor: Tensor, name: str) -> Tensor:
    if tensor.device.type != "meta":
        raise HyperionError(
            f"{name} is on {tensor.device}, not on meta",
            where="shapes_only",
            next_step='build the module in `with torch.device("meta"):`',
        )
    fake = FakeTensor(mode, tensor.detach(), torch.device("cpu"))
    return nn.Parameter(fake, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else fake


@dataclass(frozen=True)
class Product:
    """A batch of matrix products of the same size: C[b,M,N] = A[b,M,K]·B[b,K,N] for b = 0 … batch - 1.

    Args:
        kind: "matmul", "convolution" or "attention".
        batch: number of independent products of the same size in one call. This is the batch size of `bmm`, the number of groups
            of a convolution, or the batch size times the number of heads of attention.
        m, n, k: sizes M, N and K.
        dtype: dtype of the operands, such as "bf16".
        transposes: memory layout of A and of B, one letter each. "N" is row-major and "T" is column-major. "" for convolutions,
            because their patches are not stored.
        bytes: minimum number of bytes that the call reads and writes for this product. Attention scores are not included,
            because they stay on the chip.
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
        """Number of FLOPs, 2·batch·M·N·K."""
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
    """Return the matrix products of an operator, or None if there is no formula for the operator.

    The list is empty for the backward pass of a convolution if none of the gradients is requested.
    """
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
    # Column-major: the stride of the rows is 1. A matrix with a single column is both, and counts as row-major.
    return "T" if rows == 1 and columns != 1 and matrix.shape[-1] > 1 else "N"


def _convolution(call: Call) -> Iterator[Product]:
    image = call.arguments["input" if "input" in call.arguments else "self"]  # cuDNN and MIOpen call it `self`
    forward, _, _ = _unfolded(call, image, call.outputs[0])
    yield _implicit(call, image, forward, call.bytes)


def _convolution_backward(call: Call) -> Iterator[Product]:
    gradient, image, kernel = (call.arguments[name] for name in ("grad_output", "input", "weight"))
    _, of_image, of_kernel = _unfolded(call, image, gradient)
    # Each product reads two of the three tensors (gradient, image, kernel) and writes an output of the size of the third.
    traffic = gradient.bytes + image.bytes + kernel.bytes
    for size, requested in zip((of_image, of_kernel), call.arguments["output_mask"], strict=False):
        if requested:
            yield _implicit(call, image, size, traffic)


def _unfolded(call: Call, image: TensorShape, output: TensorShape) -> tuple[tuple[int, int, int], ...]:
    """Return three tuples (M, N, K): for the convolution, for the gradient of the image, and for the gradient of the kernel.

    A transposed convolution computes the image gradient of another convolution, so the first two tuples are swapped for it.
    """
    kernel, transposed = call.arguments["weight"], bool(call.arguments.get("transposed", False))
    pixels = image if transposed else output
    positions = pixels.shape[0] * prod(pixels.shape[2:])
    channels, patch = kernel.shape[0] // call.arguments.get("groups", 1), prod(kernel.shape[1:])
    # M = positions, K = elements of a patch (input channels of a group times kernel size), N = output channels of a group. The
    # gradient of the image swaps N and K, and the gradient of the kernel sums over the positions.
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
    """Return (batch x heads, queries, keys, query width, value width) of tensors of shape [batch, heads, positions, width]."""
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
class Census:
    """The numbers of operations, FLOPs and bytes of one call of a function.

    Args:
        operations: number of operations that read or write memory. Views are not counted.
        products: number of matrix products, convolutions and attentions among them.
        flops: a dict that maps a dtype ("bf16") to the FLOPs of matrix products, convolutions and attention in this dtype. A
            multiply-add counts as 2.
        weight_flops: the part of `flops` in products with weights and in convolutions, which a causal mask cannot skip.
        product_bytes: bytes that matrix products, convolutions and attention read and write.
        other_bytes: bytes that all other operations read and write.
    """

    operations: int = 0
    products: int = 0
    flops: dict[str, int] = field(default_factory=dict)
    weight_flops: int = 0
    product_bytes: int = 0
    other_bytes: int = 0

    @property
    def total_flops(self) -> int:
        """Sum of the FLOPs over all dtypes."""
        return sum(self.flops.values())

    def share_in(self, dtype: str) -> float:
        """Return the share of the FLOPs that are in a dtype ("bf16"), or 0 if there are no FLOPs."""
        return self.flops.get(dtype, 0) / self.total_flops if self.total_flops else 0.0


def count_operations(function: Callable[[], object]) -> Census:
    """Call a function once without gradients, and count the operations that PyTorch dispatches."""
    with torch.no_grad():
        calls = [call for call in dispatched(function) if call.moves]
    flops: Counter[str] = Counter()
    weight_flops = product_bytes = products = 0
    for call in calls:
        for product in products_of(call) or ():
            flops["fp32" if product.dtype == "tf32" else product.dtype] += product.flops
            weight_flops += product.flops if call.name in _WEIGHTED else 0
        product_bytes += call.bytes if products_of(call) is not None else 0
        products += products_of(call) is not None
    return Census(
        len(calls), products, dict(flops), weight_flops, product_bytes, sum(call.bytes for call in calls) - product_bytes
    )
