"""Measure a function of your own: its time, its speed against another one, its memory, and its FLOPs.

    from hyperion import measure

    print(measure.time(lambda: model(x)))
    print(measure.compare(eager, compiled, labels=("eager", "compiled")))

A function takes no arguments: bind them with a lambda. All timing is done by `time_interleaved`.

`time` and `compare` also check the outputs. They call each function twice before the timing and twice after it, from the same
random state, and require that the outputs before and after agree (unless the first two calls already differ, as those of a
training step do), that every call writes its output, and that no work is left on other threads or streams. If a function
returns None, its output is not checked.
"""

import contextlib
import functools
import inspect
import time as host_clock
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist

from hyperion.errors import HyperionError
from hyperion.hardware import Device, detect, detect_cpu
from hyperion.measure.api.answers import ComparisonAnswer, TimeAnswer
from hyperion.measure.api.counting import FlopsAnswer, MemoryAnswer, count_flops, watch_memory
from hyperion.measure.api.outputs import (
    Difference,
    OutputMismatchError,
    Snapshot,
    WorkLeft,
    call_from_seed,
    captured_tensors,
    difference,
    require_nothing_left,
    require_written,
    state_changed,
    state_of,
)
from hyperion.measure.clock.clocks import RanksClock
from hyperion.measure.clock.timing import LEAST_SAMPLES, MINIMUM_SAMPLES, HarnessError, Timing, require_sampling, time_interleaved
from hyperion.measure.memory_use.tensor_memory import allocated_peak
from hyperion.processes import World, world

Function = Callable[[], object]
Result = TypeVar("Result")
# Defaults: samples and time limit with `quick`, and the time limit without it.
_QUICK_SAMPLES, _QUICK_LIMIT_S, _LIMIT_S = 10, 0.2, 5.0
# The fewest calls of a function after its first two, however short the limit: one of warm-up, one block of calls in a row,
# three samples, and one after the timing. A GPU's clock adds one call to each of the first small batches.
_LEAST_CALLS = {"cpu": 6}
_LEAST_CALLS_ON_A_GPU = 11
_RENDEZVOUS_S = 60.0


def time(
    function: Function,
    *,
    device: Device | str | torch.device | None = None,
    cold: bool | None = None,
    label: str | None = None,
    minimum_samples: int | None = None,
    time_limit_s: float | None = None,
    back_to_back: int = 0,
    quick: bool = False,
    alone: bool = False,
) -> TimeAnswer:
    """Measure the time of one call in seconds.

    Warms up until the times are stable, then samples until the 95 % interval of the median is within 1 %.

    In a process group, every rank must call this function. All ranks take the same number of samples, and each sample is the
    time of the slowest rank, so the measured function may contain collectives.

    Args:
        function: takes no arguments and does one unit of work. It does not have to synchronise.
        device: a `hyperion.hardware.Device` or a PyTorch device name ("cpu", "cuda:1"). None uses the current device.
        cold: flush the last-level cache before each call. Use False for whole steps and for code that runs in a tight loop.
            None means True, or False with `quick` or `back_to_back`.
        label: name of the function in the output. None uses its own name.
        minimum_samples: at least 3. None means 30, or 10 with `quick`. The time limit can end sampling earlier.
        time_limit_s: seconds for warm-up, checks and samples. The first call, which may compile, is not included. None means
            5 s, or 0.2 s with `quick`; a slow function then gets as long as the fewest calls need.
        back_to_back: if above 0, each sample is the mean of this many calls in a row on the host's clock, launch overhead
            included. Requires cold=False.
        quick: answer in about 0.2 s, like `torch.utils.benchmark.Timer.blocked_autorange`. Caches are hot, warm-up does not
            wait for slow clocks to settle, and the interval is wider than 1 %.
        alone: in a process group, time on this rank only.

    Raises:
        HyperionError: an argument is out of range, or the time limit is too short for 3 samples.
        HarnessError: the output changed between the calls before and after the timing, aliases an input, or was not written;
            work was left on another thread or stream; or the timing failed one of its checks. An exception of the function
            itself is re-raised with a note.
    """
    settings = _Settings.of("time", device, cold, minimum_samples, time_limit_s, back_to_back, quick, alone)
    function, label = checked_callable(function, "time"), _label(label) or _name_of(function, "the function")
    with noting("time", label):
        examined = _examine([function], (label,), settings)
        (timing,) = examined.timings
    change = examined.changes[0]
    if change is not None and not change.agrees:
        raise HarnessError(
            f"{label}: a call after the timing returned another value than the first two calls: {change.worst}",
            where="the output of a timed function",
            next_step="do the same work on the same input in every call; return None if a call changes state that it depends on",
        )
    return TimeAnswer(label, timing, settings.device, settings.minimum_samples, examined.notes)


