"""Record the lifetime of every tensor of a training step by kind, so that its memory is known after each event.

Like `TensorMemory`, it observes the outputs of operators. It also works on fake tensors, which have a shape and no memory; this
predicts the memory of a step without running it, see hyperion.training.memory_estimate.
"""

import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from hyperion.measure.memory_use.tensor_memory import storage_key

PHASES = ("forward", "backward", "update")
ACTIVATIONS, GRADIENTS, TEMPORARY = "activations", "gradients", "temporary"
WORKSPACE = "workspace"  # memory of a kernel while it runs, which is not an output of the operator


@dataclass(frozen=True)
class Birth:
    """The lifetime of a piece of memory.

    Args:
        size: bytes.
        kind: "parameters", "optimizer state", … for memory that existed before the step, else one of the four kinds of this
            module.
        born, died: event numbers from 0; `died` is None if it outlives the step.
    """

    size: int
    kind: str
    born: int
    died: int | None


@dataclass(frozen=True)
class MemoryHistory:
    """The history of the memory of a step.

    Args:
        lives: lifetimes of all pieces of memory; those that existed before the step are born at event 0.
        events: number of allocations and releases.
        phase_ends: event number at the end of each of PHASES.
    """

    lives: tuple[Birth, ...]
    events: int
    phase_ends: tuple[int, ...]

    def levels(self, kind: str | None = None) -> list[int]:
        """Return the live bytes after each event, of one kind or of all."""
        changes = [0] * self.events
        for life in self.lives:
            if kind in (None, life.kind):
                changes[life.born] += life.size
                if life.died is not None:
                    changes[life.died] -= life.size
        return list(accumulate(changes))

    def kinds(self) -> list[str]:
        """Return the kinds in the order in which they first appear."""
        return list(dict.fromkeys(life.kind for life in sorted(self.lives, key=lambda life: life.born)))

    @property
    def parts(self) -> dict[str, int]:
        """Peak bytes of each kind; the peaks can be at different events."""
        return {kind: max(self.levels(kind)) for kind in self.kinds()}

    @property
    def kept_bytes(self) -> int:
        """Bytes of activations at the end of the forward pass."""
        return self.levels(ACTIVATIONS)[self.phase_ends[0] - 1]

    def fullest(self) -> int:
        """Return the event after which the live bytes are largest."""
        levels = self.levels()
        return levels.index(max(levels))

    @property
    def peak_bytes(self) -> int:
        """Largest number of live bytes, workspaces included."""
        return max(self.levels())

    @property
    def tensor_peak_bytes(self) -> int:
        """Largest number of live bytes of tensors, without workspaces of kernels."""
        return max(all_of_it - inside for all_of_it, inside in zip(self.levels(), self.levels(WORKSPACE), strict=True))

    def phase_of(self, event: int) -> str:
        """Return the phase of an event."""
        return next((name for name, end in zip(PHASES, self.phase_ends, strict=True) if event < end), PHASES[-1])

    def at(self, event: int) -> dict[str, int]:
        """Return the live bytes by kind after an event."""
        return {kind: self.levels(kind)[event] for kind in self.kinds()}


