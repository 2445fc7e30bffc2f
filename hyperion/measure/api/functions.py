"""Measure a function of your own: its time, its speed relative to another function, its memory, and its FLOPs.

    from hyperion import measure

    print(measure.time(lambda: model(x)))
    print(measure.compare(eager, compiled, labels=("eager", "compiled")))

The measured function takes no arguments. Use a lambda to bind its arguments. All times are measured by `time_interleaved`.

`time` and `compare` also check the outputs. They call each function twice before and twice after the timing. All of these calls
start from the same random state. The checks require:

- The outputs before and after the timing agree. This check is skipped if the outputs of the first two calls already differ, as
  in a training step.
- Every call writes its output.
- No work is still running on other threads or streams when a call returns.

If a function returns None, its output is not checked.
"""

import functools
import time as host_clock
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist

from hyperion.errors import HyperionError
from hyperion.hardware import Device
from hyperion.measure.api.answers import ComparisonAnswer, TimeAnswer
from hyperion.measure.api.arguments import (
    Function,
    checked_callable,
    checked_label,
    checked_labels,
    device_of,
    name_of,
    noting,
    two_names,
)
from hyperion.measure.api.counting import FlopsAnswer, MemoryAnswer, count_flops, watch_memory
from hyperion.measure.api.outputs import (
    Difference,
    OutputMismatchError,
    Snapshot,
    call_from_seed,
    captured_tensors,
    difference,
    require_written,
    shared_tensors,
    state_changed,
    state_of,
)
from hyperion.measure.api.unfinished_work import WorkLeft, require_nothing_left
from hyperion.measure.clock.clocks import RanksClock
from hyperion.measure.clock.timing import LEAST_SAMPLES, MINIMUM_SAMPLES, HarnessError, Timing, require_sampling, time_interleaved
from hyperion.measure.memory_use.tensor_memory import allocated_peak
from hyperion.processes import World, world