def compare(
    function_a: Function,
    function_b: Function,
    *,
    device: Device | str | torch.device | None = None,
    cold: bool | None = None,
    labels: tuple[str, str] | None = None,
    tolerance: float | None = None,
    minimum_samples: int | None = None,
    time_limit_s: float | None = None,
    back_to_back: int = 0,
    quick: bool = False,
    alone: bool = False,
) -> ComparisonAnswer:
    """Compare the speed of two functions and their outputs.

    Calls of A and B alternate, so drift affects both alike. Outputs are compared in float64 for the first call, the second
    call, and one call after the timing (the last one only if calls do not depend on earlier calls). They agree if the relative
    Frobenius error is within `OUTPUT_TOLERANCE` of the coarser dtype and each element is within `element_tolerance`, for sums
    as long as the largest tensor that the functions can reach. NaN and infinity agree only with the same value at the same
    index. Integers and booleans must be equal.

    If the values differ, the answer says so and its `row` raises.

    Args:
        labels: names of A and B in the output. None uses the functions' names, or "A" and "B".
        tolerance: replaces both tolerances: the largest relative Frobenius error, and the largest |a - b| / (|b| + rms(b)) of
            an element.

    The other arguments and errors are those of `time`.

    Raises:
        OutputMismatchError: the outputs differ in structure, shape or kind of number.
    """
    settings = _Settings.of("compare", device, cold, minimum_samples, time_limit_s, back_to_back, quick, alone)
    functions = [checked_callable(function_a, "compare"), checked_callable(function_b, "compare")]
    labels = _two_labels(labels) or _two_names(*functions)
    if tolerance is not None and not (isinstance(tolerance, int | float) and 0 <= tolerance < float("inf")):
        raise HyperionError(
            f"tolerance is {tolerance!r}", where="tolerance=", next_step="pass a relative error of at least 0, such as 1e-3"
        )
    with noting("compare", " or ".join(labels)):
        examined = _examine(functions, labels, settings, tolerance)
    differences = [one for one in (*examined.between, *examined.changes) if one is not None]
    worst = max(differences, key=lambda one: one.severity, default=None)
    reason = "" if worst else "they do not both return tensors"
    timing_a, timing_b = examined.timings
    return ComparisonAnswer(
        labels, (timing_a, timing_b), settings.device, worst, reason, settings.minimum_samples, examined.notes
    )


@dataclass(frozen=True)
class _Settings:
    """The validated arguments of `time` and `compare`, with their defaults."""

    device: Device
    cold: bool
    minimum_samples: int
    time_limit_s: float | None
    default_limit_s: float
    back_to_back: int
    here: World

    @classmethod
    def of(cls, question: str, device, cold, minimum_samples, time_limit_s, back_to_back, quick, alone) -> "_Settings":
        where = f"hyperion.measure.{question}"
        for name, value, allowed in (
            ("cold", cold, (True, False, None)),
            ("quick", quick, (True, False)),
            ("alone", alone, (True, False)),
        ):
            if not any(value is one for one in allowed):
                raise HyperionError(f"{name} is {value!r}", where=where, next_step=f"pass one of {allowed}")
        minimum_samples = (_QUICK_SAMPLES if quick else MINIMUM_SAMPLES) if minimum_samples is None else minimum_samples
        require_sampling(minimum_samples, back_to_back, time_limit_s=time_limit_s)
        cold = not (quick or back_to_back) if cold is None else cold
        if back_to_back and cold:
            raise HyperionError("back_to_back calls cannot start with a cold cache", where=where, next_step="pass cold=False")
        device, here = device_of(device), world()
        if alone or here.size == 1:
            here = World(0, 1, 0, "", device)
        limit_s = _QUICK_LIMIT_S if quick else _LIMIT_S
        return cls(device, cold, minimum_samples, time_limit_s, limit_s, back_to_back, replace(here, device=device))


