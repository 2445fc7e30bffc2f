"""Four questions about a function of your own: how long, which of two is faster, how much memory, how many FLOPs.

    from hyperion import measure

    print(measure.time(lambda: model(x)))
    print(measure.compare(eager, compiled, labels=("eager", "compiled")))

A function takes no arguments: close over them with a lambda. Everything is timed by `time_interleaved`.

`time` and `compare` call each function twice before the timing and twice after it, from the same random state, and look at
what it returns: the same numbers before and after (where the first two calls agree: calls of a training step do not), written
by every call, and nothing left to other threads or streams. A function that returns None is not checked for its numbers.
"""

import contextlib
import functools
import inspect
import time as host_clock
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from datetime import timedelta

import torch
import torch.distributed as dist

from hyperion.errors import HyperionError
from hyperion.hardware import Device, detect, detect_cpu
from hyperion.measure.api.answers import ComparisonAnswer, TimeAnswer
from hyperion.measure.api.answers_counted import FlopsAnswer, MemoryAnswer
from hyperion.measure.api.counting import count_flops, watch_memory
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
from hyperion.measure.clock.checks import HarnessError
from hyperion.measure.clock.ranks_clock import RanksClock
from hyperion.measure.clock.timing import LEAST_SAMPLES, MINIMUM_SAMPLES, Timing, require_sampling, time_interleaved
from hyperion.measure.memory.memory import GIB, PeakMemoryRegion
from hyperion.processes import World, world

Function = Callable[[], object]
# What `quick` asks for, and everything else: samples, and seconds where no limit is given.
_QUICK_SAMPLES, _QUICK_LIMIT_S, _LIMIT_S = 10, 0.2, 5.0
# Calls of each function that do not shrink with the limit, without one before and one after the timing: one of warm-up, one
# block in a row, three samples, one after the timing; a GPU's clock makes one more with each of the first four batches.
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
    """Seconds of one call: warmed up until flat, at least `minimum_samples` samples, until the 95 % interval is within 1 %.

    In a process group of several ranks every rank calls it, with a function that may hold collectives: the ranks take the
    same number of samples, and a sample is the slowest rank's.

    Args:
        function: takes nothing and does one unit of work; it need not synchronise.
        device: a `hyperion.hardware.Device` or a name as PyTorch's ("cpu", "cuda:1"); None takes the one torch uses here.
        cold: flush the last-level cache before each call, as a call among others finds it. False leaves it as the call
            before left it: right for whole steps, and for what really runs in a tight loop. None is True, and False where
            `quick` or `back_to_back` is given.
        label: what to call the function in print; None takes its name.
        minimum_samples: at least 3; None is 30, or 10 where `quick`. Fewer are taken where the time limit ends sampling.
        time_limit_s: seconds for all that follows the first call (which may compile): warm-up, checks and samples. None is 5,
            or 0.2 where `quick`, or as long as the fewest calls take where the function is slower than that.
        back_to_back: above 0, a sample is the mean of that many calls in a row on the host's clock: what a loop around
            the function sees, the host's cost to launch it included. Needs cold=False.
        quick: an answer in about the time of `torch.utils.benchmark.Timer.blocked_autorange`, 0.2 s. It gives up cold caches,
            a warm-up that waits for slow clocks to settle, and an interval of 1 %; the interval that it gives is wider.
        alone: in a process group, time on this rank only, without the others.

    Raises:
        HyperionError: an argument is outside of its range, or the time limit is too short for 3 samples.
        HarnessError: the output changed between the calls before and after the timing, aliases an input, or was not written;
            work is left to another thread or stream; or the timing failed one of its own checks. What the function raises
            itself comes through as it is, with a note.
    """
    asked = _Asked.of("time", device, cold, minimum_samples, time_limit_s, back_to_back, quick, alone)
    function, label = checked_callable(function, "time"), _label(label) or _name_of(function, "the function")
    with noting("time", label):
        examined = _examine([function], (label,), asked)
        (timing,) = examined.timings
    change = examined.changes[0]
    if change is not None and not change.agrees:
        raise HarnessError(
            f"{label}: the first two calls returned the same, a call after the timing did not: {change.worst}",
            where="the output of a timed function",
            next_step="let every call do the same work on the same input; for a step that changes its state return None",
        )
    return TimeAnswer(label, timing, asked.device, asked.minimum_samples, examined.notes)


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
    """Which of two functions is faster: timed in turn, so that drift meets both alike, and their outputs compared.

    The outputs of A and B are compared in float64 for the first call, the second, and one after the timing (the last not where
    calls build on each other). They agree when the relative Frobenius error is within `OUTPUT_TOLERANCE` of the coarser dtype
    and every element is within `element_tolerance`, for sums as long as the largest tensor that the functions can reach.
    NaN and infinity agree only with themselves at the same place; integers and booleans must be equal.

    Args:
        labels: what to call them in print; None takes their names, or A and B.
        tolerance: replaces both tolerances: largest relative Frobenius error, and largest |a - b| / (|b| + rms(b)) of an
            element.

    The other arguments and errors are those of `time`; outputs that differ in value make the answer say so and refuse its row.

    Raises:
        OutputMismatchError: the outputs have another structure, shape or kind of numbers.
    """
    asked = _Asked.of("compare", device, cold, minimum_samples, time_limit_s, back_to_back, quick, alone)
    functions = [checked_callable(function_a, "compare"), checked_callable(function_b, "compare")]
    labels = _two_labels(labels) or _two_names(*functions)
    if tolerance is not None and not (isinstance(tolerance, int | float) and 0 <= tolerance < float("inf")):
        raise HyperionError(
            f"tolerance is {tolerance!r}", where="tolerance=", next_step="pass a relative error of at least 0, 1e-3 say"
        )
    with noting("compare", " or ".join(labels)):
        examined = _examine(functions, labels, asked, tolerance)
    found = [one for one in (*examined.between, *examined.changes) if one is not None]
    worst = max(found, key=lambda one: one.severity, default=None)
    reason = "" if worst else "they do not both return tensors"
    return ComparisonAnswer(labels, examined.timings, asked.device, worst, reason, asked.minimum_samples, examined.notes)


