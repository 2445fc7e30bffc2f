"""What a function returns: compared element by element, written by every call, and finished when the call returns.

A function may be timed right and still do nothing: it returns what an earlier call computed, its own input, or a buffer that
another thread fills later. The checks here call the function a few times outside of the timing and look at its output.
"""

import contextlib
import functools
import linecache
import math
import platform
import sys
import threading
import time
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import keystr, tree_flatten_with_path

from hyperion.errors import HyperionError
from hyperion.hardware import Device
from hyperion.measure.clock.checks import HarnessError

# Largest relative Frobenius error between two right ways to compute the same: another order of the sums, with room.
OUTPUT_TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 3e-2}
# Roundings to the format of the output that one element may differ by, and the lengths of reductions that are assumed: a
# function chains several operations, so none is taken as short; blocked sums are never as bad as a very long one.
_ROUNDINGS, _SHORTEST_REDUCTION, _LONGEST_REDUCTION = 4, 1 << 12, 1 << 24
_CHUNK = 1 << 22
# Of a larger output so many elements tell whether it was written; of what a function reaches, so many of so many tensors
# tell whether its state changed.
_SAMPLE, _STATE_ELEMENTS, _STATE_TENSORS = 1 << 24, 1 << 10, 512
# Of a function's closure, arguments and globals so many objects are looked at, to this depth.
_MOST_OBJECTS, _DEPTH = 10_000, 5
# A thread that just finished its work needs a moment to wait for the next; so does a device to pass its last event.
_THREAD_SETTLES_S, _STREAM_SETTLES_S = 2e-3, 2e-4


class OutputMismatchError(HyperionError):
    """Outputs that cannot be compared: other structure, shape or kind of numbers."""


@dataclass(frozen=True)
class Snapshot:
    """A copy of what a call returned, in host memory.

    Args:
        leaves: path within the returned structure ("", "['loss']", "[0]") and a tensor, or None for what is no number.
        structure: of the nest, comparable by ==.
        uncompared: paths of the tensors whose numbers cannot be read.
    """

    leaves: tuple[tuple[str, torch.Tensor | None], ...]
    structure: object
    uncompared: tuple[str, ...] = ()

    @property
    def numbers(self) -> int:
        """How many leaves hold numbers."""
        return sum(tensor is not None for _, tensor in self.leaves)

    @property
    def sizes(self) -> list[int]:
        """Elements of each leaf that holds numbers."""
        return [tensor.numel() for _, tensor in self.leaves if tensor is not None]


@dataclass(frozen=True)
class Difference:
    """How far two outputs are apart.

    Args:
        error, tolerance: relative Frobenius error of the worst leaf, and its largest allowed value.
        element_error, element_tolerance: of the worst element, |a - b| / (|b| + rms(b)), and its largest allowed value.
        worst: that element in words: its index, both values.
    """

    error: float
    tolerance: float
    element_error: float
    element_tolerance: float
    worst: str

    @property
    def agrees(self) -> bool:
        # Not `error > tolerance`: a NaN must fail.
        return self.error <= self.tolerance and self.element_error <= self.element_tolerance

    @property
    def severity(self) -> float:
        """Above 1 where the outputs differ; what the worst of several comparisons is chosen by."""
        pairs = ((self.error, self.tolerance), (self.element_error, self.element_tolerance))
        return max(_ratio(error, tolerance) for error, tolerance in pairs)


def _ratio(error: float, tolerance: float) -> float:
    if math.isnan(error):
        return math.inf
    return error / tolerance if tolerance else (math.inf if error else 0.0)


# Comparing


def element_tolerance(dtype: torch.dtype, reduction: int) -> float:
    """Largest |a - b| / (|b| + rms(b)) of one element between two right ways to compute it; 0 for exact dtypes.

    4 roundings to the format of the output, and sqrt(K) roundings of the accumulation: the roundings of a sum of K terms are
    independent, and 16-bit formats accumulate in float32. The rms of the whole output stands for the size of the terms of an
    element that cancellation made small.

    Args:
        reduction: K, taken as at least 4096 and at most 2^24.

    Source: Higham, Accuracy and Stability of Numerical Algorithms, 2nd edition, sections 2.8 and 3.1.
    """
    if dtype not in OUTPUT_TOLERANCE:
        return 0.0
    eps = torch.finfo(dtype).eps
    terms = min(max(reduction, _SHORTEST_REDUCTION), _LONGEST_REDUCTION)
    return _ROUNDINGS * eps + math.sqrt(terms) * min(eps, torch.finfo(torch.float32).eps)


