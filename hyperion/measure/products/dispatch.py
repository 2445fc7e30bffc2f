"""Record the operators that a call dispatches as plain data, and dispatch a whole step without computing it.

PyTorch dispatches the operators of forward and backward passes one by one on every device. Each is recorded with the shapes of
its tensors, not with the tensors.
"""

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from hyperion.errors import HyperionError
from hyperion.hardware import canonical_dtype

# These allocate or alias memory and move no bytes.
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


@dataclass(frozen=True)
class TensorShape:
    """A tensor without its values.

    Args:
        stride: in elements.
        dtype: Hyperion's name ("bf16"), or torch's if Hyperion has none ("int64").
        itemsize: bytes per element.
        device: device type: "cpu", "cuda".
    """

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: str
    itemsize: int
    device: str

    @property
    def bytes(self) -> int:
        """Bytes of its elements in memory; an element repeated by stride 0 counts once."""
        elements = 1
        for size, step in zip(self.shape, self.stride, strict=True):
            elements *= size if step or not size else 1
        return elements * self.itemsize


@dataclass(frozen=True)
class Call:
    """One dispatched operator.

    Args:
        name: name without overload and, for PyTorch's own operators, without namespace: "addmm".
        arguments: arguments by name; tensors are replaced by their `TensorShape`.
        inputs, outputs: tensors that it reads, and tensors that it returns or overwrites.
        moves: whether it reads or writes memory; a view does not.
        tf32: whether its float32 products may use the TF32 units of a GPU.
    """

    name: str
    arguments: dict[str, Any]
    inputs: tuple[TensorShape, ...]
    outputs: tuple[TensorShape, ...]
    moves: bool
    tf32: bool = False

    @property
    def bytes(self) -> int:
        """Minimum traffic: each input read once, each output written once; 0 for a view."""
        if not self.moves:
            return 0
        # An embedding reads the rows that it returns, not the whole table.
        read = self.outputs if self.name == "embedding" else self.inputs
        return sum(tensor.bytes for tensor in (*read, *self.outputs))


def dispatched(function: Callable[[], object]) -> list[Call]:
    """Call a function once and return the operators that it dispatches in order, including those of its backward pass.

    A composite operator (such as `linear` in inference mode) is recorded as the operators that it consists of. Compiled code
    runs uncompiled, because fused operators are not dispatched.
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
        if operation.namespace in ("prim", "profiler"):  # queries of a tensor, and marks for the profiler
            return operation(*arguments, **named)
        if _is_composite(operation):
            with self:
                return operation.decompose(*arguments, **named)
        output = operation(*arguments, **named)
        self.calls.append(_call(operation, arguments, named, output))
        return output


def _is_composite(operation) -> bool:
    # Below autograd a composite operator appears only in inference mode. If it also has kernels, these are used.
    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
    return operation._can_decompose() and not any(has_kernel(operation.name(), key) for key in ("CPU", "CUDA", "Meta"))


def _call(operation, arguments, named, output) -> Call:
    schema = operation._schema
    passed = {declared.name: value for declared, value in zip(schema.arguments, arguments, strict=False)} | named
    name = schema.name.removeprefix("aten::")
    written = [passed[argument] for argument in _overwritten(schema, name) if argument in passed]
    aliases = [returned.alias_info for returned in schema.returns]
    view = any(alias is not None and not alias.is_write for alias in aliases)
    # Tensors overwritten in place are often also returned; count them once.
    outputs = {id(leaf): leaf for leaf in tree_leaves((written, output)) if isinstance(leaf, Tensor)}
    inputs = tuple(_shape_of(leaf) for leaf in tree_leaves(passed) if isinstance(leaf, Tensor))
    return Call(
        name,
        tree_map_only(Tensor, _shape_of, passed),
        inputs,
        tuple(_shape_of(leaf) for leaf in outputs.values()),
        not view and name not in _MOVE_NOTHING,
        any(tensor.device == "cuda" for tensor in inputs) and _tf32_allowed(name),
    )


def _overwritten(schema, name: str) -> list[str]:
    """Return the arguments that an operator writes. Fused optimizers write the gradients only with a gradient scaler."""
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
    """Return Hyperion's name of a torch dtype, or torch's name if there is none."""
    try:
        return canonical_dtype(str(dtype))
    except HyperionError:
        return str(dtype).removeprefix("torch.")


@contextlib.contextmanager
def shapes_only(*modules: nn.Module) -> Iterator[None]:
    """Within this context, tensors have shapes but no values: nothing is computed or stored.

    The tensors appear to be on a CPU, so autocast and the choice of attention kernels work as on a device, unlike on the device
    `meta`. Tensors created within the context have shapes only.

    Args:
        modules: modules built on `meta`. They are converted in place and cannot be used afterwards. Shared tensors stay shared.

    Raises:
        HyperionError: a parameter or buffer is not on `meta`.
    """
    mode = FakeTensorMode()
    known: dict[Tensor, Tensor] = {}
    for part in (part for module in modules for part in module.modules()):
        for tensors in (cast("dict[str, Any]", part._parameters), part._buffers):
            for name, tensor in tensors.items():
                if tensor is not None:
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
