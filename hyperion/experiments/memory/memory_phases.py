"""Where the memory of a training step goes: parameters, optimizer state, activations and gradients, phase by phase."""

from dataclasses import dataclass
from functools import partial

import pandas as pd
import torch

from hyperion.chapter.context import Context, Experiment, Forecast, Result
from hyperion.chapter.rows import out_of_memory_reason
from hyperion.chapter.side_by_side import run_counted
from hyperion.chapter.variants import merged
from hyperion.hardware import Device
from hyperion.measure import SavedForBackward, TensorMemory, bytes_of, state_of
from hyperion.results import Row
from hyperion.training import TorchEngine
from hyperion.workloads import workloads
from hyperion.workloads.memory_forecasts import foretold, policy
from hyperion.workloads.workloads import KINDS, Batch, Workload

GIB = 2**30
PHASES = ("before forward", "after forward", "after backward", "after step")
WARM_UP_STEPS = 2  # the first step makes the optimizer's state


def forecast(context: Context) -> list[Forecast]:
    """Activations after the forward pass, by the estimator."""
    lines = []
    for kind in KINDS:
        work = workloads.workload(kind, context.sizes[kind])
        for dtype in context.sizes["dtypes"]:
            kept = foretold(work, dtype, policy(), context.device).history.kept_bytes
            basis = "the estimator: this very step on tensors that have shapes and no memory"
            params = {"batch": work.items, "phase": "after forward", "part": "activations"}
            lines.append(
                Forecast(
                    variant=work.name, metric="allocated_memory_gib", estimate=kept / GIB, basis=basis, dtype=dtype, params=params
                )
            )
    return lines


def run(context: Context, report) -> Result:
    """Profile one step of each model and format, on random batches: only their shapes matter."""
    cells = [{"kind": kind, "dtype": dtype} for kind in KINDS for dtype in context.sizes["dtypes"]]
    return merged(run_counted(context, report, profile_step, cells))


EXPERIMENT = Experiment(forecast, run)


def profile_step(context: Context, report, kind: str, dtype: str) -> Result:
    """One step, its memory looked at between the phases."""
    work, shared = workloads.workload(kind, context.sizes[kind]), {"dtype": dtype}
    try:
        batch = workloads.random_batch(work, context.device, context.seed)
        moments = memory_by_phase(work.engine(dtype, context.device, context.seed), batch)
    except torch.OutOfMemoryError as error:
        shared |= {"params": {"batch": work.items, "phase": PHASES[1], "part": "all tensors"}}
        absent = context.row(work.name, "allocated_memory_gib", None, value_reason=out_of_memory_reason(error), **shared)
        return Result([absent], pd.DataFrame())
    rows = [row for moment in moments for row in _rows(context, work, moment, moments[0], shared)]
    return Result(rows, pd.DataFrame())


@dataclass(frozen=True)
class Moment:
    """Memory at the end of a phase.

    Attributes:
        phase: one of PHASES.
        parts: bytes by what they are.
        tensors: bytes of all tensors alive, by a count of its own.
        peak: the most of them since the moment before.
        allocator: what the accelerator's allocator says, empty on a CPU: requested, allocated, peak and reserved bytes.
    """

    phase: str
    parts: dict[str, int]
    tensors: int
    peak: int
    allocator: dict[str, int]


def memory_by_phase(engine: TorchEngine, batch: Batch) -> list[Moment]:
    """Take some steps, then one whose phases are looked at. Changes the engine."""
    for _ in range(WARM_UP_STEPS):
        engine.train_step(batch)
    parts = state_of(engine.model, engine.optimizer) | {"batch": [*batch]}
    known = [tensor for tensors in parts.values() for tensor in tensors]
    saved = SavedForBackward(known)
    with TensorMemory(engine.device, known) as memory:
        look = partial(_look, engine, batch, memory, saved)
        moments = [look(PHASES[0])]
        items = engine.count_items(batch)
        with engine.precision.products():
            with saved, engine.precision.autocast(engine.device):
                loss = engine.summed_loss(batch) / items
            moments.append(look(PHASES[1]))
            engine.scaler.backward(loss)
        moments.append(look(PHASES[2]))
        engine.scaler.unscale(engine.optimizer)
        norm = torch.nn.utils.clip_grad_norm_(engine.model.parameters(), engine.clip_norm)
        engine.scaler.step(engine.optimizer, norm)
        moments.append(look(PHASES[3]))
    engine.optimizer.zero_grad()
    return moments


def _look(engine: TorchEngine, batch: Batch, memory: TensorMemory, saved: SavedForBackward, phase: str) -> Moment:
    parts = {name: bytes_of(tensors) for name, tensors in state_of(engine.model, engine.optimizer).items()}
    parts |= {"batch": bytes_of(batch), "activations": saved.bytes}
    moment = Moment(phase, parts, memory.now_bytes, memory.peak_bytes, _allocator(engine.device))
    memory.reset_peak()
    return moment


def _allocator(device: Device) -> dict[str, int]:
    if device.kind == "cpu":
        return {}
    where = torch.device(device.torch_device)
    torch.cuda.synchronize(where)
    told = torch.cuda.memory_stats(where)
    torch.cuda.reset_peak_memory_stats(where)
    return {
        # What was asked for, before it was rounded up to blocks.
        "requested": told["requested_bytes.all.current"],
        "allocated": told["allocated_bytes.all.current"],
        "peak": told["allocated_bytes.all.peak"],
        "reserved": told["reserved_bytes.all.current"],
    }


def _rows(context: Context, work: Workload, moment: Moment, first: Moment, shared: dict) -> list[Row]:
    params = {"batch": work.items, "phase": moment.phase}
    row = partial(context.row, work.name, **shared)
    error = abs(sum(moment.parts.values()) / moment.tensors - 1)
    rows = [row("allocated_memory_gib", size / GIB, params=params | {"part": part}) for part, size in moment.parts.items()]
    rows.append(
        row(
            "allocated_memory_gib",
            moment.tensors / GIB,
            params=params | {"part": "all tensors"},
            check="the parts add up to all tensors",
            check_error=error,
            check_tolerance=context.sizes["parts_tolerance"],
        )
    )
    if moment is not first:
        rows.append(row("tensor_memory_gib", moment.peak / GIB, params=params))
    return rows + _allocator_rows(context, moment, first, params, row)


def _allocator_rows(context: Context, moment: Moment, first: Moment, params: dict, row: partial) -> list[Row]:
    """What the allocator says. Libraries keep workspaces in it, so its growth, not its level, must be that of the tensors."""
    told = moment.allocator
    if not told:
        return []
    grown, counted = told["requested"] - first.allocator["requested"], moment.tensors - first.tensors
    rows = [
        row(
            "allocated_memory_gib",
            told["allocated"] / GIB,
            params=params | {"part": "allocator"},
            check="the allocator grew as the tensors did",
            check_error=abs(grown - counted) / told["requested"],
            check_tolerance=context.sizes["allocator_tolerance"],
        ),
        row("reserved_memory_gib", told["reserved"] / GIB, params=params),
    ]
    if moment is not first:
        limit_source = "no limit: the tensors' own peak of the same phase stands beside it"
        rows.append(row("peak_memory_gib", told["peak"] / GIB, params=params, limit_source=limit_source))
    return rows
