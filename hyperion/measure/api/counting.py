"""Count the memory and the FLOPs of one call with dispatch modes, which see each operator that PyTorch dispatches.

Compiled functions run without compilation during counting, because PyTorch does not dispatch fused operators.
"""

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop_count, sdpa_flop_count

from hyperion.hardware import Device
from hyperion.measure.api.answers import Answer, bytes_text, flops_text
from hyperion.measure.memory_use.tensor_memory import TensorMemory, parts_of, storage_key
from hyperion.measure.products.dispatch import is_view
from hyperion.results import Row
from hyperion.units import GIB

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True, repr=False)
class MemoryAnswer(Answer):
    """The peak memory of a call.

    Args:
        label: name of the function.
        device: the device that ran the function.
        before_bytes: total size of the tensors that existed before the call and that the call uses.
        peak_bytes: largest total size of live tensors. The tensors of `before_bytes` and the outputs of all operators that
            PyTorch dispatches are counted.
        peak_operator: name of the operator after which the total size was largest.
        history_bytes: total size of live tensors after each operator.
        allocator_peak_bytes: peak of the device's allocator over all tensors of the process. None on a CPU.
        allocator_before_bytes: number of allocated bytes just before the call. None on a CPU.
    """

    label: str
    device: Device
    before_bytes: int
    peak_bytes: int
    peak_operator: str
    history_bytes: tuple[int, ...]
    allocator_peak_bytes: int | None = None
    allocator_before_bytes: int | None = None

    @property
    def added_bytes(self) -> int:
        """Number of bytes at the peak minus number of bytes before the call.

        On a GPU, both numbers come from the allocator. On a CPU, they are counted tensor sizes.
        """
        if self.allocator_peak_bytes is None or self.allocator_before_bytes is None:
            return self.peak_bytes - self.before_bytes
        return self.allocator_peak_bytes - self.allocator_before_bytes

    @property
    def verdict(self) -> str:
        """Text that names the operator after which the total size of live tensors was largest."""
        return f"peak after {self.peak_operator}" if self.peak_operator else "no operator created a tensor on this device"

    def __str__(self) -> str:
        tensors = f"{bytes_text(self.peak_bytes)} of tensors at the peak, {bytes_text(self.before_bytes)} of them before the call"
        counted = f"(counted by dispatch, n=1), {self.device.name}; {self.verdict}"
        if self.allocator_peak_bytes is None:
            return f"{self.label}: {tensors} {counted}\nbuffers inside libraries are not counted on a CPU"
        allocated = (
            f"{bytes_text(self.allocator_peak_bytes)} at the peak, {bytes_text(self.added_bytes)} more than before the call"
        )
        return f"{self.label}: {allocated} (device allocator, n=1)\n{tensors} {counted}"

    def row(self, *, notebook: str, experiment: str, variant: str, **columns: Any) -> Row:
        """Return the first row of `rows`.

        On a GPU, it contains the peak of the allocator. On a CPU, it contains the largest total size of live tensors.
        """
        return self.rows(notebook=notebook, experiment=experiment, variant=variant, **columns)[0]

    def rows(self, *, notebook: str, experiment: str, variant: str, **columns: Any) -> list[Row]:
        """Return a row of the metric `tensor_memory_gib`, which is `peak_bytes` in GiB.

        On a GPU, also return a row of the metric `peak_memory_gib`, which is the peak of the allocator. It is the first row.
        """
        place = {"notebook": notebook, "experiment": experiment, "variant": variant, **columns}
        reason = "" if columns.get("limit") is not None else "no limit: what the function must hold is not known"
        peaks = {"peak_memory_gib": self.allocator_peak_bytes, "tensor_memory_gib": self.peak_bytes}
        return [
            self._row(place, metric, peak / GIB, {}, n=1, limit_source=reason)
            for metric, peak in peaks.items()
            if peak is not None
        ]

    def plot(self) -> "Figure":
        """Plot the size of live tensors after each operator."""
        from hyperion.measure.api.display import draw_memory

        return draw_memory(self.label, self.history_bytes, self.before_bytes, self.device.name, self.verdict)


@dataclass(frozen=True)
class Uncounted:
    """An operator without a FLOP formula. Its FLOPs count as 0.

    Args:
        name: name with namespace, such as "aten::relu".
        calls: number of calls.
        elements: number of elements of inputs and outputs, summed over all calls.
        pointwise: whether PyTorch tags the operator as pointwise. Such an operator executes only a few FLOPs per element.
    """

    name: str
    calls: int
    elements: int
    pointwise: bool


