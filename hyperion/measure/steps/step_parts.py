"""Profile the steps of a loop that runs elsewhere, and split their time by part of a training step.

`hyperion.measure.steps.trace` splits a step by the unit that works: matrix products, memory, links. The parts here are those of
a training step: a kernel is assigned to the optimizer or to the loss if an operator of the optimizer or of the loss launched it,
although its name is that of any elementwise kernel.
"""

import functools
import json
import re
import tempfile
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, record_function

from hyperion.errors import HyperionError
from hyperion.hardware import Device
from hyperion.measure.steps.profiled import TraceProfiler
from hyperion.measure.steps.trace import (
    COMMUNICATION,
    GAPS,
    GEMM,
    UNEXPLAINED,
    Event,
    device_work,
    ends_of,
    innermost,
    is_fused,
    is_host_work,
    kernel_kind,
    operator_kind,
    partition,
)

PRODUCTS, ATTENTION, ELEMENTWISE, LOSS, OPTIMIZER, CASTS, EXCHANGE, OTHER, IDLE = (
    "matrix products",
    "attention",
    "norms, activations and other elementwise work",
    "loss",
    "optimizer and clipping",
    "copies and casts",
    "communication",
    "other",
    "idle",
)
# Time in which kernels of several parts run is assigned to the first of them. Communication comes last, so that its part is the
# time that no computation hides.
ORDER = (PRODUCTS, ATTENTION, ELEMENTWISE, LOSS, OPTIMIZER, CASTS, OTHER, EXCHANGE)
PARTS = (*ORDER, IDLE)
WARM_UP_STEPS = 1  # steps between the start of the tracer and the first traced step

_MARK = "hyperion: end of step"
# Largest relative difference of the rates of two clocks of the host: the kernel may slew CLOCK_MONOTONIC by 500 ppm (adjtimex).
_SLEW = 5e-4

_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset", "gpu_user_annotation")
_ATTENTION_KERNEL = re.compile(
    # FlashAttention, cuDNN, CUTLASS, CK and AOTriton; flex attention is a template of Inductor.
    r"flash|fmha|sdpa|attn_(fwd|bwd)|attention|bwd_kernel_(d[kq]|fuse)|bwd_preprocess",
    re.IGNORECASE,
)
_ATTENTION_OPERATOR = re.compile(r"(scaled_dot_product|flash|efficient|cudnn|flex)\w*_attention|ScaledDotProduct\w*Backward")
# `nll_and_slope` is the kernel of `hyperion.kernels.token_loss`.
_LOSS = re.compile(r"log_?softmax|nll_?loss|nll_and_slope|cross_?entropy", re.IGNORECASE)
_OPTIMIZER = re.compile(r"Optimizer\.step#|_fused_adam|_fused_sgd|FusedAdam|FusedSgd|_foreach_(?!copy)|linalg_vector_norm")
_FOREACH_KERNEL = re.compile(r"multi_tensor_apply|^triton_for_fused_")
_CAST_KERNEL = re.compile(
    r"copy_kernel|CopyFunctor|CatArrayBatchedCopy|copyBuffer|^triton_poi_fused_((_to)?_?(copy|clone|cat)_+)+\d+$"
)
_CAST_OPERATOR = re.compile(r"^aten::(_to_copy|copy_|_foreach_copy_|clone|contiguous|cat|_local_scalar_dense)$")
_ELEMENTWISE_KERNEL = re.compile(
    r"elementwise|reduce_kernel|norm|^triton_(poi|red|per)\w*_fused_|RowwiseMoments|silu|softmax", re.I
)
_ELEMENTWISE_OPERATOR = re.compile(
    r"^aten::(add|sub|mul|div|neg|pow|rsqrt|sqrt|reciprocal|exp|cos|sin|sum|mean|where|masked_fill|_?softmax\w*|silu|sigmoid|gelu"
    r"|relu|tanh|threshold|dropout|native_dropout|\w*norm|complex|polar|view_as_complex|view_as_real)(_backward|_backward_data)?_?$"
)


@dataclass(frozen=True)
class Kernel:
    """A kernel of a traced step, or on a CPU an operator.

    Args:
        name: name of the kernel.
        operator: operator that launched it; "" if the trace does not contain it.
        part: part of the step, one of `PARTS`.
        calls: number of launches in a step. On a CPU, it is the number of uninterrupted pieces of the operator.
        time_s: time in seconds in a step. On a CPU, it excludes the operators that this one calls.
    """

    name: str
    operator: str
    part: str
    calls: float
    time_s: float


