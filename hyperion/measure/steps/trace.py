"""Steps under PyTorch's profiler, as events of a few kinds: what the device did, and which part of the step the host was in.

No tool of a vendor is needed: the profiler's own trace names every kernel's interval on the device's timeline (through CUPTI
or roctracer), and every operator's on the host's.
"""

import contextlib
import json
import re
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from hyperion.errors import HyperionError
from hyperion.hardware import Device

NOBODY = "unexplained"


@dataclass(frozen=True)
class Event:
    """Something that went on from start to end.

    Args:
        name: of the kernel, operator or region.
        start_ns, end_ns: on one clock for all events; an event that ends where it starts takes no time.
        stream: the queue or thread it ran on.
        kind: what it counts as.
    """

    name: str
    start_ns: int
    end_ns: int
    stream: int | str
    kind: str


def partition(events: Iterable[Event], start_ns: int, end_ns: int, order: Sequence[str]) -> dict[str, int]:
    """Nanoseconds of each kind within a window. Each moment belongs to one kind: of those going on, the first in `order`.

    Moments at which nothing goes on are `unexplained`. The values are at least 0 and add up to the window exactly, however
    many events overlap.

    Args:
        order: all kinds there are; a kind that is listed before another hides it.

    Raises:
        ValueError: an event of a kind that `order` lacks, or one that ends before it starts.
    """
    changes: dict[int, Counter] = {start_ns: Counter(), end_ns: Counter()}
    for event in events:
        if event.kind not in order or event.end_ns < event.start_ns:
            raise ValueError(f"{event} is of no kind in {tuple(order)}, or ends before it starts")
        first, last = max(event.start_ns, start_ns), min(event.end_ns, end_ns)
        if first < last:
            changes.setdefault(first, Counter())[event.kind] += 1
            changes.setdefault(last, Counter())[event.kind] -= 1
    parts = dict.fromkeys((*order, NOBODY), 0)
    going_on: Counter = Counter()
    for moment, following in pairwise(sorted(changes)):
        going_on.update(changes[moment])
        parts[next((kind for kind in order if going_on[kind] > 0), NOBODY)] += following - moment
    return parts


def innermost(events: Iterable[Event]) -> list[Event]:
    """The events of each stream cut into pieces, each moment given to the event that began last.

    What is left of an operator is its own time, without that of the operators it calls.
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
# Of what goes on at once, the first takes the moment. On a GPU waiting for data matters only while the device is idle; on
# a CPU the operators that make a batch are part of making it.
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
# What Inductor fuses around a product or a collective bears its name as well: triton_poi_fused_convolution_relu_3.
_FUSED = re.compile(r"^triton_(?!tem_)[a-z]+_fused_")
_PRODUCT_OPERATOR = re.compile(
    r"^(aten|mkldnn|mkl|quantized|onednn)::_?(mm|addmm|bmm|baddbmm|mv|addmv|dot|vdot|linear|addbmm|int_mm|scaled_mm|grouped_mm"
    r"|scaled_grouped_mm|mkl_linear|linear_pointwise|.*conv.*|.*scaled_dot_product.*attention.*)$"
)
_GLUE = re.compile(r"^autograd::|Backward\d*$|^torch::autograd::")
# Work of a CPU that is noted as a region, not as an operator: what a compiler fused, and collectives on threads of their own.
_WORK_NOTED = re.compile(r"CompiledFxGraph|^gloo:")
_HOST_COPY = re.compile(r"HtoD|DtoH|HostToDevice|DeviceToHost|Host ?-> ?Device|Device ?-> ?Host", re.IGNORECASE)


@dataclass(frozen=True)
class Trace:
    """Profiled steps.

    Args:
        events: kernels, copies, operators and regions of the host, by kind.
        start_ns, end_ns: from the first step's begin to the moment the device had done the last one.
        steps: how many there are in between.
    """

    events: list[Event]
    start_ns: int
    end_ns: int
    steps: int


def trace_steps(step: Callable[[], object], data: Callable[[], object] | None, device: Device, steps: int) -> Trace:
    """Run steps in a row under the profiler, three times, and sort what it saw the time of median length.

    Args:
        step: one step; takes what `data` delivers, where that is given.

    Raises:
        HyperionError: the profiler saw no kernel of the GPU.
    """
    gpu = device.kind != "cpu"
    activities = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if gpu else [])
    wait = (lambda: torch.cuda.synchronize(device.torch_device)) if gpu else (lambda: None)

    def some(count: int) -> None:
        for _ in range(count):
            run_step(step, data, record_function)
        wait()

    with profile(activities=activities, acc_events=True):
        some(1)  # starting a GPU's tracer takes seconds the first time
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
            "the profiler saw no kernel on the GPU",
            where=f"torch {torch.__version__}, {device.name}",
            next_step="let the step run on it, detach other profilers, and see that CUPTI or roctracer may be used",
        )
    return Trace(events, start, end, steps)


def run_step(step: Callable, data: Callable[[], object] | None, region=contextlib.nullcontext) -> None:
    """One step with its batch, each within a named region."""
    batch = ()
    if data is not None:
        with region("hyperion: data"):
            batch = (data(),)
    with region("hyperion: step"):
        step(*batch)


def kernel_kind(name: str) -> str:
    """What a kernel counts as, by its name: a collective, a product (convolution and attention too), else memory-bound."""
    if _FUSED.match(name):
        return MEMORY
    if _COLLECTIVE.search(name):
        return COMMUNICATION
    return GEMM if _PRODUCT.search(name) else MEMORY


def operator_kind(name: str) -> str:
    """The same for an operator on a CPU; autograd's own work between operators is a gap."""
    if _COLLECTIVE.search(name):
        return COMMUNICATION
    if _GLUE.search(name):
        return GAPS
    return GEMM if _PRODUCT_OPERATOR.match(name) else MEMORY


def gpu_events(raw: list[dict], index: int | None) -> list[Event]:
    """Kernels, copies and fills of one GPU in a trace of the profiler; of every GPU where `index` is None."""
    work = [event for event in raw if event.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")]
    # Tracers number devices in ways of their own; one that is alone must be the one.
    alone = len({event["args"].get("device") for event in work}) < 2
    found = []
    for event in work:
        category, about = event["cat"], event["args"]
        if not alone and index is not None and about.get("device") != index:
            continue
        kind = MEMORY
        if category == "kernel":
            kind = kernel_kind(event["name"])
        elif category == "gpu_memcpy" and _HOST_COPY.search(event["name"]):
            kind = COPIES
        found.append(Event(event["name"], *_ends(event), about.get("stream", 0), kind))
    return found


def cpu_events(raw: list[dict]) -> list[Event]:
    """Operators' own times on each thread, those of the operators they call taken out."""
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
