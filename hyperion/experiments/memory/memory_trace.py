"""One training step from inside: every tensor's life by what it is, the allocator's own snapshot, the kernels' times."""

import gzip
import json
from collections import Counter
from dataclasses import asdict
from pathlib import Path

import pandas as pd
import torch
from torch.profiler import ProfilerActivity, profile

from hyperion.chapter.context import Context, Experiment, Forecast, Result
from hyperion.chapter.side_by_side import run_counted
from hyperion.chapter.variants import merged
from hyperion.hardware import Device
from hyperion.measure import state_of
from hyperion.measure.memory_use.timeline import MemoryHistory, MemoryTimeline
from hyperion.measure.steps.trace import cpu_events, gpu_events
from hyperion.results import Row
from hyperion.training import TorchEngine, choose_precision
from hyperion.workloads.memory_forecasts import foretold, made, policy, workload
from hyperion.workloads.workloads import Batch, Workload

GIB = 2**30
TRACE, SNAPSHOT, TIMELINE = "step_trace.json.gz", "memory_snapshot.pickle", "memory_timeline.json"
WARM_UP_STEPS = 2
_TOP, _POINTS, _NAME = 10, 400, 90
_BASIS = "the estimator: this very step on tensors that have shapes and no memory"


def forecast(context: Context) -> list[Forecast]:
    """The fullest moment under each policy."""
    work, dtype = _workload(context)
    return [
        Forecast(
            variant=work.name,
            metric="tensor_memory_gib",
            dtype=dtype,
            basis=_BASIS,
            params={"checkpointing": how},
            estimate=foretold(work, dtype, policy(how), context.device).history.tensor_peak_bytes / GIB,
        )
        for how in context.sizes["policies"]
    ]


def run(context: Context, report) -> Result:
    """A step under each policy; files of the first one's lie in the run's folder."""
    context.workspace.mkdir(parents=True, exist_ok=True)
    policies = context.sizes["policies"]
    variants = [{"checkpointing": how, "folder": "" if place else str(context.workspace)} for place, how in enumerate(policies)]
    return merged(run_counted(context, report, look_inside, variants))


EXPERIMENT = Experiment(forecast, run)


def look_inside(context: Context, report, checkpointing: str, folder: str) -> Result:
    """A steady step's history of memory; with a folder also the files there, and which kernels took the time."""
    (work, dtype), device = _workload(context), context.device
    engine, batch = made(work, dtype, policy(checkpointing), device, context.seed)
    for _ in range(WARM_UP_STEPS):
        engine.train_step(batch)
    timeline = MemoryTimeline(engine.model, state_of(engine.model, engine.optimizer) | {"batch": batch})
    with timeline:
        engine.train_step(batch)
    history, params = timeline.history(), {"checkpointing": checkpointing}
    row = context.row(work.name, "tensor_memory_gib", history.peak_bytes / GIB, dtype=dtype, params=params)
    samples = curve(history).assign(variant=work.name, dtype=dtype, checkpointing=checkpointing)
    if not folder:
        return Result([row], samples)
    names = [_keep_history(engine, batch, device, history, Path(folder)), _keep_trace(engine, batch, device, Path(folder))]
    rows = [row, *_kernel_rows(context, work, dtype, Path(folder) / TRACE)]
    for name in names:
        stored = (Path(folder) / name).stat().st_size / 1e9
        rows.append(context.row(work.name, "stored_gb", stored, dtype=dtype, params={"file": name}))
    return Result(rows, samples)


def curve(history: MemoryHistory, points: int = _POINTS) -> pd.DataFrame:
    """Bytes by kind over the step: the fullest moment of each of at most `points` stretches; columns event, phase, kind, gib."""
    total, kinds = history.levels(), {kind: history.levels(kind) for kind in history.kinds()}
    stretch = -(-len(total) // points)
    chosen = [
        max(range(first, min(first + stretch, len(total))), key=total.__getitem__) for first in range(0, len(total), stretch)
    ]
    return pd.DataFrame(
        {"event": event, "phase": history.phase_of(event), "kind": kind, "gib": levels[event] / GIB}
        for event in chosen
        for kind, levels in kinds.items()
    )


def _workload(context: Context) -> tuple[Workload, str]:
    sizes = context.sizes["language"]
    return workload("language", sizes), choose_precision(context.device, context.sizes["precision"]).dtype


def _keep_history(engine: TorchEngine, batch: Batch, device: Device, history: MemoryHistory, folder: Path) -> str:
    """The allocator's snapshot of a step, for https://pytorch.org/memory_viz; on a CPU, which has none, the watched lives."""
    if device.kind == "cpu":
        (folder / TIMELINE).write_text(json.dumps(asdict(history)))
        return TIMELINE
    torch.cuda.memory._record_memory_history(max_entries=100_000, stacks="python", device=device.torch_device)
    try:
        engine.train_step(batch)
        torch.cuda.synchronize(device.torch_device)
        torch.cuda.memory._dump_snapshot(str(folder / SNAPSHOT))
    finally:
        torch.cuda.memory._record_memory_history(enabled=None, device=device.torch_device)
    return SNAPSHOT


def _keep_trace(engine: TorchEngine, batch: Batch, device: Device, folder: Path) -> str:
    """The profiler's trace of a step, for https://ui.perfetto.dev."""
    activities = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if device.kind != "cpu" else [])
    for _ in range(2):  # starting a GPU's tracer takes seconds the first time
        with profile(activities=activities, acc_events=True) as profiler:
            engine.train_step(batch)
            if device.kind != "cpu":
                torch.cuda.synchronize(device.torch_device)
    profiler.export_chrome_trace(str(folder / TRACE))
    return TRACE


def _kernel_rows(context: Context, work: Workload, dtype: str, trace: Path) -> list[Row]:
    """Shares of the kernels (on a CPU the operators) that took most of the time."""
    with gzip.open(trace, "rt") as file:
        raw = json.load(file)["traceEvents"]
    device = context.device
    events = cpu_events(raw) if device.kind == "cpu" else gpu_events(raw, torch.device(device.torch_device).index)
    times, kinds = Counter(), {}
    for event in events:
        name = event.name[:_NAME]
        times[name] += event.end_ns - event.start_ns
        kinds[name] = event.kind
    return [
        context.row(
            work.name,
            "share",
            time / times.total(),
            dtype=dtype,
            params={"of": "time of all kernels", "what": name, "kind": kinds[name]},
        )
        for name, time in times.most_common(_TOP)
    ]