@dataclass(frozen=True)
class _Asked:
    """The arguments that `time` and `compare` share, checked and filled in."""

    device: Device
    cold: bool
    minimum_samples: int
    time_limit_s: float | None
    default_limit_s: float
    back_to_back: int
    here: World

    @classmethod
    def of(cls, question: str, device, cold, minimum_samples, time_limit_s, back_to_back, quick, alone) -> "_Asked":
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
            raise HyperionError("calls in a row find the cache as the call before left it", where=where, next_step="cold=False")
        device, here = device_of(device), world()
        if alone or here.size == 1:
            here = World(0, 1, 0, "", device)
        limit_s = _QUICK_LIMIT_S if quick else _LIMIT_S
        return cls(device, cold, minimum_samples, time_limit_s, limit_s, back_to_back, replace(here, device=device))


@dataclass(frozen=True)
class _Examined:
    """Timings and what became of the outputs.

    Args:
        between: of A and B in each call that can be compared.
        changes: of each function between its first call and the one after the timing, None where there is nothing to compare.
        notes: doubts in words.
    """

    timings: tuple[Timing, ...]
    between: tuple[Difference | None, ...]
    changes: tuple[Difference | None, ...]
    notes: tuple[str, ...]


def _examine(functions: list[Function], labels: tuple[str, ...], asked: _Asked, tolerance: float | None = None) -> _Examined:
    """Call the functions before the timing, time them, call them after it; refuse what makes the times another quantity."""
    device, here = asked.device, asked.here
    if here.size > 1:
        _meet(here)
    before = _agreed(here, lambda: _before(functions, labels, device, tolerance))
    outputs, call_s, used_s = before
    call_s, used_s = _slowest(here, call_s), _slowest(here, used_s)
    limit_s = _limit(asked, call_s, used_s, labels)
    timed, clock, share = functions, None, 1
    if here.size > 1:
        # How often to call is decided by samples and by the time; ranks that decide differently wait for each other for ever.
        clock, share = RanksClock(here, lambda: None, lambda what: None), max(1, asked.back_to_back)
        timed = [functools.partial(_repeat, function, share) for function in functions]
    timings = time_interleaved(
        timed,
        device,
        cold=asked.cold,
        minimum_samples=asked.minimum_samples,
        time_limit_s=limit_s,
        back_to_back=0 if clock else asked.back_to_back,
        clock=clock,
        budget_s=limit_s - 2 * used_s - call_s,
    )
    if share > 1:
        timings = [replace(t, samples_s=t.samples_s / share, warmup_s=tuple(s / share for s in t.warmup_s)) for t in timings]
    return _agreed(here, lambda: _after(functions, labels, device, tolerance, outputs, timings))


def _repeat(function: Function, times: int) -> None:
    for _ in range(times):
        function()


@dataclass(frozen=True)
class _Outputs:
    """Of one function: copies of what its first two calls returned, whether they differ, whether the second changed tensors
    that the function reaches, and the terms of its longest sum."""

    calls: tuple[Snapshot, Snapshot]
    differ: bool
    keeps_state: bool
    reduction: int


