"""Resharding: save a checkpoint on N ranks, and resume from it on N/2 ranks, on N/4 ranks, …, and on one rank."""

import shutil
from pathlib import Path

import pandas as pd
import torch.distributed as dist

from hyperion.chapter.context import Context, Experiment, Forecast, Report, Result
from hyperion.chapter.variants import merged, run_on_ranks
from hyperion.checkpoints.folders import checkpoint_path
from hyperion.experiments.distributed.parallel_parity import ShortTrainingOptions, largest_relative_difference
from hyperion.processes import world
from hyperion.results import Row
from hyperion.training import TrainingPlan, train
from hyperion.workloads import datasets
from hyperion.workloads.recipes import set_up
from hyperion.workloads.twins import SCATTER_FP32

TOLERANCE = 1e-4
_SAVED = "saved"


class ReshardingOptions(ShortTrainingOptions):
    """Options for the `resharding` experiment.

    Args:
        steps_before: number of optimizer steps before the checkpoint.
        steps_after: number of optimizer steps after the checkpoint. The resumed runs repeat these steps.
    """

    steps_before: int
    steps_after: int

    @property
    def steps(self) -> int:
        """Total number of optimizer steps before and after the checkpoint."""
        return self.steps_before + self.steps_after

    def resuming(self, context: Context) -> list[int]:
        """Return the rank counts on which training resumes: half and a quarter of the saving ranks, …, and 1."""
        ranks = self.rank_count(context, self.batch_size)
        return [ranks >> halvings for halvings in range(1, ranks.bit_length())]


def forecast(context: Context) -> list[Forecast]:
    """Predict the largest relative difference between the losses of a resumed run and those of the uninterrupted run."""
    options = ReshardingOptions.of(context)
    after = options.steps_after
    basis = f"each of {after} steps adds sums in another order: {after} x 2^-24; the state itself is copied without rounding"
    return [
        Forecast("fsdp", "relative_difference", after * 2.0**-24, basis, dtype="fp32", params=_params(context, options, ranks))
        for ranks in options.resuming(context)
    ]


def run(context: Context, report: Report) -> Result:
    """Train on all ranks, save a checkpoint, and continue. Then resume copies of the checkpoint on fewer ranks."""
    options = ReshardingOptions.of(context)
    shutil.rmtree(context.workspace, ignore_errors=True)
    first = run_on_ranks(context, report, save_and_go_on, ranks=options.rank_count(context, options.batch_size))
    curves, rows = [first[0].samples], []
    for ranks in options.resuming(context):
        resumed = run_on_ranks(context, report, resume, ranks=ranks)
        curves.append(resumed[0].samples)
        rows += _rows(context, options, ranks, first[0], resumed[0])
    return Result(merged(first).rows + rows, pd.concat(curves, ignore_index=True), first[0].source)


EXPERIMENT = Experiment(forecast, run, data=datasets.TEXT, options=ReshardingOptions)


def save_and_go_on(context: Context, report: Report) -> Result:
    """Train, save a checkpoint, and continue training. Every rank runs this function.

    The losses after the checkpoint are the reference that every resumed run must repeat.
    """
    options, folder = ReshardingOptions.of(context), context.workspace / "first"
    before = options.steps_before
    plan = TrainingPlan(steps=options.steps, checkpoint_every=before)
    result = _train(context, options, plan, folder, report)
    if world().rank == 0:
        saved = context.workspace / _SAVED
        shutil.copytree(checkpoint_path(folder, before), checkpoint_path(saved, before))
        size = sum(path.stat().st_size for path in saved.rglob("*") if path.is_file())
        parameters = {"what": "checkpoint", "ranks": world().size}
        result.rows.append(context.row("fsdp", "stored_gb", size / 1e9, dtype="fp32", params=parameters))
    dist.barrier()
    return result


def resume(context: Context, report: Report) -> Result:
    """Resume from a copy of the checkpoint, which was saved by a larger number of ranks. Every rank runs this function."""
    folder = context.workspace / f"resumed-{world().size}"
    if world().rank == 0:
        shutil.copytree(context.workspace / _SAVED, folder)
    dist.barrier()
    options = ReshardingOptions.of(context)
    return _train(context, options, TrainingPlan(steps=options.steps), folder, report)


def _train(context: Context, options: ReshardingOptions, plan: TrainingPlan, folder: Path, report: Report) -> Result:
    training = set_up(context, options.recipe("fsdp", options.steps))
    history = train(training.engine, training.batches, plan, folder=folder, report=report)
    curve = pd.DataFrame({"ranks": world().size, "step": range(1, options.steps + 1), "loss": history.losses})
    curve["resumed_at"] = max(history.resumed_at, default=0)
    return Result([], curve, training.source)


def _rows(context: Context, options: ReshardingOptions, ranks: int, first: Result, resumed: Result) -> list[Row]:
    """Return the rows with the difference of the losses, and with the distance of the step at which the run resumed.

    A run that ignored the checkpoint and started again would have the same losses.
    """
    expected, losses = (
        result.samples.sort_values(by="step")["loss"].to_numpy()[options.steps_before :] for result in (first, resumed)
    )
    difference = largest_relative_difference(losses, expected)
    late = abs(int(resumed.samples["resumed_at"].iloc[0]) - options.steps_before)
    params = _params(context, options, ranks)
    shared = {"dtype": "fp32", "data_source": resumed.source}
    check = f"next losses of the ranks that saved; {SCATTER_FP32}"
    where = params | {"what": "steps between the checkpoint and the resume"}
    return [
        context.error_row("fsdp", "relative_difference", difference, check, TOLERANCE, params=params, **shared),
        context.error_row("fsdp", "count", late, "resumed at the checkpoint", 0, params=where, **shared),
    ]


def _params(context: Context, options: ReshardingOptions, ranks: int) -> dict:
    saved_by = options.rank_count(context, options.batch_size)
    return {"what": "next losses", "saved_by": saved_by, "resumed_by": ranks, "steps": options.steps_after}