def difference(a: Snapshot, b: Snapshot, *, reduction: int, tolerance: float | None = None) -> Difference | None:
    """Compare two outputs; None where neither holds a number. NaN and infinity agree only with themselves, at the same place.

    Args:
        reduction: terms of the longest sum behind an element, see `element_tolerance`.
        tolerance: replaces the tolerances of both the norm and the elements.

    Raises:
        OutputMismatchError: the structures, shapes or kinds of numbers differ.
    """
    if not a.numbers and not b.numbers:
        return None
    if a.structure != b.structure:
        raise _mismatch(f"the outputs are nested differently: {a.structure} and {b.structure}")
    found = []
    for (path, left), (_, right) in zip(a.leaves, b.leaves, strict=True):
        if (left is None) != (right is None):
            raise _mismatch(f"output{path}: one is a tensor or number, the other is not")
        if left is None:
            continue
        if left.shape != right.shape:
            raise _mismatch(f"output{path}: the shapes {tuple(left.shape)} and {tuple(right.shape)} differ")
        if _kind(left) != _kind(right):
            raise _mismatch(f"output{path}: {left.dtype} and {right.dtype} are different kinds of numbers")
        found.append(_leaf_difference(path, left, right, reduction, tolerance))
    return max(found, key=lambda one: one.severity)


def _mismatch(what: str) -> OutputMismatchError:
    return OutputMismatchError(
        what, where="the outputs of the functions", next_step="let both return the same structure, or let both return None"
    )


def _kind(tensor: torch.Tensor) -> str:
    if tensor.dtype == torch.bool:
        return "bool"
    return "complex" if tensor.is_complex() else "float" if tensor.is_floating_point() else "integer"