@dataclass(frozen=True)
class _Examined:
    """Timings, and the comparisons of the outputs.

    Args:
        between: differences of A and B in each call that can be compared.
        changes: difference of each function between its first call and the one after the timing; None if not comparable.
        notes: warnings about the outputs.
    """

    timings: tuple[Timing, ...]
    between: tuple[Difference | None, ...]
    changes: tuple[Difference | None, ...]
    notes: tuple[str, ...]


def _examine(
    functions: list[Function], labels: tuple[str, ...], settings: _Settings, tolerance: float | None = None
) -> _Examined:
    """Call the functions, time them, call them again, and check the outputs."""
    device, here = settings.device, settings.here
    if here.size > 1:
        _meet(here)
    outputs, call_s, used_s = _agreed(here, lambda: _before(functions, labels, device, tolerance))
    call_s, used_s = _slowest(here, call_s), _slowest(here, used_s)
    limit_s = _limit(settings, call_s, used_s, labels)
    timed: list[Function] = functions
    clock, calls = None, 1
    if here.size > 1:
        # The samples and the elapsed time decide how often to call. RanksClock makes both equal on all ranks: ranks that
        # called a collective a different number of times would hang.
        clock, calls = RanksClock(here, lambda: None, lambda what: None), max(1, settings.back_to_back)
        timed = [functools.partial(repeat, function, calls) for function in functions]
    timings = time_interleaved(
        timed,
        device,
        cold=settings.cold,
        minimum_samples=settings.minimum_samples,
        time_limit_s=limit_s,
        back_to_back=0 if clock else settings.back_to_back,
        clock=clock,
        budget_s=limit_s - 2 * used_s - call_s,
    )
    timings = [timing.per_call(calls) for timing in timings]
    return _agreed(here, lambda: _after(functions, labels, device, tolerance, outputs, timings))


def repeat(function: Function, times: int) -> None:
    """Call a function several times in a row."""
    for _ in range(times):
        function()


@dataclass(frozen=True)
class _Outputs:
    """Outputs of the first two calls of one function.

    Args:
        calls: copies of both outputs.
        differ: the two outputs differ.
        keeps_state: the second call changed tensors that the function can reach.
        reduction: length of the longest sum, for the tolerance.
    """

    calls: tuple[Snapshot, Snapshot]
    differ: bool
    keeps_state: bool
    reduction: int


def _before(
    functions: list[Function], labels: tuple[str, ...], device: Device, tolerance: float | None
) -> tuple[list[_Outputs], float, float]:
    """Call each function twice.

    Returns:
        Outputs, seconds of one call of all functions together, and seconds since the end of the first calls.
    """
    calls: list[list[Snapshot]] = [[] for _ in functions]
    watches = [WorkLeft(device) for _ in functions]
    work_left: list[list[str]] = [[] for _ in functions]
    states: list[tuple[bool, bool]] = []
    call_s, started = 0.0, host_clock.monotonic()
    for call in range(2):
        if call == 1:
            started = host_clock.monotonic()  # the first call may compile
        for place, function in enumerate(functions):
            state = state_of(function) if call == 1 else {}
            began = host_clock.monotonic()
            returned = call_from_seed(function, device)
            work_left[place].append(watches[place].after_a_call())
            call_s += call * (host_clock.monotonic() - began)
            calls[place].append(returned.snapshot())
            if call == 1:
                states.append(state_changed(state, state_of(function)))
    for label, left in zip(labels, work_left, strict=True):
        require_nothing_left(left, label)
    outputs = []
    for function, (first, second), (written, changed) in zip(functions, calls, states, strict=True):
        reduction = max([t.numel() for t in captured_tensors(function).values()] + first.sizes, default=1)
        keeps_state = changed or (written and not _same(first, second, reduction, tolerance=0.0))
        outputs.append(_Outputs((first, second), not _same(first, second, reduction), keeps_state, reduction))
    if len(functions) == 2:
        _between(outputs, 0, tolerance)  # raises before the timing if the outputs cannot be compared
    return outputs, call_s, host_clock.monotonic() - started