class MemoryTimeline(TorchDispatchMode):
    """Context of one training step on one device; `history()` then returns its memory.

    Args:
        model: the model whose gradients are recognised.
        standing: existing tensors by kind.
        block_bytes: sizes are rounded up to multiples of this, as an allocator does.
        inside: (operator, arguments) -> workspace bytes of its kernel while it runs.
        in_place: fake tensors only: add two gradients of the same tensor in place, as autograd does without a dispatch mode.
    """

    def __init__(
        self,
        model: nn.Module,
        standing: dict[str, Iterable[Tensor]],
        block_bytes: int = 1,
        inside: Callable[[Any, tuple], int] | None = None,
        in_place: bool = False,
    ):
        super().__init__()
        self._model, self._block, self._inside, self._in_place = model, block_bytes, inside, in_place
        self._numbers: dict[int, int] = {}  # index of each live piece of memory by storage key
        self._finalizers: dict[int, weakref.finalize] = {}
        self._sizes: list[int] = []
        self._born: list[int] = []
        self._died: list[int | None] = []
        self._kinds: list[str] = []
        self._event, self._ends = 0, [0, 0]
        for kind, tensors in standing.items():
            for tensor in tensors:
                self._count(tensor, kind)
        self._event = 1
        self._hooks: list = []

    def __enter__(self) -> "MemoryTimeline":
        self._hooks = [
            parameter.register_post_accumulate_grad_hook(self._mark_gradient)
            for parameter in self._model.parameters()
            if parameter.requires_grad
        ]
        self._saved = saved_tensors_hooks(self._mark_saved, lambda tensor: tensor)
        self._saved.__enter__()
        return super().__enter__()

    def __exit__(self, *exception) -> None:
        super().__exit__(*exception)
        self._saved.__exit__(*exception)
        for handle in self._hooks:
            handle.remove()
        for finalizer in self._finalizers.values():
            finalizer.detach()
        self._finalizers.clear()
        self._hooks.clear()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None) -> Any:
        in_node = torch._C._current_autograd_node() is not None
        if in_node and not self._ends[0]:
            self._ends[0] = self._event  # the first operation of the backward pass
        if self._in_place and in_node and (summed := _sum_of_gradients(func, args)) is not None:
            return summed
        returned = func(*args, **kwargs or {})
        for leaf in tree_leaves(returned):
            if isinstance(leaf, Tensor):
                self._count(leaf, TEMPORARY)
        if self._inside is not None and (size := self._inside(func, args)):
            self._die(self._bear(size, WORKSPACE))
        return returned

    def history(self) -> MemoryHistory:
        """Return the history up to now."""
        ends = self._ends[0] or self._event, self._ends[1] or self._event, self._event
        lives = tuple(map(Birth, self._sizes, self._kinds, self._born, self._died))
        return MemoryHistory(tuple(_as_activation(life, ends[0]) for life in lives), self._event, ends)

    def _count(self, tensor: Tensor, kind: str) -> None:
        storage = tensor.untyped_storage()
        key = id(storage)
        if key in self._numbers or tensor.device.type != self._device_type:
            return
        size = -(-storage.nbytes() // self._block) * self._block
        if size:
            self._numbers[key] = number = self._bear(size, kind)
            self._finalizers[key] = weakref.finalize(storage, self._forget, key, number)

    def _bear(self, size: int, kind: str) -> int:
        self._sizes.append(size)
        self._kinds.append(kind)
        self._born.append(self._event)
        self._died.append(None)
        self._event += self._event > 0
        return len(self._sizes) - 1

    def _die(self, number: int) -> None:
        self._died[number] = self._event
        self._event += 1

    def _forget(self, key: int, number: int) -> None:
        del self._numbers[key], self._finalizers[key]
        self._die(number)

    @property
    def _device_type(self) -> str:
        return next(self._model.parameters()).device.type

    def _mark_saved(self, tensor: Tensor) -> Tensor:
        self._mark(tensor, ACTIVATIONS)
        return tensor.detach()  # without its graph: an output saved by its own node would keep itself alive

    def _mark_gradient(self, parameter: Tensor) -> None:
        if parameter.grad is not None:
            self._mark(parameter.grad, GRADIENTS)
        self._ends[1] = self._event  # the last gradient ends the backward pass

    def _mark(self, tensor: Tensor, kind: str) -> None:
        number = self._numbers.get(storage_key(tensor))
        if number is not None and self._kinds[number] == TEMPORARY:
            self._kinds[number] = kind


def _as_activation(life: Birth, forward_end: int) -> Birth:
    """Classify memory that outlives the forward pass as activation, also if autograd did not save it itself."""
    left = 0 < life.born < forward_end and (life.died is None or life.died >= forward_end)
    return replace(life, kind=ACTIVATIONS) if life.kind == TEMPORARY and left else life


def _sum_of_gradients(operator: Any, arguments: tuple) -> Tensor | None:
    """Add in place if autograd accumulates two gradients of the same tensor; return None for any other operation.

    Recomputed forward passes run with gradients enabled, and backward formulas hardly ever add tensors of equal layout.
    """
    if operator is not torch.ops.aten.add.Tensor or torch.is_grad_enabled() or len(arguments) != 2:
        return None
    one, other = arguments
    alike = isinstance(other, Tensor) and (one.shape, one.stride(), one.dtype) == (other.shape, other.stride(), other.dtype)
    return one.add_(other) if alike and 0 not in one.stride() else None