def _leaf_difference(path: str, a: torch.Tensor, b: torch.Tensor, reduction: int, tolerance: float | None) -> Difference:
    shape = a.shape
    if a.is_complex():
        a, b = torch.view_as_real(a.resolve_conj()), torch.view_as_real(b.resolve_conj())
    width = 2 if a.shape != shape else 1
    coarser = max((a.dtype, b.dtype), key=lambda dtype: OUTPUT_TOLERANCE.get(dtype, 0.0))
    norm_tolerance = OUTPUT_TOLERANCE.get(coarser, 0.0) if tolerance is None else tolerance
    each_tolerance = element_tolerance(coarser, reduction) if tolerance is None else tolerance
    a, b = a.reshape(-1), b.reshape(-1)
    if not a.numel():
        return Difference(0.0, norm_tolerance, 0.0, each_tolerance, "")
    if a.dtype == b.dtype and torch.equal(a, b):
        return Difference(0.0, norm_tolerance, 0.0, each_tolerance, f"output{path}: all are equal")
    squares = scale = 0.0
    for start in range(0, a.numel(), _CHUNK):
        distance, reference = _distances(a[start : start + _CHUNK], b[start : start + _CHUNK])
        squares, scale = squares + distance.dot(distance).item(), scale + reference.dot(reference).item()
    rms = math.sqrt(scale / b.numel())
    worst, place = -1.0, 0
    for start in range(0, a.numel(), _CHUNK):
        if a.numel() > _CHUNK:  # else those of the loop above are all of them
            distance, reference = _distances(a[start : start + _CHUNK], b[start : start + _CHUNK])
        size = reference.abs_().add_(rms)
        # A distance from an output of zeros alone is judged as it is.
        value, index = distance.div_(size if rms else 1.0).max(dim=0)
        if value.item() > worst:
            worst, place = value.item(), start + int(index)
    error = math.sqrt(squares) / (math.sqrt(scale) or 1.0)
    index = tuple(int(i) for i in np.unravel_index(place // width, tuple(shape))) if len(shape) else ()
    said = f"output{path}{list(index) if index else ''}: {a[place].item():.6g} against {b[place].item():.6g}"
    return Difference(error, norm_tolerance, worst, each_tolerance, said)


def _distances(a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(|a - b|, b) in float64; 0 where both are the same NaN or infinity, infinite where only one is or signs differ."""
    exact = a != b if a.dtype == b.dtype and not a.is_floating_point() and a.element_size() == 8 else None
    a, b = a.double(), b.double()
    distance, reference = (a - b).abs_(), b.clone()
    if exact is not None:
        distance[exact & (distance == 0)] = 1.0  # integers beyond 2^53 that differ may be equal in float64
    if not bool(torch.isfinite(distance).all() & torch.isfinite(reference).all()):
        strange = ~(torch.isfinite(a) & torch.isfinite(b))
        same = (a == b) | (torch.isnan(a) & torch.isnan(b))
        distance[strange & same], distance[strange & ~same] = 0.0, math.inf
        reference[strange] = 0.0
    return distance, reference


# Calling


def call_from_seed(function: Callable[[], object], device: Device) -> "Returned":
    """Paths and leaves of what a call returns, from random generators seeded with 0; those of the caller stay as they were.

    Raises:
        HarnessError: what it returns is not computed yet, a Future say.
    """
    gpus = [torch.device(device.torch_device)] if device.kind != "cpu" else []
    with torch.random.fork_rng(gpus):
        torch.default_generator.manual_seed(0)  # torch.manual_seed would seed GPUs that nobody restores
        for gpu in gpus:
            with torch.cuda.device(gpu):
                torch.cuda.manual_seed(0)
        returned = function()
    leaves, structure = tree_flatten_with_path(returned)
    for _, leaf in leaves:
        asked = next((getattr(leaf, name) for name in ("is_completed", "done") if callable(getattr(leaf, name, None))), None)
        if asked is not None and not isinstance(leaf, torch.Tensor | type) and asked() is False:
            raise HarnessError(
                f"the function returned a {type(leaf).__name__} whose work is not done",
                where="a timed function",
                next_step="wait for it inside the function",
            )
    return Returned([(keystr(path), leaf) for path, leaf in leaves], structure)


class Returned(list):
    """Paths and leaves of what a call returned, and the structure that they form."""

    def __init__(self, leaves: list[tuple[str, object]], structure: object):
        super().__init__(leaves)
        self.structure = structure

    def tensors(self) -> list[torch.Tensor]:
        return [leaf for _, leaf in self if isinstance(leaf, torch.Tensor) and _plain(leaf)]

    def snapshot(self) -> Snapshot:
        """Copies in host memory: the next call may overwrite the originals, and copies on a GPU would lie in the way."""
        leaves = tuple((path, _copied(leaf)) for path, leaf in self)
        unread = (path for (path, leaf), (_, copy) in zip(self, leaves, strict=True) if copy is None)
        tensors = {path for path, leaf in self if isinstance(leaf, torch.Tensor)}
        return Snapshot(leaves, self.structure, tuple(path for path in unread if path in tensors))


def _copied_tensor(tensor: torch.Tensor) -> torch.Tensor | None:
    """In host memory, and of a dtype that has arithmetic; None where it has no numbers or none that can be read."""
    if tensor.device.type == "meta":
        return None
    try:
        if tensor.is_nested:
            tensor = tensor.values()
        if tensor.is_quantized:
            tensor = tensor.dequantize()
        copy = (tensor if tensor.layout == torch.strided else tensor.to_dense()).to("cpu", copy=True)
        if copy.dtype in (torch.uint16, torch.uint32):
            return copy.to(torch.int64)
        if copy.dtype == torch.uint64:
            return copy.contiguous().view(torch.int64)
        if copy.dtype != torch.bool and not copy.is_complex():
            copy[(slice(0, 1),) * copy.dim()].double()  # formats below a byte have no conversion
        return copy
    except (RuntimeError, NotImplementedError):
        with contextlib.suppress(RuntimeError, NotImplementedError):
            return tensor.to("cpu", copy=True).contiguous().view(torch.uint8)
        return None


def _copied(leaf: object) -> torch.Tensor | None:
    if isinstance(leaf, torch.Tensor):
        return _copied_tensor(leaf.detach())
    if isinstance(leaf, bool | int | float | complex | np.number | np.bool_):
        return torch.as_tensor(np.asarray(leaf))
    if isinstance(leaf, np.ndarray) and leaf.dtype.kind in "biufc":
        return torch.as_tensor(leaf.copy())
    return None


# Inputs


def captured_tensors(function: object) -> dict[str, torch.Tensor]:
    """Tensors that a function can reach, by name: its closure, defaults, bound object, partial arguments, and the globals
    that its code names; within lists, tuples, dictionaries, modules and other functions."""
    found: dict[str, torch.Tensor] = {}
    seen: set[int] = set()

    def visit(name: str, value: object, depth: int) -> None:
        if id(value) in seen or depth > _DEPTH or len(seen) > _MOST_OBJECTS:
            return
        seen.add(id(value))
        if isinstance(value, torch.Tensor):
            found.setdefault(name, value)
            return
        for inner, child in _children(value):
            visit(f"{name}{inner}" if name else inner.lstrip("."), child, depth + 1)

    visit("", function, 0)
    return found


def _children(value: object) -> Iterator[tuple[str, object]]:
    if isinstance(value, functools.partial):
        yield "", value.func
        yield from ((f"[{i}]", given) for i, given in enumerate(value.args))
        yield from ((f".{name}", given) for name, given in value.keywords.items())
    elif isinstance(value, types.MethodType):
        yield "", value.__func__
        yield ".self", value.__self__
    elif isinstance(value, types.FunctionType):
        names = value.__code__.co_freevars
        for name, cell in zip(names, value.__closure__ or (), strict=True):
            with contextlib.suppress(ValueError):  # a cell that is not filled yet
                yield f".{name}", cell.cell_contents
        yield from ((f".default {i}", given) for i, given in enumerate(value.__defaults__ or ()))
        yield from ((f".{name}", given) for name, given in (value.__kwdefaults__ or {}).items())
        for name in value.__code__.co_names:
            named = value.__globals__.get(name)
            if named is not None and not isinstance(named, types.ModuleType | type):
                yield f".{name}", named
        if hasattr(value, "__wrapped__"):
            yield "", value.__wrapped__
    elif isinstance(value, nn.Module):
        yield from ((f".{name}", tensor) for name, tensor in (*value.named_parameters(), *value.named_buffers()))
    elif isinstance(value, list | tuple | set):
        yield from ((f"[{i}]", item) for i, item in enumerate(value))
    elif isinstance(value, dict):
        yield from ((f"[{key!r}]", item) for key, item in value.items())
    elif type(value).__module__ != "builtins" and not isinstance(value, type):
        yield from ((f".{name}", item) for name, item in getattr(value, "__dict__", {}).items())


# Written by each call


def require_written(function: Callable[[], object], device: Device, label: str) -> tuple[Snapshot, str]:
    """Call a function twice more, and see that the second call writes its output.

    Nothing is written into what a call returns: memory that outlives a call is somebody's state. Where the second call returns
    memory of the first, PyTorch must have counted a write to it, or its bits must have changed. Writes of NumPy, of
    collectives and of kernels on a GPU are not counted: where there may have been one, that is a doubt and no error.

    Returns:
        A copy of what the first of the two returned; and a doubt in words, or "".

    Raises:
        HarnessError: the second call returned only memory of the first, or inputs, and wrote to none of it; or part of it is
            a cache of the function's.
    """
    inputs = {_storage(given): name for name, given in captured_tensors(function).items() if _plain(given)}
    returned = call_from_seed(function, device)
    first, tensors = returned.snapshot(), [tensor.detach() for tensor in returned.tensors()]
    versions, bits = [_version(tensor) for tensor in tensors], [_bits(tensor) for tensor in tensors]
    again = call_from_seed(function, device).tensors()
    memory = {_storage(tensor) for tensor in again}
    unwritten = [
        tensor
        for tensor, version, before in zip(tensors, versions, bits, strict=True)
        if tensor.numel() and _storage(tensor) in memory and _version(tensor) == version and torch.equal(_bits(tensor), before)
    ]
    if not unwritten:
        return first, ""
    unseen = _may_write_unseen(function, device, unwritten)
    if not unwritten:
        return first, ""
    if unseen:
        return first, f"{label}: {unseen}, so that a write to the output cannot be told from none"
    passed = [inputs[_storage(tensor)] for tensor in unwritten if _storage(tensor) in inputs]
    if len(passed) < len(unwritten) or len(unwritten) == len(tensors):
        raise _not_written(inputs, label, next((t for t in unwritten if _storage(t) not in inputs), unwritten[0]))
    return first, f"{label}: returns its input {', '.join(dict.fromkeys(passed))} beside what it computes"


def _not_written(inputs: dict, label: str, tensor: torch.Tensor) -> HarnessError:
    name = inputs.get(_storage(tensor))
    shape = f"{tensor.dtype} {list(tensor.shape)}"
    if name is not None:
        return HarnessError(
            f"{label}: the output aliases an input: it is {name} ({shape}), to which the call wrote nothing",
            where="the output of a timed function",
            next_step="return what the function computes; to time a call without a result (a view, say), or one that writes "
            "where PyTorch does not see it, let it return None",
        )
    return HarnessError(
        f"{label}: a call returned the memory of an earlier call ({shape}) and wrote nothing to it: no work was done",
        where="the output of a timed function",
        next_step="compute in every call; remove the cache around the function",
    )


def _may_write_unseen(function: Callable[[], object], device: Device, tensors: list[torch.Tensor]) -> str:
    """Why a write to one of these might not have been counted, in words, or "". Calls the function once more, and removes the
    tensors that an operator of PyTorch writes to: versions miss writes in inference mode and through `.data`."""
    if any(not tensor.untyped_storage().resizable() for tensor in tensors if tensor.device.type == "cpu"):
        return "it shares its memory with NumPy or another library"
    if device.kind != "cpu" and any(tensor.device.type != "cpu" for tensor in tensors):
        worked = _device_works(function, device)
        return "" if worked is False else "kernels ran whose writes PyTorch does not count"
    with _OperatorsOn({_storage(tensor) for tensor in tensors}) as seen:
        call_from_seed(function, device)
    tensors[:] = [tensor for tensor in tensors if _storage(tensor) not in seen.written]
    return f"{seen.names[0]} works on it, whose writes PyTorch does not count" if seen.names else ""


class _OperatorsOn(TorchDispatchMode):
    """Which of these storages operators write to, and the names of operators from outside of PyTorch's own namespace
    (collectives, say) that are given one: what those write need not be declared."""

    def __init__(self, storages: set):
        super().__init__()
        self.storages, self.names, self.written = storages, [], set()

    def __torch_dispatch__(self, operator, kinds, args=(), kwargs=None):
        own = operator.namespace in ("aten", "prim", "prims")
        if not own or operator._schema.is_mutable:
            declared = [a.alias_info is not None and a.alias_info.is_write for a in operator._schema.arguments]
            names = [a.name for a in operator._schema.arguments]
            writes = [a for a, w in zip(args, declared, strict=False) if w]
            writes += [a for name, a in (kwargs or {}).items() if declared[names.index(name)]]
            self.written |= self._among(writes)
            if not own and self._among((args, kwargs or {})):
                self.names.append(str(operator))
        return operator(*args, **(kwargs or {}))

    def _among(self, given: object) -> set:
        tensors = (one for _, one in tree_flatten_with_path(given)[0] if isinstance(one, torch.Tensor) and _plain(one))
        return {_storage(tensor) for tensor in tensors} & self.storages


def _device_works(function: Callable[[], object], device: Device) -> bool | None:
    """Whether a call starts anything on the GPU: kernels, copies; None where the profiler sees nothing at all."""
    place = torch.device(device.torch_device)
    with torch.cuda.device(place), torch.random.fork_rng([place]):
        marker = torch.zeros(1, device=place)
        torch.cuda.synchronize()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            marker.fill_(1.0)
            function()
            torch.cuda.synchronize()
    seen = sum(event.device_type == torch.autograd.DeviceType.CUDA for event in profile.events())
    return seen > 1 if seen else None


def state_of(function: object) -> "dict[str, tuple[int, torch.Tensor | None]]":
    """Of each tensor that a function can reach: how often PyTorch wrote to it, and the bits of a sample of its elements."""
    reached = {name: tensor for name, tensor in captured_tensors(function).items() if _plain(tensor)}
    return {
        name: (_version(tensor), _bits(tensor.detach(), _STATE_ELEMENTS) if place < _STATE_TENSORS else None)
        for place, (name, tensor) in enumerate(reached.items())
    }


def state_changed(before: dict, after: dict) -> tuple[bool, bool]:
    """(whether something was written to what both reach, whether a value in it changed)."""
    pairs = [(before[name], after[name]) for name in before if name in after]
    written = any(old != new for (old, _), (new, _) in pairs)
    values = any(
        old is not None and new is not None and not (old.device == new.device and torch.equal(old, new))
        for (_, old), (_, new) in pairs
    )
    return written, values


def _version(tensor: torch.Tensor) -> int:
    return -1 if tensor.is_inference() else tensor._version


def _storage(tensor: torch.Tensor) -> tuple[torch.device, int]:
    return tensor.device, tensor.untyped_storage().data_ptr()


def _plain(tensor: torch.Tensor) -> bool:
    """Whether it has memory of its own that can be looked at."""
    if tensor.layout != torch.strided or tensor.is_nested or tensor.is_quantized or tensor.device.type == "meta":
        return False
    try:
        tensor.untyped_storage().data_ptr()
    except (RuntimeError, NotImplementedError):  # subclasses that wrap other tensors
        return False
    return True


def _bits(tensor: torch.Tensor, most: int = _SAMPLE) -> torch.Tensor:
    """The bytes of its elements, or of evenly spaced ones where there are more than `most`; a copy."""
    for dimension, stride in enumerate(tensor.stride()):
        if stride == 0 and tensor.shape[dimension] > 1:  # an expanded tensor has each element many times
            tensor = tensor.narrow(dimension, 0, 1)
    while tensor.numel() > most:
        longest = max(range(tensor.dim()), key=lambda dimension: tensor.shape[dimension])
        every = min(-(-tensor.numel() // most), tensor.shape[longest])
        tensor = tensor[(slice(None),) * longest + (slice(None, None, every),)]
    tensor = tensor.resolve_conj().resolve_neg()
    return tensor.clone(memory_format=torch.contiguous_format).reshape(-1).view(torch.uint8)


# Finished when the call returns


class WorkLeft:
    """Watches what a function leaves running: threads that became busy since this was made, and other streams of a GPU.

    A thread counts as busy while it executes or sleeps, and as idle while it waits in Python's own queues, locks, selectors
    and pools, or is blocked in the system (in a read, say) without using the CPU.
    Threads that were busy before are not the function's. Native threads are not seen.
    """

    def __init__(self, device: Device):
        self.device = device
        self._own = threading.get_ident()
        self._before = set(self._busy())

    def after_a_call(self) -> str:
        """What still works after the function returned, in words, or ""."""
        if left := self._on_other_streams():
            return left
        time.sleep(_THREAD_SETTLES_S / 8)  # a worker that was just handed work needs a moment to begin
        deadline = time.monotonic() + _THREAD_SETTLES_S
        while busy := self._new():
            if time.monotonic() > deadline:
                threads = {thread.ident: thread for thread in threading.enumerate()}
                works = _working([(ident, getattr(threads.get(ident), "native_id", None)) for ident in busy])
                if works is None:
                    return ""
                return f"thread {getattr(threads.get(works), 'name', works)!r} still works after the call returned"
            time.sleep(_THREAD_SETTLES_S / 8)
        return ""

    def _new(self) -> list[int]:
        return [ident for ident in self._busy() if ident not in self._before]

    def _busy(self) -> Iterator[int]:
        for ident, frame in sys._current_frames().items():
            if ident != self._own and not _waits(frame):
                yield ident

    def _on_other_streams(self) -> str:
        if self.device.kind == "cpu":
            return ""
        with torch.cuda.device(self.device.torch_device):
            event = torch.cuda.Event()
            event.record()
            event.synchronize()
            started = time.perf_counter()
            torch.cuda.synchronize()
            waited_s = time.perf_counter() - started
        if waited_s <= _STREAM_SETTLES_S:
            return ""
        return f"the device works {waited_s * 1e3:.3g} ms longer, on other streams than the current one"


def _working(threads: list[tuple[int, int | None]]) -> int | None:
    """The first of these (Python's ident, the system's) that runs, uses the CPU between two looks, or sleeps for a while."""
    before = [_look(native) for _, native in threads]
    time.sleep(_THREAD_SETTLES_S / 2)
    for (ident, native), old in zip(threads, before, strict=True):
        new = _look(native)
        if old is not None and new is None:
            continue  # it ended
        if old is None or "R" in (old[0], new[0]) or old[1] != new[1] or _sleeps(ident, native):
            return ident
    return None


def _look(native: int | None) -> tuple[str, int] | None:
    """(state, CPU time) of a thread; None where the system does not say."""
    task = Path(f"/proc/self/task/{native}")
    try:
        fields = (task / "stat").read_text().rpartition(")")[2].split()
        with contextlib.suppress(OSError, IndexError, ValueError):
            return fields[0], int((task / "schedstat").read_text().split()[0])  # ns; the times of `stat` are ticks of 10 ms
        return fields[0], int(fields[11]) + int(fields[12])
    except (OSError, IndexError, ValueError):
        return None


# nanosleep and clock_nanosleep.
_SLEEPS = {"x86_64": ("35", "230"), "aarch64": ("101", "115")}


def _sleeps(ident: int, native: int | None) -> bool:
    """Whether a thread that uses no CPU waits for a time to pass, which stands for work, and not for others."""
    with contextlib.suppress(OSError, LookupError):
        return Path(f"/proc/self/task/{native}/syscall").read_text().split()[0] in _SLEEPS[platform.machine()]
    frame = sys._current_frames().get(ident)
    line = linecache.getline(frame.f_code.co_filename, frame.f_lineno) if frame else ""
    return "sleep" in line or any(mark in line for mark in _RUNS_WORK)


# Files of Python's own whose functions wait for others, and the lines within them that run what they were given.
_WAITERS = tuple(
    f"/{name}"
    for name in (
        "threading.py",
        "queue.py",
        "selectors.py",
        "socketserver.py",
        "subprocess.py",
        "concurrent/futures/thread.py",
        "concurrent/futures/process.py",
        "concurrent/futures/_base.py",
        "multiprocessing/connection.py",
        "multiprocessing/queues.py",
        "multiprocessing/pool.py",
        "asyncio/base_events.py",
    )
)
_RUNS_WORK = ("self._target(", "self.fn(", "fn(*", "func(*", "self.task")


def _waits(frame: types.FrameType) -> bool:
    if not frame.f_code.co_filename.replace("\\", "/").endswith(_WAITERS):
        return False
    # A built-in function has no frame: `Thread(target=time.sleep)` is seen at the line that calls it.
    line = linecache.getline(frame.f_code.co_filename, frame.f_lineno)
    return not any(mark in line for mark in _RUNS_WORK)


def require_nothing_left(left: list[str], label: str) -> None:
    """Raise when every one of several calls left work behind: once may be a thread on its way to rest.

    Args:
        left: what `WorkLeft.after_a_call` said after each.

    Raises:
        HarnessError: work is left to another thread or stream, whose time no clock here sees.
    """
    if left and all(left):
        raise HarnessError(
            f"{label}: {left[0]}",
            where="a timed function",
            next_step="wait inside the function for all that it starts: join threads, take results, synchronise streams",
        )
