"""The command of run_distributed.py: train on all ranks, or measure scaling.

The command writes a run folder with rows of every rank, and checkpoints from which training can resume.
"""

import contextlib
import math
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path

import pandas as pd
import torch.distributed as dist

from hyperion.chapter.chapter import run_information
from hyperion.chapter.context import Context, Result
from hyperion.chapter.profiles import default_profile, load_profile
from hyperion.chapter.variants import merged, packed, restored
from hyperion.checkpoints import on_rank_0
from hyperion.commands.distributed_options import COMMAND, Machine, TrainingRequest, checked, parsed
from hyperion.errors import HyperionError
from hyperion.experiments.distributed.distributed_training import DistributedTrainingOptions, epoch_rows, mean_rows, test_rows
from hyperion.experiments.scaling import scaling
from hyperion.hardware import collect_facts, detect
from hyperion.measure.memory_use.allocation import release_memory
from hyperion.processes import Job, RankError, World, process_group, run_ranks, world
from hyperion.processes.this_rank import choose_device, rank_info
from hyperion.results import Run, new_run_folder, set_latest
from hyperion.training import EpochRecord, Interrupted, save_adapter, train
from hyperion.workloads.recipes import Recipe, Training, set_up
from hyperion.workloads.training_rows import loss_curve

TRAINING, SCALING = ("05_distributed_training", "distributed_training"), ("08_scaling_analysis", "scaling")
CPU_RANKS = 2
_FAILED = 1
_LONGEST_S = 30 * 86400.0
# After an error, a rank waits this many seconds before it exits, so that torchrun reports the rank that failed first and stops
# the others.
_PATIENCE_S = 5.0
LINE_EVERY_S = 5.0
_RATES, _PEAKS = ("tokens_per_s", "images_per_s"), ("peak_memory_gib", "peak_rss_gib")


def main(description: str, export: Callable[[Run], object], given: Sequence[str] | None = None) -> int:
    """Run the command line.

    Args:
        description: description of the program for `--help`.
        export: function that writes tables and pictures of a run. Rank 0 calls it at the end.
        given: command-line arguments; default: `sys.argv[1:]`.

    Returns:
        0 on success, 1 if a training run or a launch failed, 2 if the request cannot be carried out, and 75 if the state was
        saved after SIGTERM.
    """
    try:
        info = rank_info(os.environ)
    except HyperionError as error:
        return _leave(error, 0)
    rank = info.rank if info else 0
    # All ranks share one terminal, so only rank 0 prints.
    with contextlib.redirect_stdout(open(os.devnull, "w")) if rank else contextlib.nullcontext():
        try:
            options = parsed(given, description)
            machine = this_machine()
            # Check everything before a process group is started or a folder is created.
            request = checked(options, machine)
            _say(request.notes)
            if request.counts:
                return _scaled(request, export)
            # torchrun has already started this process as a rank, so the command does not start ranks itself.
            return _joined(request, export) if machine.launched else _launched(request, machine, export)
        except HyperionError as error:
            return _leave(error, rank)


def this_machine() -> Machine:
    """Return the device of this process, the number of devices, and the number of ranks.

    Raises:
        HyperionError: torchrun started more ranks than there are devices, or a device cannot be opened.
    """
    info, facts = rank_info(os.environ), collect_facts()
    devices = len(facts.gpus) or CPU_RANKS
    if info is None:
        return Machine(device=detect(facts), devices=devices, ranks=devices, launched=False)
    _, device = choose_device(info, None, facts)
    return Machine(device=device, devices=devices, ranks=info.size, launched=True)


def train_all(context: Context) -> dict[str, str]:
    """Run all training runs of the context on this rank, one after the other.

    If a training run fails on all ranks, the next one starts.

    Returns:
        A dict that maps the name of each failed training run to the reason why it failed.

    Raises:
        HyperionError: the context has only one training run, and it failed.
        Interrupted: the state was saved after SIGTERM.
    """
    recipes, done, failures = DistributedTrainingOptions.of(context).trainings, [], {}
    for recipe in recipes:
        try:
            done.append(train_one(context, recipe))
        except Interrupted as error:
            remedy = f"resume the training: {COMMAND}.py --resume {context.workspace.parent}"
            raise Interrupted(error.what, where=error.where, next_step=remedy) from error
        except HyperionError as error:
            if len(recipes) == 1:
                raise
            failures[recipe.name] = str(error)
            _say([f"{recipe.name} FAILED: {error}"])
            continue
        finally:
            # Free the memory after a failure too, because the next model needs it.
            release_memory()
        if world().rank == 0:
            results = merged(done)
            run = Run.open(context.workspace.parent)
            # Store the results after every training run, so that none are lost if a later one is interrupted.
            run.record(*TRAINING, results.rows, results.samples, input_hash="command", source=results.source)
    return failures


