"""Trace one training step.

The trace contains the creation and release of tensors of each kind, a snapshot of the memory allocator, and the time of each
kernel.
"""

import gzip
import json
from collections import Counter
from dataclasses import asdict
from operator import methodcaller
from pathlib import Path

import pandas as pd
import torch
from torch.profiler import ProfilerActivity, schedule

from hyperion.chapter.context import Context, Experiment, Forecast, Options, Report, Result
from hyperion.chapter.variants import merged, run_counted
from hyperion.hardware import Device
from hyperion.measure import state_of
from hyperion.measure.memory_use.tensor_memory import MemoryHistory, MemoryTimeline
from hyperion.measure.steps.profiled import TraceProfiler
from hyperion.measure.steps.trace import cpu_events, gpu_events
from hyperion.parallel import ParallelPlan
from hyperion.results import Row
from hyperion.training import TorchEngine, choose_precision
from hyperion.units import GIB
from hyperion.workloads.workloads import BASIS, WARM_UP_STEPS, Batch, LanguageSizes, Workload, build_step, estimate_step, workload

TRACE, SNAPSHOT, TIMELINE = "step_trace.json.gz", "memory_snapshot.pickle", "memory_timeline.json"
KERNELS = "kernels.csv"
_TRACED_STEPS = 3
_TOP_KERNELS, _POINTS, _NAME_LENGTH = 10, 400, 90


class MemoryTraceOptions(Options):
    """Options for the `memory_trace` experiment.

    Args:
        precision: number format of the step, or "auto".
        policies: activation-checkpointing policies, see `ParallelPlan`. Trace files are written for the first policy only.
        language: the language model and its batch.
    """

    precision: str
    policies: tuple[str, ...]
    language: LanguageSizes

    def step(self, context: Context) -> tuple[Workload, str]:
        """Return (workload, number format) of the step on the context's device."""
        return workload(self.language), choose_precision(context.device, self.precision).dtype


def forecast(context: Context) -> list[Forecast]:
    """Predict the peak memory under each policy with the memory estimator."""
    options = MemoryTraceOptions.of(context)
    work, dtype = options.step(context)
    return [
        Forecast(
            work.name,
            "tensor_memory_gib",
            estimate_step(work, dtype, ParallelPlan(checkpointing=policy), context.device).history.tensor_peak_bytes / GIB,
            BASIS,
            dtype=dtype,
            params={"checkpointing": policy},
        )
        for policy in options.policies
    ]


def run(context: Context, report: Report) -> Result:
    """Trace a step under each policy. Write the trace files of the first policy to the workspace."""
    context.workspace.mkdir(parents=True, exist_ok=True)
    variants = [
        {"checkpointing": policy, "folder": "" if number else str(context.workspace)}
        for number, policy in enumerate(MemoryTraceOptions.of(context).policies)
    ]
    return merged(run_counted(context, report, trace_step, variants))


EXPERIMENT = Experiment(forecast, run, options=MemoryTraceOptions)


def trace_step(context: Context, report: Report, checkpointing: str, folder: str) -> Result:
    """Measure the memory during one step after warm-up.

    If `folder` is not empty, also write the trace files to this folder, and return rows for the kernels that take the most time.
    """
    (work, dtype), device = MemoryTraceOptions.of(context).step(context), context.device
    engine, batch = build_step(work, dtype, ParallelPlan(checkpointing=checkpointing), device, context.seed)
    for _ in range(WARM_UP_STEPS):
        engine.train_step(batch)
    timeline = MemoryTimeline(engine.model, {**state_of(engine.model, engine.optimizer), "batch": batch})
    with timeline:
        engine.train_step(batch)
    history, params = timeline.history(), {"checkpointing": checkpointing}
    rows = [context.row(work.name, "tensor_memory_gib", history.peak_bytes / GIB, dtype=dtype, params=params)]
    samples = curve(history).assign(variant=work.name, dtype=dtype, checkpointing=checkpointing)
    if folder:
        names = [_write_history(engine, batch, device, history, Path(folder)), _write_trace(engine, batch, device, Path(folder))]
        rows += _kernel_rows(context, work, dtype, Path(folder) / TRACE)
        for name in names:
            stored = (Path(folder) / name).stat().st_size / 1e9
            rows.append(context.row(work.name, "stored_gb", stored, dtype=dtype, params={"file": name}))
    return Result(rows, samples)


