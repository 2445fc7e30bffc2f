"""The command behind run_distributed.py: one training or several on all ranks, or scaling; a run folder with a row from
every rank, checkpoints to go on from, and an exit code that says how it ended."""

import contextlib
import gc
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path

import torch
import torch.distributed as dist

from hyperion.chapter.chapter import run_information
from hyperion.chapter.context import Context, Result
from hyperion.chapter.profiles import default_profile, load_profile
from hyperion.chapter.variants import merged, packed, restored
from hyperion.checkpoints import on_rank_0, save_adapter
from hyperion.commands.distributed_options import COMMAND, parsed
from hyperion.commands.distributed_progress import Progress, scaling_table, training_table
from hyperion.commands.distributed_request import Machine, Request, checked
from hyperion.errors import HyperionError
from hyperion.experiments.distributed.distributed_training import epoch_rows, mean_rows, test_rows
from hyperion.experiments.scaling import scaling
from hyperion.hardware import collect_facts, detect
from hyperion.parallel import assert_ranks_agree
from hyperion.processes import Job, RankError, process_group, run_ranks, world
from hyperion.processes.group import choose_device, rank_info
from hyperion.results import Run, new_run_folder, set_latest
from hyperion.training import Interrupted, train
from hyperion.workloads.recipes import Recipe, set_up
from hyperion.workloads.training_rows import loss_curve

TRAINING, SCALING = ("05_distributed_training", "distributed_training"), ("08_scaling_analysis", "scaling")
CPU_RANKS = 2
_FAILED = 1
_LONGEST_S = 30 * 86400.0
# torchrun ends the others when a rank left. A rank that is still there after this while has something of its own to tell.
_PATIENCE_S = 5.0


def main(description: str, export: Callable[[Run], object], given: Sequence[str] | None = None) -> int:
    """Do what the command line asks.

    Args:
        description: for `--help`.
        export: makes tables and pictures of a run, on rank 0, when all is measured.

    Returns:
        0; 1 when a training or a launch failed; 2 when the request cannot be met; 75 when SIGTERM came, and the state was
        saved.
    """
    try:
        info = rank_info(os.environ)
    except HyperionError as error:
        return _leave(error, 0)
    rank = info.rank if info else 0
    with contextlib.redirect_stdout(open(os.devnull, "w")) if rank else contextlib.nullcontext():
        try:
            options = parsed(given, description)
            machine = this_machine()
            request = checked(options, machine)
            _say(request.notes)
            if request.counts:
                return _scaled(request, export)
            return _joined(request, export) if machine.launched else _launched(request, machine, export)
        except HyperionError as error:
            return _leave(error, rank)


