"""Memory of a training step by phase: parameters, optimizer state, activations and gradients."""

from dataclasses import dataclass
from functools import partial
from typing import Any

import pandas as pd
import torch

from hyperion.chapter.context import Context, Experiment, Forecast, Options, Report, Result
from hyperion.chapter.rows import checked, out_of_memory_reason
from hyperion.chapter.variants import merged, run_counted
from hyperion.hardware import Device
from hyperion.measure import SavedForBackward, TensorMemory, bytes_of, state_of
from hyperion.parallel import ParallelPlan
from hyperion.results import Row
from hyperion.training import TorchEngine
from hyperion.units import GIB
from hyperion.workloads.workloads import (
    BASIS,
    KINDS,
    WARM_UP_STEPS,
    Batch,
    ImageSizes,
    LanguageSizes,
    Workload,
    estimate_step,
    random_batch,
    workload,
)

PHASES = ("before forward", "after forward", "after backward", "after step")


class MemoryPhasesOptions(Options):
    """Options for the `memory_phases` experiment.

    Args:
        dtypes: number formats to measure.
        parts_tolerance: largest allowed relative difference between the sum of the parts and the bytes of all tensors.
        allocator_tolerance: largest allowed difference between two numbers: the growth of the allocator's memory since the end of
            the first phase, and the growth of the tensors. It is a share of the allocator's memory.
        language: the language model and its batch.
        image: the ResNet-18 and its batch.
    """

    dtypes: tuple[str, ...]
    parts_tolerance: float
    allocator_tolerance: float
    language: LanguageSizes
    image: ImageSizes

    def work(self, kind: str) -> Workload:
        """Return the workload of a kind of model."""
        return workload(getattr(self, kind))


def forecast(context: Context) -> list[Forecast]:
    """Predict the activation memory after the forward pass with the memory estimator."""
    options = MemoryPhasesOptions.of(context)
    lines = []
    for work in map(options.work, KINDS):
        for dtype in options.dtypes:
            kept_bytes = estimate_step(work, dtype, ParallelPlan(), context.device).history.kept_bytes
            lines.append(
                Forecast(
                    work.name,
                    "allocated_memory_gib",
                    kept_bytes / GIB,
                    BASIS,
                    dtype=dtype,
                    params={"batch": work.items, "phase": "after forward", "part": "activations"},
                )
            )
    return lines


def run(context: Context, report: Report) -> Result:
    """Measure one step of each model in each number format.

    The batches are random, because memory depends only on their shapes.
    """
    cells = [{"kind": kind, "dtype": dtype} for kind in KINDS for dtype in MemoryPhasesOptions.of(context).dtypes]
    return merged(run_counted(context, report, profile_step, cells))


EXPERIMENT = Experiment(forecast, run, options=MemoryPhasesOptions)


def profile_step(context: Context, report: Report, kind: str, dtype: str) -> Result:
    """Measure the memory of one step at the end of each phase, for one kind of model and one number format."""
    options = MemoryPhasesOptions.of(context)
    work, shared = options.work(kind), {"dtype": dtype}
    try:
        batch = random_batch(work, context.device, context.seed)
        moments = memory_by_phase(work.engine(dtype, context.device, context.seed), batch)
    except torch.OutOfMemoryError as error:
        params = {"batch": work.items, "phase": PHASES[1], "part": "all tensors"}
        reason = out_of_memory_reason(error)
        absent = context.absent_row(work.name, "allocated_memory_gib", reason, params=params, **shared)
        return Result([absent], pd.DataFrame())
    rows = [row for moment in moments for row in _rows(context, options, work, moment, moments[0], shared)]
    return Result(rows, pd.DataFrame())


@dataclass(frozen=True)
class Moment:
    """Memory at the end of one phase of a training step.

    Attributes:
        phase: name of the phase, one of PHASES.
        parts: bytes of the tensors of each kind ("parameters", "gradients", …).
        tensors: bytes of all existing tensors, counted independently of the parts.
        peak: largest number of bytes of tensors that existed at the same time during the phase.
        allocator: bytes that the accelerator's allocator reports, with the keys "requested", "allocated", "peak" and "reserved".
            Empty on a CPU.
    """

    phase: str
    parts: dict[str, int]
    tensors: int
    peak: int
    allocator: dict[str, int]