def curve(history: MemoryHistory, points: int = _POINTS) -> pd.DataFrame:
    """Return the memory during a step as one curve for each kind of tensor.

    An event is the allocation or the release of a tensor. The events of the step are divided into at most `points` intervals. The
    curves have one point for each interval: the memory at the interval's peak.

    Returns:
        A table with the columns event, phase, kind and gib.
    """
    total, kinds = history.levels(), {kind: history.levels(kind) for kind in history.kinds()}
    # Number of events per interval, rounded up, so that there are at most `points` intervals.
    stretch = -(-len(total) // points)
    # In each interval, choose the event with the largest total memory. A mean would hide short peaks.
    chosen = [
        max(range(first, min(first + stretch, len(total))), key=total.__getitem__) for first in range(0, len(total), stretch)
    ]
    return pd.DataFrame(
        {"event": event, "phase": history.phase_of(event), "kind": kind, "gib": levels[event] / GIB}
        for event in chosen
        for kind, levels in kinds.items()
    )


def _write_history(engine: TorchEngine, batch: Batch, device: Device, history: MemoryHistory, folder: Path) -> str:
    """Run a step, write the allocator's snapshot to a file, and return the file name.

    https://pytorch.org/memory_viz can show the snapshot. On a CPU, which has no such allocator, the history of the tensors is
    written instead.
    """
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


def _write_trace(engine: TorchEngine, batch: Batch, device: Device, folder: Path) -> str:
    """Run some steps under the profiler, write its trace to a file, and return the file name.

    https://ui.perfetto.dev can show the trace.
    """
    activities = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if device.kind != "cpu" else [])
    # The GPU tracer takes seconds to start. It starts in the warm-up step, which is not part of the trace.
    steps = schedule(wait=0, warmup=1, active=_TRACED_STEPS, repeat=1)
    ready = methodcaller("export_chrome_trace", str(folder / TRACE))
    with TraceProfiler(activities, schedule=steps, on_trace_ready=ready) as profiler:
        for _ in range(1 + _TRACED_STEPS):
            engine.train_step(batch)
            if device.kind != "cpu":
                torch.cuda.synchronize(device.torch_device)
            profiler.step()
    return TRACE


def _kernel_rows(context: Context, work: Workload, dtype: str, trace: Path) -> list[Row]:
    """Return a row for each of the kernels that take the most time, with its share of the time of all kernels.

    Also write a table of all kernels to a file next to the trace, with the columns kernel, kind, intervals, time and share. On a
    GPU, an interval is a launch. On a CPU, the rows describe operators instead of kernels. An interval then ends when the
    operator calls another one.
    """
    with gzip.open(trace, "rt") as file:
        raw = json.load(file)["traceEvents"]
    device = context.device
    events = cpu_events(raw) if device.kind == "cpu" else gpu_events(raw, torch.device(device.torch_device).index)
    table = pd.DataFrame([(e.name, e.kind, e.end_ns - e.start_ns) for e in events], columns=["kernel", "kind", "time_ns"])
    whole = table.groupby(["kernel", "kind"], as_index=False).agg(intervals=("time_ns", "size"), time_ns=("time_ns", "sum"))
    whole["share"] = whole["time_ns"] / whole["time_ns"].sum()
    whole.sort_values("time_ns", ascending=False).to_csv(trace.with_name(KERNELS), index=False)
    times, kinds = Counter(), {}
    for event in events:
        name = event.name[:_NAME_LENGTH]
        times[name] += event.end_ns - event.start_ns
        kinds[name] = event.kind
    return [
        context.row(
            work.name,
            "share",
            time_ns / times.total(),
            dtype=dtype,
            params={"of": "time of all kernels", "what": name, "kind": kinds[name]},
        )
        for name, time_ns in times.most_common(_TOP_KERNELS)
    ]
