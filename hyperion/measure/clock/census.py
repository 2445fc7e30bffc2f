"""What a function asks the device to do, operation by operation: how many, which FLOPs in which dtype, how many bytes.

Counted where PyTorch dispatches, so it works without a device too: on tensors of the device `meta`, which have a shape and
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
    """One call of a function.

    Args:
        operations: operations that read or write memory; views are none.
        flops: floating-point operations of matrix products, convolutions and attention, by dtype; a multiply-add is 2.
        weight_flops: of them those of products with weights and of convolutions: what no causal mask can spare.
        product_bytes: what these products read and write, one after the other.
        other_bytes: what all other operations read and write, when each reads and writes memory.
    """

    operations: int = 0
    flops: dict[str, int] = field(default_factory=dict)
    weight_flops: int = 0
    product_bytes: int = 0
    other_bytes: int = 0

    @property
    def total_flops(self) -> int:
        return sum(self.flops.values())

    def share_in(self, dtype: str) -> float:
        """Share of the FLOPs that were done in a dtype, by its name ("bf16"); 0 where there were none."""
        return self.flops.get(dtype, 0) / self.total_flops if self.total_flops else 0.0


def count_operations(function: Callable[[], object]) -> Census:
    """Call a function once, without gradients, and count what it dispatches."""
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
        # An embedding reads the rows it gives out, not the whole table.
        read = outputs if name == "embedding" else inputs
        self.bytes[formula is None] += sum(tensor.numel() * tensor.element_size() for tensor in (*read, *outputs))
        if formula is not None:
            flops = formula(*arguments, **named, out_val=output)
            self.flops[_DTYPES.get(inputs[0].dtype, str(inputs[0].dtype))] += flops
            self.weight_flops += flops if name in _WEIGHTED else 0


def _is_view(operation) -> bool:
    """Whether what comes out is only another way to see what went in."""
    aliases = [returned.alias_info for returned in operation._schema.returns]
    return any(alias is not None and not alias.is_write for alias in aliases)
