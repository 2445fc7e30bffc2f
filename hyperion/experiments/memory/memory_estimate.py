"""Estimate the peak memory of training steps before they run, then measure it.

A cell is one measured step. It has a model, a batch size, a number format and an activation-checkpointing policy. The experiment
also predicts the largest batch that fits into a given amount of memory, and tests this prediction with measured steps. The reader
of the chapter makes the same prediction before the measurement.
"""

import math
from collections.abc import Iterable
from functools import partial
from typing import Annotated, Literal

import pandas as pd
import torch
from pydantic import BaseModel, Field
from torch import Tensor

from hyperion.chapter.context import Context, Experiment, Forecast, Options, Report, Result
from hyperion.chapter.rows import out_of_memory_reason
from hyperion.chapter.variants import merged, run_counted
from hyperion.hardware import Device
from hyperion.measure import bytes_of, memory_cap, state_of
from hyperion.measure.memory_use.tensor_memory import ACTIVATIONS, GRADIENTS, MemoryTimeline, allocated_peak
from hyperion.parallel.parallelize import NONE, ParallelPlan
from hyperion.results import Row
from hyperion.training.memory_estimate import largest_batch
from hyperion.units import GIB
from hyperion.workloads.workloads import (
    BASIS,
    WARM_UP_STEPS,
    ImageSizes,
    LanguageSizes,
    Workload,
    build_step,
    estimate_step,
    workload,
)

PARTS = ("parameters", "optimizer state", GRADIENTS, ACTIVATIONS)
LARGEST_BATCH = "largest batch that fits"
_NO_LIMIT = "no limit: the row is compared with the estimate of the same step"
_TOO_LARGE = 1.25  # a batch this many times as large as the predicted largest batch must not fit


class _Step(BaseModel, extra="forbid", frozen=True, strict=True):
    """Options for a training step: its number format and its activation-checkpointing policy.

    Args:
        dtype: number format.
        checkpointing: activation-checkpointing policy, see `ParallelPlan`.
    """

    dtype: str
    checkpointing: str = NONE

    @property
    def plan(self) -> ParallelPlan:
        """The `ParallelPlan` with this policy."""
        return ParallelPlan(checkpointing=self.checkpointing)


class LanguageCell(LanguageSizes, _Step, frozen=True):
    """Options for one measured training step of a language model."""

    kind: Literal["language"]


class ImageCell(ImageSizes, _Step, frozen=True):
    """Options for one measured training step of a ResNet-18."""

    kind: Literal["image"]


Cell = Annotated[LanguageCell | ImageCell, Field(discriminator="kind")]


class Question(_Step, frozen=True):
    """Options for the question how many sequences a batch can have so that a training step still fits into memory.

    Args:
        kind: always "language".
        model, vocabulary, sequence_length: as in `LanguageSizes`.
        memory_gib: memory of the device in GiB.
        margin: share of the memory that the step must leave free, because the allocator cannot use every gap between tensors.
    """

    kind: Literal["language"]
    model: str
    vocabulary: int = 0
    sequence_length: int
    memory_gib: float
    margin: float

    def cell(self, batch_size: int) -> LanguageCell:
        """Return the step with this batch size."""
        return LanguageCell(batch_size=batch_size, **self.model_dump(exclude={"memory_gib", "margin"}))

    def largest(self, device: Device) -> int:
        """Return the largest batch size that fits on a device according to the memory estimator."""

        def peak(batch: int) -> int:
            return estimate_step(workload(self.cell(batch)), self.dtype, self.plan, device).peak_bytes

        return largest_batch(peak, int((1 - self.margin) * self.memory_gib * GIB))

    @property
    def params(self) -> dict:
        """Params of the row with the largest batch."""
        return {"what": LARGEST_BATCH, "memory_gib": self.memory_gib, "checkpointing": self.checkpointing}


class MemoryEstimateOptions(Options):
    """Options for the `memory_estimate` experiment.

    Args:
        cells: the steps to estimate and measure.
        question: the step and the memory for which the largest batch is predicted.
    """

    cells: tuple[Cell, ...]
    question: Question


def forecast(context: Context) -> list[Forecast]:
    """Predict the peak memory and its parts for every measured step, and the largest batch that fits."""
    options = MemoryEstimateOptions.of(context)
    question, device = options.question, context.device
    lines = [line for cell in options.cells for line in _cell_forecasts(device, cell)]
    batch = question.largest(device)
    lines += _cell_forecasts(device, question.cell(batch), {"memory_gib": question.memory_gib})[:1]
    answer = Forecast(
        workload(question.cell(1)).name,
        "count",
        batch,
        f"the largest batch whose estimated peak is at most {question.memory_gib:g} GiB minus a margin",
        dtype=question.dtype,
        params=question.params,
    )
    return [*lines, answer]


