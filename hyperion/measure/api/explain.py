"""Where a training step's time goes, as a waterfall that adds up: your own step, a few of them under PyTorch's profiler."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from hyperion.errors import HyperionError
from hyperion.hardware import Device
from hyperion.measure.api.answers import Answer, state_of_device
from hyperion.measure.api.functions import checked_callable, device_of, flops, noting
from hyperion.measure.clock.ranks_clock import RanksClock
from hyperion.measure.clock.timing import MINIMUM_SAMPLES, Timing, require_sampling, time_function
from hyperion.measure.clock.units import estimate_text, seconds_text
from hyperion.measure.products.roofline import Ceilings
from hyperion.measure.steps.intervals import NOBODY, partition
from hyperion.measure.steps.trace import (
    COMMUNICATION,
    COPIES,
    CPU_ORDER,
    DATA,
    GAPS,
    GEMM,
    GPU_ORDER,
    MEMORY,
    run_step,
    trace_steps,
)
from hyperion.processes import world
from hyperion.results import Estimate, Row

if TYPE_CHECKING:
    from matplotlib.figure import Figure

GEMM_IDEAL, GEMM_LOST = "GEMM at the ceiling", "GEMM inefficiency"
_OVERHEAD_WORTH_A_WARNING = 0.1


@dataclass(frozen=True)
class Part:
    """A part of a step.

    Args:
        name: data wait, launch gaps, exposed communication …
        nanoseconds: of all profiled steps together.
        share: of their whole time, 0 to 1.
        seconds: that share of an unprofiled step.
    """

    name: str
    nanoseconds: int
    share: float
    seconds: float


@dataclass(frozen=True, repr=False)
class Explanation(Answer):
    """A step in its parts, which add up to it.

    Args:
        parts: in the order of the step: waiting, moving, computing, and what nothing explains.
        timing: the unprofiled step in seconds; on a GPU each sample is the mean of as many in a row as were profiled, because
            the host runs ahead of the device.
        profiled_step_s: the same under the profiler: the difference is the profiler's own cost.
        steps: how many were profiled.
        flops: of one step, None without ceilings.
        notes: what to bear in mind when reading it.
    """

    label: str
    device: Device
    parts: tuple[Part, ...]
    timing: Timing
    profiled_step_s: float
    steps: int
    flops: int | None = None
    notes: tuple[str, ...] = ()

    @property
    def estimate(self) -> Estimate:
        """Median seconds of an unprofiled step with its 95 % interval."""
        return self.timing.estimate

    @property
    def verdict(self) -> str:
        """What takes most of the step."""
        most = max(self.parts, key=lambda part: part.nanoseconds)
        return f"most of the step: {most.name}, {100 * most.share:.1f} %"

    def __getitem__(self, name: str) -> Part:
        """The part of that name.

        Raises:
            KeyError: there is none; GEMM is one part without ceilings, two with them.
        """
        try:
            return next(part for part in self.parts if part.name == name)
        except StopIteration:
            raise KeyError(f"{name!r} is none of {', '.join(part.name for part in self.parts)}") from None

    def __str__(self) -> str:
        lines = [f"{self.label}: {estimate_text(self.estimate)} a step, hot cache, {self.device.name}"]
        width = max(len(part.name) for part in self.parts)
        for part in self.parts:
            bar = "█" * round(30 * part.share)
            lines.append(f"  {part.name:<{width}} {100 * part.share:5.1f} %  {seconds_text(part.seconds):>9}  {bar}".rstrip())
        lines.append(f"  {'sum':<{width}} {100 * sum(part.share for part in self.parts):5.1f} %")
        return "\n".join([*lines, self.verdict, self.profiler_cost, *self.notes])

    @property
    def profiler_cost(self) -> str:
        """Which steps the shares are of, and how much slower the profiler made them."""
        unprofiled = self.estimate.value
        return (
            f"shares of {self.steps} profiled steps in a row of {seconds_text(self.profiled_step_s)}, scaled to the unprofiled "
            f"{seconds_text(unprofiled)}: the profiler costs {100 * (self.profiled_step_s / unprofiled - 1):+.0f} %"
        )

    def rows(self, *, notebook: str, experiment: str, variant: str, **columns) -> list[Row]:
        """A row of `share` for each part, params what=its name, and one of `step_time_s`."""
        place = {"notebook": notebook, "experiment": experiment, "variant": variant, **columns}
        time = self.estimate
        step = self._row(
            place,
            "step_time_s",
            time.value,
            {"cache": "hot"},
            n=time.n,
            ci_low=time.ci_low,
            ci_high=time.ci_high,
            limit_source="no limit: what the step must do is not known",
            **state_of_device(self.timing),
        )
        about = {"of": "step", "profiled_steps": self.steps}
        return [step] + [self._row(place, "share", part.share, about | {"what": part.name}) for part in self.parts]

    def plot(self) -> "Figure":
        """The parts as a waterfall, one below the other."""
        from hyperion.measure.api.pictures import draw_waterfall

        parts = [(part.name, part.seconds, part.share) for part in self.parts]
        notes = "\n".join([self.profiler_cost, *self.notes])
        return draw_waterfall(f"{self.label}: where a step goes", parts, self.device.name, notes)


def explain(
    step: Callable[..., object],
    *,
    data: Callable[[], object] | Iterable | None = None,
    device: Device | str | torch.device | None = None,
    ceilings: Ceilings | None = None,
    label: str = "step",
    profiled_steps: int = 5,
    minimum_samples: int = MINIMUM_SAMPLES,
    time_limit_s: float = 5.0,
) -> Explanation:
    """Take your own training step apart: where does its time go? The parts add up to 100 %.

    Each moment of the profiled steps belongs to one part. On a GPU: products (convolutions and attention too), else other
    kernels, else communication that nothing covers, else copies to or from the host; while the device is idle, data wait
    or launch gaps, by where the host is. On a CPU: data, then operators' own times by their kinds; launch gaps are the step
    outside of operators. What is left is unexplained. Kinds of kernels are told by their names.

    The step is really done, some hundred times in all: three times `profiled_steps` in a row under the profiler, of which the
    time of median length counts; without it `minimum_samples` times (on a GPU each of `profiled_steps` in a row), whose
    median the shares are scaled to; and warm-up.

    In a process group every rank calls it: the unprofiled step is the slowest rank's, the parts are this rank's own.

    Args:
        step: does one step. Takes nothing, or the batch where `data` is given. It need not synchronise.
        data: delivers the batch: a callable, or an iterable (a DataLoader, say), begun anew where it ends.
        device: as in `time`.
        ceilings: the rate that products could reach; splits GEMM into what they need at it and what is lost. The step's FLOPs
            are counted for it, once, uncompiled.
        minimum_samples: unprofiled samples; fewer, but at least 3, where the time limit ends them.
        time_limit_s: seconds for warm-up and unprofiled samples, after a first step that may compile.

    Raises:
        HyperionError: an argument outside of its range, no callable step, no batch, no kernel seen. What the step raises itself
            comes through with a note.
    """
    feed = _feed(data)
    checked_callable(step, "explain", () if feed is None else ("the batch",))
    if not isinstance(profiled_steps, int) or profiled_steps < 1:
        raise HyperionError(f"{profiled_steps} profiled steps", where="explain", next_step="profile at least one")
    require_sampling(minimum_samples, time_limit_s=time_limit_s)
    device = device_of(device)
    with noting("explain", label):
        sampling = {"minimum_samples": minimum_samples, "time_limit_s": time_limit_s, "cold": False}
        in_a_row = 1 if device.kind == "cpu" else profiled_steps
        timing = _time_steps(lambda: run_step(step, feed), device, in_a_row, sampling)
        trace = trace_steps(step, feed, device, profiled_steps)
        work = flops(lambda: run_step(step, feed)).total if ceilings else None
    order = CPU_ORDER if device.kind == "cpu" else GPU_ORDER
    kinds = partition(trace.events, trace.start_ns, trace.end_ns, order)
    window = trace.end_ns - trace.start_ns
    ideal = None if ceilings is None else work * trace.steps / (ceilings.tflops * 1e12) * 1e9
    median = float(timing.estimate.value)
    parts = tuple(Part(name, ns, ns / window, ns / window * median) for name, ns in _named(kinds, ideal).items())
    profiled = window / trace.steps / 1e9
    notes = tuple(_notes(kinds[GEMM], ideal, ceilings, profiled / median - 1))
    return Explanation(label, device, parts, timing, profiled, trace.steps, work, notes)


def _time_steps(one: Callable[[], object], device: Device, in_a_row: int, sampling: dict) -> Timing:
    one()  # compiles, loads and allocates; the limit is for what follows
    here = world()
    sampling = sampling | {"budget_s": sampling["time_limit_s"]}
    if here.size == 1:
        return time_function(one, device, back_to_back=in_a_row, **sampling)
    # A step may hold collectives: all ranks must take as many of them.
    clock = RanksClock(replace(here, device=device), lambda: None, lambda what: None)
    timing = time_function(lambda: [one() for _ in range(in_a_row)], device, clock=clock, **sampling)
    return replace(timing, samples_s=timing.samples_s / in_a_row, warmup_s=tuple(s / in_a_row for s in timing.warmup_s))


def _named(kinds: dict[str, int], ideal_ns: float | None) -> dict[str, int]:
    """The parts in the order they are shown, products split at the ceiling where there is one."""
    named = {kind: kinds[kind] for kind in (DATA, GAPS, COMMUNICATION, COPIES, MEMORY)}
    if ideal_ns is None:
        named[GEMM] = kinds[GEMM]
    else:
        named[GEMM_IDEAL] = min(kinds[GEMM], round(ideal_ns))
        named[GEMM_LOST] = kinds[GEMM] - named[GEMM_IDEAL]
    return named | {NOBODY: kinds[NOBODY]}


def _notes(gemm_ns: int, ideal_ns: float | None, ceilings: Ceilings | None, overhead: float) -> list[str]:
    notes = []
    if ideal_ns is not None and ideal_ns > gemm_ns:
        notes.append(
            f"WARNING: products took less than they need at the ceiling of {ceilings.tflops:.4g} TFLOPS ({ceilings.source}): "
            "it is the ceiling of another dtype, or not all kernels that multiply were recognised"
        )
    if overhead > _OVERHEAD_WORTH_A_WARNING:
        notes.append(f"the profiler slows the host by about {100 * overhead:.0f} % of the step: launch gaps are overstated")
    return notes


def _feed(data: Callable[[], object] | Iterable | None) -> Callable[[], object] | None:
    if data is None or callable(data):
        return data
    if not hasattr(data, "__iter__"):
        raise HyperionError(
            f"{type(data).__name__} delivers no batches",
            where="explain(data=…)",
            next_step="hand over a callable or an iterable; a step that makes its own batch needs none",
        )
    batches = iter(data)

    def following() -> object:
        nonlocal batches
        for _ in range(2):
            try:
                return next(batches)
            except StopIteration:
                batches = iter(data)  # the next epoch
        raise HyperionError(
            "data has no batch any more and cannot be begun anew",
            where="explain(data=…)",
            next_step="hand over a callable, or an iterable that can be gone through again, such as a DataLoader",
        )

    return following