@dataclass(frozen=True, repr=False)
class FlopsAnswer(Answer):
    """The floating-point operations of one call. A multiply-add counts as 2, and one of complex numbers as 8.

    Args:
        label: name of the function.
        by_operator: a dict that maps the name of an operator ("aten.mm") to its FLOPs, in descending order of FLOPs.
        by_module: a dict that maps the path of a module to its FLOPs, including those of its submodules.
        uncounted: operators without a formula. Custom operators come before PyTorch's own operators. In both groups, operators
            with more elements come first.
    """

    label: str
    by_operator: dict[str, int]
    by_module: dict[str, int]
    uncounted: tuple[Uncounted, ...]

    @property
    def total(self) -> int:
        """Total number of FLOPs of all operators. Operators without a formula count as 0."""
        return sum(self.by_operator.values())

    @property
    def verdict(self) -> str:
        """Text that says which operators the total does not include."""
        custom = [f"{operator.name} ({operator.calls}×)" for operator in self.uncounted if not operator.pointwise]
        light = sum(operator.pointwise for operator in self.uncounted)
        if not self.by_operator and not self.uncounted:
            return "no PyTorch operator was dispatched: replayed graphs and work outside of PyTorch cannot be counted"
        pointwise = f"{light} element-wise operator{' counts' if light == 1 else 's count'} as 0" if light else ""
        if not custom:
            return f"every other operator has a formula; {pointwise}" if light else "every operator has a formula"
        named = ", ".join(custom[:4]) + (f" and {len(custom) - 4} more" if len(custom) > 4 else "")
        bound = "a lower bound" if self.total else "THE NUMBER OF FLOPS IS UNKNOWN"
        return f"{bound}: no formula for {named}" + (f"; {pointwise} too" if light else "")

    def __str__(self) -> str:
        parts = ", ".join(f"{name} {flops_text(flops)}" for name, flops in list(self.by_operator.items())[:4])
        total = f"{self.label}: {flops_text(self.total)} per call, counted by dispatch (n=1)"
        return f"{total}{f': {parts}' if parts else ''}\n{self.verdict}"

    def row(self, *, notebook: str, experiment: str, variant: str, **columns: Any) -> Row:
        """Return the total as a row of the metric `flops`. The row's params list the operators without a formula.

        The row has no value if nothing could be counted. Its reason is then the verdict.
        """
        place = {"notebook": notebook, "experiment": experiment, "variant": variant, **columns}
        without_formula = [operator.name for operator in self.uncounted if not operator.pointwise]
        about = {"without_formula": without_formula}
        if not self.total and (without_formula or not self.by_operator and not self.uncounted):
            return self._row(place, "flops", None, about, value_reason=self.verdict)
        return self._row(place, "flops", float(self.total), about, n=1)

    def plot(self) -> "Figure":
        """Plot FLOPs by operator and by module."""
        from hyperion.measure.api.display import draw_flops

        return draw_flops(self.label, self.by_operator, self.by_module, self.verdict)


_SPARSE = {torch.sparse_coo, torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc}
# These operators allocate, move or fill memory. They do no arithmetic.
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
    """Count the FLOPs of one call.

    Returns:
        The three fields `by_operator`, `by_module` and `uncounted` of `FlopsAnswer`.
    """
    counter = FlopCounterMode(display=False, custom_mapping=_more_formulas())
    counter.flop_registry = {operator: _for_any_tensor(formula) for operator, formula in counter.flop_registry.items()}
    rest = _OperatorsWithoutFormula(counter)
    # The dispatch mode that is entered last sees an operator first. `rest` is entered first, so that it also sees the operators
    # into which the counter decomposes other operators.
    with torch.compiler.set_stance("force_eager"), rest, counter:
        function()
    counts = counter.get_flop_counts()
    whole = counts.pop("Global", {})
    by_operator = dict(sorted(((str(op), n) for op, n in whole.items()), key=lambda item: item[1], reverse=True))
    by_module = {module: sum(operators.values()) for module, operators in counts.items()}
    uncounted = (Uncounted(name, calls, elements, pointwise) for name, (calls, elements, pointwise) in rest.counts.items())
    # Custom operators come first, because nothing is known about their FLOPs.
    order = sorted(uncounted, key=lambda operator: (operator.name.startswith("aten::"), -operator.elements))
    return by_operator, by_module, tuple(order)


def _more_formulas() -> dict:
    """Return the FLOP formulas that PyTorch's registry lacks: for attention on CPUs and for integer matrix products."""
    aten = torch.ops.aten

    def attention(query, key, value, *_, out_shape=None, **__) -> int:
        return sdpa_flop_count(query, key, value)

    def attention_backward(gradient, query, key, value, *_, out_shape=None, **__) -> int:
        return sdpa_backward_flop_count(gradient, query, key, value)

    def integer_product(a, b, *_, out_shape=None, **__) -> int:
        # a and b are shapes, because the counter passes shapes instead of tensors to the formulas.
        return 2 * a[0] * a[1] * b[1]

    return {
        aten._scaled_dot_product_flash_attention_for_cpu: attention,
        aten._scaled_dot_product_flash_attention_for_cpu_backward: attention_backward,
        aten._int_mm: integer_product,
    }


