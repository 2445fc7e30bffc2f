"""What a call dispatches, operator by operator, as plain data; and a way to dispatch a whole step without computing it.

PyTorch dispatches one operator after the other, forward and backward, whatever the device. Here each is written down with
the sizes of its tensors, and none of the tensors is kept.
"""

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from hyperion.errors import HyperionError
from hyperion.hardware import canonical_dtype

# They give memory out or a name to it, and move nothing.
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
    """What is known of a tensor without its values.

    Args:
        dtype: hyperion's name of it ("bf16"), torch's where hyperion has none ("int64").
        stride: in elements; it tells which way a matrix lies in memory.
        device: its kind: "cpu", "cuda".
    """

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: str
    itemsize: int
    device: str

    @property
    def bytes(self) -> int:
        """Bytes that its elements take: an element that is only repeated (stride 0) lies in memory once."""
        elements = 1
        for size, step in zip(self.shape, self.stride, strict=True):
            elements *= size if step or not size else 1
        return elements * self.itemsize


@dataclass(frozen=True)
class Call:
    """One operator as it was dispatched.

    Args:
        name: without its overload and, for PyTorch's own, without its namespace: "addmm".
        arguments: by name of the schema, every tensor in them replaced by its `TensorShape`.
        inputs, outputs: the tensors that it reads and those that it gives out or overwrites.
        moves: whether it reads or writes memory: a view of a tensor is a call too, and moves nothing.
        tf32: whether float32 products of it may be done by the TF32 units of a GPU.
    """

    name: str
    arguments: dict[str, object]
    inputs: tuple[TensorShape, ...]
    outputs: tuple[TensorShape, ...]
    moves: bool
    tf32: bool = False

    @property
    def bytes(self) -> int:
        """Least traffic: every input read once, every output written once; 0 for a view."""
        if not self.moves:
            return 0
        # An embedding reads the rows that it gives out, not the whole table.
        read = self.outputs if self.name == "embedding" else self.inputs
        return sum(tensor.bytes for tensor in (*read, *self.outputs))


def dispatched(function: Callable[[], object]) -> list[Call]:
    """Call a function once and list the operators that it dispatches, in their order, those of its backward included.

    An operator that only stands for others (`linear` in inference mode) is listed as these others. Compiled code is called
    uncompiled: what a compiler has fused, no dispatcher sees.
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
        if operation.namespace in ("prim", "profiler"):  # questions about a tensor, and marks for the profiler
            return operation(*arguments, **named)
        if _only_stands_for_others(operation):
            with self:
                return operation.decompose(*arguments, **named)
        output = operation(*arguments, **named)
        self.calls.append(_call(operation, arguments, named, output))
        return output


def _only_stands_for_others(operation) -> bool:
    # Below autograd such an operator comes whole in inference mode only; one that has kernels besides is done by them.
    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
    return operation._can_decompose() and not any(has_kernel(operation.name(), key) for key in ("CPU", "CUDA", "Meta"))


def _call(operation, arguments, named, output) -> Call:
    schema = operation._schema
    passed = {declared.name: value for declared, value in zip(schema.arguments, arguments, strict=False)} | named
    name = schema.name.removeprefix("aten::")
    written = [passed[argument] for argument in _overwritten(schema, name) if argument in passed]
    aliases = [returned.alias_info for returned in schema.returns]
    view = any(alias is not None and not alias.is_write for alias in aliases)
    # What is overwritten in place is given out too, once.
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
    """Arguments that an operator writes. A fused optimizer may write the gradients too, but does so for a scaler only."""
    written = [a.name for a in schema.arguments if a.alias_info is not None and a.alias_info.is_write]
    return [argument for argument in written if not (name.startswith("_fused_") and argument == "grads")]


def _tf32_allowed(name: str) -> bool:
    setting = torch.backends.cudnn.conv if "convolution" in name else torch.backends.cuda.matmul
    return setting.fp32_precision == "tf32"


def _shape_of(tensor: Tensor) -> TensorShape:
    return TensorShape(
        tuple(tensor.shape), tuple(tensor.stride()), dtype_name(tensor.dtype), tensor.element_size(), tensor.device.type
    )


def dtype_name(dtype: torch.dtype) -> str:
    """hyperion's name of a torch dtype, torch's own where it has none."""
    try:
        return canonical_dtype(str(dtype))
    except HyperionError:
        return str(dtype).removeprefix("torch.")


@contextlib.contextmanager
def shapes_only(*modules: nn.Module) -> Iterator[None]:
    """Within it tensors have shapes and no values, and pass for those of a CPU: nothing is computed, and nothing stored.

    Autocast and the choice of an attention kernel go as they do on a device, which they do not on the device `meta`. What
    is made within has shapes only.

    Args:
        modules: built on `meta` before; they are brought in, in place, and are of no use afterwards. Tensors that modules
            share stay shared.

    Raises:
        HyperionError: a parameter or buffer of a module is on a device.
    """
    mode = FakeTensorMode()
    known: dict[Tensor, Tensor] = {}
    for part in (part for module in modules for part in module.modules()):
        for tensors in (part._parameters, part._buffers):
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
            next_step='build the module within `with torch.device("meta"):`',
        )
    fake = FakeTensor(mode, tensor.detach(), torch.device("cpu"))
    return nn.Parameter(fake, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else fake