def _before(
    functions: list[Function], labels: tuple[str, ...], device: Device, tolerance: float | None
) -> tuple[list[_Outputs], float, float]:
    """(outputs, seconds of a call of each function together, seconds since the first calls)."""
    calls: list[list[Snapshot]] = [[] for _ in functions]
    watches, left = [WorkLeft(device) for _ in functions], [[] for _ in functions]
    states: list[tuple[bool, bool]] = []
    call_s, started = 0.0, host_clock.monotonic()
    for call in range(2):
        if call == 1:
            started = host_clock.monotonic()  # the first call may compile
        for place, function in enumerate(functions):
            state = state_of(function) if call == 1 else {}
            began = host_clock.monotonic()
            returned = call_from_seed(function, device)
            left[place].append(watches[place].after_a_call())
            call_s += call * (host_clock.monotonic() - began)
            calls[place].append(returned.snapshot())
            if call == 1:
                states.append(state_changed(state, state_of(function)))
    for label, said in zip(labels, left, strict=True):
        require_nothing_left(said, label)
    outputs = []
    for function, (first, second), (written, changed) in zip(functions, calls, states, strict=True):
        reduction = max([t.numel() for t in captured_tensors(function).values()] + first.sizes, default=1)
        keeps_state = changed or (written and not _same(first, second, reduction, tolerance=0.0))
        outputs.append(_Outputs((first, second), not _same(first, second, reduction), keeps_state, reduction))
    if len(functions) == 2:
        _between(outputs, 0, tolerance)  # raises before the timing where they cannot be compared
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
            notes.append(f"{label}: {paths} cannot be read and was not compared")
        change = None if own.differ else _change(own, snapshot, tolerance)
        if own.differ or (own.keeps_state and change is not None and not change.agrees):
            notes.append(f"{label}: calls return different values, so that only the first two were checked")
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
        found = difference(second, first, reduction=reduction, tolerance=tolerance)
    except OutputMismatchError:
        return False
    return found is None or found.agrees


def _limit(asked: _Asked, call_s: float, used_s: float, labels: tuple[str, ...]) -> float:
    """Seconds for all that follows the first calls; enough for the fewest calls where no limit was given.

    Raises:
        HyperionError: the given limit is too short for three samples.
    """
    calls = _LEAST_CALLS.get(asked.device.kind, _LEAST_CALLS_ON_A_GPU) + 4 * (max(1, asked.back_to_back) - 1)
    needed_s = 2 * used_s + calls * call_s  # the calls after the timing and their checks take as long again
    if asked.time_limit_s is None:
        return max(asked.default_limit_s, 1.2 * needed_s)
    if needed_s > asked.time_limit_s:
        raise HyperionError(
            f"{LEAST_SAMPLES} samples do not fit into {asked.time_limit_s:g} s: a call of {' and '.join(labels)} takes "
            f"{call_s:.3g} s, {calls + 2} calls follow the first with warm-up and checks, and comparing outputs takes "
            f"{2 * (used_s - call_s):.2g} s",
            where="time_limit_s=",
            next_step=f"pass time_limit_s={1.2 * needed_s:.2g} or more, or None",
        )
    return asked.time_limit_s


# Ranks


_meetings = 0


def _meet(here: World) -> None:
    """Wait until every rank is here: whoever measures with collectives while another does not would wait for ever.

    Raises:
        HyperionError: some ranks did not call within a minute.
    """
    global _meetings
    store = dist.PrefixStore(f"hyperion/measure/{_meetings}", dist.distributed_c10d._get_default_store())
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
    """The largest of all ranks' values."""
    if here.size == 1:
        return seconds
    agreed = torch.tensor([seconds], dtype=torch.float64, device=here.device.torch_device)
    dist.all_reduce(agreed, dist.ReduceOp.MAX)
    return agreed.item()


def _agreed(here: World, work: Callable[[], object]):
    """Do something on every rank; where one rank fails, all do, instead of waiting for it in the next collective."""
    if here.size == 1:
        return work()
    result, error = None, None
    try:
        result = work()
    except Exception as raised:  # raised again below, once the other ranks know
        error = raised
    failed = int(_slowest(here, float(here.rank + 1 if error else 0)))
    if error is not None:
        raise error
    if failed:
        raise HyperionError(
            f"rank {failed - 1} refused its function or its output",
            where=f"rank {here.rank} of {here.size}",
            next_step=f"read the error of rank {failed - 1}",
        )
    return result


def memory(function: Function, *, device: Device | str | torch.device | None = None, label: str | None = None) -> MemoryAnswer:
    """The most memory a call needs at once: tensors by dispatch on any device, and by the device's allocator on a GPU.

    The function is called three times (a GPU: four): once to warm up, so that lazily made state is there, once to learn which
    tensors it works on, and once for each count. Under the count by dispatch a compiled function runs uncompiled.

    The arguments and errors are those of `time`.
    """
    function, label = checked_callable(function, "memory"), _label(label) or _name_of(function, "the function")
    device = device_of(device)
    with noting("memory", label):
        function()
        allocator = _allocated(function, device) if device.kind != "cpu" else {}
        watched = watch_memory(function, device)
    return MemoryAnswer(
        label, device, watched.before_bytes, watched.peak_bytes, watched.peak_operator, tuple(watched.history), **allocator
    )


