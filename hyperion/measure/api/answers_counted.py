"""What `measure.memory` and `measure.flops` answer: counts of one call, in words, as a picture, and as rows."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from hyperion.hardware import Device
from hyperion.measure.api.answers import Answer
from hyperion.measure.clock.units import bytes_text, flops_text
from hyperion.measure.memory.memory import GIB
from hyperion.results import Row

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True, repr=False)
class MemoryAnswer(Answer):
    """The most memory a call needs at once.

    Args:
        before_bytes: tensors that the call works on and that were there before it.
        peak_bytes: the most bytes of tensors alive at once, those included, counted by dispatch.
        peak_operator: the operator after which that many were alive.
        history_bytes: bytes alive after each operator.
        allocator_peak_bytes: the most that the device's allocator had given out at once, to whatever tensors; None on a CPU.
        allocator_before_bytes: what it had given just before the call.
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
        """What the call needs on top of what was there: by the allocator on a GPU, by dispatch on a CPU."""
        if self.allocator_peak_bytes is None:
            return self.peak_bytes - self.before_bytes
        return self.allocator_peak_bytes - self.allocator_before_bytes

    @property
    def verdict(self) -> str:
        """Where the peak lies."""
        return f"most after {self.peak_operator}" if self.peak_operator else "no operator made a tensor on this device"

    def __str__(self) -> str:
        tensors = f"{bytes_text(self.peak_bytes)} of tensors at once, {bytes_text(self.before_bytes)} of them there before"
        counted = f"(counted by dispatch, n=1), {self.device.name}; {self.verdict}"
        if self.allocator_peak_bytes is None:
            return f"{self.label}: {tensors} {counted}\nno allocator to ask on a CPU: libraries' own buffers are not in it"
        allocated = f"{bytes_text(self.allocator_peak_bytes)} at the peak, {bytes_text(self.added_bytes)} above the start"
        return f"{self.label}: {allocated} (device allocator, n=1)\n{tensors} {counted}"

    def row(self, *, notebook: str, experiment: str, variant: str, **columns) -> Row:
        """The first of `rows`: the allocator's peak on a GPU, the count by dispatch on a CPU."""
        return self.rows(notebook=notebook, experiment=experiment, variant=variant, **columns)[0]

    def rows(self, *, notebook: str, experiment: str, variant: str, **columns) -> list[Row]:
        """`peak_memory_gib` by the allocator (GPUs only) and `tensor_memory_gib` by dispatch."""
        place = {"notebook": notebook, "experiment": experiment, "variant": variant, **columns}
        reason = "" if columns.get("limit") is not None else "no limit: what the function must hold is not known"
        peaks = {"peak_memory_gib": self.allocator_peak_bytes, "tensor_memory_gib": self.peak_bytes}
        return [
            self._row(place, metric, peak / GIB, {}, n=1, limit_source=reason)
            for metric, peak in peaks.items()
            if peak is not None
        ]

    def plot(self) -> "Figure":
        """Bytes of tensors alive, operator by operator."""
        from hyperion.measure.api.pictures import draw_memory

        return draw_memory(self.label, self.history_bytes, self.before_bytes, self.device.name, self.verdict)


@dataclass(frozen=True)
class Uncounted:
    """An operator on tensors that no FLOP formula is known for: it counts as 0.

    Args:
        name: "aten::relu".
        calls: how often it ran.
        elements: elements that went in and came out, of all calls.
        pointwise: PyTorch says it does each element by itself, a handful of FLOPs.
    """

    name: str
    calls: int
    elements: int
    pointwise: bool


@dataclass(frozen=True, repr=False)
class FlopsAnswer(Answer):
    """Floating-point operations of one call; a multiply-add is 2.

    Args:
        by_operator: FLOPs by operator ("aten.mm"), largest first.
        by_module: FLOPs by module path, submodules included in their parents.
        uncounted: operators without a formula: custom ones first, then by elements.
    """

    label: str
    by_operator: dict[str, int]
    by_module: dict[str, int]
    uncounted: tuple[Uncounted, ...]

    @property
    def total(self) -> int:
        return sum(self.by_operator.values())

    @property
    def verdict(self) -> str:
        """What the number leaves out."""
        strange = [f"{found.name} ({found.calls}×)" for found in self.uncounted if not found.pointwise]
        light = sum(found.pointwise for found in self.uncounted)
        if not self.by_operator and not self.uncounted:
            return "no PyTorch operator was seen: a replayed graph, or work outside of PyTorch, cannot be counted"
        besides = f"{light} element-wise operator{'s' if light > 1 else ''} count as 0" if light else ""
        if not strange:
            return f"every other operator has a formula; {besides}" if light else "every operator has a formula"
        named = ", ".join(strange[:4]) + (f" and {len(strange) - 4} more" if len(strange) > 4 else "")
        bound = "a lower bound" if self.total else "0 IS NOT THE ANSWER"
        return f"{bound}: no formula for {named}" + (f"; {besides} too" if light else "")

    def __str__(self) -> str:
        parts = ", ".join(f"{name} {flops_text(flops)}" for name, flops in list(self.by_operator.items())[:4])
        total = f"{self.label}: {flops_text(self.total)} a call, counted by dispatch (n=1)"
        return f"{total}{f': {parts}' if parts else ''}\n{self.verdict}"

    def row(self, *, notebook: str, experiment: str, variant: str, **columns) -> Row:
        """The total as a row of `flops`; params name what has no formula."""
        place = {"notebook": notebook, "experiment": experiment, "variant": variant, **columns}
        about = {"without_formula": [found.name for found in self.uncounted if not found.pointwise]}
        return self._row(place, "flops", float(self.total), about, n=1)

    def plot(self) -> "Figure":
        """FLOPs by operator and by module."""
        from hyperion.measure.api.pictures import draw_flops

        return draw_flops(self.label, self.by_operator, self.by_module, self.verdict)