def memory_by_phase(engine: TorchEngine, batch: Batch) -> list[Moment]:
    """Run a few warm-up steps, then one step phase by phase. Return the memory at the end of each phase.

    The steps change the weights of the engine.
    """
    for _ in range(WARM_UP_STEPS):
        engine.train_step(batch)
    parts = state_of(engine.model, engine.optimizer) | {"batch": [*batch]}
    present = [tensor for tensors in parts.values() for tensor in tensors]
    saved = SavedForBackward(present)
    with TensorMemory(engine.device, present) as memory:
        look = partial(_look, engine, batch, memory, saved)
        moments = [look(PHASES[0])]
        items = engine.count_items(batch)
        with engine.precision.products():
            # `saved` wraps only the forward pass, in which autograd stores activations for the backward pass.
            with saved, engine.precision.autocast(engine.device):
                loss = engine.summed_loss(batch) / items
            moments.append(look(PHASES[1]))
            engine.scaler.backward(loss)
        moments.append(look(PHASES[2]))
        engine.scaler.unscale(engine.optimizer)
        norm = torch.nn.utils.clip_grad_norm_(engine.model.parameters(), engine.clip_norm)
        engine.scaler.step(engine.optimizer, norm)
        moments.append(look(PHASES[3]))
    # Clear the gradients after the last reading, because they still count in the phase "after step".
    engine.optimizer.zero_grad()
    return moments


def _look(engine: TorchEngine, batch: Batch, memory: TensorMemory, saved: SavedForBackward, phase: str) -> Moment:
    parts = {name: bytes_of(tensors) for name, tensors in state_of(engine.model, engine.optimizer).items()}
    parts |= {"batch": bytes_of(batch), "activations": saved.bytes}
    moment = Moment(phase, parts, memory.now_bytes, memory.peak_bytes, _allocator(engine.device))
    # Each phase has its own peak.
    memory.reset_peak()
    return moment


def _allocator(device: Device) -> dict[str, int]:
    if device.kind == "cpu":
        return {}
    where = torch.device(device.torch_device)
    torch.cuda.synchronize(where)
    statistics: dict[str, Any] = torch.cuda.memory_stats(where)
    torch.cuda.reset_peak_memory_stats(where)
    return {
        "requested": statistics["requested_bytes.all.current"],  # before rounding up to whole blocks
        "allocated": statistics["allocated_bytes.all.current"],
        "peak": statistics["allocated_bytes.all.peak"],
        "reserved": statistics["reserved_bytes.all.current"],
    }


def _rows(
    context: Context, options: MemoryPhasesOptions, work: Workload, moment: Moment, first: Moment, shared: dict
) -> list[Row]:
    params = {"batch": work.items, "phase": moment.phase}
    row = partial(context.row, work.name, **shared)
    error = abs(sum(moment.parts.values()) / moment.tensors - 1)
    rows = [row("allocated_memory_gib", size / GIB, params=params | {"part": part}) for part, size in moment.parts.items()]
    rows.append(
        row(
            "allocated_memory_gib",
            moment.tensors / GIB,
            params=params | {"part": "all tensors"},
            **checked("the parts add up to all tensors", error, options.parts_tolerance),
        )
    )
    if moment is not first:
        rows.append(row("tensor_memory_gib", moment.peak / GIB, params=params))
    if not moment.allocator:
        return rows
    # The allocator's memory includes workspaces of libraries, which are not tensors. Therefore, compare the growth since the
    # first phase instead of the total.
    requested = moment.allocator["requested"]
    grown, counted = requested - first.allocator["requested"], moment.tensors - first.tensors
    rows.append(
        row(
            "allocated_memory_gib",
            moment.allocator["allocated"] / GIB,
            params=params | {"part": "allocator"},
            **checked("the allocator grew as the tensors did", abs(grown - counted) / requested, options.allocator_tolerance),
        )
    )
    rows.append(row("reserved_memory_gib", moment.allocator["reserved"] / GIB, params=params))
    if moment is not first:
        limit_source = "no limit: the row of the tensors' own peak in the same phase is the comparison"
        rows.append(row("peak_memory_gib", moment.allocator["peak"] / GIB, params=params, limit_source=limit_source))
    return rows
