"""Explain where the time of a training step goes. PyTorch's profiler splits the step into parts that add up to the step time."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from hyperion.errors import HyperionError
from hyperion.figures.material import signed_number
from hyperion.hardware import Device
from hyperion.hardware.specs import Ceilings
from hyperion.measure.api.answers import Answer, estimate_text, seconds_text
from hyperion.measure.api.arguments import checked_callable, device_of, noting
from hyperion.measure.api.functions import flops, repeat
from hyperion.measure.clock.clocks import RanksClock
from hyperion.measure.clock.timing import MINIMUM_SAMPLES, Timing, require_sampling, time_function
from hyperion.measure.steps.trace import (
    COMMUNICATION,
    COPIES,
    CPU_ORDER,
    DATA,
    GAPS,
    GEMM,
    GPU_ORDER,
    MEMORY,
    UNEXPLAINED,
    partition,
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
        name: name of the part, such as "data wait", "launch gaps" or "exposed communication".
        nanoseconds: time of the part, summed over all profiled steps.
        share: share of the profiled time, 0 to 1.
        seconds: `share` times the duration of an unprofiled step.
    """

    name: str
    nanoseconds: int
    share: float
    seconds: float


@dataclass(frozen=True, repr=False)
class Explanation(Answer):
    """The parts of a step. Their times add up to the time of the step.

    Args:
        parts: parts for waiting, for moving data and for computing, and the unexplained rest.
        timing: times of an unprofiled step in seconds. On a GPU, each sample is the mean of `steps` steps in a row, because the
            host runs ahead of the device.
        profiled_step_s: time of a step under the profiler in seconds. The difference from `timing` is the cost of the profiler.
        steps: number of profiled steps.
        flops: FLOPs of one step. None if `explain` was called without ceilings.
        notes: warnings about the times and the ceilings.
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
        """Median time of an unprofiled step in seconds with its 95 % interval."""
        return self.timing.estimate

    @property
    def verdict(self) -> str:
        """Text that names the largest part of the step and its share."""
        largest = max(self.parts, key=lambda part: part.nanoseconds)
        return f"largest part: {largest.name}, {100 * largest.share:.1f} %"

    def __getitem__(self, name: str) -> Part:
        """Return the part with this name.

        Raises:
            KeyError: no part has this name. With ceilings, GEMM is split into two parts with other names.
        """
        try:
            return next(part for part in self.parts if part.name == name)
        except StopIteration:
            raise KeyError(f"{name!r} is not one of {', '.join(part.name for part in self.parts)}") from None

    def __str__(self) -> str:
        lines = [f"{self.label}: {estimate_text(self.estimate)} per step, hot cache, {self.device.name}"]
        width = max(len(part.name) for part in self.parts)
        for part in self.parts:
            bar = "█" * round(30 * part.share)
            lines.append(f"  {part.name:<{width}} {100 * part.share:5.1f} %  {seconds_text(part.seconds):>9}  {bar}".rstrip())
        lines.append(f"  {'sum':<{width}} {100 * sum(part.share for part in self.parts):5.1f} %")
        return "\n".join([*lines, self.verdict, self.profiler_cost, *self.notes])

    @property
    def profiler_cost(self) -> str:
        """Text with the number of profiled steps, their time, and the time that the profiler added."""
        cost = signed_number(100 * (self.profiled_step_s / self.estimate.value - 1), 0)
        return (
            f"shares are from {self.steps} profiled steps in a row ({seconds_text(self.profiled_step_s)} each); times are "
            f"scaled to the unprofiled step; the profiler costs {cost} %"
        )

    def rows(self, *, notebook: str, experiment: str, variant: str, **columns: Any) -> list[Row]:
        """Return one row for the step time, and one row for each part of the step.

        The row for the step time has the metric `step_time_s`. The row for a part has the metric `share`, and its params["what"]
        contains the name of the part.
        """
        place = {"notebook": notebook, "experiment": experiment, "variant": variant, **columns}
        time = self.estimate
        step = self._row(
            place,
            "step_time_s",
            time.value,
            {"cache": "hot"},
            **time.columns,
            limit_source="no limit: what the step must do is not known",
            **self.timing.telemetry.row_columns(),
        )
        about = {"of": "step", "profiled_steps": self.steps}
        return [step] + [self._row(place, "share", part.share, about | {"what": part.name}) for part in self.parts]

    def plot(self) -> "Figure":
        """Plot the parts as a waterfall."""
        from hyperion.measure.api.display import draw_waterfall

        parts = [(part.name, part.seconds, part.share) for part in self.parts]
        notes = "\n".join([self.profiler_cost, *self.notes])
        return draw_waterfall(f"{self.label}: where the time of a step goes", parts, self.device.name, notes)


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
    """Explain where the time of a training step goes. The parts add up to 100 %.

    Every nanosecond of the profiled steps is assigned to exactly one part. On a GPU, several kinds of work can run at the same
    time. The time is then assigned to the first active kind in this order:

    1. GEMM kernels, including convolutions and attention
    2. other kernels
    3. communication
    4. copies to or from the host

    While the device is idle, the time counts as data wait if the host is fetching a batch, and as launch gap if the host is
    running the step. On a CPU, the parts are the data wait, one part for each kind of operator, and the launch gaps, which are
    the time of the step outside of operators. All other time is unexplained. The kind of a kernel is derived from its name.

    The step runs a few hundred times:

    - Warm-up steps.
    - Three windows of `profiled_steps` steps under the profiler. The window of median length is used.
    - At least `minimum_samples` samples without the profiler. On a GPU, each sample consists of `profiled_steps` steps.

    In a process group, every rank must call this function. The time of the unprofiled step is that of the slowest rank. The
    parts are those of the calling rank.

    Args:
        step: function that executes one step. It takes the batch as its argument if `data` is given, and no argument otherwise.
            It does not have to synchronise.
        data: source of batches: a callable, or an iterable such as a DataLoader. The iterable is restarted when it ends.
        device: device of the step; see the argument `device` of `time`.
        label: name of the step in the output.
        profiled_steps: number of steps in each profiled window, and on a GPU in each sample.
        ceilings: the rate that matrix products (GEMMs) could reach. With ceilings, the GEMM time is split into the time that is
            needed at this rate and the rest. This needs one additional call without compilation to count the FLOPs.
        minimum_samples: minimum number of unprofiled samples. The time limit can end sampling earlier, but not before 3 samples.
        time_limit_s: time limit for warm-up and unprofiled samples in seconds. The first step may compile, so its time is not
            included.

    Raises:
        HyperionError: an argument is out of range, the step is not callable, the data is empty, or the profiler recorded no
            kernel.

    An exception that the step itself raises is re-raised with a note.
    """
    feed = _feed(data)
    checked_callable(step, "explain", () if feed is None else ("the batch",))
    if not isinstance(profiled_steps, int) or profiled_steps < 1:
        raise HyperionError(
            f"profiled_steps is {profiled_steps!r}, which is not a whole number of at least 1",
            where="explain",
            next_step="pass a whole number of at least 1",
        )
    require_sampling(minimum_samples, time_limit_s=time_limit_s)
    device = device_of(device)
    with noting("explain", label):
        sampling = {"minimum_samples": minimum_samples, "time_limit_s": time_limit_s, "cold": False}
        in_a_row = 1 if device.kind == "cpu" else profiled_steps
        # Time the steps before the trace, because the profiler can slow down later work.
        timing = _time_steps(lambda: run_step(step, feed), device, in_a_row, sampling)
        trace = trace_steps(step, feed, device, profiled_steps)
        step_flops = flops(lambda: run_step(step, feed)).total if ceilings else None
    order = CPU_ORDER if device.kind == "cpu" else GPU_ORDER
    kinds = partition(trace.events, trace.start_ns, trace.end_ns, order)
    window = trace.end_ns - trace.start_ns
    ideal_ns = None
    if ceilings is not None and step_flops is not None:
        # FLOPs divided by FLOP/s, in nanoseconds, for all steps of the window.
        ideal_ns = step_flops * trace.steps / (ceilings.tflops * 1e12) * 1e9
    median = float(timing.estimate.value)
    parts = tuple(Part(name, ns, ns / window, ns / window * median) for name, ns in _named(kinds, ideal_ns).items())
    profiled = window / trace.steps / 1e9
    notes = tuple(_notes(kinds[GEMM], ideal_ns, ceilings, profiled / median - 1))
    return Explanation(label, device, parts, timing, profiled, trace.steps, step_flops, notes)


def _time_steps(one: Callable[[], object], device: Device, in_a_row: int, sampling: dict) -> Timing:
    one()  # the first step compiles, loads and allocates; it does not count towards the time limit
    here = world()
    sampling = sampling | {"budget_s": sampling["time_limit_s"]}
    if here.size == 1:
        return time_function(one, device, back_to_back=in_a_row, **sampling)
    # A step may contain collectives, so all ranks must execute the same number of steps.
    clock = RanksClock(replace(here, device=device), lambda: None, lambda what: None)
    return time_function(lambda: repeat(one, in_a_row), device, clock=clock, **sampling).per_call(in_a_row)


def _named(kinds: dict[str, int], ideal_ns: float | None) -> dict[str, int]:
    """Return a dict that maps the name of a part of the step to its nanoseconds, in display order.

    Args:
        kinds: a dict that maps a kind of event to its nanoseconds, as `partition` returns it.
        ideal_ns: nanoseconds that the matrix products would need at the ceiling. The part "GEMM" is then split into two parts.
            None if there are no ceilings.
    """
    named = {kind: kinds[kind] for kind in (DATA, GAPS, COMMUNICATION, COPIES, MEMORY)}
    if ideal_ns is None:
        named[GEMM] = kinds[GEMM]
    else:
        named[GEMM_IDEAL] = min(kinds[GEMM], round(ideal_ns))
        named[GEMM_LOST] = kinds[GEMM] - named[GEMM_IDEAL]
    return named | {UNEXPLAINED: kinds[UNEXPLAINED]}


def _notes(gemm_ns: int, ideal_ns: float | None, ceilings: Ceilings | None, overhead: float) -> list[str]:
    notes = []
    if ceilings is not None and ideal_ns is not None and ideal_ns > gemm_ns:
        notes.append(
            f"WARNING: matrix products were faster than the ceiling of {ceilings.tflops:.4g} TFLOPS ({ceilings.source}): "
            "the ceiling belongs to another dtype, or the names of some GEMM kernels were not recognised"
        )
    if overhead > _OVERHEAD_WORTH_A_WARNING:
        notes.append(f"launch gaps are overstated: the profiler slows the host by about {100 * overhead:.0f} % of the step")
    return notes


def _feed(data: Callable[[], object] | Iterable | None) -> Callable[[], object] | None:
    if data is None or callable(data):
        return data
    if not hasattr(data, "__iter__"):
        raise HyperionError(
            f"data is of type {type(data).__name__}, which is neither callable nor iterable",
            where="explain(data=…)",
            next_step="pass a callable or an iterable, or no data if the step creates its own batch",
        )
    batches = iter(data)

    def next_batch() -> object:
        nonlocal batches
        # The second try fetches the first batch of the next epoch. If it fails too, the iterable is exhausted or empty.
        for _ in range(2):
            try:
                return next(batches)
            except StopIteration:
                batches = iter(data)  # the next epoch
        raise HyperionError(
            "data ended and cannot be restarted",
            where="explain(data=…)",
            next_step="pass a callable, or an iterable that can be iterated again, such as a DataLoader",
        )

    return next_batch