Result = TypeVar("Result")
# Default values: number of samples and time limit in seconds with `quick`, and time limit in seconds without `quick`.
_QUICK_SAMPLES, _QUICK_LIMIT_S, _LIMIT_S = 10, 0.2, 5.0
# Minimum number of calls of a function after its first two calls, for any time limit. On a CPU: one call for warm-up, one block
# of calls in a row, three samples, and one call after the timing. On a GPU, the clock adds one call to each of the first small
# batches.
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

    The function is first called until its times are stable (warm-up). Then samples are taken until the 95 % confidence interval
    lies within 1 % of the median.

    In a process group, every rank must call this function. All ranks take the same number of samples, so the measured function
    may contain collectives. Each sample is the time of the slowest rank.

    Args:
        function: function without arguments that does one unit of work. It does not have to synchronise.
        device: a `hyperion.hardware.Device` or a PyTorch device name ("cpu", "cuda:1"). None means the current device.
        cold: if True, flush the last-level cache before each call. Use False for whole steps and for code that runs in a tight
            loop. None means False with `quick` or `back_to_back`, and True otherwise.
        label: name of the function in the output. None means the function's own name.
        minimum_samples: minimum number of samples, at least 3. None means 10 with `quick`, and 30 otherwise. Fewer samples are
            taken if the time limit is reached first.
        time_limit_s: time limit for warm-up, checks and samples in seconds. The first call may compile, so its time is not
            included. None means 0.2 s with `quick`, and 5 s otherwise, or more if the minimum number of calls takes longer.
        back_to_back: if above 0, each sample is the mean time of this many calls in a row. It is measured on the host's clock, so
            it includes the launch overhead. Requires cold=False.
        quick: if True, return a result in about 0.2 s, like `torch.utils.benchmark.Timer.blocked_autorange`. Caches are hot, the
            warm-up does not wait until the device's clock frequency is stable, and the interval may be wider than 1 %.
        alone: if True, measure on this rank only, even in a process group.

    Raises:
        HyperionError: an argument is out of range, or the time limit is too short for 3 samples.
        HarnessError: the output after the timing differs from the output before it; the output is memory of an input; a call did
            not write its output; work was still running on another thread or stream when a call returned; or the timing failed
            one of its own checks.

    An exception that the function itself raises is re-raised with a note.
    """
    settings = _Settings.of("time", device, cold, minimum_samples, time_limit_s, back_to_back, quick, alone)
    function, label = checked_callable(function, "time"), checked_label(label) or name_of(function, "the function")
    with noting("time", label):
        examined = _examine([function], (label,), settings)
        (timing,) = examined.timings
    change = examined.changes[0]
    if change is not None and not change.agrees:
        raise HarnessError(
            f"{label}: a call after the timing returned a different value than the first two calls: {change.worst}",
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
    """Compare two functions: their speed and their outputs.

    Calls to the first function (A) and the second function (B) alternate, so that drift affects both in the same way.

    Outputs are compared in float64: for the first call, for the second call, and for one call after the timing. The comparison
    after the timing is skipped if calls depend on earlier calls. Two outputs agree if both conditions hold:

    - The relative Frobenius error is within `OUTPUT_TOLERANCE` of the less precise dtype.
    - The error of each element is within `element_tolerance`. This tolerance depends on the length of the longest sum in the
      computation. This length is unknown, so it is assumed to be the number of elements of the largest tensor that the functions
      use.

    NaN and infinity agree only with the same value at the same index. Integers and booleans must be equal.

    If the values differ, the text of the result says so, and its method `row` raises an error.

    Args:
        labels: names of A and B in the output. None means the functions' names, or "A" and "B".
        tolerance: one value that replaces both tolerances. It is the largest allowed relative Frobenius error, and the largest
            allowed |a - b| / (|b| + rms(b)) of an element.

    The other arguments and errors are the same as in `time`.

    Raises:
        OutputMismatchError: the outputs differ in structure, shape or kind of number.
    """
    settings = _Settings.of("compare", device, cold, minimum_samples, time_limit_s, back_to_back, quick, alone)
    functions = [checked_callable(function_a, "compare"), checked_callable(function_b, "compare")]
    labels = checked_labels(labels) or two_names(*functions)
    if tolerance is not None and not (isinstance(tolerance, int | float) and 0 <= tolerance < float("inf")):
        raise HyperionError(
            f"tolerance is {tolerance!r}, which is not a number of at least 0",
            where="tolerance=",
            next_step="pass a relative error of at least 0, such as 1e-3",
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
    """The validated arguments of `time` and `compare`. Arguments that were not given have their default values."""

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
                raise HyperionError(
                    f"{name} is {value!r}, which is not a possible value", where=where, next_step=f"pass one of {allowed}"
                )
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
    """The timings of the measured functions, and the results of the comparisons of their outputs.

    Args:
        between: differences between the outputs of A and B, one for each call that can be compared.
        changes: for each function, the difference between the output of the first call and the output after the timing. None if
            the two outputs cannot be compared.
        notes: warnings about the outputs.
    """

    timings: tuple[Timing, ...]
    between: tuple[Difference | None, ...]
    changes: tuple[Difference | None, ...]
    notes: tuple[str, ...]


def _examine(
    functions: list[Function], labels: tuple[str, ...], settings: _Settings, tolerance: float | None = None
) -> _Examined:
    """Call each function twice, time the functions, call them again, and check the outputs of the calls."""
    device, here = settings.device, settings.here
    if here.size > 1:
        _meet(here)
    outputs, call_s, used_s = _agreed(here, lambda: _before(functions, labels, device, tolerance))
    # The time budget is computed from these times, so they must be the same on all ranks.
    call_s, used_s = _slowest(here, call_s), _slowest(here, used_s)
    limit_s = _limit(settings, call_s, used_s, labels)
    timed: list[Function] = functions
    clock, calls = None, 1
    if here.size > 1:
        # The samples and the elapsed time determine how often the functions are called. RanksClock makes both equal on all ranks.
        # Without it, ranks could call a collective a different number of times and hang.
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
        # `used_s` is the time of the checks so far. Subtract it twice, because the checks after the timing take as long. Also
        # subtract one call per function, because the checks after the timing call each function twice.
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
        differ: whether the two outputs differ.
        keeps_state: whether the second call changed tensors that the function can reach (`captured_tensors`).
        changed: names of these tensors, also of those to which only a write was counted.
        draws: whether the second call drew random numbers.
        reduction: assumed length of the longest sum, which sets the tolerance.
    """

    calls: tuple[Snapshot, Snapshot]
    differ: bool
    keeps_state: bool
    changed: tuple[str, ...]
    draws: bool
    reduction: int


