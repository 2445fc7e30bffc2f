"""Measure the memory of tensors: the peak of a region, the live bytes after each operator, and the lifetime of each tensor.

`TensorMemory` counts the sizes of the storages of all live tensors. The count includes the outputs of operators, but not the
workspaces of kernels. Other measures of memory are larger: an allocator rounds sizes up and also holds cached blocks and
workspaces of libraries, and the resident memory of a process also contains the Python interpreter.

The count can be too high in one case. If a weight is used twice, autograd adds its two gradients, normally in place. While a
dispatch mode is active, it writes the sum to a new tensor (ATen's isTensorSubclassLike). If the peak occurs in this addition, the
count is too high by the size of one gradient of this weight.

`MemoryTimeline` also works with fake tensors, which have a shape but no memory. This predicts the memory of a step without
running it; see hyperion.training.memory_estimate.
"""

import weakref
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.profiler import ProfilerActivity
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from hyperion.hardware import Device
from hyperion.measure.steps.profiled import TraceProfiler
from hyperion.units import GIB

_STATUS, _CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")
PHASES = ("forward", "backward", "update")
ACTIVATIONS, GRADIENTS, TEMPORARY = "activations", "gradients", "temporary"
WORKSPACE = "workspace"  # memory that a kernel needs only while it runs


class TensorMemory(TorchDispatchMode):
    """Context manager that counts the bytes of live tensors. Tensors that other Python threads create are not counted.

    Args:
        device: only tensors on this type of device are counted.
        alive: existing tensors that are counted too.

    Attributes:
        now_bytes: current size of all counted live tensors. A storage that several tensors share counts once.
        peak_bytes: largest value of `now_bytes` since the start, or since the last call to `reset_peak`.
    """

    def __init__(self, device: Device, alive: Iterable[Tensor] = ()):
        super().__init__()
        self._type = torch.device(device.torch_device).type
        self._storages: dict[int, weakref.finalize] = {}
        self._sizes: dict[int, int] = {}
        self.now_bytes = self.peak_bytes = 0
        for tensor in alive:
            self._count(tensor)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None) -> Any:
        returned = func(*args, **kwargs or {})
        for leaf in tree_leaves(returned):
            if isinstance(leaf, Tensor):
                self._count(leaf)
        return returned

    def __exit__(self, *exception) -> None:
        super().__exit__(*exception)
        # Without this, `_forget` would still be called for memory that is freed after the block.
        for finalizer in self._storages.values():
            finalizer.detach()
        self._storages.clear()
        self._sizes.clear()

    def reset_peak(self) -> None:
        """Start a new peak: set `peak_bytes` to `now_bytes`."""
        self.peak_bytes = self.now_bytes

    def _count(self, tensor: Tensor) -> None:
        for part in parts_of(tensor):
            self._count_storage(part.untyped_storage())

    def _count_storage(self, storage: torch.UntypedStorage) -> None:
        if storage.device.type != self._type:
            return
        key, size = id(storage), storage.nbytes()
        if key not in self._storages:
            # The Python object of a storage lives exactly as long as the storage's memory, whichever tensors share it.
            self._storages[key] = weakref.finalize(storage, self._forget, key)
        # An operator may resize a storage, for example that of an empty tensor that is passed as `out`.
        self.now_bytes += size - self._sizes.get(key, 0)
        self._sizes[key] = size
        self.peak_bytes = max(self.peak_bytes, self.now_bytes)

    def _forget(self, key: int) -> None:
        del self._storages[key]
        self.now_bytes -= self._sizes.pop(key)