@dataclass(frozen=True)
class StepParts:
    """The mean time of each part of some traced steps.

    Args:
        steps: number of traced steps.
        step_time_s: time of a step in seconds by the clock of the host, with a synchronized device.
        tolerance_s: largest difference between this time and the sum of the parts that the two clocks explain. They are not read
            at the same moment, and their rates may differ.
        parts_s: time of each of `PARTS` in a step in seconds, from the trace. They add up to the step.
        kernels: all kernels. The kernel with the longest time comes first.
    """

    steps: int
    step_time_s: float
    tolerance_s: float
    parts_s: dict[str, float]
    kernels: list[Kernel]

    @classmethod
    def of(cls, values: dict) -> "StepParts":
        """Return the parts from the dict that `dataclasses.asdict` returned and that may have been stored as JSON."""
        return cls(**{**values, "kernels": [Kernel(**kernel) for kernel in values["kernels"]]})


class StepTracer:
    """Trace the steps of a loop that this class does not run.

    Call `start` after a step, and then `end_step` after each of the next `WARM_UP_STEPS` + `steps` steps, both with a
    synchronized device. Then read `parts`.

    Args:
        device: device of the steps.
        steps: number of steps to trace.
    """

    def __init__(self, device: Device, steps: int):
        self._gpu, self._index = device.kind != "cpu", torch.device(device.torch_device).index
        self._steps = steps
        activities = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if self._gpu else [])
        self._profiler = TraceProfiler(activities)
        self._ended, self._running = 0, False
        self._marked_s: list[tuple[float, float]] = []  # times before and after each mark

    def start(self) -> None:
        """Start the profiler. On a GPU, its first start takes seconds."""
        self._running = True
        self._profiler.start()

    def end_step(self) -> bool:
        """Mark the end of a step. Return True if this was the last traced step; the profiler is then stopped."""
        self._ended += 1
        if self._ended >= WARM_UP_STEPS:
            before_s = time.perf_counter()
            with record_function(_MARK):
                pass
            self._marked_s.append((before_s, time.perf_counter()))
        finished = self._ended == WARM_UP_STEPS + self._steps
        if finished:
            self.stop()
        return finished

    def stop(self) -> None:
        """Stop the profiler if it runs. A process that ends while it runs may crash."""
        if self._running:
            self._running = False
            self._profiler.stop()

    def parts(self) -> StepParts:
        """Return the parts of the traced steps.

        Raises:
            HyperionError: the trace does not contain the steps, or no kernel on the GPU.
        """
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "trace.json"
            self._profiler.export_chrome_trace(str(path))
            raw = json.loads(path.read_text("utf-8", errors="replace"))["traceEvents"]
        return step_parts(raw, self._marked_s, self._gpu, self._index)


def step_parts(raw: list[dict], marked_s: Sequence[tuple[float, float]], gpu: bool, index: int | None = None) -> StepParts:
    """Return the parts of the steps in a trace.

    Args:
        raw: events of the trace. It contains one mark before each step, and one after the last.
        marked_s: times before and after each mark, in seconds by the clock of the host.
        gpu: whether the kernels of a GPU are split. Otherwise, these are the operators of the CPU.
        index: index of the GPU; see `gpu_events`.

    Raises:
        HyperionError: see `StepTracer.parts`.
    """
    steps = len(marked_s) - 1
    marks = sorted(ends_of(event)[0] for event in raw if event.get("cat") == "user_annotation" and event["name"] == _MARK)
    if len(marks) != steps + 1:
        raise HyperionError(f"the trace has {len(marks)} marks instead of {steps + 1}", where=f"torch {torch.__version__}")
    start_ns, end_ns = marks[0], marks[-1]
    launched = _gpu_kernels(raw, index) if gpu else _cpu_operators(raw)
    inside = [(event, operator) for event, operator in launched if start_ns <= event.start_ns < end_ns]
    if gpu and not any(event.kind in (PRODUCTS, ELEMENTWISE) for event, _ in inside):
        raise HyperionError(
            "the profiler recorded no kernel on the GPU",
            where=f"torch {torch.__version__}",
            next_step="detach other profilers, and check the permissions of CUPTI or roctracer",
        )
    spent_ns = partition((event for event, _ in inside), start_ns, end_ns, ORDER)
    spent_ns[IDLE] = spent_ns.pop(UNEXPLAINED)
    parts_s = {part: spent_ns[part] / steps / 1e9 for part in PARTS}
    (before_s, after_s), (last_before_s, last_after_s) = marked_s[0], marked_s[-1]
    step_time_s = (last_before_s - before_s) / steps
    # The profiler reads its clock between the two times of a mark.
    tolerance_s = max(after_s - before_s, last_after_s - last_before_s) / steps + _SLEW * step_time_s
    return StepParts(steps, step_time_s, tolerance_s, parts_s, _kernels(inside, steps))