def _after(
    functions: list[Function],
    labels: tuple[str, ...],
    device: Device,
    tolerance: float | None,
    outputs: list[_Outputs],
    timings: list[Timing],
) -> _Examined:
    notes, last, changes, drifts = [], [], [], False
    for function, label, own in zip(functions, labels, outputs, strict=True):
        watch = WorkLeft(device)
        snapshot, doubt = require_written(function, device, label)
        if left := watch.after_a_call():
            call_from_seed(function, device)
            require_nothing_left([left, watch.after_a_call()], label)
        last.append(snapshot)
        notes += [doubt] if doubt else []
        if snapshot.uncompared:
            paths = ", ".join(f"output{path}" for path in snapshot.uncompared)
            notes.append(f"{label}: {paths} cannot be read, so it was not compared")
        change = None if own.differ else _change(own, snapshot, tolerance)
        if own.differ or (own.keeps_state and change is not None and not change.agrees):
            notes.append(f"{label}: calls return different values, so only the first two were checked")
            change, drifts = None, True
        changes.append(change)
    between = []
    if len(functions) == 2:
        between = [_between(outputs, call, tolerance) for call in range(2)]
        if not drifts:
            between.append(difference(*last, reduction=max(own.reduction for own in outputs), tolerance=tolerance))
    return _Examined(tuple(timings), tuple(between), tuple(changes), tuple(notes))


def _between(outputs: list[_Outputs], call: int, tolerance: float | None) -> Difference | None:
    a, b = (own.calls[call] for own in outputs)
    return difference(a, b, reduction=max(own.reduction for own in outputs), tolerance=tolerance)


def _change(own: _Outputs, last: Snapshot, tolerance: float | None) -> Difference | None:
    try:
        return difference(last, own.calls[0], reduction=own.reduction, tolerance=tolerance)
    except OutputMismatchError as error:
        error.add_note("between the first call and one after the timing")
        raise


def _same(first: Snapshot, second: Snapshot, reduction: int, tolerance: float | None = None) -> bool:
    try:
        change = difference(second, first, reduction=reduction, tolerance=tolerance)
    except OutputMismatchError:
        return False
    return change is None or change.agrees


def _limit(settings: _Settings, call_s: float, used_s: float, labels: tuple[str, ...]) -> float:
    """Return the seconds available after the first calls; without a limit, at least enough for the fewest calls.

    Raises:
        HyperionError: the given limit is too short for three samples.
    """
    calls = _LEAST_CALLS.get(settings.device.kind, _LEAST_CALLS_ON_A_GPU) + 4 * (max(1, settings.back_to_back) - 1)
    needed_s = 2 * used_s + calls * call_s  # the calls after the timing and their checks take as long again
    if settings.time_limit_s is None:
        return max(settings.default_limit_s, 1.2 * needed_s)
    if needed_s > settings.time_limit_s:
        raise HyperionError(
            f"{LEAST_SAMPLES} samples do not fit into {settings.time_limit_s:g} s: a call of {' and '.join(labels)} takes "
            f"{call_s:.3g} s, warm-up and checks need {calls + 2} calls after the first one, and comparing the outputs takes "
            f"{2 * (used_s - call_s):.2g} s",
            where="time_limit_s=",
            next_step=f"pass time_limit_s={1.2 * needed_s:.2g} or more, or None",
        )
    return settings.time_limit_s


# Ranks


_meetings = 0