class SavedForBackward:
    """Context manager that counts the activations that autograd saves for the backward pass. Use it around a forward pass.

    Args:
        known: tensors that are not activations, such as parameters, buffers and the batch. They are not counted.
    """

    def __init__(self, known: Iterable[Tensor]):
        self._known = {storage_key(tensor) for tensor in known}
        self._kept: dict[int, weakref.ref] = {}
        self._hooks = saved_tensors_hooks(self._pack, lambda tensor: tensor)

    def __enter__(self) -> "SavedForBackward":
        self._hooks.__enter__()
        return self

    def __exit__(self, *exception) -> None:
        self._hooks.__exit__(*exception)

    @property
    def bytes(self) -> int:
        """Total size in bytes of all live saved activations. A storage that several tensors share counts once."""
        return sum(storage.nbytes() for storage in self._alive())

    def _alive(self) -> Iterator[torch.UntypedStorage]:
        return (storage for reference in self._kept.values() if (storage := reference()) is not None)

    def _pack(self, tensor: Tensor) -> Tensor:
        key = storage_key(tensor)
        if key not in self._known:
            self._kept[key] = weakref.ref(tensor.untyped_storage())
        # Detach the tensor, because an output that its own autograd node saves would otherwise keep itself alive.
        return tensor.detach()


def parts_of(tensor: Tensor) -> tuple[Tensor, ...]:
    """Return the tensors that hold the memory of a tensor: the indices and values of a sparse tensor, else the tensor itself."""
    if tensor.layout == torch.sparse_coo:
        return tensor._indices(), tensor._values()
    if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        return tensor.crow_indices(), tensor.col_indices(), tensor.values()
    if tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        return tensor.ccol_indices(), tensor.row_indices(), tensor.values()
    return (tensor,)


def storage_key(tensor: Tensor) -> int:
    """Return a key of the tensor's storage. Two live storages have different keys."""
    return id(tensor.untyped_storage())


def bytes_of(tensors: Iterable[Tensor]) -> int:
    """Return the total size in bytes of the storages of the tensors. A storage that several tensors share counts once."""
    return sum({storage_key(tensor): tensor.untyped_storage().nbytes() for tensor in tensors}.values())


def state_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, list[Tensor]]:
    """Return the tensors that exist between training steps, as a dict that maps a kind of memory to its tensors.

    The kinds are "parameters", "buffers", "gradients" and "optimizer state".
    """
    parameters: list[Tensor] = list(model.parameters())
    moments = [value for state in optimizer.state.values() for value in state.values() if isinstance(value, Tensor)]
    return {
        "parameters": parameters,
        "buffers": list(model.buffers()),
        "gradients": [parameter.grad for parameter in parameters if parameter.grad is not None],
        "optimizer state": moments,
    }


@dataclass(frozen=True)
class PeakMemory:
    """The peak memory of a region.

    Args:
        metric: "peak_memory_gib" for the allocated tensor memory on a GPU, or "peak_rss_gib" for the resident host memory of the
            whole process, including the interpreter and libraries.
        gib: the peak in GiB. None if the system does not report it.
        reason: reason why `gib` is None. "" if it is known.
    """

    metric: str
    gib: float | None
    reason: str = ""


class PeakMemoryRegion:
    """Context manager that measures the peak memory of a region. At the end of the region, it sets the attributes.

    The peaks include memory that was allocated before the region.

    Attributes:
        peak: peak of the memory that tensors occupy on an accelerator, or of the resident memory of the process on a CPU.
        reserved_gib: peak of the memory in GiB that the allocator of the accelerator holds. None on a CPU.
    """

    peak: PeakMemory
    reserved_gib: float | None = None

    def __init__(self, device: Device):
        self.device = device

    def __enter__(self) -> "PeakMemoryRegion":
        self._error = ""
        if self.device.kind != "cpu":
            torch.cuda.synchronize(self.device.torch_device)
            torch.cuda.reset_peak_memory_stats(self.device.torch_device)
            return self
        try:
            _CLEAR.write_text("5")  # resets VmHWM; see proc(5)
        except OSError as error:
            self._error = f"peak resident size cannot be reset here: {error.strerror}"
        return self

    def __exit__(self, *exception) -> None:
        if self.device.kind != "cpu":
            torch.cuda.synchronize(self.device.torch_device)
            self.peak = PeakMemory("peak_memory_gib", torch.cuda.max_memory_allocated(self.device.torch_device) / GIB)
            self.reserved_gib = torch.cuda.max_memory_reserved(self.device.torch_device) / GIB
        elif self._error:
            self.peak = PeakMemory("peak_rss_gib", None, self._error)
        else:
            kib = next(int(line.split()[1]) for line in _STATUS.read_text().splitlines() if line.startswith("VmHWM"))
            self.peak = PeakMemory("peak_rss_gib", kib * 1024 / GIB)


