"""Time the phases of a step, or profile steps with PyTorch's profiler and split their time by kind of work.

No profiling tools from NVIDIA or AMD are needed. The profiler's trace contains the start and the end of every kernel on the
device and of every operator on the host. The profiler gets kernel times from CUPTI or roctracer. All times are integer
nanoseconds, so the parts of a step add up exactly.
"""

import contextlib
import functools
import json
import re
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch
from torch.profiler import ProfilerActivity, record_function

from hyperion.errors import HyperionError
from hyperion.hardware import Device
from hyperion.measure.clock.clocks import device_clock
from hyperion.measure.clock.timing import MINIMUM_SAMPLES, Timing, time_function
from hyperion.measure.clock.verify import Verification
from hyperion.measure.steps.profiled import TraceProfiler

UNEXPLAINED = "unexplained"
PHASE_TOLERANCE = 0.05

Phase = Callable[[str], AbstractContextManager]


@dataclass(frozen=True)
class Event:
    """A kernel, an operator or a named region in a trace of the profiler.

    Args:
        name: name of the kernel, operator or region.
        start_ns, end_ns: start and end in nanoseconds. All events use the same clock.
        stream: the stream of a kernel, or the thread of an operator.
        kind: name of the part of the step to which the time of this event is assigned.
    """

    name: str
    start_ns: int
    end_ns: int
    stream: int | str
    kind: str


def partition(events: Iterable[Event], start_ns: int, end_ns: int, order: Sequence[str]) -> dict[str, int]:
    """Split the time of a window by kind of event. Return a dict that maps each kind to its nanoseconds.

    Time in which events of several kinds are active is assigned to the kind that comes first in `order`. Time without any active
    event is "unexplained". The returned values add up to the length of the window.

    Args:
        events: the events. Their kinds must be in `order`.
        start_ns, end_ns: start and end of the window.
        order: all kinds. The kind with the highest priority comes first.

    Raises:
        ValueError: the kind of an event is not in `order`, or an event ends before it starts.
    """
    # Sweep over time. For each time: number of events of each kind that start, minus number of events that end.
    changes: dict[int, Counter] = {start_ns: Counter(), end_ns: Counter()}
    for event in events:
        if event.kind not in order or event.end_ns < event.start_ns:
            raise ValueError(f"the kind of {event} is not in {tuple(order)}, or the event ends before it starts")
        first, last = max(event.start_ns, start_ns), min(event.end_ns, end_ns)
        if first < last:
            changes.setdefault(first, Counter())[event.kind] += 1
            changes.setdefault(last, Counter())[event.kind] -= 1
    parts = dict.fromkeys((*order, UNEXPLAINED), 0)
    active: Counter = Counter()
    for moment, following in pairwise(sorted(changes)):
        active.update(changes[moment])
        parts[next((kind for kind in order if active[kind] > 0), UNEXPLAINED)] += following - moment
    return parts


def innermost(events: Iterable[Event]) -> list[Event]:
    """Split nested events into pieces that do not overlap, separately for each stream.

    Time in which several events of a stream are active is assigned to the event that started last. So the pieces of an operator
    are its own time, without that of the operators that it calls.
    """
    pieces: list[Event] = []
    streams: dict[int | str, list[Event]] = {}
    for event in events:
        streams.setdefault(event.stream, []).append(event)
    for nested in streams.values():
        # If two events start at the same time, the longer one is the caller and comes first.
        pieces += _cut(sorted(nested, key=lambda event: (event.start_ns, -event.end_ns)))
    return pieces


def _cut(events: list[Event]) -> list[Event]:
    pieces: list[Event] = []
    open_events: list[Event] = []
    covered = events[0].start_ns

    def give_to_last(until: int) -> None:
        nonlocal covered
        if covered < until:
            last = open_events[-1]
            pieces.append(Event(last.name, covered, until, last.stream, last.kind))
            covered = until

    def close_all_before(moment: float) -> None:
        while open_events and open_events[-1].end_ns <= moment:
            give_to_last(open_events[-1].end_ns)
            open_events.pop()

    for event in events:
        close_all_before(event.start_ns)
        if open_events:
            give_to_last(event.start_ns)
        covered = max(covered, event.start_ns)
        open_events.append(event)
    close_all_before(float("inf"))
    return pieces