def _meet(here: World) -> None:
    """Wait until every rank has called: collectives of a timing that only some ranks run would hang.

    Raises:
        HyperionError: some ranks did not call within a minute.
    """
    global _meetings
    default_store = dist.distributed_c10d._get_default_store()
    store = dist.distributed_c10d.PrefixStore(f"hyperion/measure/{_meetings}", default_store)
    store.set(str(here.rank), "here")
    ranks = [str(rank) for rank in range(here.size)]
    try:
        store.wait(ranks, timedelta(seconds=_RENDEZVOUS_S))
    except RuntimeError as error:  # torch's DistStoreError is one
        missing = [rank for rank in ranks if not store.check([rank])]
        raise HyperionError(
            f"rank {', '.join(missing)} did not call this within {_RENDEZVOUS_S:g} s",
            where=f"rank {here.rank} of {here.size}",
            next_step="call it on every rank, or pass alone=True to time on this rank only",
        ) from error
    _meetings += 1


def _slowest(here: World, seconds: float) -> float:
    """Return the largest value of all ranks."""
    if here.size == 1:
        return seconds
    agreed = torch.tensor([seconds], dtype=torch.float64, device=here.device.torch_device)
    dist.all_reduce(agreed, dist.ReduceOp.MAX)
    return agreed.item()


def _agreed(here: World, work: Callable[[], Result]) -> Result:
    """Run work on every rank. If it fails on one rank, raise on all, so that no rank hangs in the next collective."""
    if here.size == 1:
        return work()
    try:
        result = work()
    except Exception:
        _slowest(here, float(here.rank + 1))  # the other ranks must know of the failure before this one leaves
        raise
    if failed := int(_slowest(here, 0.0)):
        raise HyperionError(
            f"the function or its output failed on rank {failed - 1}",
            where=f"rank {here.rank} of {here.size}",
            next_step=f"see the error of rank {failed - 1}",
        )
    return result


def memory(function: Function, *, device: Device | str | torch.device | None = None, label: str | None = None) -> MemoryAnswer:
    """Measure the peak memory of one call in bytes.

    Counts the tensors that operators return (by dispatch, on any device) and, on a GPU, reads the allocator's peak. The
    function is called three times, four on a GPU: to warm up and create lazy state, to find the tensors that it works on, and
    once per count. While operators are counted, a compiled function runs uncompiled.

    The arguments and errors are those of `time`.
    """
    function, label = checked_callable(function, "memory"), _label(label) or _name_of(function, "the function")
    device = device_of(device)
    with noting("memory", label):
        function()
        allocator = {}
        if device.kind != "cpu":
            torch.cuda.synchronize(device.torch_device)
            allocator["allocator_before_bytes"] = torch.cuda.memory_allocated(device.torch_device)
            allocator["allocator_peak_bytes"] = allocated_peak(device, function)
        watched = watch_memory(function, device)
    return MemoryAnswer(
        label, device, watched.before_bytes, watched.peak_bytes, watched.peak_operator, tuple(watched.history_bytes), **allocator
    )


def flops(function: Function, *, label: str | None = None) -> FlopsAnswer:
    """Count the floating-point operations of one call, by operator and by module, and list operators without a formula.

    Operators are counted where PyTorch dispatches them, with the formulas of torch.utils.flop_counter for products,
    convolutions and attention. A multiply-add counts as 2. The function is called once; a compiled one runs uncompiled.

    The errors are those of `time`.
    """
    function, label = checked_callable(function, "flops"), _label(label) or _name_of(function, "the function")
    with noting("flops", label):
        return FlopsAnswer(label, *count_flops(function))