def this_machine() -> Machine:
    """The device of this process, and how many there are and train together.

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
    """Every training of the context in turn, on this rank's group; one that fails on all ranks alike does not end the rest.

    Returns:
        Why those failed that did, by name.

    Raises:
        HyperionError: the only training failed; Interrupted: SIGTERM came, and the state was saved.
    """
    recipes, done, failures = [Recipe(**settings) for settings in context.sizes["trainings"]], [], {}
    for recipe in recipes:
        try:
            done.append(trained(context, recipe))
        except Interrupted as error:
            remedy = f"go on with it: {COMMAND}.py --resume {context.workspace.parent}"
            raise Interrupted(error.what, where=error.where, next_step=remedy) from error
        except HyperionError as error:
            if len(recipes) == 1:
                raise
            failures[recipe.name] = str(error)
            _say([f"{recipe.name} FAILED: {error}"])
            continue
        finally:
            _free_memory()
        if world().rank == 0:
            found = merged(done)
            run = Run.open(context.workspace.parent)
            run.record(*TRAINING, found.rows, found.samples, input_hash="command", source=found.source)
    return failures


def trained(context: Context, recipe: Recipe) -> Result:
    """One training, gone on with where a checkpoint of it lies in the workspace; the rows of all ranks on rank 0."""
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
    assert_ranks_agree(training.engine.model)
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


def on_rank(context: dict) -> dict:
    """The entry of ranks that this command launched itself."""
    return {"failures": train_all(restored(context))}


def _joined(request: Request, export: Callable[[Run], object]) -> int:
    """This process is a rank that torchrun started. Rank 0 says how it ended; the others stay until it has written all."""
    code = 0
    with process_group() as here:
        folder = Path(on_rank_0(lambda: str(_opened(request).folder)))
        try:
            failures = train_all(_context(request, folder))
            if here.rank == 0:
                code = _finished(Run.open(folder), failures, export, training_table)
            dist.barrier()
        except RuntimeError:  # of gloo and NCCL: a peer is gone, which torchrun must see first
            time.sleep(_PATIENCE_S)
            raise
    return code


def _launched(request: Request, machine: Machine, export: Callable[[Run], object]) -> int:
    """This process starts a rank for each device and waits for them."""
    run, heard = _opened(request), []

    def hear(line: str) -> None:
        heard.append(line)
        print(line, flush=True)

    job = Job(on_rank, {"context": packed(_context(request, run.folder))}, timeout_s=_LONGEST_S, ranks=machine.ranks)
    try:
        failures = run_ranks(job, on_line=hear, log_folder=run.folder / "logs")[0]["failures"]
    except RankError as error:
        if not any(error.what.splitlines()[0] in line for line in heard):  # else rank 0 has told it
            _leave(error, rank=0)
        crashed = error.signal not in ("", "SIGTERM") or "Traceback" in error.what
        return _FAILED if crashed else error.exit_code
    return _finished(run, failures, export, training_table)


def _scaled(request: Request, export: Callable[[Run], object]) -> int:
    """Chapter 2.8 with the numbers of devices that were asked for, each a launch of its own."""
    run, seed = _opened(request), request.options.seed
    sizes = load_profile(default_profile(detect().kind)).sizes(*SCALING) | {"counts": list(request.counts)}
    if request.options.precision != "auto":
        sizes["precision"] = request.options.precision
    context = Context(notebook=SCALING[0], experiment=SCALING[1], sizes=sizes, seed=seed, workspace=run.folder / "checkpoints")
    result = scaling.run(context, lambda done, total, note: print(f"[{done}/{total}] {note}", flush=True))
    run.record(*SCALING, result.rows, result.samples, input_hash="command")
    failures = {
        f"{row.variant} on {row.params['ranks']}": row.value_reason
        for row in result.rows
        if row.value_reason.startswith(scaling.LAUNCH_FAILED)
    }
    return _finished(run, failures, export, scaling_table)


def _opened(request: Request) -> Run:
    """The run that is continued, or a new one that says what was asked for."""
    if request.run is not None:
        return Run.open(request.run)
    options = request.options
    run = Run.create(
        new_run_folder(f"{COMMAND}-{options.model}", request.results),
        run_information("command", options.data_source, options.seed)
        | {"command": {"options": asdict(options), "recipes": [asdict(recipe) for recipe in request.recipes]}},
    )
    print(f"rows, samples and checkpoints go to {run.folder}", flush=True)
    if request.recipes:
        print(f"whatever ends it, it goes on with: {COMMAND}.py --resume {run.folder}", flush=True)
    return run


def _context(request: Request, folder: Path) -> Context:
    profile = load_profile(default_profile(detect().kind))
    return Context(
        notebook=TRAINING[0],
        experiment=TRAINING[1],
        sizes={"trainings": [asdict(recipe) for recipe in request.recipes]},
        seed=request.options.seed,
        data_source=request.options.data_source,
        allow_synthetic=profile.allow_synthetic,
        synthetic=profile.synthetic,
        workspace=folder / "checkpoints",
    )


def _finished(run: Run, failures: dict[str, str], export: Callable[[Run], object], table: Callable[[Run], str]) -> int:
    """Tables and pictures of what was measured, and the summary."""
    if run.rows():
        export(run)
        set_latest(run.folder)
        print(table(run))
    for name, reason in failures.items():
        print(f"FAILED  {name}: {reason}")
    print(f"{run.folder}", flush=True)
    return _FAILED if failures else 0


def _leave(error: HyperionError, rank: int) -> int:
    """Tell what cannot be put right from here, once: of many ranks that all met it rank 0 tells it."""
    if rank:
        time.sleep(_PATIENCE_S)
        if isinstance(error, Interrupted):
            return error.exit_code
    print(f"{COMMAND}: {error}", file=sys.stderr, flush=True)
    return error.exit_code


def _say(lines: Sequence[str]) -> None:
    if world().rank == 0:
        for line in lines:
            print(line, flush=True)


def _free_memory() -> None:
    """One training's model is gone before the next one is built."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
