"""Check the output of a timed function.

The checks compare outputs element by element, and require that every call writes its output. They are needed because a time can
be measured correctly although the function does no work: it may return the result of an earlier call, or its own input. The
checks call the function a few times outside of the timing.
"""

import contextlib
import dataclasses
import functools
import math
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import nn
from torch._C._autograd import DeviceType
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import keystr, tree_flatten_with_path

from hyperion.hardware import Device
from hyperion.measure.clock.timing import HarnessError
from hyperion.measure.clock.verify import OutputMismatchError

# Largest relative Frobenius error between two correct computations that sum in different orders.
OUTPUT_TOLERANCE = {
    **{torch.float64: 1e-10, torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 3e-2},
    # The largest relative error of rounding to 4 or 3 significant bits. A wrong scale of 2 exceeds it by far.
    **dict.fromkeys((torch.float8_e4m3fn, torch.float8_e4m3fnuz), 2**-4),
    **dict.fromkeys((torch.float8_e5m2, torch.float8_e5m2fnuz), 2**-3),
}
# Number of roundings to the output format by which an element may differ, and limits on the assumed length of sums. The lower
# limit allows for functions that chain several operations. The upper limit exists because libraries sum in blocks, which is more
# accurate than one very long running sum.
_ROUNDINGS, _SHORTEST_REDUCTION, _LONGEST_REDUCTION = 4, 1 << 12, 1 << 24
_CHUNK = 1 << 22
# Limits that keep the checks fast: number of sampled elements to decide whether an output was written; number of sampled
# elements per tensor and number of tensors to decide whether the state of a function changed.
_SAMPLE, _STATE_ELEMENTS, _STATE_TENSORS = 1 << 24, 1 << 10, 512
# Largest number of objects, and largest nesting depth, in the search for tensors in a closure, in arguments and in globals.
_MOST_OBJECTS, _DEPTH = 10_000, 5


@dataclass(frozen=True)
class Snapshot:
    """A copy of an output in host memory.

    Args:
        leaves: (path, tensor) of each leaf of the returned structure. Examples of paths: "", "['loss']", "[0]". The tensor is
            None if the leaf is not numeric.
        structure: the nesting of the output. Two structures can be compared with ==.
        uncompared: paths of objects and tensors whose values cannot be read.
    """

    leaves: tuple[tuple[str, torch.Tensor | None], ...]
    structure: object
    uncompared: tuple[str, ...] = ()

    @property
    def numbers(self) -> int:
        """Number of numeric leaves."""
        return sum(tensor is not None for _, tensor in self.leaves)

    @property
    def sizes(self) -> list[int]:
        """Number of elements of each numeric leaf."""
        return [tensor.numel() for _, tensor in self.leaves if tensor is not None]

    @property
    def not_finite(self) -> list[str]:
        """Description of each leaf that contains NaN or infinity. Example: "4 of 4 values of output[0] are NaN or infinite"."""
        described = []
        for path, tensor in self.leaves:
            if tensor is None or not (tensor.is_floating_point() or tensor.is_complex()):
                continue
            # Formats of 8 bits have no isfinite.
            strange = tensor.numel() - int((tensor.float() if tensor.element_size() == 1 else tensor).isfinite().sum())
            if strange:
                described.append(f"{strange} of {tensor.numel()} values of output{path} are NaN or infinite")
        return described


@dataclass(frozen=True)
class Difference:
    """The difference between two outputs.

    Args:
        error, tolerance: relative Frobenius error of the worst leaf, and the largest allowed error.
        element_error, element_tolerance: |a - b| / (|b| + rms(b)) of the worst element, and the largest allowed value.
        worst: description of the worst element with its index and both values.
    """

    error: float
    tolerance: float
    element_error: float
    element_tolerance: float
    worst: str

    @property
    def agrees(self) -> bool:
        """Whether both errors are within their tolerances."""
        # Written with <= because a NaN must fail.
        return self.error <= self.tolerance and self.element_error <= self.element_tolerance

    @property
    def severity(self) -> float:
        """Largest ratio of error to tolerance. A value above 1 means that the outputs differ."""
        pairs = ((self.error, self.tolerance), (self.element_error, self.element_tolerance))
        return max(_ratio(error, tolerance) for error, tolerance in pairs)


def _ratio(error: float, tolerance: float) -> float:
    if math.isnan(error):
        return math.inf
    return error / tolerance if tolerance else (math.inf if error else 0.0)


# Comparing