def _before(
    functions: list[Function], labels: tuple[str, ...], device: Device, tolerance: float | None
) -> tuple[list[_Outputs], float, float]:
    """Call each function twice.

    Returns:
        The outputs, the total seconds of one call to every function, and the seconds since the end of the first calls.
    """
    calls: list[list[Snapshot]] = [[] for _ in functions]
    watches = [WorkLeft(device) for _ in functions]
    work_left: list[list[str]] = [[] for _ in functions]
    # For each function, the two results of `state_changed` for its second call. The first call may create state at first use.
    states: list[tuple[list[str], list[str]]] = []
    draws = []
    call_s, started = 0.0, host_clock.monotonic()
    for call in range(2):
        if call == 1:
            started = host_clock.monotonic()  # the first call may compile
        for place, function in enumerate(functions):
            state = state_of(function) if call == 1 else {}
            began = host_clock.monotonic()
            returned = call_from_seed(function, device)
            work_left[place].append(watches[place].after_a_call())
            # Only the time of the second call is added.
            call_s += call * (host_clock.monotonic() - began)
            calls[place].append(returned.snapshot())
            if call == 1:
                states.append(state_changed(state, state_of(function)))
                draws.append(returned.draws)
    for label, watch, left in zip(labels, watches, work_left, strict=True):
        # Work was still running after the second call only.
        if left == ["", left[1]] and left[1]:
            left[0] = watch.after_a_while()  # the thread may have started after the check of the first call
        require_nothing_left(left, label)
    outputs = []
    for function, (first, second), (written, changed), random in zip(functions, calls, states, draws, strict=True):
        reduction = max([t.numel() for t in captured_tensors(function).values()] + first.sizes, default=1)
        keeps_state = bool(changed or (written and not _same(first, second, reduction, tolerance=0.0)))
        names = tuple(dict.fromkeys([*written, *changed]))
        outputs.append(_Outputs((first, second), not _same(first, second, reduction), keeps_state, names, random, reduction))
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
            notes.append(f"{label}: the values of {paths} cannot be read, so they were not compared")
        change = None if own.differ else _change(own, snapshot, tolerance)
        if own.differ or (own.keeps_state and change is not None and not change.agrees):
            notes.append(f"{label}: calls return different values, so only the first two calls were checked")
            change, drifts = None, True
        changes.append(change)
        notes += [f"{label}: {described}" for described in own.calls[0].not_finite]
    between = []
    if len(functions) == 2:
        between = [_between(outputs, call, tolerance) for call in range(2)]
        if not drifts:
            between.append(difference(*last, reduction=max(own.reduction for own in outputs), tolerance=tolerance))
        notes += _notes_on_a_pair(functions, labels, outputs, between)
    return _Examined(tuple(timings), tuple(between), tuple(changes), tuple(notes))


