"""Kill one rank during training.

The experiment measures how many seconds the launcher takes to report the failure, how many rank processes still run at that
point, and whether the training run can be resumed from its last checkpoint.
"""

import os
import shutil
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pandas as pd
import psutil

from hyperion.chapter.context import Context, Experiment, Forecast, Report, Result
from hyperion.chapter.rows import checked
from hyperion.chapter.variants import run_on_ranks
from hyperion.data.batches import ResumableBatches
from hyperion.errors import HyperionError
from hyperion.experiments.distributed.parallel_parity import ShortTrainingOptions, largest_relative_difference
from hyperion.processes import RankError, world
from hyperion.processes.child_process import has_ended
from hyperion.training import train
from hyperion.workloads import datasets
from hyperion.workloads.recipes import set_up
from hyperion.workloads.twins import SCATTER_FP32

SOON_S = 60.0
RUNS = ("resumed", "undisturbed")
_MARK = "HYPERION_RANK_FAILURE"


class RankFailureOptions(ShortTrainingOptions):
    """Options for the `rank_failure` experiment.

    Args:
        steps: number of optimizer steps of the whole training run.
        checkpoint_every: number of steps between checkpoints.
        kill_after: number of steps after which the last rank is killed.
    """

    steps: int
    checkpoint_every: int
    kill_after: int


def forecast(context: Context) -> list[Forecast]:
    """Predict the seconds between the signal that kills the rank and the launcher's failure report."""
    options = RankFailureOptions.of(context)
    ranks = options.rank_count(context, options.batch_size)
    basis = (
        "torchrun checks its workers ten times a second and stops the other workers at once, which exit within a second or two"
    )
    params = _killing(ranks, ranks - 1, "SIGKILL")
    return [Forecast("ddp", "detection_time_s", 3.0, basis, dtype="fp32", params=params)]


def run(context: Context, report: Report) -> Result:
    """Train, kill the last rank, and resume the run. Then train again without a failure, and compare all losses."""
    # Delete checkpoints and notes of an earlier attempt. The run would resume from them, and the rank would die at another step.
    shutil.rmtree(context.workspace, ignore_errors=True)
    options = RankFailureOptions.of(context)
    ranks = options.rank_count(context, options.batch_size)
    error, seconds, remaining = _killed(context, options, report, ranks)
    print(f"after {seconds:.1f} s: {error.what.splitlines()[0]}")
    again = run_on_ranks(context, report, resume_and_repeat, ranks=ranks)[0]
    resumed, undisturbed = (again.samples.loc[again.samples["run"] == run, "loss"].to_numpy() for run in RUNS)
    difference = largest_relative_difference(resumed, undisturbed)
    source = again.source
    # A run that ignored the checkpoint and started again would have the same losses.
    saved = options.kill_after - options.kill_after % options.checkpoint_every
    late = abs(int(again.samples.loc[again.samples["run"] == RUNS[0], "resumed_at"].iloc[0]) - saved)
    rows = [
        context.row(
            "ddp",
            "detection_time_s",
            seconds,
            dtype="fp32",
            limit_source="no limit: it should be short",
            params=_killing(ranks, error.rank, error.signal),
            **checked(
                "rank and signal named, within a minute",
                # A report that names the wrong rank or signal fails the check, however fast it is.
                seconds if (error.rank, error.signal) == (ranks - 1, "SIGKILL") else 10 * SOON_S,
                SOON_S,
            ),
        ),
        context.error_row("ddp", "count", remaining, "none", 0, params={"what": "processes left behind", "ranks": ranks}),
        context.error_row(
            "ddp",
            "count",
            late,
            "resumed at the last checkpoint",
            0,
            params={"what": "steps between the last checkpoint and the resume", "ranks": ranks, "checkpoint": saved},
        ),
        context.error_row(
            "ddp",
            "relative_difference",
            difference,
            f"losses of the undisturbed run; {SCATTER_FP32}",
            1e-5,
            dtype="fp32",
            params={"what": "losses after the kill", "ranks": ranks, "steps": len(resumed)},
            data_source=source,
        ),
    ]
    return Result(rows, again.samples, source)


EXPERIMENT = Experiment(forecast, run, data=datasets.TEXT, options=RankFailureOptions)


def _killing(ranks: int, rank: int | None, signal_name: str) -> dict:
    return {"ranks": ranks, "rank": rank, "signal": signal_name}