def element_tolerance(dtype: torch.dtype, reduction: int) -> float:
    """Return the largest allowed |a - b| / (|b| + rms(b)) of one element between two correct computations.

    The tolerance of exact dtypes (integers and booleans) is 0. Other dtypes allow 4 roundings to the output format plus sqrt(K)
    roundings of the accumulation, where K is the length of the sum: the rounding errors of K terms are assumed to be independent.
    16-bit and 8-bit formats accumulate in float32. rms(b) is part of the denominator because an element can be small by
    cancellation although the terms of its sum are large.

    Args:
        reduction: K, clamped to the range from 4096 to 2^24.

    Source: Higham, Accuracy and Stability of Numerical Algorithms, 2nd edition, sections 2.8 and 3.1.
    """
    if dtype not in OUTPUT_TOLERANCE:
        return 0.0
    eps = torch.finfo(dtype).eps
    terms = min(max(reduction, _SHORTEST_REDUCTION), _LONGEST_REDUCTION)
    return _ROUNDINGS * eps + math.sqrt(terms) * min(eps, torch.finfo(torch.float32).eps)


def difference(a: Snapshot, b: Snapshot, *, reduction: int, tolerance: float | None = None) -> Difference | None:
    """Compare two outputs. Return None if neither output contains a number.

    NaN and infinity agree only with the same value at the same index.

    Args:
        reduction: length of the longest sum that computes one element; see `element_tolerance`.
        tolerance: replaces the tolerance for the Frobenius error and the tolerance for elements.

    Raises:
        OutputMismatchError: the structures, shapes or kinds of numbers differ.
    """
    if not a.numbers and not b.numbers:
        return None
    if a.structure != b.structure:
        raise _mismatch(f"the outputs have different structures: {a.structure} and {b.structure}")
    differences = []
    for (path, left), (_, right) in zip(a.leaves, b.leaves, strict=True):
        if left is None and right is None:
            continue
        if left is None or right is None:
            raise _mismatch(f"output{path}: one function returns a tensor or number here, the other function does not")
        if left.shape != right.shape:
            raise _mismatch(f"output{path}: the shapes differ: {tuple(left.shape)} and {tuple(right.shape)}")
        if _kind(left) != _kind(right):
            raise _mismatch(f"output{path}: {left.dtype} and {right.dtype} are different kinds of numbers")
        differences.append(_leaf_difference(path, left, right, reduction, tolerance))
    return max(differences, key=lambda one: one.severity)


def _mismatch(what: str) -> OutputMismatchError:
    return OutputMismatchError(
        what,
        where="the outputs of the functions",
        next_step="return the same structure from both functions, or return None from both functions",
    )


def _kind(tensor: torch.Tensor) -> str:
    if tensor.dtype == torch.bool:
        return "bool"
    return "complex" if tensor.is_complex() else "float" if tensor.is_floating_point() else "integer"