DATA, GAPS, COMMUNICATION, COPIES, MEMORY, GEMM = (
    "data wait",
    "launch gaps",
    "exposed communication",
    "exposed copies",
    "memory-bound kernels",
    "GEMM",
)
# Priority of the kinds if events are active at the same time. On a GPU, the wait for data counts only while the device is idle.
# On a CPU, the operators that create a batch are part of the data wait, so the data wait comes first.
GPU_ORDER = (GEMM, MEMORY, COMMUNICATION, COPIES, DATA, GAPS)
CPU_ORDER = (DATA, GEMM, MEMORY, COMMUNICATION, COPIES, GAPS)

_REGIONS = {"hyperion: data": DATA, "hyperion: step": GAPS}
_WINDOW, _WINDOWS = "hyperion: window", 3

_COLLECTIVE = re.compile(
    r"nccl|rccl|msccl|nvshmem|gloo|c10d|all_?reduce|all_?gather|reduce_?scatter|all_?to_?all|multimem", re.IGNORECASE
)
# Matches the kernels of cuBLAS (gemm, xmma, nvjet, splitK), CUTLASS, CK and Tensile (Cijk_), the convolutions of MIOpen and
# cuDNN, attention kernels, and the template kernels of Inductor, which are matrix products, convolutions and attention.
_PRODUCT = re.compile(
    r"gemm|gemv|xmma|nvjet|splitk|cutlass|cijk_|wgmma|wmma|mfma|winograd|igemm|dgrad|wgrad|fprop|conv(?!ert)|triton_tem|triton_mm"
    r"|flash|fmha|attn_fwd|attn_bwd|attention|bwd_kernel_(d[kq]|fuse)|bwd_preprocess",
    re.IGNORECASE,
)
# The name of a fused Inductor kernel can contain the name of a neighbouring matrix product or convolution that another kernel
# computes, such as triton_poi_fused_convolution_relu_3.
_FUSED = re.compile(r"^triton_(?!tem_)[a-z]+_fused_")
_PRODUCT_OPERATOR = re.compile(
    r"^(aten|mkldnn|mkl|quantized|onednn)::_?(mm|addmm|bmm|baddbmm|mv|addmv|dot|vdot|linear|addbmm|int_mm|scaled_mm|grouped_mm"
    r"|scaled_grouped_mm|mkl_linear|linear_pointwise|.*conv.*|.*scaled_dot_product.*attention.*)$"
)
_GLUE = re.compile(r"^autograd::|Backward\d*$|^torch::autograd::")
# Matches work on a CPU that the profiler records as a region: compiled code, and collectives on separate threads.
_WORK_NOTED = re.compile(r"CompiledFxGraph|^gloo:")
_HOST_COPY = re.compile(r"HtoD|DtoH|HostToDevice|DeviceToHost|Host ?-> ?Device|Device ?-> ?Host", re.IGNORECASE)


@dataclass(frozen=True)
class Trace:
    """The trace of several steps in a row. A window is a group of steps that the profiler recorded together.

    Args:
        events: events of all windows: kernels, copies and host regions on a GPU; operators and regions on a CPU.
        start_ns: start of the first step of the chosen window.
        end_ns: time at which the device finished the last step of the chosen window.
        steps: number of steps in the window.
    """

    events: list[Event]
    start_ns: int
    end_ns: int
    steps: int