def _notes_on_a_pair(
    functions: list[Function], labels: tuple[str, ...], outputs: list[_Outputs], between: list[Difference | None]
) -> list[str]:
    """Return the reasons why the outputs of two functions can differ, or agree, although each function is correct."""
    notes = []
    for place, (function, own, label) in enumerate(zip(functions, outputs, labels, strict=True)):
        other = labels[1 - place]
        if shared := shared_tensors(list(own.changed), function, functions[1 - place]):
            more = f" and {len(shared) - 3} other tensors" if len(shared) > 3 else ""
            notes.append(
                f"{label} writes to {', '.join(shared[:3])}{more}, which {other} uses too, so {other} may start from other values"
            )
    if any(own.draws for own in outputs) and any(one is not None and not one.agrees for one in between):
        notes.append(
            "the calls draw random numbers, and compiled code draws other numbers from the same seed: compare models in eval "
            "mode, or set torch._inductor.config.fallback_random = True before compilation"
        )
    return notes


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
    """Return the seconds that are left for the timing after the first calls.

    If the user gave no limit, this time is long enough for the minimum number of calls.

    Raises:
        HyperionError: the given limit is too short for three samples.
    """
    calls = _LEAST_CALLS.get(settings.device.kind, _LEAST_CALLS_ON_A_GPU) + 4 * (max(1, settings.back_to_back) - 1)
    needed_s = 2 * used_s + calls * call_s  # the checks after the timing take as long as the checks before it
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
    """Wait until every rank has called the timing function. If only some ranks called it, its collectives would hang.

    Raises:
        HyperionError: some ranks did not call the timing function within a minute.
    """
    global _meetings
    default_store = dist.distributed_c10d._get_default_store()
    store = dist.distributed_c10d.PrefixStore(f"hyperion/measure/{_meetings}", default_store)
    # Use the store instead of a collective, because a collective hangs if a rank does not take part.
    store.set(str(here.rank), "here")
    ranks = [str(rank) for rank in range(here.size)]
    try:
        store.wait(ranks, timedelta(seconds=_RENDEZVOUS_S))
    except RuntimeError as error:  # torch's DistStoreError is one
        missing = [rank for rank in ranks if not store.check([rank])]
        raise HyperionError(
            f"rank {', '.join(missing)} did not call this timing function within {_RENDEZVOUS_S:g} s",
            where=f"rank {here.rank} of {here.size}",
            next_step="call the timing function on every rank, or pass alone=True to time on this rank only",
        ) from error
    _meetings += 1


def _slowest(here: World, seconds: float) -> float:
    """Return the maximum of `seconds` over all ranks."""
    if here.size == 1:
        return seconds
    agreed = torch.tensor([seconds], dtype=torch.float64, device=here.device.torch_device)
    dist.all_reduce(agreed, dist.ReduceOp.MAX)
    return agreed.item()


def _agreed(here: World, work: Callable[[], Result]) -> Result:
    """Run `work` on every rank. If it fails on one rank, raise on all ranks, so that no rank hangs in the next collective."""
    if here.size == 1:
        return work()
    try:
        result = work()
    except Exception:
        # The other ranks are in the same all-reduce and send 0, so a maximum above 0 is the highest failed rank + 1.
        _slowest(here, float(here.rank + 1))  # tell the other ranks about the failure before this rank leaves
        raise
    if failed := int(_slowest(here, 0.0)):
        raise HyperionError(
            f"the call of the function, or the check of its output, failed on rank {failed - 1}",
            where=f"rank {here.rank} of {here.size}",
            next_step=f"see the error of rank {failed - 1}",
        )
    return result


def memory(function: Function, *, device: Device | str | torch.device | None = None, label: str | None = None) -> MemoryAnswer:
    """Measure the peak memory of one call in bytes.

    On every device, the sizes of the tensors that operators return are counted when PyTorch dispatches the operators. On a GPU,
    the peak of the allocator is also read.

    The function is called three times, or four times on a GPU. The first call is the warm-up, which also creates any state that
    is created at first use. The second call finds the tensors that the function uses. Each remaining call measures one peak.
    During counting, compiled functions run without compilation.

    The arguments and errors are the same as in `time`.
    """
    function, label = checked_callable(function, "memory"), checked_label(label) or name_of(function, "the function")
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

    Operators are counted when PyTorch dispatches them. The formulas for matrix products, convolutions and attention are those
    of torch.utils.flop_counter. A multiply-add counts as 2. The function is called once, without compilation if it is compiled.

    The errors are the same as in `time`.
    """
    function, label = checked_callable(function, "flops"), checked_label(label) or name_of(function, "the function")
    with noting("flops", label):
        return FlopsAnswer(label, *count_flops(function))