def train_one(context: Context, recipe: Recipe) -> Result:
    """Train one model. If the workspace has a checkpoint of this training run, resume from it.

    Returns:
        On rank 0, the rows of all ranks. On other ranks, a result without rows.
    """
    training, here = set_up(context, recipe), world()
    progress = Progress(recipe, training, here)
    history = train(
        training.engine,
        training.batches,
        recipe.plan(),
        validation=training.validation,
        folder=context.workspace / recipe.name,
        on_epoch=(progress.epoch,),
        report=progress.report,
    )
    # A collective call, so it must come before rank 0 alone writes results.
    tested = test_rows(context, recipe, training)
    _say([f"{recipe.name}  {row.value:.4f} of {row.n} test images classified correctly" for row in tested])
    if recipe.lora:
        folder = context.workspace.parent / "adapters" / recipe.name
        saved = save_adapter(folder, len(history.losses), training.engine.model, training.base_sha256)
        _say([f"{recipe.name}  adapters for peft: {saved}"])
    if here.rank:
        return Result([], loss_curve(history), training.source)
    rows = epoch_rows(context, recipe, training, history) + mean_rows(context, recipe, training, history) + tested
    return Result(rows, loss_curve(history).assign(training=recipe.name), training.source)


class Progress:
    """Prints the progress of one training run: a line every few seconds, and a line after every epoch.

    Rank 0 also prints a line at the start, with the number of steps, the batch size, the precision and the data source.
    """

    def __init__(self, recipe: Recipe, training: Training, here: World):
        self.name, self.engine = recipe.name, training.engine
        self._since: tuple[float, int] | None = None
        if here.rank == 0:
            steps = recipe.plan().total_steps(len(training.batches))
            print(
                f"{recipe.name}: {steps} steps of {recipe.batch_size} on {here.size} ranks in {training.engine.precision}; "
                f"data: {training.source}",
                flush=True,
            )

    def report(self, done: int, total: int, note: str) -> None:
        """Print the number of finished steps, and the rate since the previous line.

        Call this method only after losses have been read. By then the device has finished its work, so the processed tokens or
        images can be counted without another synchronization.
        """
        now, items = time.perf_counter(), self.engine.tokens_seen
        rate = ""
        if self._since is not None:
            since, before = self._since
            if now - since < LINE_EVERY_S and done < total:
                return
            rate = f", {(items - before) / (now - since):,.0f} {self.engine.item}s/s"
        self._since = now, items
        print(f"{self.name}  step {done}/{total}  {note}{rate}", flush=True)

    def epoch(self, record: EpochRecord) -> None:
        """Print the results of an epoch, and restart the clock, because the evaluation is not part of the training time."""
        self._since = None
        held_out = "" if record.evaluation is None else f", held out {record.evaluation['loss']:.4f}"
        rate = "" if record.items_per_s is None else f", {record.items_per_s:,.0f} {self.engine.item}s/s"
        print(f"{self.name}  epoch {record.epoch}  loss {record.loss:.4f}{held_out}{rate}", flush=True)


def on_rank(context: dict) -> dict:
    """Run all training runs on one of the ranks that this command launches."""
    return {"failures": train_all(restored(context))}


def _joined(request: TrainingRequest, export: Callable[[Run], object]) -> int:
    """Train in this process, which torchrun started as one of the ranks.

    All other ranks wait at the end until rank 0 has written all results.
    """
    code = 0
    with process_group() as here:
        # Only rank 0 creates the folder. The other ranks get its name.
        folder = Path(on_rank_0(lambda: str(_opened(request).folder)))
        try:
            failures = train_all(_context(request, folder))
            if here.rank == 0:
                code = _finished(Run.open(folder), failures, export, training_table)
            # The other ranks wait, so that torchrun does not end the job while rank 0 is still writing.
            dist.barrier()
        except RuntimeError:  # gloo and NCCL raise it if another rank died; torchrun must report that rank first
            time.sleep(_PATIENCE_S)
            raise
    return code


def _launched(request: TrainingRequest, machine: Machine, export: Callable[[Run], object]) -> int:
    """Start one rank per device and wait until all ranks have ended."""
    run, lines = _opened(request), []

    def show(line: str) -> None:
        lines.append(line)
        print(line, flush=True)

    job = Job(on_rank, {"context": packed(_context(request, run.folder))}, timeout_s=_LONGEST_S, ranks=machine.ranks)
    try:
        failures = run_ranks(job, on_line=show, log_folder=run.folder / "logs")[0]["failures"]
    except RankError as error:
        if not any(error.what.splitlines()[0] in line for line in lines):  # otherwise, rank 0 has already printed it
            _leave(error, rank=0)
        # A rank that was killed by a signal or raised a Python error is a failure of the program, whatever its exit code.
        crashed = error.signal not in ("", "SIGTERM") or "Traceback" in error.what
        return _FAILED if crashed else error.exit_code
    return _finished(run, failures, export, training_table)