_MEMORY_EVENT = "[memory]"


def allocated_peak(device: Device, call: Callable[[], object], standing_bytes: int = 0) -> int:
    """Call a function once and return the peak memory of PyTorch's allocator in bytes.

    Workspaces that come from this allocator are included. On a GPU, the peak is read from the allocator and includes all tensors
    of the process. The CPU allocator does not count memory, but it reports every allocation and every release to the profiler.

    Args:
        standing_bytes: for a CPU only, the size in bytes of the existing tensors to include.
    """
    if device.kind != "cpu":
        torch.cuda.synchronize(device.torch_device)
        torch.cuda.reset_peak_memory_stats(device.torch_device)
        call()
        torch.cuda.synchronize(device.torch_device)
        return torch.cuda.max_memory_allocated(device.torch_device)
    with TraceProfiler([ProfilerActivity.CPU], profile_memory=True) as watch:
        call()
    # Memory events have positive sizes for allocations and negative sizes for releases.
    level = peak = standing_bytes
    profiler: Any = watch.profiler  # torch types neither the profiler's results nor its memory events
    for event in profiler.kineto_results.events():
        if event.name() == _MEMORY_EVENT:
            level += event.nbytes()
            peak = max(peak, level)
    return peak


@dataclass(frozen=True)
class Birth:
    """The lifetime of a memory block.

    Each allocation and each release of a block during the step is an event. Events are numbered from 1 in the order in which they
    happen. Event 0 stands for all allocations before the step.

    Args:
        size: size in bytes.
        kind: kind of memory: "parameters", "optimizer state" or a similar name for a block that existed before the step, else
            `ACTIVATIONS`, `GRADIENTS`, `TEMPORARY` or `WORKSPACE`.
        born: number of the event that allocated the block.
        died: number of the event that released the block. None if the block still exists at the end of the step.
    """

    size: int
    kind: str
    born: int
    died: int | None


@dataclass(frozen=True)
class MemoryHistory:
    """The history of the memory of a training step.

    Args:
        lives: lifetimes of all memory blocks. A block that existed before the step has `born` = 0.
        events: number of events (see `Birth`), including event 0.
        phase_ends: for each phase in PHASES, the number of the first event after the phase.
    """

    lives: tuple[Birth, ...]
    events: int
    phase_ends: tuple[int, ...]

    def levels(self, kind: str | None = None) -> list[int]:
        """Return the live bytes of one kind of memory after each event (see `Birth`). None means the total of all kinds."""
        changes = [0] * self.events
        for life in self.lives:
            if kind in (None, life.kind):
                changes[life.born] += life.size
                if life.died is not None:
                    changes[life.died] -= life.size
        return list(accumulate(changes))

    def kinds(self) -> list[str]:
        """Return all kinds of memory, in the order in which they first appear."""
        return list(dict.fromkeys(life.kind for life in sorted(self.lives, key=lambda life: life.born)))

    @property
    def parts(self) -> dict[str, int]:
        """A dict that maps each kind of memory to its own peak in bytes.

        The kinds can reach their peaks at different times, so the sum of these peaks can exceed the peak of the step.
        """
        return {kind: max(self.levels(kind)) for kind in self.kinds()}

    @property
    def kept_bytes(self) -> int:
        """Size in bytes of the activations at the end of the forward pass."""
        return self.levels(ACTIVATIONS)[self.phase_ends[0] - 1]

    def fullest(self) -> int:
        """Return the number of the event after which the most bytes are live (the first such event)."""
        levels = self.levels()
        return levels.index(max(levels))

    @property
    def peak_bytes(self) -> int:
        """Largest number of live bytes, including workspaces of kernels."""
        return max(self.levels())

    @property
    def tensor_peak_bytes(self) -> int:
        """Largest number of live bytes of tensors, without workspaces of kernels."""
        return max(all_of_it - inside for all_of_it, inside in zip(self.levels(), self.levels(WORKSPACE), strict=True))

    def phase_of(self, event: int) -> str:
        """Return the name of the phase in which an event happens."""
        return next((name for name, end in zip(PHASES, self.phase_ends, strict=True) if event < end), PHASES[-1])

    def at(self, event: int) -> dict[str, int]:
        """Return the live bytes after an event, as a dict that maps the kind of memory to bytes."""
        return {kind: self.levels(kind)[event] for kind in self.kinds()}


