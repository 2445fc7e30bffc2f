"""Time the phases of a step, or run steps under PyTorch's profiler and classify every moment of them.

No vendor tool is needed: the profiler's trace has the interval of every kernel on the device (through CUPTI or roctracer) and of
every operator on the host. Interval arithmetic is in integer nanoseconds, so that parts add up exactly.
"""

import contextlib
import json
import re
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch
from torch.profiler import ProfilerActivity, profile, record_function

from hyperion.errors import HyperionError
from hyperion.hardware import Device
from hyperion.measure.clock.clocks import device_clock
from hyperion.measure.clock.timing import MINIMUM_SAMPLES, Timing, time_function
from hyperion.measure.clock.verify import Verification

NOBODY = "unexplained"
PHASE_TOLERANCE = 0.05

Phase = Callable[[str], AbstractContextManager]


@dataclass(frozen=True)
class Event:
    """A kernel, operator or region with its interval.

    Args:
        name: name of the kernel, operator or region.
        start_ns, end_ns: interval on a clock common to all events.
        stream: stream or thread.
        kind: the part of the step that it counts as.
    """

    name: str
    start_ns: int
    end_ns: int
    stream: int | str
    kind: str


def partition(events: Iterable[Event], start_ns: int, end_ns: int, order: Sequence[str]) -> dict[str, int]:
    """Return the nanoseconds of each kind within a window. Each moment counts for the active kind that is first in `order`.

    Moments without an active event are `unexplained`. The values add up to the window exactly, also if events overlap.

    Args:
        events: events with kinds in `order`.
        start_ns, end_ns: the window.
        order: all kinds by priority.

    Raises:
        ValueError: an event has an unknown kind or ends before it starts.
    """
    changes: dict[int, Counter] = {start_ns: Counter(), end_ns: Counter()}
    for event in events:
        if event.kind not in order or event.end_ns < event.start_ns:
            raise ValueError(f"{event} has a kind outside of {tuple(order)}, or ends before it starts")
        first, last = max(event.start_ns, start_ns), min(event.end_ns, end_ns)
        if first < last:
            changes.setdefault(first, Counter())[event.kind] += 1
            changes.setdefault(last, Counter())[event.kind] -= 1
    parts = dict.fromkeys((*order, NOBODY), 0)
    active: Counter = Counter()
    for moment, following in pairwise(sorted(changes)):
        active.update(changes[moment])
        parts[next((kind for kind in order if active[kind] > 0), NOBODY)] += following - moment
    return parts


def innermost(events: Iterable[Event]) -> list[Event]:
    """Split the events of each stream so that each moment belongs to the event that started last.

    The pieces of an operator are its own time, without the operators that it calls.
    """
    pieces: list[Event] = []
    streams: dict[int | str, list[Event]] = {}
    for event in events:
        streams.setdefault(event.stream, []).append(event)
    for nested in streams.values():
        pieces += _cut(sorted(nested, key=lambda event: (event.start_ns, -event.end_ns)))
    return pieces


def _cut(events: list[Event]) -> list[Event]:
    pieces: list[Event] = []
    open_events: list[Event] = []
    covered = events[0].start_ns

    def give_to_last(until: int) -> None:
        nonlocal covered
        if covered < until:
            pieces.append(replace(open_events[-1], start_ns=covered, end_ns=until))
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
# Priorities of simultaneous events. On a GPU, waiting for data matters only while the device is idle. On a CPU, the operators
# that create a batch are part of the data wait.
GPU_ORDER = (GEMM, MEMORY, COMMUNICATION, COPIES, DATA, GAPS)
CPU_ORDER = (DATA, GEMM, MEMORY, COMMUNICATION, COPIES, GAPS)

_REGIONS = {"hyperion: data": DATA, "hyperion: step": GAPS}
_WINDOW, _WINDOWS = "hyperion: window", 3