def _killed(context: Context, options: RankFailureOptions, report: Report, ranks: int) -> tuple[RankError, float, int]:
    """Train on several ranks, of which the last one kills itself.

    Returns:
        The error that the launcher raised, the seconds between the signal and this error, and the number of processes still
        running at that point.
    """
    os.environ[_MARK] = mark = os.urandom(8).hex()
    params = {"folder": "killed", "kill_after": options.kill_after}
    try:
        run_on_ranks(context, report, train_on_rank, params, ranks=ranks)
    except RankError as error:
        raised = time.time()
        # The rank itself records the time of its death, because no other process knows it. Both times come from the wall clock of
        # this host.
        died = (context.workspace / "died").stat().st_mtime
        # Find the processes in two ways: by the process ids that the ranks recorded, and by the inherited environment variable.
        # The second way also finds child processes of the ranks.
        return error, raised - died, len(_remaining_ranks(context) | _marked(mark))
    finally:
        del os.environ[_MARK]
    raise HyperionError(
        "a rank was killed and the launcher reported no failure",
        where=f"{context.notebook}.{context.experiment}",
        next_step="run the experiment again, and report a bug in the launcher if this error occurs again",
    )


def _remaining_ranks(context: Context) -> set[int]:
    """Return the process ids of the ranks that still run. The ranks have written their process ids to files."""
    written = [int(note.read_text()) for note in context.workspace.glob("pid-*")]
    return {pid for pid in written if not has_ended(pid)}


def _marked(mark: str) -> set[int]:
    """Return the process ids of other running processes that inherited this launch's mark: ranks and their children.

    A process has the mark if its environment variable `_MARK` equals `mark`.
    """
    found = set()
    for process in psutil.process_iter():
        try:
            if process.pid != os.getpid() and process.environ().get(_MARK) == mark:
                found.add(process.pid)
        except (psutil.NoSuchProcess, psutil.AccessDenied, psutil.ZombieProcess):
            continue  # the process has ended, or belongs to another user
    return found


class _KilledAfter:
    """Wrap an iterator of batches, and kill the current process after some steps.

    A signal kills the process, so there is no error message. This resembles the failure of a machine.

    Args:
        batches: batches of the training run.
        steps: number of steps after which the process is killed.
        note: path of a file created just before the process is killed. Its modification time is the time of the failure.
    """

    def __init__(self, batches: ResumableBatches, steps: int, note: Path):
        self.batches, self.steps, self.note = batches, steps, note

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[Any]:
        for batch in self.batches:
            if self.steps == 0:
                # Create the file immediately before the signal, because the process runs no code after it.
                self.note.touch()
                os.kill(os.getpid(), signal.SIGKILL)
            self.steps -= 1
            yield batch

    def state_dict(self) -> dict:
        return self.batches.state_dict()

    def load_state_dict(self, state: dict) -> None:
        self.batches.load_state_dict(state)


def resume_and_repeat(context: Context, report: Report) -> Result:
    """Resume the killed run and finish it. Then repeat the run from the beginning, without a failure."""
    runs = [train_on_rank(context, report, folder) for folder in ("killed", "undisturbed")]
    curves = [result.samples.assign(run=run) for result, run in zip(runs, RUNS, strict=True)]
    return Result([], pd.concat(curves, ignore_index=True), runs[0].source)


def train_on_rank(context: Context, report: Report, folder: str, kill_after: int | None = None) -> Result:
    """Train under DDP with checkpoints.

    Args:
        context: context of the experiment.
        report: function called with the progress.
        folder: name of the checkpoint folder in the workspace.
        kill_after: number of steps after which the last rank kills itself. None for a run without a failure.
    """
    options, here = RankFailureOptions.of(context), world()
    recipe = options.recipe("ddp", options.steps, options.checkpoint_every)
    if kill_after is not None:
        (context.workspace / f"pid-{here.rank}").write_text(str(os.getpid()))
    training = set_up(context, recipe)
    batches = training.batches
    if kill_after is not None and here.rank == here.size - 1:
        batches = _KilledAfter(batches, kill_after, context.workspace / "died")
    history = train(training.engine, batches, recipe.plan(), folder=context.workspace / folder, report=report)
    curve = pd.DataFrame({"step": range(1, len(history.losses) + 1), "loss": history.losses})
    curve["resumed_at"] = max(history.resumed_at, default=0)
    return Result([], curve, training.source)
