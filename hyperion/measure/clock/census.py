"""Count the operations of a function, their FLOPs by dtype, and their bytes.

Operations are counted where PyTorch dispatches them, so this also works on the device `meta`, whose tensors have a shape and
no storage.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

_DTYPES = {torch.float64: "fp64", torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16"}
_WEIGHTED = ("mm", "addmm", "convolution")
_MOVE_NOTHING = ("_unsafe_view", "empty", "empty_like", "detach")


@dataclass(frozen=True)
class Census:
    """The operations of one call of a function.

    Args:
        operations: operations that read or write memory; views do not.
        flops: FLOPs of matrix products, convolutions and attention by dtype; a multiply-add counts as 2.
        weight_flops: the part of `flops` in products with weights and convolutions, which a causal mask cannot skip.
        product_bytes: bytes that these products read and write.
        other_bytes: bytes that all other operations read and write.
    """

    operations: int = 0
    flops: dict[str, int] = field(default_factory=dict)
    weight_flops: int = 0
    product_bytes: int = 0
    other_bytes: int = 0

    @property
    def total_flops(self) -> int:
        """FLOPs of all dtypes."""
        return sum(self.flops.values())

    def share_in(self, dtype: str) -> float:
        """Return the share of the FLOPs in a dtype ("bf16"); 0 if there are no FLOPs."""
        return self.flops.get(dtype, 0) / self.total_flops if self.total_flops else 0.0


def count_operations(function: Callable[[], object]) -> Census:
    """Call a function once, without gradients, and count the operations that it dispatches."""
    counter = _Counter()
    with torch.no_grad(), counter:
        function()
    return Census(counter.operations, dict(counter.flops), counter.weight_flops, *counter.bytes)


class _Counter(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.operations, self.weight_flops = 0, 0
        self.flops: Counter = Counter()
        self.bytes = [0, 0]

    def __torch_dispatch__(self, operation, types, arguments=(), named=None):
        named = named or {}
        output = operation(*arguments, **named)
        name = operation._schema.name.removeprefix("aten::")
        if not _is_view(operation) and name not in _MOVE_NOTHING:
            self._count(operation, name, arguments, named, output)
        return output

    def _count(self, operation, name: str, arguments, named, output) -> None:
        inputs = [leaf for leaf in tree_leaves((arguments, named)) if isinstance(leaf, torch.Tensor)]
        outputs = [leaf for leaf in tree_leaves(output) if isinstance(leaf, torch.Tensor)]
        formula = flop_registry.get(operation._overloadpacket)
        self.operations += 1
        # An embedding reads the rows that it returns, not the whole table.
        read = outputs if name == "embedding" else inputs
        self.bytes[formula is None] += sum(tensor.numel() * tensor.element_size() for tensor in (*read, *outputs))
        if formula is not None:
            flops = formula(*arguments, **named, out_val=output)
            self.flops[_DTYPES.get(inputs[0].dtype, str(inputs[0].dtype))] += flops
            self.weight_flops += flops if name in _WEIGHTED else 0


def _is_view(operation) -> bool:
    """Return whether an operation returns only a view of its input."""
    aliases = [returned.alias_info for returned in operation._schema.returns]
    return any(alias is not None and not alias.is_write for alias in aliases)