_COLLECTIVE = re.compile(
    r"nccl|rccl|nvshmem|gloo|c10d|all_?reduce|all_?gather|reduce_?scatter|all_?to_?all|multimem", re.IGNORECASE
)
# cuBLAS (gemm, xmma, nvjet, splitK), CUTLASS and CK, Tensile (Cijk_), MIOpen and cuDNN convolutions, attention kernels, and
# the templates of Inductor, which are products, convolutions and attention.
_PRODUCT = re.compile(
    r"gemm|gemv|xmma|nvjet|splitk|cutlass|cijk_|wgmma|wmma|mfma|winograd|igemm|dgrad|wgrad|fprop|conv(?!ert)|triton_tem|triton_mm"
    r"|flash|fmha|attn_fwd|attn_bwd|attention",
    re.IGNORECASE,
)
# Kernels that Inductor fuses contain the names of neighbouring products: triton_poi_fused_convolution_relu_3.
_FUSED = re.compile(r"^triton_(?!tem_)[a-z]+_fused_")
_PRODUCT_OPERATOR = re.compile(
    r"^(aten|mkldnn|mkl|quantized|onednn)::_?(mm|addmm|bmm|baddbmm|mv|addmv|dot|vdot|linear|addbmm|int_mm|scaled_mm|grouped_mm"
    r"|scaled_grouped_mm|mkl_linear|linear_pointwise|.*conv.*|.*scaled_dot_product.*attention.*)$"
)
_GLUE = re.compile(r"^autograd::|Backward\d*$|^torch::autograd::")
# Work on a CPU that is recorded as a region, not as an operator: compiled code, and collectives on separate threads.
_WORK_NOTED = re.compile(r"CompiledFxGraph|^gloo:")
_HOST_COPY = re.compile(r"HtoD|DtoH|HostToDevice|DeviceToHost|Host ?-> ?Device|Device ?-> ?Host", re.IGNORECASE)


@dataclass(frozen=True)
class Trace:
    """Profiled steps.

    Args:
        events: kernels, copies, operators and regions of the host.
        start_ns, end_ns: from the start of the first step until the device has finished the last one.
        steps: number of steps in this window.
    """

    events: list[Event]
    start_ns: int
    end_ns: int
    steps: int


def trace_steps(step: Callable[[], object], data: Callable[[], object] | None, device: Device, steps: int) -> Trace:
    """Run three windows of steps under the profiler and return the events of the window of median length.

    Args:
        step: one step; takes the batch if `data` is given.
        data: returns a batch.
        device: device of the step.
        steps: number of steps in a window.

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

    with profile(activities=activities, acc_events=True):
        some(1)  # the first start of the GPU tracer takes seconds
    wait()
    with profile(activities=activities, acc_events=True) as profiler:
        for _ in range(_WINDOWS):
            with record_function(_WINDOW):
                some(steps)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        raw = json.loads(path.read_text())["traceEvents"]
    windows = [_ends(event) for event in raw if event.get("cat") == "user_annotation" and event["name"] == _WINDOW]
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
    """Run one step with its batch, each in a named region."""
    batch = ()
    if data is not None:
        with region("hyperion: data"):
            batch = (data(),)
    with region("hyperion: step"):
        step(*batch)


def kernel_kind(name: str) -> str:
    """Return the kind of a kernel by its name: communication, GEMM (including convolution and attention), else memory."""
    if _FUSED.match(name):
        return MEMORY
    if _COLLECTIVE.search(name):
        return COMMUNICATION
    return GEMM if _PRODUCT.search(name) else MEMORY


def operator_kind(name: str) -> str:
    """Return the kind of an operator on a CPU; autograd's own work between operators is a launch gap."""
    if _COLLECTIVE.search(name):
        return COMMUNICATION
    if _GLUE.search(name):
        return GAPS
    return GEMM if _PRODUCT_OPERATOR.match(name) else MEMORY