def _for_any_tensor(formula: Callable[..., int]) -> Callable[..., int]:
    """Return a FLOP formula that is also right for complex and sparse tensors. The given formula knows only their shapes."""

    def flops(*arguments, out_val=None, **named) -> int:
        if _has_sparse(arguments, named):
            return 0  # `_OperatorsWithoutFormula` lists the operator
        # A multiplication of complex numbers is 4 multiplications and 2 additions, and an addition is 2 additions.
        is_complex = isinstance(out_val, torch.Tensor) and out_val.is_complex()
        return formula(*arguments, out_val=out_val, **named) * (4 if is_complex else 1)

    return flops


def _has_sparse(*nests: object) -> bool:
    return any(isinstance(leaf, torch.Tensor) and leaf.layout in _SPARSE for leaf in tree_leaves(nests))


class _OperatorsWithoutFormula(TorchDispatchMode):
    """Records the operators without a FLOP formula.

    `counts` maps the name of an operator to (number of calls, number of elements of inputs and outputs, whether it is pointwise).
    """

    def __init__(self, counter: FlopCounterMode):
        super().__init__()
        self._known = counter.flop_registry
        self.counts: dict[str, tuple[int, int, bool]] = {}

    def __torch_dispatch__(self, operator, types, arguments=(), named=None):
        named = named or {}
        output = operator(*arguments, **named)
        name = operator._schema.name
        tensors = [leaf for leaf in tree_leaves((arguments, named)) if isinstance(leaf, torch.Tensor)]
        has_formula = operator._overloadpacket in self._known
        if has_formula and _has_sparse(tensors):
            name, has_formula = f"{name} of sparse tensors", False
        if tensors and not has_formula and name not in _NO_ARITHMETIC and not is_view(operator):
            outputs = [leaf for leaf in tree_leaves(output) if isinstance(leaf, torch.Tensor)]
            calls, elements, _ = self.counts.get(name, (0, 0, False))
            elements += sum(tensor.numel() for tensor in (*tensors, *outputs))
            self.counts[name] = (calls + 1, elements, torch.Tag.pointwise in operator.tags)
        return output


def watch_memory(function: Callable[[], object], device: Device) -> "PeakCounter":
    """Call a function twice: first to find the existing tensors that the function uses, then to count the live tensors."""
    # The existing tensors that a call uses are known only at the end of the call. Therefore, a second call counts the live
    # tensors.
    with torch.compiler.set_stance("force_eager"):
        with _ExistingTensors(device) as existing:
            function()
        with PeakCounter(device, existing.tensors()) as counter:
            function()
    return counter


class _ExistingTensors(TorchDispatchMode):
    """Records the storages that existed before the call and that an operator of the call uses."""

    def __init__(self, device: Device):
        super().__init__()
        self._type = torch.device(device.torch_device).type
        self._known_storages: dict[int, weakref.ref] = {}
        self._existing: list[weakref.ref] = []

    def __torch_dispatch__(self, operator, types, arguments=(), named=None):
        named = named or {}
        # If no operator of this call has returned the storage of an argument, the storage existed before the call.
        for tensor in self._new((arguments, named)):
            self._existing.append(self._remember(tensor))
        output = operator(*arguments, **named)
        for tensor in self._new(output):
            self._remember(tensor)
        return output

    def tensors(self) -> list[torch.Tensor]:
        """Return one tensor for each recorded storage that is still alive."""
        alive = [storage for reference in self._existing if (storage := reference()) is not None]
        # An empty tensor that refers to the storage needs no memory of its own.
        return [torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage) for storage in alive]

    def _new(self, nest) -> list[torch.Tensor]:
        leaves = [leaf for leaf in tree_leaves(nest) if isinstance(leaf, torch.Tensor) and leaf.device.type == self._type]
        return [part for leaf in leaves for part in parts_of(leaf) if not self._known(part)]

    def _known(self, tensor: torch.Tensor) -> bool:
        # A new storage can have the key of a storage that was freed.
        reference = self._known_storages.get(storage_key(tensor))
        return reference is not None and reference() is not None

    def _remember(self, tensor: torch.Tensor) -> weakref.ref:
        self._known_storages[storage_key(tensor)] = weakref.ref(tensor.untyped_storage())
        return self._known_storages[storage_key(tensor)]


class PeakCounter(TensorMemory):
    """Counts the bytes of live tensors before the first operator and after each operator.

    Attributes:
        before_bytes: total size of `alive`.
        history_bytes: total size of live tensors after each operator.
        peak_operator: name of the operator after which the total size was largest.
    """

    def __init__(self, device: Device, alive: list[torch.Tensor]):
        super().__init__(device, alive)
        alive.clear()  # the list would keep tensors alive that the function frees
        self.before_bytes, self.peak_operator = self.now_bytes, ""
        self.history_bytes: list[int] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        peak_bytes = self.peak_bytes
        returned = super().__torch_dispatch__(func, types, args, kwargs)
        self.history_bytes.append(self.now_bytes)
        if self.peak_bytes > peak_bytes:
            self.peak_operator = func._schema.name
        return returned