def trace_steps(step: Callable[[], object], data: Callable[[], object] | None, device: Device, steps: int) -> Trace:
    """Profile three windows of steps, and choose the window of median length.

    Args:
        step: function that executes one step. It takes the batch as its argument if `data` is given.
        data: function that returns a batch. None if the step takes no batch.
        device: device of the step.
        steps: number of steps in each window.

    Raises:
        HyperionError: the profiler recorded no kernel on the GPU.
    """
    gpu = device.kind != "cpu"
    activities = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if gpu else [])
    wait = (lambda: torch.cuda.synchronize(device.torch_device)) if gpu else (lambda: None)

    def some(count: int) -> None:
        for _ in range(count):
            run_step(step, data, record_function)
        wait()

    with TraceProfiler(activities):
        some(1)  # the first start of the GPU tracer takes seconds
    wait()
    with TraceProfiler(activities) as profiler:
        for _ in range(_WINDOWS):
            with record_function(_WINDOW):
                some(steps)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        raw = json.loads(path.read_text())["traceEvents"]
    windows = [ends_of(event) for event in raw if event.get("cat") == "user_annotation" and event["name"] == _WINDOW]
    # The median of three windows is robust against one interruption.
    start, end = sorted(windows, key=lambda ends: ends[1] - ends[0])[_WINDOWS // 2]
    events = (gpu_events(raw, torch.device(device.torch_device).index) if gpu else cpu_events(raw)) + _regions(raw)
    if gpu and not any(event.kind in (GEMM, MEMORY) for event in events):
        raise HyperionError(
            "the profiler recorded no kernel on the GPU",
            where=f"torch {torch.__version__}, {device.name}",
            next_step="run the step on the GPU, detach other profilers, and check the permissions of CUPTI or roctracer",
        )
    return Trace(events, start, end, steps)


def run_step(step: Callable, data: Callable[[], object] | None, region: Callable = contextlib.nullcontext) -> None:
    """Fetch a batch and run one step, each in its own named region of the trace.

    Args:
        region: function that takes the name of a region and returns a context manager. The default records nothing.
    """
    batch = ()
    if data is not None:
        with region("hyperion: data"):
            batch = (data(),)
    with region("hyperion: step"):
        step(*batch)


def is_fused(name: str) -> bool:
    """Return True if this is a kernel that Inductor made from elementwise operators and reductions.

    Its name may contain the name of a neighbouring matrix product, attention or collective that another kernel computes.
    """
    return bool(_FUSED.match(name))


def kernel_kind(name: str) -> str:
    """Return the kind of a GPU kernel, derived from its name.

    The kind is communication, GEMM (including convolutions and attention), or memory-bound for all other kernels.
    """
    # This is checked first, because the name of a fused kernel can contain the name of a product.
    if is_fused(name):
        return MEMORY
    if _COLLECTIVE.search(name):
        return COMMUNICATION
    return GEMM if _PRODUCT.search(name) else MEMORY


@functools.cache  # all steps and layers call the same operators
def operator_kind(name: str) -> str:
    """Return the kind of a CPU operator, derived from its name. The work of autograd between operators counts as launch gap."""
    if _COLLECTIVE.search(name):
        return COMMUNICATION
    if _GLUE.search(name):
        return GAPS
    return GEMM if _PRODUCT_OPERATOR.match(name) else MEMORY


def gpu_events(raw: list[dict], index: int | None) -> list[Event]:
    """Return the kernels, copies and memory fills of one GPU in a trace.

    Args:
        raw: events of the trace.
        index: index of the GPU. None means all GPUs.
    """
    events = []
    for event in device_work(raw, index):
        kind = MEMORY
        if event["cat"] == "kernel":
            kind = kernel_kind(event["name"])
        elif event["cat"] == "gpu_memcpy" and _HOST_COPY.search(event["name"]):
            kind = COPIES
        events.append(Event(event["name"], *ends_of(event), event["args"].get("stream", 0), kind))
    return events


def device_work(raw: list[dict], index: int | None) -> list[dict]:
    """Return the events of `raw` that are kernels, copies and memory fills of one GPU; see `gpu_events`."""
    work = [event for event in raw if event.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")]
    # A tracer can number the GPUs differently from PyTorch. If the trace contains only one GPU, it must be the right one.
    alone = len({event["args"].get("device") for event in work}) < 2
    return [event for event in work if alone or index is None or event["args"].get("device") == index]


def cpu_events(raw: list[dict]) -> list[Event]:
    """Return the operators of all threads in a trace. The time of an operator excludes that of the operators that it calls."""
    operators = [
        Event(event["name"], *ends_of(event), event["tid"], operator_kind(event["name"])) for event in raw if is_host_work(event)
    ]
    return innermost(operators) if operators else []


def is_host_work(event: dict) -> bool:
    """Return True if an event of a trace is an operator, or other work of the CPU that the profiler records as a region."""
    return event.get("ph") == "X" and (event.get("cat") == "cpu_op" or bool(_WORK_NOTED.search(event["name"])))


def _regions(raw: list[dict]) -> list[Event]:
    return [
        Event(event["name"], *ends_of(event), "host", _REGIONS[event["name"]])
        for event in raw
        if event.get("cat") == "user_annotation" and event["name"] in _REGIONS
    ]


def ends_of(event: dict) -> tuple[int, int]:
    """Return start and end of an event of a trace in nanoseconds."""
    # Times in the trace are microseconds with three decimals.
    start = round(event["ts"] * 1e3)
    return start, start + round(event["dur"] * 1e3)


@dataclass(frozen=True)
class StepTiming:
    """The times of a step and of its phases. All times come from the same steps.

    Args:
        whole: timing of the whole step.
        phases: a dict that maps the name of a phase to its timing, in the order in which they run. Sample i of a phase and sample
            i of `whole` come from the same step.
        verification: check that the phases add up to the step. The error is the median over the steps of
            |sum of the phases / whole - 1|.
    """

    whole: Timing
    phases: dict[str, Timing]
    verification: Verification


def time_step(
    step: Callable[[Phase], object], device: Device, *, minimum_samples: int = MINIMUM_SAMPLES, time_limit_s: float = 5.0
) -> StepTiming:
    """Time a step and its phases with hot caches.

    The warm-up, the clock and the number of samples are the same as in `time_interleaved`.

    Args:
        step: function that executes one step. Its argument is a function `phase`. Each part of the step must run in
            `with phase("name"):`. If a step enters a phase several times, the times are added.
        minimum_samples, time_limit_s: see `time_interleaved`.

    Raises:
        HyperionError: the step has no phases, or not all steps have the same phases in the same order.
    """
    stamps = _Stamps(device)

    def marked() -> None:
        stamps.steps.append({})
        step(stamps.phase)

    whole = time_function(marked, device, cold=False, minimum_samples=minimum_samples, time_limit_s=time_limit_s, clock=stamps)
    seconds = stamps.seconds(whole.samples_s)
    phases = {name: replace(whole, samples_s=samples, warmup_s=()) for name, samples in seconds.items()}
    errors = np.abs(np.sum(list(seconds.values()), axis=0) / whole.samples_s - 1)
    verification = Verification(f"{' + '.join(phases)} = step", float(np.median(errors)), PHASE_TOLERANCE)
    return StepTiming(whole, phases, verification)


class _Stamps:
    """A clock of a device that also records the start and the end of each phase of each sampled step.

    On a GPU, the recorded events are read only after the last step, because reading an event would synchronise.
    """

    def __init__(self, device: Device):
        self._clock = device_clock(device)
        self.now, self.in_a_row = self._clock.now, self._clock.in_a_row
        self.steps: list[dict[str, list[tuple]]] = []
        # The seconds and the phases of every sample so far.
        self._sampled: list[tuple[float, dict[str, list[tuple]]]] = []

    def sample(self, functions: list[Callable], flush: Callable | None, count: int) -> list[list[float]]:
        """Take samples of one function with the clock of the device, and store each sample with the phases of its step."""
        self.steps.clear()
        [samples] = self._clock.sample(functions, flush, count)
        # On a GPU, small batches start with a call that is not timed.
        self._sampled += zip(samples, self.steps[-count:], strict=True)
        return [samples]

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        start = self._clock.stamp()
        yield
        self.steps[-1].setdefault(name, []).append((start, self._clock.stamp()))

    def seconds(self, samples_s: np.ndarray) -> dict[str, np.ndarray]:
        """Return a dict that maps the name of a phase to the seconds that it took in each step.

        Args:
            samples_s: the sampled times of these steps in seconds, in the order in which they were taken, shape [steps].
        """
        steps = self._steps_of(samples_s)
        names = list(steps[0])
        if not names or any(list(step) != names for step in steps):
            raise HyperionError(
                "the step has no phases" if not names else f"the phases differ between steps; first step: {', '.join(names)}",
                where="time_step",
                next_step="put every part of the step into `with phase(name):`, and use the same names in every step",
            )
        return {name: np.array([self._sum(step[name]) for step in steps]) for name in names}

    def _steps_of(self, samples_s: np.ndarray) -> list[dict[str, list[tuple]]]:
        # `self._sampled` also contains samples of the warm-up, which come first, and samples of `require_whole_work`, which may
        # come last. Find the wanted samples by comparing their times.
        taken_s, count = np.array([seconds for seconds, _ in self._sampled]), len(samples_s)
        start = next(at for at in range(len(taken_s) - count, -1, -1) if np.array_equal(taken_s[at : at + count], samples_s))
        return [step for _, step in self._sampled[start : start + count]]

    def _sum(self, pairs: list[tuple]) -> float:
        return sum(self._clock.seconds(*pair) for pair in pairs)