def _scaled(request: TrainingRequest, export: Callable[[Run], object]) -> int:
    """Run the experiment of chapter 2.8. New ranks are started for each requested number of devices."""
    run, seed = _opened(request), request.options.seed or 0
    precision = request.options.precision
    own = {"counts": list(request.counts)} | ({} if precision in (None, "auto") else {"precision": precision})
    sizes = load_profile(default_profile(detect().kind)).sizes(SCALING[1]) | own
    context = Context(notebook=SCALING[0], experiment=SCALING[1], sizes=sizes, seed=seed, workspace=run.folder / "checkpoints")
    result = scaling.run(context, lambda done, total, note: print(f"[{done}/{total}] {note}", flush=True))
    run.record(*SCALING, result.rows, result.samples, input_hash="command")
    failures = {
        f"{row.variant} on {row.params['ranks']}": row.value_reason
        for row in result.rows
        if row.value_reason.startswith(scaling.LAUNCH_FAILED)
    }
    return _finished(run, failures, export, scaling_table)


def _opened(request: TrainingRequest) -> Run:
    """Return the run to resume, or a new run that stores the request."""
    if request.run is not None:
        return Run.open(request.run)
    options = request.options
    run = Run.create(
        new_run_folder(f"{COMMAND}-{options.model}", request.results),
        run_information("command", options.data_source or "auto", options.seed or 0)
        | {"command": {"options": asdict(options), "recipes": [asdict(recipe) for recipe in request.recipes]}},
    )
    print(f"rows, samples and checkpoints: {run.folder}", flush=True)
    if request.recipes:
        print(f"to resume the run after an interruption: {COMMAND}.py --resume {run.folder}", flush=True)
    return run


def _context(request: TrainingRequest, folder: Path) -> Context:
    profile = load_profile(default_profile(detect().kind))
    return Context(
        notebook=TRAINING[0],
        experiment=TRAINING[1],
        sizes={"trainings": [asdict(recipe) for recipe in request.recipes]},
        seed=request.options.seed or 0,
        data_source=request.options.data_source or "auto",
        allow_synthetic=profile.allow_synthetic,
        synthetic=profile.synthetic,
        workspace=folder / "checkpoints",
    )


def _finished(run: Run, failures: dict[str, str], export: Callable[[Run], object], table: Callable[[Run], str]) -> int:
    """Write tables and pictures, print the summary, and return the exit code."""
    if run.rows():
        export(run)
        set_latest(run.folder)
        print(table(run))
    for name, reason in failures.items():
        print(f"FAILED  {name}: {reason}")
    print(f"{run.folder}", flush=True)
    return _FAILED if failures else 0


def training_table(run: Run) -> str:
    """Return a table of the last epoch of each training run, with one line for the whole run and one line per rank."""
    rows = [row for row in run.rows() if "epoch" in row.params]
    last = {row.variant: max(r.params["epoch"] for r in rows if r.variant == row.variant) for row in rows}
    lines: dict[tuple, dict] = {}
    for row in rows:
        if row.params["epoch"] != last[row.variant]:
            continue
        line = lines.setdefault(
            (row.variant, row.rank),
            {
                "training": row.variant,
                "dtype": row.dtype,
                "epoch": last[row.variant],
                "rank": "all" if row.rank is None else row.rank,
            },
        )
        name = "items/s" if row.metric in _RATES else "peak GiB" if row.metric in _PEAKS else row.metric
        line[name] = row.value
    return _text(pd.DataFrame(list(lines.values())))


def scaling_table(run: Run) -> str:
    """Return a table with one line per training run, mode and number of devices.

    A line contains the reason if its value is missing.
    """
    lines: dict[tuple, dict] = {}
    for row in run.rows():
        if "mode" not in row.params:
            continue
        key = {"training": row.variant, "mode": row.params["mode"], "devices": row.params["ranks"]}
        line = lines.setdefault(tuple(key.values()), key)
        line[row.metric] = row.value
        if row.value_reason:
            line["missing"] = row.value_reason
    return _text(pd.DataFrame(list(lines.values())))


def _text(table: pd.DataFrame) -> str:
    return table.map(_cell).to_string(index=False)


def _cell(value: object) -> str:
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return ""
    return f"{value:,.5g}" if isinstance(value, float) else str(value)


def _leave(error: HyperionError, rank: int) -> int:
    """Print an error and return its exit code. If every rank has the same error, only rank 0 prints it."""
    if rank:
        # An invalid request fails on every rank. Wait until rank 0 has printed the error, because torchrun stops the others when
        # this rank exits.
        time.sleep(_PATIENCE_S)
        if isinstance(error, Interrupted):
            return error.exit_code
    print(f"{COMMAND}: {error}", file=sys.stderr, flush=True)
    return error.exit_code


def _say(lines: Sequence[str]) -> None:
    if world().rank == 0:
        for line in lines:
            print(line, flush=True)