def _leaf_difference(path: str, a: torch.Tensor, b: torch.Tensor, reduction: int, tolerance: float | None) -> Difference:
    shape = a.shape
    if a.is_complex():
        # Each complex number becomes two floats. A lazy conjugation must be materialised first.
        a, b = torch.view_as_real(a.resolve_conj()), torch.view_as_real(b.resolve_conj())
    width = 2 if a.shape != shape else 1
    coarser = max((a.dtype, b.dtype), key=lambda dtype: OUTPUT_TOLERANCE.get(dtype, 0.0))
    norm_tolerance = OUTPUT_TOLERANCE.get(coarser, 0.0) if tolerance is None else tolerance
    each_tolerance = element_tolerance(coarser, reduction) if tolerance is None else tolerance
    a, b = a.reshape(-1), b.reshape(-1)
    if not a.numel():
        return Difference(0.0, norm_tolerance, 0.0, each_tolerance, f"output{path}: it has no elements")
    if a.dtype == b.dtype and torch.equal(a, b):
        return Difference(0.0, norm_tolerance, 0.0, each_tolerance, f"output{path}: all are equal")
    squares = scale = 0.0
    for start in range(0, a.numel(), _CHUNK):
        distance, reference = _distances(a[start : start + _CHUNK], b[start : start + _CHUNK])
        squares, scale = squares + distance.dot(distance).item(), scale + reference.dot(reference).item()
    # A second pass is needed, because the error of an element is relative to the rms of all elements.
    rms = math.sqrt(scale / b.numel())
    worst, place = -1.0, 0
    for start in range(0, a.numel(), _CHUNK):
        if a.numel() > _CHUNK:  # otherwise `distance` and `reference` still contain the only chunk
            distance, reference = _distances(a[start : start + _CHUNK], b[start : start + _CHUNK])
        size = reference.abs_().add_(rms)
        # If the reference contains only zeros, the absolute distance is used.
        value, index = distance.div_(size if rms else 1.0).max(dim=0)
        if value.item() > worst:
            worst, place = value.item(), start + int(index)
    error = math.sqrt(squares) / (math.sqrt(scale) or 1.0)
    index = tuple(int(i) for i in np.unravel_index(place // width, tuple(shape))) if len(shape) else ()
    described = f"output{path}{list(index) if index else ''}: {a[place].item():.6g} against {b[place].item():.6g}"
    return Difference(error, norm_tolerance, worst, each_tolerance, described)


def _distances(a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (|a - b|, b) in float64.

    The distance is 0 if both values are NaN or the same infinity. It is infinite if only one value is NaN or infinite.
    """
    exact = a != b if a.dtype == b.dtype and not a.is_floating_point() and a.element_size() == 8 else None
    a, b = a.double(), b.double()
    distance, reference = (a - b).abs_(), b.clone()
    if exact is not None:
        distance[exact & (distance == 0)] = 1.0  # different integers above 2^53 can be equal in float64
    if not bool(torch.isfinite(distance).all() & torch.isfinite(reference).all()):
        strange = ~(torch.isfinite(a) & torch.isfinite(b))
        same = (a == b) | (torch.isnan(a) & torch.isnan(b))
        # inf - inf and NaN - NaN are NaN, although the values agree.
        distance[strange & same], distance[strange & ~same] = 0.0, math.inf
        # Non-finite values would make the norm of the reference non-finite.
        reference[strange] = 0.0
    return distance, reference


# Calling


def call_from_seed(function: Callable[[], object], device: Device) -> "Returned":
    """Call a function with random generators seeded with 0, and then restore the state of the caller's generators.

    Raises:
        HarnessError: the function returned a Future or another handle of unfinished work.
    """
    gpus = [torch.device(device.torch_device)] if device.kind != "cpu" else []
    with torch.random.fork_rng(gpus):
        torch.default_generator.manual_seed(0)  # torch.manual_seed would also seed GPUs, which fork_rng does not restore
        for gpu in gpus:
            with torch.cuda.device(gpu):
                torch.cuda.manual_seed(0)
        states = _generator_states(gpus)
        returned = function()
        draws = any(not torch.equal(old, new) for old, new in zip(states, _generator_states(gpus), strict=True))
    leaves, structure = _flattened(returned)
    for _, leaf in leaves:
        is_done = next((getattr(leaf, name) for name in ("is_completed", "done") if callable(getattr(leaf, name, None))), None)
        if is_done is not None and not isinstance(leaf, torch.Tensor | type) and is_done() is False:
            raise HarnessError(
                f"the function returned a {type(leaf).__name__} whose work is not done",
                where="a timed function",
                next_step="wait for this work inside the function",
            )
        if isinstance(leaf, types.GeneratorType | types.CoroutineType | types.AsyncGeneratorType):
            raise HarnessError(
                f"the function returned a {type(leaf).__name__}, which has not run yet",
                where="a timed function",
                next_step="consume it inside the function, for example with list() or asyncio.run()",
            )
    return Returned(leaves, structure, draws)


def _flattened(returned: object) -> tuple[list[tuple[str, object]], object]:
    """Return (path, leaf) of each leaf, and the structure. The fields of dataclasses, which PyTorch takes for leaves, are leaves.

    Texts are part of the structure, so outputs with different texts cannot be compared.
    """
    found, structure = tree_flatten_with_path(returned)
    leaves: list[tuple[str, object]] = []
    inner: list[object] = []
    for path, leaf in found:
        if isinstance(leaf, str | bytes):
            inner.append((keystr(path), leaf))
        elif dataclasses.is_dataclass(leaf) and not isinstance(leaf, type):
            fields = {field.name: getattr(leaf, field.name) for field in dataclasses.fields(leaf)}
            parts, below = _flattened(fields)
            leaves += [(keystr(path) + part, value) for part, value in parts]
            inner.append((keystr(path), type(leaf).__qualname__, below))
        else:
            leaves.append((keystr(path), leaf))
    return leaves, (structure, *inner) if inner else structure


def _generator_states(gpus: list[torch.device]) -> list[torch.Tensor]:
    return [torch.default_generator.get_state(), *(torch.cuda.get_rng_state(gpu) for gpu in gpus)]


class Returned(list):
    """The output of a call as a list of (path, leaf), together with its nested structure.

    Args:
        draws: whether the call drew random numbers from PyTorch's default generators.
    """

    def __init__(self, leaves: list[tuple[str, object]], structure: object, draws: bool):
        super().__init__(leaves)
        self.structure, self.draws = structure, draws

    def tensors(self) -> list[torch.Tensor]:
        """Return the tensors of the output whose memory can be read."""
        return [leaf for _, leaf in self if isinstance(leaf, torch.Tensor) and _plain(leaf)]

    def snapshot(self) -> Snapshot:
        """Copy the output to host memory: the next call may overwrite the original, and a copy on the GPU would need memory."""
        leaves = tuple((path, _copied(leaf)) for path, leaf in self)
        unread = tuple(path for (path, leaf), (_, copy) in zip(self, leaves, strict=True) if copy is None and leaf is not None)
        return Snapshot(leaves, self.structure, unread)


def _copied_tensor(tensor: torch.Tensor) -> torch.Tensor | None:
    """Copy a tensor to host memory, in a dtype that supports arithmetic. Return None if the values cannot be read."""
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
            copy[(slice(0, 1),) * copy.dim()].double()  # raises for formats smaller than a byte, which cannot be converted
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
    """Return a dict that maps names to the tensors that a function can reach.

    The search covers the closure, the defaults, the bound object, partial arguments, and the globals that the function's code
    uses. Lists, tuples, dictionaries, modules and other functions that are found there are searched as well.
    """
    tensors: dict[str, torch.Tensor] = {}
    seen: set[int] = set()

    def visit(name: str, value: object, depth: int) -> None:
        if id(value) in seen or depth > _DEPTH or len(seen) > _MOST_OBJECTS:
            return
        seen.add(id(value))
        if isinstance(value, torch.Tensor):
            tensors.setdefault(name, value)
            return
        for inner, child in _children(value):
            visit(f"{name}{inner}" if name else inner.lstrip("."), child, depth + 1)

    visit("", function, 0)
    return tensors


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
            with contextlib.suppress(ValueError):  # an empty cell
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
    """Call a function twice and check that the second call writes its output.

    The check never overwrites the output, because memory that outlives a call may be state of the function. If both calls return
    the same memory, then either PyTorch must have counted a write to it, or its bits must have changed. PyTorch does not count
    writes by NumPy, by collectives and by kernels of other libraries. If such a write is possible, the check returns a warning
    instead of raising an error.

    Returns:
        A copy of the first output, and a warning. The warning is "" if there is none.

    Raises:
        HarnessError: the second call returned only inputs or memory of the first call, and did not write to them; or it returned
            a part of its output from a cache.
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
    # This call can remove tensors from `unwritten`.
    unseen = _may_write_unseen(function, device, unwritten)
    if not unwritten:
        return first, ""
    if unseen:
        return first, f"{label}: it is unknown whether the call wrote its output: {unseen}"
    passed = [inputs[_storage(tensor)] for tensor in unwritten if _storage(tensor) in inputs]
    if len(passed) < len(unwritten) or len(unwritten) == len(tensors):
        raise _not_written(inputs, label, next((t for t in unwritten if _storage(t) not in inputs), unwritten[0]))
    return first, f"{label}: returns its input {', '.join(dict.fromkeys(passed))} in addition to computed values"


def _not_written(inputs: dict, label: str, tensor: torch.Tensor) -> HarnessError:
    name = inputs.get(_storage(tensor))
    shape = f"{tensor.dtype} {list(tensor.shape)}"
    if name is not None:
        return HarnessError(
            f"{label}: the output aliases an input: it is {name} ({shape}), and the call did not write to it",
            where="the output of a timed function",
            next_step="return the computed result; return None to time a view or a call whose writes PyTorch does not count",
        )
    return HarnessError(
        f"{label}: a call returned memory of an earlier call ({shape}) and did not write to this memory, so the call did no work",
        where="the output of a timed function",
        next_step="compute the result in every call; remove any cache around the function",
    )


def _may_write_unseen(function: Callable[[], object], device: Device, tensors: list[torch.Tensor]) -> str:
    """Return the reason why PyTorch may have missed a write to one of these tensors, or "" if there is no such reason.

    This may call the function once more. On a CPU, tensors to which a PyTorch operator writes during this call are removed from
    the list `tensors`. Version counters do not show all of these writes: they miss writes in inference mode and through `.data`.
    """
    if any(not tensor.untyped_storage().resizable() for tensor in tensors if tensor.device.type == "cpu"):
        return "its memory is shared with NumPy or another library"
    if device.kind != "cpu" and any(tensor.device.type != "cpu" for tensor in tensors):
        worked = _device_works(function, device)
        return "" if worked is False else "PyTorch does not count the writes of all kernels"
    with _OperatorsOn({_storage(tensor) for tensor in tensors}) as seen:
        call_from_seed(function, device)
    tensors[:] = [tensor for tensor in tensors if _storage(tensor) not in seen.written]
    return f"{seen.names[0]} uses it, and PyTorch does not count the writes of this operator" if seen.names else ""


class _OperatorsOn(TorchDispatchMode):
    """Records which of the given storages PyTorch's own operators write to, and which other operators use any of the storages.

    Other operators, such as collectives, do not have to declare to which arguments they write.
    """

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
    """Return True if a call starts kernels or copies on the GPU, else False.

    Return None if the profiler records no event at all.
    """
    place = torch.device(device.torch_device)
    with torch.cuda.device(place), torch.random.fork_rng([place]):
        marker = torch.zeros(1, device=place)
        torch.cuda.synchronize()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            # This event must be recorded. If it is missing, the profiler does not work here.
            marker.fill_(1.0)
            function()
            torch.cuda.synchronize()
    seen = sum(event.device_type == DeviceType.CUDA for event in profile.events() or ())
    return seen > 1 if seen else None


def state_of(function: object) -> "dict[str, tuple[int, torch.Tensor | None]]":
    """Return the state of each tensor that a function can reach: its version counter, and the bytes of some of its elements.

    Returns:
        A dict that maps the name of a tensor to its state. After the first `_STATE_TENSORS` tensors, None replaces the bytes.
    """
    reached = {name: tensor for name, tensor in captured_tensors(function).items() if _plain(tensor)}
    return {
        name: (_version(tensor), _bits(tensor.detach(), _STATE_ELEMENTS) if place < _STATE_TENSORS else None)
        for place, (name, tensor) in enumerate(reached.items())
    }


def state_changed(before: dict, after: dict) -> tuple[list[str], list[str]]:
    """Compare two results of `state_of`. Only tensors that are in both results are compared.

    Returns:
        The names of the tensors to which PyTorch counted a write, and the names of those of which an element changed.
    """
    pairs = {name: (before[name], after[name]) for name in before if name in after}
    written = [name for name, ((old, _), (new, _)) in pairs.items() if old != new]
    values = [
        name
        for name, ((_, old), (_, new)) in pairs.items()
        if old is not None and new is not None and not (old.device == new.device and torch.equal(old, new))
    ]
    return written, values


def shared_tensors(names: list[str], function: object, other: object) -> list[str]:
    """Return those of the tensors of a function, given by name, whose memory another function can reach as well."""
    reached = {_storage(tensor) for tensor in captured_tensors(other).values() if _plain(tensor)}
    own = captured_tensors(function)
    return [name for name in names if name in own and _plain(own[name]) and _storage(own[name]) in reached]


def _version(tensor: torch.Tensor) -> int:
    # Tensors of inference mode have no version counter.
    return -1 if tensor.is_inference() else tensor._version


def _storage(tensor: torch.Tensor) -> tuple[torch.device, int]:
    return tensor.device, tensor.untyped_storage().data_ptr()


def _plain(tensor: torch.Tensor) -> bool:
    """Return True if the tensor has ordinary, readable memory."""
    if tensor.layout != torch.strided or tensor.is_nested or tensor.is_quantized or tensor.device.type == "meta":
        return False
    try:
        tensor.untyped_storage().data_ptr()
    except (RuntimeError, NotImplementedError):  # subclasses that wrap other tensors
        return False
    return True


def _bits(tensor: torch.Tensor, most: int = _SAMPLE) -> torch.Tensor:
    """Return a copy of the bytes of all elements. For larger tensors, copy about `most` evenly spaced elements."""
    for dimension, stride in enumerate(tensor.stride()):
        if stride == 0 and tensor.shape[dimension] > 1:  # an expanded dimension repeats its elements
            tensor = tensor.narrow(dimension, 0, 1)
    while tensor.numel() > most:
        longest = max(range(tensor.dim()), key=lambda dimension: tensor.shape[dimension])
        # Take every n-th element along the longest dimension. This makes a view and allocates no memory of the tensor's size.
        every = min(-(-tensor.numel() // most), tensor.shape[longest])
        tensor = tensor[(slice(None),) * longest + (slice(None, None, every),)]
    tensor = tensor.resolve_conj().resolve_neg()
    return tensor.clone(memory_format=torch.contiguous_format).reshape(-1).view(torch.uint8)
