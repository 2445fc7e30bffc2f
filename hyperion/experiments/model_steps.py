"""How long does a training step of a well-known model take, where does the time go, and how far is that from the limits?"""

import gc

import pandas as pd
import torch

from hyperion.experiments.context import Context, Experiment, Forecast, Result
from hyperion.experiments.reference_steps import (
    GIB,
    LEAST_MEMORY,
    TrainingStep,
    least_memory_gib,
    processes_of,
    step_params,
    step_rows,
    timed,
)
from hyperion.experiments.step_forecasts import forecast_reference_step
from hyperion.experiments.variants import merged, run_variant
from hyperion.measure import PeakMemory, PeakMemoryRegion, allocator_refusal
from hyperion.models import ReferenceModel, parameter_count, reference_model
from hyperion.results import Row

# Workspaces of the BLAS libraries stay for the life of a process; a model that stayed would be larger.
_LEFT_GIB = 0.25


def forecast(context: Context) -> list[Forecast]:
    """Samples per second and seconds a step of every model and dtype, from ceilings and from what its step dispatches."""
    return [
        foretold
        for name in context.sizes["models"]
        for dtype in context.sizes["dtypes"]
        if context.device.supports(dtype)[0]
        for foretold in forecast_reference_step(context, name, context.sizes["batch_size"], dtype)
    ]


def run(context: Context, report) -> Result:
    """Time every model in every dtype, in processes of their own."""
    function = "hyperion.experiments.model_steps:measure"
    groups = processes_of(context, context.sizes["models"])
    return merged([run_variant(context, report, function, {"names": names}) for names in groups])


EXPERIMENT = Experiment(forecast, run, forecast_reads=("gemm", "bandwidth", "launch_cost"))


def measure(context: Context, report, names: list[str]) -> Result:
    """The worker's side: one variant after the other."""
    rows: list[Row] = []
    frames: list[pd.DataFrame] = []
    variants = [(reference_model(name), dtype) for name in names for dtype in context.sizes["dtypes"]]
    for done, (model, dtype) in enumerate(variants):
        report(done, len(variants), f"{model.name} {dtype}")
        new_rows, new_frames = _measure_variant(context, model, dtype)
        rows += new_rows
        frames += new_frames
        gc.collect()
    report(len(variants), len(variants), "done")
    return Result(rows, pd.concat(frames, ignore_index=True) if frames else pd.DataFrame())


def _measure_variant(context: Context, model: ReferenceModel, dtype: str) -> tuple[list[Row], list[pd.DataFrame]]:
    device, batch = context.device, context.sizes["batch_size"]
    supported, how = device.supports(dtype)
    if not supported:
        return [_absent(context, model, dtype, f"unsupported: {how}")], []
    left_gib = None if device.kind == "cpu" else torch.cuda.memory_allocated(device.torch_device) / GIB
    try:
        with PeakMemoryRegion(device) as region:
            step = TrainingStep(model.name, batch, dtype, device, context.seed)
            timing, learned = timed(step, device, context.sizes["time_limit_s"])
    except (RuntimeError, MemoryError) as error:
        refusal = allocator_refusal(error, device)
        if refusal is None:
            raise
        return [_absent(context, model, dtype, f"out of memory: {refusal}")], []
    rows, frame = step_rows(context, model, batch, dtype, timing, learned)
    count = _count_row(context, model, dtype, parameter_count(step.module))
    return [count, *rows, _memory_row(context, model, dtype, region.peak, left_gib)], [frame]


def _absent(context: Context, model: ReferenceModel, dtype: str, reason: str) -> Row:
    params = step_params(context.sizes["batch_size"])
    return context.row(model.name, "step_time_s", None, dtype=dtype, params=params, value_reason=reason)


def _count_row(context: Context, model: ReferenceModel, dtype: str, counted: int) -> Row:
    """Parameters of what was really trained, held against the published number."""
    return context.row(
        model.name, "count", float(counted), dtype=dtype, params={"what": "parameters"}, check="expected count",
        check_error=float(abs(counted - model.parameter_count)), check_tolerance=0.0,
    )  # fmt: skip


def _memory_row(context: Context, model: ReferenceModel, dtype: str, peak: PeakMemory, left_gib: float | None) -> Row:
    """The peak of build and steps, above what weights, gradients, moments and the batch take by themselves."""
    batch = context.sizes["batch_size"]
    check = {}
    if left_gib is not None:
        check = {"check": "GiB left by the variant before", "check_error": left_gib, "check_tolerance": _LEFT_GIB}
    return context.row(
        model.name, peak.metric, peak.gib, dtype=dtype, params=step_params(batch), value_reason=peak.reason,
        limit=least_memory_gib(model, batch), limit_source=LEAST_MEMORY, **check,
    )  # fmt: skip
