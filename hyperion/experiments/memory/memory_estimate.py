"""The peak of memory of every named model, foretold before anything runs, and then measured; and the largest batch that fits."""

import math
from functools import partial

import pandas as pd
import torch

from hyperion.chapter.context import Context, Experiment, Forecast, Result
from hyperion.chapter.rows import out_of_memory_reason
from hyperion.chapter.side_by_side import run_counted
from hyperion.chapter.variants import merged
from hyperion.hardware import Device
from hyperion.measure import bytes_of, state_of
from hyperion.measure.memory_use.allocation import memory_cap
from hyperion.measure.memory_use.peak import allocated_peak
from hyperion.measure.memory_use.timeline import ACTIVATIONS, GRADIENTS, MemoryTimeline
from hyperion.parallel.plan import NONE, ParallelPlan
from hyperion.results import Row
from hyperion.training.memory_estimate import largest_batch
from hyperion.workloads.memory_forecasts import foretold, made, policy, workload
from hyperion.workloads.workloads import Workload

GIB = 2**30
PARTS = ("parameters", "optimizer state", GRADIENTS, ACTIVATIONS)
LARGEST_BATCH = "largest batch that fits"
WARM_UP_STEPS = 2  # the first makes the optimizer's state, and libraries take their workspaces
_NO_LIMIT = "no limit: the estimate of this very step stands beside it"
_TOO_LARGE = 1.25  # of the largest batch that fits: it must not


def forecast(context: Context) -> list[Forecast]:
    """The peak of every cell, its parts, and the largest batch of the question."""
    lines = [line for cell in context.sizes["cells"] for line in _cell_forecasts(context.device, cell)]
    question = context.sizes["question"]
    work = workload(question["kind"], question | {"batch_size": 1})
    basis = f"the estimator: the largest batch whose peak is at most {question['memory_gib']:g} GiB less a margin"
    batch = _largest(context.device, question)
    lines += _cell_forecasts(context.device, question | {"batch_size": batch}, {"memory_gib": question["memory_gib"]})[:1]
    asked = Forecast(
        variant=work.name, metric="count", estimate=batch, basis=basis, dtype=question["dtype"], params=_question_params(question)
    )
    return [*lines, asked]


def run(context: Context, report) -> Result:
    """Each cell by itself; then a step of the largest batch in the memory of the question, and on a GPU one of a larger."""
    question, cells = context.sizes["question"], list(context.sizes["cells"])
    batch = _largest(context.device, question)
    jobs = [{"cell": cell} for cell in cells]
    jobs.append({"cell": question | {"batch_size": batch}, "memory_gib": question["memory_gib"]})
    if context.device.kind != "cpu":
        larger = math.ceil(_TOO_LARGE * batch)
        jobs.append({"cell": question | {"batch_size": larger}, "memory_gib": question["memory_gib"]})
    results = run_counted(context, report, measure_cell, jobs)
    work = workload(question["kind"], question | {"batch_size": batch})
    answer = context.row(work.name, "count", batch, dtype=question["dtype"], params=_question_params(question))
    return merged([*results, Result([answer], pd.DataFrame())])


EXPERIMENT = Experiment(forecast, run)


def measure_cell(context: Context, report, cell: dict, memory_gib: float | None = None) -> Result:
    """The peak of a training step in the steady state, by the allocator, and its parts by dispatch.

    Args:
        memory_gib: an accelerator's allocator is given no more than this.
    """
    work, device = workload(cell["kind"], cell), context.device
    row = partial(context.row, work.name, dtype=cell["dtype"])
    params = _params(work, cell) | ({} if memory_gib is None else {"memory_gib": memory_gib})
    try:
        if memory_gib is None or device.kind == "cpu":
            rows = _measured(work, cell, device, row, params)
        else:
            with memory_cap(device, memory_gib):
                rows = _measured(work, cell, device, row, params)
    except torch.OutOfMemoryError as error:
        rows = [row("peak_memory_gib", None, params=params, value_reason=out_of_memory_reason(error))]
    return Result(rows, pd.DataFrame())


def _measured(work: Workload, cell: dict, device: Device, row: partial, params: dict) -> list[Row]:
    engine, batch = made(work, cell["dtype"], _plan(cell), device)
    for _ in range(WARM_UP_STEPS):
        engine.train_step(batch)
    standing = state_of(engine.model, engine.optimizer) | {"batch": batch}
    there = bytes_of(tensor for tensors in standing.values() for tensor in tensors)
    peak = allocated_peak(device, lambda: engine.train_step(batch), there)
    rows = [row("peak_memory_gib", peak / GIB, params=params, limit_source=_NO_LIMIT)]
    if device.kind != "cpu":
        reserved = torch.cuda.max_memory_reserved(device.torch_device)
        rows.append(row("reserved_memory_gib", reserved / GIB, params=params))
    if "memory_gib" in params:
        return rows
    timeline = MemoryTimeline(engine.model, standing)
    with timeline:
        engine.train_step(batch)
    parts = timeline.history().parts
    return rows + [row("tensor_memory_gib", parts[part] / GIB, params=params | {"part": part}) for part in PARTS]


def _cell_forecasts(device: Device, cell: dict, more: dict | None = None) -> list[Forecast]:
    work = workload(cell["kind"], cell)
    estimate = foretold(work, cell["dtype"], _plan(cell), device)
    line = partial(Forecast, variant=work.name, dtype=cell["dtype"])
    basis = "the estimator: this very step on tensors that have shapes and no memory"
    params = _params(work, cell) | (more or {})
    return [line(metric="peak_memory_gib", estimate=estimate.peak_bytes / GIB, basis=basis, params=params)] + [
        line(metric="tensor_memory_gib", estimate=estimate.parts[part] / GIB, basis=basis, params=params | {"part": part})
        for part in PARTS
    ]


def _largest(device: Device, question: dict) -> int:
    """Of the memory a margin stays free: an allocator cannot use every gap between its tensors."""

    def peak(batch: int) -> int:
        work = workload(question["kind"], question | {"batch_size": batch})
        return foretold(work, question["dtype"], _plan(question), device).peak_bytes

    return largest_batch(peak, int((1 - question["margin"]) * question["memory_gib"] * GIB))


def _plan(cell: dict) -> ParallelPlan:
    return policy(cell.get("checkpointing", NONE))


def _params(work: Workload, cell: dict) -> dict:
    return {"batch": work.items, "checkpointing": cell.get("checkpointing", NONE)}


def _question_params(question: dict) -> dict:
    return {"what": LARGEST_BATCH, "memory_gib": question["memory_gib"], "checkpointing": question.get("checkpointing", NONE)}