def gpu_events(raw: list[dict], index: int | None) -> list[Event]:
    """Return the kernels, copies and fills of one GPU in a trace, or of all GPUs if `index` is None."""
    work = [event for event in raw if event.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")]
    # Tracers can number devices differently; a single device must be the right one.
    alone = len({event["args"].get("device") for event in work}) < 2
    events = []
    for event in work:
        category, about = event["cat"], event["args"]
        if not alone and index is not None and about.get("device") != index:
            continue
        kind = MEMORY
        if category == "kernel":
            kind = kernel_kind(event["name"])
        elif category == "gpu_memcpy" and _HOST_COPY.search(event["name"]):
            kind = COPIES
        events.append(Event(event["name"], *_ends(event), about.get("stream", 0), kind))
    return events


def cpu_events(raw: list[dict]) -> list[Event]:
    """Return the operators of each thread, without the time of the operators that they call."""
    operators = [
        Event(event["name"], *_ends(event), event["tid"], operator_kind(event["name"]))
        for event in raw
        if event.get("ph") == "X" and (event.get("cat") == "cpu_op" or _WORK_NOTED.search(event["name"]))
    ]
    return innermost(operators) if operators else []


def _regions(raw: list[dict]) -> list[Event]:
    return [
        Event(event["name"], *_ends(event), "host", _REGIONS[event["name"]])
        for event in raw
        if event.get("cat") == "user_annotation" and event["name"] in _REGIONS
    ]


def _ends(event: dict) -> tuple[int, int]:
    # The trace gives microseconds with three decimals.
    start = round(event["ts"] * 1e3)
    return start, start + round(event["dur"] * 1e3)


@dataclass(frozen=True)
class StepTiming:
    """The times of a step and its phases, from the same steps.

    Args:
        whole: the whole step.
        phases: phases by name in the order of the step; one sample for each sample of `whole`.
        verification: check that the phases add up to the step: the median over the steps of |sum / whole - 1|.
    """

    whole: Timing
    phases: dict[str, Timing]
    verification: Verification


def time_step(
    step: Callable[[Phase], object], device: Device, *, minimum_samples: int = MINIMUM_SAMPLES, time_limit_s: float = 5.0
) -> StepTiming:
    """Time a step and its phases with hot caches; warm-up, clock and number of samples as in `time_interleaved`.

    Args:
        step: does one step, each part of it in `with phase("name"):`. A phase that is entered twice in a step is summed.

    Raises:
        HyperionError: the step has no phases, or its phases change from step to step.
    """
    stamps = _Stamps(device)

    def marked() -> None:
        stamps.steps.append({})
        step(stamps.phase)

    whole = time_function(marked, device, cold=False, minimum_samples=minimum_samples, time_limit_s=time_limit_s, clock=stamps)
    seconds = stamps.seconds(len(whole.samples_s))
    phases = {name: replace(whole, samples_s=samples, warmup_s=()) for name, samples in seconds.items()}
    errors = np.abs(np.sum(list(seconds.values()), axis=0) / whole.samples_s - 1)
    verification = Verification(f"{' + '.join(phases)} = step", float(np.median(errors)), PHASE_TOLERANCE)
    return StepTiming(whole, phases, verification)


class _Stamps:
    """The device's clock, which also records pairs of stamps by phase for each sampled step.

    On a GPU the stamps are read only after the last step, because reading them would synchronise.
    """

    def __init__(self, device: Device):
        self._clock = device_clock(device)
        self.now, self.in_a_row = self._clock.now, self._clock.in_a_row
        self.steps: list[dict[str, list[tuple]]] = []

    def sample(self, functions: list[Callable], flush: Callable | None, count: int) -> list[list[float]]:
        """Sample the device's clock, and drop the stamps of steps that it runs without timing them."""
        before = len(self.steps)
        samples = self._clock.sample(functions, flush, count)
        del self.steps[before : len(self.steps) - count * len(functions)]
        return samples

    @contextlib.contextmanager
    def phase(self, name: str):
        start = self._clock.stamp()
        yield
        self.steps[-1].setdefault(name, []).append((start, self._clock.stamp()))

    def seconds(self, count: int) -> dict[str, np.ndarray]:
        """Return the seconds of each phase in the last `count` steps; earlier steps were the warm-up."""
        steps = self.steps[-count:]
        names = list(steps[0])
        if not names or any(list(step) != names for step in steps):
            raise HyperionError(
                "the step has no phases" if not names else f"the phases differ between steps; first: {', '.join(names)}",
                where="time_step",
                next_step="put every part of the step into `with phase(name):`, with the same names in every step",
            )
        return {name: np.array([self._sum(step[name]) for step in steps]) for name in names}

    def _sum(self, pairs: list[tuple]) -> float:
        return sum(self._clock.seconds(*pair) for pair in pairs)