def run(context: Context, report: Report) -> Result:
    """Measure the peak memory of each training step in the options.

    Then run a step with the largest batch that is predicted to fit into the memory in the question. On a GPU, also run a larger
    batch, which must not fit.
    """
    options = MemoryEstimateOptions.of(context)
    question, batch = options.question, options.question.largest(context.device)
    jobs = [{"cell": number} for number in range(len(options.cells))]
    jobs.append({"batch_size": batch})
    if context.device.kind != "cpu":
        # This step must run out of memory. Otherwise, the predicted batch size is too small.
        jobs.append({"batch_size": math.ceil(_TOO_LARGE * batch)})
    results = run_counted(context, report, measure_cell, jobs)
    name = workload(question.cell(batch)).name
    answer = context.row(name, "count", batch, dtype=question.dtype, params=question.params)
    return merged([*results, Result([answer], pd.DataFrame())])


EXPERIMENT = Experiment(forecast, run, options=MemoryEstimateOptions)


def measure_cell(context: Context, report: Report, cell: int | None = None, batch_size: int | None = None) -> Result:
    """Measure the memory of one training step after warm-up.

    The peak memory is read from the allocator. To measure the parts of the memory, the tensors are counted at each operator.
    Exactly one of `cell` and `batch_size` must be given.

    Args:
        context: context of the experiment.
        report: function that is called with the progress.
        cell: index of the step in `MemoryEstimateOptions.cells`.
        batch_size: batch size for the step in `MemoryEstimateOptions.question`. The allocator of an accelerator is then limited
            to the memory in the question.
    """
    options, device = MemoryEstimateOptions.of(context), context.device
    if batch_size is not None:
        chosen, memory_gib = options.question.cell(batch_size), options.question.memory_gib
    else:
        chosen, memory_gib = options.cells[cell or 0], None
    work = workload(chosen)
    row = partial(context.row, work.name, dtype=chosen.dtype)
    params = _params(work, chosen) | ({} if memory_gib is None else {"memory_gib": memory_gib})
    try:
        if memory_gib is None or device.kind == "cpu":
            rows = _measured(work, chosen, device, row, params)
        else:
            with memory_cap(device, memory_gib):
                rows = _measured(work, chosen, device, row, params)
    except torch.OutOfMemoryError as error:
        rows = [row("peak_memory_gib", None, params=params, value_reason=out_of_memory_reason(error))]
    return Result(rows, pd.DataFrame())


def _measured(work: Workload, cell: Cell, device: Device, row: partial[Row], params: dict) -> list[Row]:
    engine, batch = build_step(work, cell.dtype, cell.plan, device)
    for _ in range(WARM_UP_STEPS):
        engine.train_step(batch)
    standing: dict[str, Iterable[Tensor]] = {**state_of(engine.model, engine.optimizer), "batch": batch}
    standing_bytes = bytes_of(tensor for tensors in standing.values() for tensor in tensors)
    peak_bytes = allocated_peak(device, lambda: engine.train_step(batch), standing_bytes)
    rows = [row("peak_memory_gib", peak_bytes / GIB, params=params, limit_source=_NO_LIMIT)]
    if device.kind != "cpu":
        reserved_bytes = torch.cuda.max_memory_reserved(device.torch_device)
        rows.append(row("reserved_memory_gib", reserved_bytes / GIB, params=params))
    if "memory_gib" in params:
        return rows
    # Count the tensors in a separate step. Counting at each operator is slow, and the allocator's peak does not need it.
    timeline = MemoryTimeline(engine.model, standing)
    with timeline:
        engine.train_step(batch)
    parts = timeline.history().parts
    return rows + [row("tensor_memory_gib", parts[part] / GIB, params=params | {"part": part}) for part in PARTS]


def _cell_forecasts(device: Device, cell: Cell, more: dict | None = None) -> list[Forecast]:
    work = workload(cell)
    estimate = estimate_step(work, cell.dtype, cell.plan, device)
    line = partial(Forecast, variant=work.name, dtype=cell.dtype, basis=BASIS)
    params = _params(work, cell) | (more or {})
    return [line(metric="peak_memory_gib", estimate=estimate.peak_bytes / GIB, params=params)] + [
        line(metric="tensor_memory_gib", estimate=estimate.parts[part] / GIB, params=params | {"part": part}) for part in PARTS
    ]


def _params(work: Workload, cell: Cell) -> dict:
    return {"batch": work.items, "checkpointing": cell.checkpointing}
