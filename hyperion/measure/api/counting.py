"""Counts of one call where PyTorch dispatches: bytes of tensors alive, operator by operator, and FLOPs by operator and module.

A compiled function is called uncompiled meanwhile: what a compiler has fused, no dispatcher sees.
"""

import weakref
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop_count, sdpa_flop_count

from hyperion.hardware import Device
from hyperion.measure.api.answers_counted import Uncounted
from hyperion.measure.memory.tensor_memory import TensorMemory, storage_key

# They allocate, move or fill: no arithmetic that a formula could miss.
_NO_ARITHMETIC = {
    f"aten::{name}"
    for name in (
        "empty_like",
        "new_empty",
        "new_empty_strided",
        "zeros_like",
        "ones_like",
        "full_like",
        "new_zeros",
        "new_ones",
        "new_full",
        "fill_",
        "zero_",
        "clone",
        "copy_",
        "_foreach_copy_",
        "_to_copy",
        "contiguous",
        "cat",
        "stack",
        "index_select",
        "gather",
        "embedding",
        "constant_pad_nd",
        "detach",
        "_unsafe_view",
        "lift_fresh",
        "_local_scalar_dense",
    )
}


def count_flops(function: Callable[[], object]) -> tuple[dict[str, int], dict[str, int], tuple[Uncounted, ...]]:
    """FLOPs of one call by operator (largest first) and by module path, and the operators without a formula."""
    counter = FlopCounterMode(display=False, custom_mapping=_more_formulas())
    rest = _Rest(counter)
    # The counter, entered last, sees each operator first and hands on what it has taken apart.
    with torch.compiler.set_stance("force_eager"), rest, counter:
        function()
    counts = counter.get_flop_counts()
    whole = counts.pop("Global", {})
    by_operator = dict(sorted(((str(op), n) for op, n in whole.items()), key=lambda item: item[1], reverse=True))
    by_module = {module: sum(operators.values()) for module, operators in counts.items()}
    uncounted = (Uncounted(name, calls, elements, pointwise) for name, (calls, elements, pointwise) in rest.found.items())
    # First what did not come with PyTorch: a kernel of one's own, for which nothing is known at all.
    order = sorted(uncounted, key=lambda found: (found.name.startswith("aten::"), -found.elements))
    return by_operator, by_module, tuple(order)


def _more_formulas() -> dict:
    """What PyTorch's own registry lacks: its attention on CPUs, and integer products."""
    aten = torch.ops.aten

    def attention(query, key, value, *_, out_shape=None, **__) -> int:
        return sdpa_flop_count(query, key, value)

    def attention_backward(gradient, query, key, value, *_, out_shape=None, **__) -> int:
        return sdpa_backward_flop_count(gradient, query, key, value)

    def integer_product(a, b, *_, out_shape=None, **__) -> int:
        return 2 * a[0] * a[1] * b[1]

    return {
        aten._scaled_dot_product_flash_attention_for_cpu: attention,
        aten._scaled_dot_product_flash_attention_for_cpu_backward: attention_backward,
        aten._int_mm: integer_product,
    }


class _Rest(TorchDispatchMode):
    """Operators on tensors that a FLOP counter has no formula for: calls, elements in and out, whether element by element."""

    def __init__(self, counter: FlopCounterMode):
        super().__init__()
        self._known = counter.flop_registry
        self.found: dict[str, tuple[int, int, bool]] = {}

    def __torch_dispatch__(self, operator, types, arguments=(), named=None):
        named = named or {}
        output = operator(*arguments, **named)
        name = operator._schema.name
        tensors = [leaf for leaf in tree_leaves((arguments, named)) if isinstance(leaf, torch.Tensor)]
        if tensors and operator._overloadpacket not in self._known and name not in _NO_ARITHMETIC and not _is_view(operator):
            made = [leaf for leaf in tree_leaves(output) if isinstance(leaf, torch.Tensor)]
            calls, elements, _ = self.found.get(name, (0, 0, False))
            elements += sum(tensor.numel() for tensor in (*tensors, *made))
            self.found[name] = (calls + 1, elements, torch.Tag.pointwise in operator.tags)
        return output


def _is_view(operator) -> bool:
    aliases = [returned.alias_info for returned in operator._schema.returns]
    return any(alias is not None and not alias.is_write for alias in aliases)


@dataclass
class WatchedMemory:
    """Bytes of tensors of one call; see `MemoryAnswer`."""

    before_bytes: int
    peak_bytes: int = 0
    peak_operator: str = ""
    history: list[int] = field(default_factory=list)


def watch_memory(function: Callable[[], object], device: Device) -> WatchedMemory:
    """Call a function twice: to learn which tensors that are there already it works on, and to count with them."""
    with torch.compiler.set_stance("force_eager"):
        with _Given(device) as given:
            function()
        with _Watch(device, given.tensors()) as watch:
            function()
    return watch.seen


class _Given(TorchDispatchMode):
    """Storages that are read or written before any operator has made them."""

    def __init__(self, device: Device):
        super().__init__()
        self._type = torch.device(device.torch_device).type
        self._seen: dict[int, weakref.ref] = {}
        self._given: list[weakref.ref] = []

    def __torch_dispatch__(self, operator, types, arguments=(), named=None):
        named = named or {}
        for tensor in self._new((arguments, named)):
            self._given.append(self._remember(tensor))
        output = operator(*arguments, **named)
        for tensor in self._new(output):
            self._remember(tensor)
        return output

    def tensors(self) -> list[torch.Tensor]:
        """One of each storage that is still there."""
        alive = [storage for reference in self._given if (storage := reference()) is not None]
        return [torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage) for storage in alive]

    def _new(self, nest) -> list[torch.Tensor]:
        leaves = [leaf for leaf in tree_leaves(nest) if isinstance(leaf, torch.Tensor) and leaf.device.type == self._type]
        return [leaf for leaf in leaves if not self._known(leaf)]

    def _known(self, tensor: torch.Tensor) -> bool:
        # A name may belong to a storage that has gone since: then this one is another.
        reference = self._seen.get(storage_key(tensor))
        return reference is not None and reference() is not None

    def _remember(self, tensor: torch.Tensor) -> weakref.ref:
        self._seen[storage_key(tensor)] = weakref.ref(tensor.untyped_storage())
        return self._seen[storage_key(tensor)]


class _Watch(TensorMemory):
    """The count after each operator, and which one was the highest."""

    def __init__(self, device: Device, alive: list[torch.Tensor]):
        super().__init__(device, alive)
        alive.clear()  # its tensors would keep alive what the function lets go
        self.seen = WatchedMemory(self.now_bytes, self.now_bytes)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        returned = super().__torch_dispatch__(func, types, args, kwargs)
        self.seen.history.append(self.now_bytes)
        if self.now_bytes > self.seen.peak_bytes:
            self.seen.peak_bytes, self.seen.peak_operator = self.now_bytes, func._schema.name
        return returned