class MemoryTimeline(TorchDispatchMode):
    """Context manager that records the memory of one training step on one device. `history()` returns the result.

    Args:
        model: the model that is trained. The gradients of its parameters get the kind `GRADIENTS`.
        standing: a dict that maps a kind of memory to the tensors of this kind that exist before the step.
        block_bytes: block size of the allocator. Sizes are rounded up to a multiple of it.
        inside: function (operator, arguments) that returns the workspace of the operator's kernel in bytes. None means that no
            operator has a workspace.
        in_place: if True, add two gradients of the same tensor in place, as autograd does if no dispatch mode is active. Use this
            only with fake tensors.
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
        self._numbers: dict[int, int] = {}  # number of each live memory block, by the key of its storage
        self._finalizers: dict[int, weakref.finalize] = {}
        self._sizes: list[int] = []
        self._born: list[int] = []
        self._died: list[int | None] = []
        self._kinds: list[str] = []
        self._event, self._ends = 0, [0, 0]
        for kind, tensors in standing.items():
            for tensor in tensors:
                self._count(tensor, kind)
        # Event 0 stands for all allocations before the step.
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
            self._ends[0] = self._event  # this is the first operation of the backward pass
        if self._in_place and in_node and (summed := _sum_of_gradients(func, args)) is not None:
            return summed
        returned = func(*args, **kwargs or {})
        for leaf in tree_leaves(returned):
            if isinstance(leaf, Tensor):
                self._count(leaf, TEMPORARY)
        if self._inside is not None and (size := self._inside(func, args)):
            # The workspace is released immediately. Its allocation is a separate event, so that the peak includes it.
            self._die(self._bear(size, WORKSPACE))
        return returned

    def history(self) -> MemoryHistory:
        """Return the history from the start to the current event."""
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
        # The event number stays 0 while the tensors that existed before the step are counted.
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
        # Detach the tensor, because an output that its own autograd node saves would otherwise keep itself alive.
        return tensor.detach()

    def _mark_gradient(self, parameter: Tensor) -> None:
        if parameter.grad is not None:
            self._mark(parameter.grad, GRADIENTS)
        self._ends[1] = self._event  # the last gradient ends the backward pass

    def _mark(self, tensor: Tensor, kind: str) -> None:
        number = self._numbers.get(storage_key(tensor))
        if number is not None and self._kinds[number] == TEMPORARY:
            self._kinds[number] = kind


def _as_activation(life: Birth, forward_end: int) -> Birth:
    """Change the kind of a temporary block to `ACTIVATIONS` if it was allocated in the forward pass and outlives this pass.

    This also covers blocks that autograd itself did not save. The lifetimes of all other blocks are returned unchanged.
    """
    left = 0 < life.born < forward_end and (life.died is None or life.died >= forward_end)
    return replace(life, kind=ACTIVATIONS) if life.kind == TEMPORARY and left else life


def _sum_of_gradients(operator: Any, arguments: tuple) -> Tensor | None:
    """Do autograd's addition of two gradients of the same tensor in place, and return the result.

    For any other operation, do nothing and return None. The addition is recognised by two properties: gradients are disabled, and
    both tensors have the same shape, strides and dtype. In a recomputed forward pass, gradients are enabled, and backward
    formulas hardly ever add two tensors with the same layout.
    """
    if operator is not torch.ops.aten.add.Tensor or torch.is_grad_enabled() or len(arguments) != 2:
        return None
    one, other = arguments
    alike = isinstance(other, Tensor) and (one.shape, one.stride(), one.dtype) == (other.shape, other.stride(), other.dtype)
    return one.add_(other) if alike and 0 not in one.stride() else None