def device_of(device: Device | str | torch.device | None) -> Device:
    """Return the described device of a PyTorch device name; None means the current GPU, or the CPU if there is none.

    Raises:
        HyperionError: there is no such device here, or its kind is not supported.
    """
    if isinstance(device, Device):
        return device
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        place = torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise HyperionError(f"{device!r} is not a device", where="device=", next_step='pass "cpu" or "cuda:0"') from error
    if place.type not in ("cpu", "cuda"):
        raise HyperionError(
            f"devices of type {place.type!r} are not supported", where="device=", next_step='use "cpu" or "cuda:<index>"'
        )
    if place.type == "cuda" and not torch.cuda.is_available():
        raise HyperionError(
            "PyTorch finds no GPU", where=f"device={str(device)!r}", next_step='run hyperion doctor, or pass device="cpu"'
        )
    if place.type == "cpu" and place.index:
        raise HyperionError(f"there is no device {str(place)!r}: all CPUs are one device", where="device=", next_step='use "cpu"')
    if place.type == "cuda" and (place.index or 0) >= torch.cuda.device_count():
        raise HyperionError(
            f"{str(place)!r} is not one of {torch.cuda.device_count()} GPUs",
            where="device=",
            next_step=f'use "cuda:0" to "cuda:{torch.cuda.device_count() - 1}"',
        )
    index = torch.cuda.current_device() if place.type == "cuda" and place.index is None else place.index or 0
    return _described(place.type, index)


@functools.cache
def _described(kind: str, index: int) -> Device:
    # Cached because detection takes about a second and cannot change within a process.
    return detect_cpu() if kind == "cpu" else detect(index=index)


def checked_callable(function: object, question: str, arguments: tuple = ()) -> Function:
    """Return the function if it can be called with these arguments and does its work when called.

    Raises:
        HyperionError: it is not callable, returns only a coroutine or generator, or takes other arguments.
    """
    where, given = f"hyperion.measure.{question}", " batch" if arguments else ""
    if not callable(function):
        raise HyperionError(
            f"{type(function).__name__} is not callable",
            where=where,
            next_step=f"pass a function, not its result: measure.{question}(lambda{given}: model(x))",
        )
    if inspect.iscoroutinefunction(function) or inspect.isgeneratorfunction(function):
        raise HyperionError(
            f"calling {_name_of(function, 'it')} only creates a coroutine or generator and does no work",
            where=where,
            next_step="pass a function that runs it to the end",
        )
    with contextlib.suppress(ValueError):  # built-in functions may have no signature
        signature = inspect.signature(function)
        try:
            signature.bind(*arguments)
        except TypeError as error:
            raise HyperionError(
                f"{_name_of(function, 'the function')}{signature} is called with {', '.join(arguments) or 'nothing'}: {error}",
                where=where,
                next_step=f"bind its arguments: measure.{question}(lambda{given}: {_name_of(function, 'f')}(...))",
            ) from None
    return function


def _label(label: str | None) -> str | None:
    """Return the label.

    Raises:
        HyperionError: it is blank or not a string.
    """
    if label is not None and not (isinstance(label, str) and label.strip()):
        raise HyperionError(f"label is {label!r}", where="label=", next_step="pass a name, or None for the function's name")
    return label


def _two_labels(labels: tuple[str, str] | None) -> tuple[str, str] | None:
    if labels is None:
        return None
    if isinstance(labels, str) or not hasattr(labels, "__len__") or len(labels) != 2 or labels[0] == labels[1]:
        raise HyperionError(f"labels are {labels!r}", where="labels=", next_step="pass two different names, or None")
    first, second = labels
    return (_label(first) or "", _label(second) or "")


def _name_of(function: object, otherwise: str) -> str:
    if isinstance(function, functools.partial):
        return _name_of(function.func, otherwise)
    name = getattr(function, "__name__", type(function).__name__)
    return otherwise if name == "<lambda>" else name


def _two_names(function_a: Function, function_b: Function) -> tuple[str, str]:
    a, b = _name_of(function_a, "A"), _name_of(function_b, "B")
    return (a, b) if a != b else (f"{a} (A)", f"{b} (B)")


@contextlib.contextmanager
def noting(question: str, label: str) -> Iterator[None]:
    """Add a note to exceptions of the measured function, and keep their type."""
    try:
        yield
    except HyperionError:
        raise
    except Exception as error:
        error.add_note(f"raised while hyperion.measure.{question} called {label}")
        raise
