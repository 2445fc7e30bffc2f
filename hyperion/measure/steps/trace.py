"""Steps under PyTorch's profiler, as events of a few kinds: what the device did, and which part of the step the host was in.

No tool of a vendor is needed: the profiler's own trace names every kernel's interval on the device's timeline (through CUPTI
or roctracer), and every operator's on the host's.
"""

import contextlib
import json
import re
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from hyperion.errors import HyperionError
from hyperion.hardware import Device
from hyperion.measure.steps.intervals import Event, innermost

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