@functools.cache  # all layers of a model launch the same kernels
def step_part(kernel: str, callers: tuple[str, ...] = ()) -> str:
    """Return the part of a step to which a kernel belongs.

    Args:
        kernel: name of the kernel, or on a CPU of the operator.
        callers: names of the operators and regions that were active at the launch, the innermost first. Without them, the name of
            the kernel decides alone.
    """
    names = (kernel, *callers)
    operator = next((name for name in callers if name.startswith("aten::")), "")
    kinds = {kernel_kind(kernel)} | ({operator_kind(operator)} if operator else set())
    if kernel_kind(kernel) == COMMUNICATION:
        return EXCHANGE
    if any(_OPTIMIZER.search(name) for name in names):
        return OPTIMIZER
    if _ATTENTION_KERNEL.search(kernel) and not is_fused(kernel):
        return ATTENTION
    if _CAST_KERNEL.search(kernel) or _CAST_OPERATOR.match(operator):
        return CASTS
    if any(_ATTENTION_OPERATOR.search(name) for name in callers):
        return ATTENTION
    if any(_LOSS.search(name) for name in names):
        return LOSS
    if GEMM in kinds:
        return PRODUCTS
    if _FOREACH_KERNEL.search(kernel):
        return OPTIMIZER
    if operator and not _ELEMENTWISE_OPERATOR.match(operator):
        return OTHER
    return ELEMENTWISE if operator or _ELEMENTWISE_KERNEL.search(kernel) else OTHER


def _gpu_kernels(raw: list[dict], index: int | None) -> list[tuple[Event, str]]:
    """Return each kernel, copy and fill of a GPU with its part as its kind, and the operator that launched it."""
    callers = _callers(raw)
    operators = (event for event in raw if event.get("cat") == "cpu_op")
    by_operator = {event["args"]["External id"]: event for event in operators if event.get("args", {}).get("External id")}
    calls = (event for event in raw if event.get("cat") not in _DEVICE and "correlation" in event.get("args", ()))
    by_call = {event["args"]["correlation"]: event for event in calls}
    launched = []
    for event in device_work(raw, index):
        about = event["args"]
        # No operator is active at the launch of a graph.
        launch = by_operator.get(about.get("External id")) or by_call.get(about.get("correlation"))
        names = callers.get(id(launch), ())
        part = CASTS if event["cat"] == "gpu_memcpy" else step_part(event["name"], names)
        launched.append(
            (
                Event(event["name"], *ends_of(event), about.get("stream", 0), part),
                next((name for name in names if "::" in name), ""),
            )
        )
    return launched


def _cpu_operators(raw: list[dict]) -> list[tuple[Event, str]]:
    """Return the pieces of each operator of the CPU in which it calls no other one, with its part as its kind."""
    callers = _callers(raw)
    work = [event for event in raw if is_host_work(event) and operator_kind(event["name"]) != GAPS]
    events = [
        Event(event["name"], *ends_of(event), event["tid"], step_part(event["name"], callers.get(id(event), ())))
        for event in work
    ]
    return [(piece, piece.name) for piece in innermost(events)]


def _callers(raw: list[dict]) -> dict[int, tuple[str, ...]]:
    """Return the names of the operators and regions that were active at each event of a host thread, the innermost first.

    The keys are the ids of the events. The first name is that of the event itself.
    """
    threads: dict[object, list[dict]] = {}
    for event in raw:
        if event.get("ph") == "X" and event.get("cat") not in _DEVICE and "tid" in event:
            threads.setdefault(event["tid"], []).append(event)
    callers: dict[int, tuple[str, ...]] = {}
    for events in threads.values():
        active: list[tuple[int, tuple[str, ...]]] = []  # end and names of each event that has not ended
        for event in sorted(events, key=lambda event: (event["ts"], -event["dur"])):
            start, end = ends_of(event)
            while active and active[-1][0] <= start:
                active.pop()
            names = (event["name"], *(active[-1][1] if active else ()))
            active.append((end, names))
            callers[id(event)] = names
    return callers


def _kernels(launched: Iterable[tuple[Event, str]], steps: int) -> list[Kernel]:
    totals: dict[tuple[str, str, str], list[int]] = {}
    for event, operator in launched:
        total = totals.setdefault((event.name, operator, event.kind), [0, 0])
        total[0] += 1
        total[1] += event.end_ns - event.start_ns
    kernels = [Kernel(*key, calls / steps, spent_ns / steps / 1e9) for key, (calls, spent_ns) in totals.items()]
    return sorted(kernels, key=lambda kernel: -kernel.time_s)
