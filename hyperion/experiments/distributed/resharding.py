"""A checkpoint of sharded training goes on with fewer ranks: saved by N, resumed by N, by half of them, and by one."""

import shutil
from pathlib import Path

import numpy as np
import pandas as pd
import torch.distributed as dist

from hyperion.chapter.context import Context, Experiment, Forecast, Result
from hyperion.chapter.ranks import ranks_of
from hyperion.chapter.variants import Report, merged, run_on_ranks
from hyperion.checkpoints.folders import checkpoint_path
from hyperion.processes import world
from hyperion.results import Row
from hyperion.training import Plan, train
from hyperion.workloads import datasets
from hyperion.workloads.recipes import Recipe, Training, set_up
from hyperion.workloads.twins import SCATTER_FP32

TOLERANCE = 1e-4
_SAVED = "saved"


def forecast(context: Context) -> list[Forecast]:
    """What the next losses may differ by, and what a checkpoint weighs."""
    after = context.sizes["steps_after"]
    basis = f"{after} steps in another order of summation: {after} x 2^-24; the state itself is copied, not computed"
    return [
        Forecast(
            variant="fsdp",
            metric="relative_difference",
            estimate=after * 2.0**-24,
            basis=basis,
            dtype="fp32",
            params=_params(context, ranks),
        )
        for ranks in _resuming(context)
    ]


def run(context: Context, report: Report) -> Result:
    """Train and save on all ranks and go on; then resume copies of that checkpoint on other numbers of ranks."""
    shutil.rmtree(context.workspace, ignore_errors=True)
    first = run_on_ranks(context, report, save_and_go_on, ranks=ranks_of(context))
    curves, rows = [first[0].samples], []
    for ranks in _resuming(context):
        resumed = run_on_ranks(context, report, resume, ranks=ranks)
        curves.append(resumed[0].samples)
        rows.append(_row(context, ranks, first[0], resumed[0]))
    return Result(merged(first).rows + rows, pd.concat(curves, ignore_index=True), first[0].source)


EXPERIMENT = Experiment(forecast, run, data=datasets.TEXT)


def save_and_go_on(context: Context, report: Report) -> Result:
    """Train past the checkpoint to the end, reading nothing back: the losses that every resumed run must repeat."""
    sizes, folder, before = context.sizes, context.workspace / "first", context.sizes["steps_before"]
    plan = Plan(steps=before + sizes["steps_after"], checkpoint_every=before)
    result = _train(context, _set_up(context), plan, folder, report)
    if world().rank == 0:
        saved = context.workspace / _SAVED
        shutil.copytree(checkpoint_path(folder, before), checkpoint_path(saved, before))
        size = sum(path.stat().st_size for path in saved.rglob("*") if path.is_file())
        parameters = {"what": "checkpoint", "ranks": world().size}
        result.rows.append(context.row("fsdp", "stored_gb", size / 1e9, dtype="fp32", params=parameters))
    dist.barrier()
    return result


def resume(context: Context, report: Report) -> Result:
    """Go on from a copy of the checkpoint with as many ranks as there are here."""
    folder = context.workspace / f"resumed-{world().size}"
    if world().rank == 0:
        shutil.copytree(context.workspace / _SAVED, folder)
    dist.barrier()
    plan = Plan(steps=context.sizes["steps_before"] + context.sizes["steps_after"])
    return _train(context, _set_up(context), plan, folder, report)


def _set_up(context: Context):
    sizes = context.sizes
    return set_up(
        context,
        Recipe(
            task="language",
            model=sizes["model"],
            strategy="fsdp",
            precision="fp32",
            batch_size=sizes["batch_size"],
            sequence_length=sizes["sequence_length"],
            steps=sizes["steps_before"] + sizes["steps_after"],
            learning_rate=sizes["learning_rate"],
            weight_decay=0.1,
            evaluation_batches=0,
        ),
    )


def _train(context: Context, training: Training, plan: Plan, folder: Path, report: Report) -> Result:
    history = train(training.engine, training.batches, plan, folder=folder, report=report)
    curve = pd.DataFrame({"ranks": world().size, "step": range(1, plan.steps + 1), "loss": history.losses})
    return Result([], curve, training.source)


def _resuming(context: Context) -> list[int]:
    """Numbers of ranks to resume with: half of those that saved, and so on down to one."""
    ranks, counts = ranks_of(context) // 2, []
    while ranks:
        counts.append(ranks)
        ranks //= 2
    return counts


def _row(context: Context, ranks: int, first: Result, resumed: Result) -> Row:
    before = context.sizes["steps_before"]
    expected, found = (result.samples.sort_values("step")["loss"].to_numpy()[before:] for result in (first, resumed))
    difference = float(np.max(np.abs(found / expected - 1)))
    return context.row(
        "fsdp",
        "relative_difference",
        difference,
        dtype="fp32",
        params=_params(context, ranks),
        check=f"next losses of the ranks that saved; {SCATTER_FP32}",
        check_error=difference,
        check_tolerance=TOLERANCE,
        data_source=resumed.source,
    )


def _params(context: Context, ranks: int) -> dict:
    return {"what": "next losses", "saved_by": ranks_of(context), "resumed_by": ranks, "steps": context.sizes["steps_after"]}
