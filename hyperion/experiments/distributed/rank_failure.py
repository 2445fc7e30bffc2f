"""A rank is killed in the middle of training: who says so, how soon, what is left behind, and does the run go on?"""

import os
import shutil
import signal
import time

import numpy as np
import pandas as pd
import psutil

from hyperion.chapter.context import Context, Experiment, Forecast, Result
from hyperion.chapter.ranks import ranks_of
from hyperion.chapter.variants import Report, run_on_ranks
from hyperion.errors import HyperionError
from hyperion.processes import RankError, world
from hyperion.processes.child_process import has_ended
from hyperion.training import train
from hyperion.workloads import datasets
from hyperion.workloads.recipes import Recipe, set_up
from hyperion.workloads.twins import SCATTER_FP32

SOON_S = 60.0
RUNS = ("resumed", "undisturbed")
_MARK = "HYPERION_RANK_FAILURE"


def forecast(context: Context) -> list[Forecast]:
    """How soon the launcher knows."""
    basis = "torchrun looks at its workers ten times a second and ends the others at once; leaving takes them a second or two"
    params = _killing(ranks_of(context), ranks_of(context) - 1, "SIGKILL")
    return [Forecast(variant="ddp", metric="detection_time_s", estimate=3.0, basis=basis, dtype="fp32", params=params)]


def run(context: Context, report: Report) -> Result:
    """Train and kill the last rank; resume, train once more from the start without a kill, and compare all losses."""
    shutil.rmtree(context.workspace, ignore_errors=True)
    ranks = ranks_of(context)
    told, seconds, left = _killed(context, report, ranks)
    print(f"after {seconds:.1f} s: {told.what.splitlines()[0]}")
    again = run_on_ranks(context, report, resume_and_repeat, ranks=ranks)[0]
    found, expected = (again.samples.loc[again.samples["run"] == run, "loss"].to_numpy() for run in RUNS)
    difference = float(np.max(np.abs(found / expected - 1)))
    source = again.source
    rows = [
        context.row(
            "ddp",
            "detection_time_s",
            seconds,
            dtype="fp32",
            limit_source="no limit: it should be short",
            params=_killing(ranks, told.rank, told.signal),
            check="rank and signal named, within a minute",
            check_error=seconds if (told.rank, told.signal) == (ranks - 1, "SIGKILL") else 10 * SOON_S,
            check_tolerance=SOON_S,
        ),
        context.row(
            "ddp",
            "count",
            left,
            params={"what": "processes left behind", "ranks": ranks},
            check="none",
            check_error=left,
            check_tolerance=0,
        ),
        context.row(
            "ddp",
            "relative_difference",
            difference,
            dtype="fp32",
            params={"what": "losses after the kill", "ranks": ranks, "steps": len(found)},
            check=f"losses of the undisturbed run; {SCATTER_FP32}",
            check_error=difference,
            check_tolerance=1e-5,
            data_source=source,
        ),
    ]
    return Result(rows, again.samples, source)


EXPERIMENT = Experiment(forecast, run, data=datasets.TEXT)


def _killing(ranks: int, rank: int | None, signal_name: str) -> dict:
    return {"ranks": ranks, "rank": rank, "signal": signal_name}


def _killed(context: Context, report: Report, ranks: int) -> tuple[RankError, float, int]:
    """The launcher's error, seconds from the rank's death to it, and how many of the job's processes are still there."""
    os.environ[_MARK] = mark = os.urandom(8).hex()
    params = {"folder": "killed", "kill_after": context.sizes["kill_after"]}
    try:
        run_on_ranks(context, report, train_on_rank, params, ranks=ranks)
    except RankError as error:
        raised = time.time()
        died = (context.workspace / "died").stat().st_mtime
        return error, raised - died, _ranks_left(context) + _marked(mark)
    finally:
        del os.environ[_MARK]
    raise HyperionError(
        "a rank was killed and the launcher did not say so",
        where=f"{context.notebook}.{context.experiment}",
        next_step="run it again; if it stays, the launcher is at fault",
    )


def _ranks_left(context: Context) -> int:
    """Ranks, by the process numbers they left, that still do something. The launcher has torchrun's exit code itself."""
    return sum(not has_ended(int(note.read_text())) for note in context.workspace.glob("pid-*"))


def _marked(mark: str) -> int:
    """Return the number of processes, other than this one, that were started with the mark in their environment."""
    found = 0
    for process in psutil.process_iter():
        try:
            found += process.pid != os.getpid() and process.environ().get(_MARK) == mark
        except (psutil.NoSuchProcess, psutil.AccessDenied, psutil.ZombieProcess):
            continue  # ended meanwhile, or another user's: not of this job
    return found


class _KilledAfter:
    """Batches that end their own process, as a failing node would: without a word."""

    def __init__(self, batches, steps: int, note):
        self.batches, self.steps, self.note = batches, steps, note

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self):
        for batch in self.batches:
            if self.steps == 0:
                self.note.touch()
                os.kill(os.getpid(), signal.SIGKILL)
            self.steps -= 1
            yield batch

    def state_dict(self) -> dict:
        return self.batches.state_dict()

    def load_state_dict(self, state: dict) -> None:
        self.batches.load_state_dict(state)


def resume_and_repeat(context: Context, report: Report) -> Result:
    """The killed run to its end, then the same run undisturbed."""
    runs = [train_on_rank(context, report, folder) for folder in ("killed", "undisturbed")]
    curves = [result.samples.assign(run=run) for result, run in zip(runs, RUNS, strict=True)]
    return Result([], pd.concat(curves, ignore_index=True), runs[0].source)


def train_on_rank(context: Context, report: Report, folder: str, kill_after: int | None = None) -> Result:
    """Train under DDP with checkpoints; with `kill_after`, the last rank dies before its next batch after so many."""
    sizes, here = context.sizes, world()
    recipe = Recipe(
        task="language",
        model=sizes["model"],
        strategy="ddp",
        precision="fp32",
        batch_size=sizes["batch_size"],
        sequence_length=sizes["sequence_length"],
        steps=sizes["steps"],
        learning_rate=sizes["learning_rate"],
        weight_decay=0.1,
        evaluation_batches=0,
        checkpoint_every=sizes["checkpoint_every"],
    )
    if kill_after is not None:
        (context.workspace / f"pid-{here.rank}").write_text(str(os.getpid()))
    training = set_up(context, recipe)
    batches = training.batches
    if kill_after is not None and here.rank == here.size - 1:
        batches = _KilledAfter(batches, kill_after, context.workspace / "died")
    history = train(training.engine, batches, recipe.plan(), folder=context.workspace / folder, report=report)
    curve = pd.DataFrame({"step": range(1, len(history.losses) + 1), "loss": history.losses})
    return Result([], curve, training.source)