def flops(function: Function, *, label: str | None = None) -> FlopsAnswer:
    """Floating-point operations of one call by operator and by module, and the operators that no formula is known for.

    Counted where PyTorch dispatches, by its own formulas (torch.utils.flop_counter) for products, convolutions and attention;
    a multiply-add is 2. The function is called once; a compiled one runs uncompiled.

    Errors are those of `time`.
    """
    function, label = checked_callable(function, "flops"), _label(label) or _name_of(function, "the function")
    with noting("flops", label):
        return FlopsAnswer(label, *count_flops(function))


def device_of(device: Device | str | torch.device | None) -> Device:
    """The described device behind a name of PyTorch's; None is the one torch uses here: its current GPU, else the CPU.

    Raises:
        HyperionError: a kind of device that nothing here measures.
    """
    if isinstance(device, Device):
        return device
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        place = torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise HyperionError(f"{device!r} is no device", where="device=", next_step='name one: "cpu", "cuda:0"') from error
    if place.type not in ("cpu", "cuda"):
        raise HyperionError(
            f"devices of the kind {place.type!r} are not measured", where="device=", next_step='use "cpu" or "cuda:<index>"'
        )
    if place.type == "cuda" and not torch.cuda.is_available():
        raise HyperionError(
            "PyTorch sees no GPU here", where=f"device={str(device)!r}", next_step='hyperion doctor says why; or device="cpu"'
        )
    if place.type == "cpu" and place.index:
        raise HyperionError(f"there is one CPU device, not {str(place)!r}", where="device=", next_step='use "cpu"')
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
    # Looking takes a second the first time and never sees another device in the same process.
    return detect_cpu() if kind == "cpu" else detect(index=index)


def checked_callable(function: object, question: str, arguments: tuple = ()) -> Function:
    """The function, if calling it with that many arguments does its work.

    Raises:
        HyperionError: it is no function, makes only a coroutine or generator, or wants other arguments.
    """
    where, given = f"hyperion.measure.{question}", " batch" if arguments else ""
    if not callable(function):
        raise HyperionError(
            f"{type(function).__name__} is no function",
            where=where,
            next_step=f"hand over the work itself, not its outcome: measure.{question}(lambda{given}: model(x))",
        )
    if inspect.iscoroutinefunction(function) or inspect.isgeneratorfunction(function):
        raise HyperionError(
            f"calling {_name_of(function, 'it')} only makes a coroutine or generator: no work would be done",
            where=where,
            next_step="wrap what runs it to its end in a function",
        )
    with contextlib.suppress(ValueError):  # built-in functions may have no signature
        signature = inspect.signature(function)
        try:
            signature.bind(*arguments)
        except TypeError as error:
            raise HyperionError(
                f"{_name_of(function, 'the function')}{signature} is called with {', '.join(arguments) or 'nothing'}: {error}",
                where=where,
                next_step=f"close over its arguments: measure.{question}(lambda{given}: {_name_of(function, 'f')}(...))",
            ) from None
    return function


def _label(label: str | None) -> str | None:
    """The label, if there is something to read.

    Raises:
        HyperionError: it is blank, or no string.
    """
    if label is not None and not (isinstance(label, str) and label.strip()):
        raise HyperionError(f"label is {label!r}", where="label=", next_step="pass words, or None for the function's name")
    return label


def _two_labels(labels: tuple[str, str] | None) -> tuple[str, str] | None:
    if labels is None:
        return None
    if isinstance(labels, str) or not hasattr(labels, "__len__") or len(labels) != 2 or labels[0] == labels[1]:
        raise HyperionError(f"labels are {labels!r}", where="labels=", next_step="pass two different names, or None")
    return tuple(_label(label) for label in labels)


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
    """An exception of the reader's own function stays what it is, with a note: another type would hide it."""
    try:
        yield
    except HyperionError:
        raise
    except Exception as error:
        error.add_note(f"raised while hyperion.measure.{question} called {label}")
        raise


def _allocated(function: Function, device: Device) -> dict[str, int]:
    torch.cuda.synchronize(device.torch_device)
    before = torch.cuda.memory_allocated(device.torch_device)
    with PeakMemoryRegion(device) as region:
        function()
    return {"allocator_before_bytes": before, "allocator_peak_bytes": round(region.peak.gib * GIB)}
