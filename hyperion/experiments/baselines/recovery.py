"""Does a training run recover from faults?

The experiment injects faults at random points in every phase of a step: signals, power cuts, NaNs and a full disk. Each trial has
one fault and two processes. The fault occurs in the first process. The second process resumes from the checkpoints of the first.
Its final state must be bitwise equal to that of a run without a fault.
"""

import hashlib
import json
import math
import os
import resource
import shutil
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from hyperion.chapter.context import Context, Experiment, Forecast, Options, Report, Result
from hyperion.chapter.rows import checked
from hyperion.checkpoints import CheckpointError
from hyperion.data.batches import LanguageBatches, evaluation_windows
from hyperion.data.images.device_images import ImageBatches
from hyperion.experiments.baselines.recovery_faults import KINDS, PHASES, Phases, TrainingFault, cut_off
from hyperion.hardware import detect_cpu
from hyperion.hardware.cpu import usable_cpus
from hyperion.models import TransformerConfig, TransformerLM, resnet18
from hyperion.processes import Job, JobError, run_job
from hyperion.results import Row
from hyperion.training import (
    ImageEngine,
    LanguageEngine,
    NonFiniteError,
    Precision,
    TrainingPlan,
    WarmupCosine,
    adamw,
    rng_state,
    seed_everything,
    sgd_nesterov,
    train,
)

EVERY = 3  # number of steps between checkpoints
STEPS = 14
EPOCH = 5  # number of steps in an epoch
# Largest number of steps that a fault may cost. After SIGTERM, the loop finishes and saves the current step, so no step is lost.
MOST_LOST = {"SIGTERM": 0, "SIGKILL": EVERY, "power cut": 2 * EVERY, "NaN": EVERY, "full disk": EVERY}
_TASKS = ("language", "images")
_MOST_WORKERS = 16
_TIMEOUT_S = 120.0
# Number of checkpoints that must exist before the fault, so that the run can resume. A power cut damages the newest checkpoint. A
# NaN or a full disk may prevent the next checkpoint from being written.
_CHECKPOINTS_BEFORE = {"power cut": 2, "NaN": 1, "full disk": 1}
_VOCABULARY, _LENGTH, _BATCH = 31, 8, 8
_EXACT = Precision("fp32", "a check of exactness")


class RecoveryOptions(Options):
    """Options for the `recovery` experiment.

    Args:
        trials: number of trials, with one fault each.
    """

    trials: int


def forecast(context: Context) -> list[Forecast]:
    """Predict the largest number of steps that each kind of fault costs, from the number of steps between checkpoints."""
    basis = {
        "SIGTERM": "the current step is finished and saved",
        "SIGKILL": f"all steps since the last checkpoint, and there is a checkpoint every {EVERY} steps",
        "power cut": f"as for SIGKILL, but the newest checkpoint is lost too: 2 x {EVERY} steps",
    }
    drawn = {fault.kind for fault in draw(context.seed, RecoveryOptions.of(context).trials)}
    return [
        Forecast(kind, "steps_lost", MOST_LOST[kind], basis[kind], dtype="fp32", params=_params(context, kind))
        for kind in basis
        if kind in drawn
    ]


def run(context: Context, report: Report) -> Result:
    """Train each model once without a fault, then run all trials in parallel.

    A trial is a training run with one fault. As many trials run at the same time as there are CPU cores, but at most 16.
    """
    shutil.rmtree(context.workspace, ignore_errors=True)
    faults = draw(context.seed, RecoveryOptions.of(context).trials)
    print(f"{len(faults)} faults drawn with seed {context.seed}")
    # Threads suffice, because each trial only waits for its own processes.
    with ThreadPoolExecutor(min(len(usable_cpus()), _MOST_WORKERS)) as threads:
        tasks = sorted({_task(number, fault) for number, fault in enumerate(faults)})
        whole = dict(zip(tasks, threads.map(lambda task: _undisturbed(context, task), tasks), strict=True))
        trials = []
        for trial in threads.map(lambda item: _trial(context, whole, *item), enumerate(faults)):
            trials.append(trial)
            report(len(trials), len(faults), f"{trial['kind']} in {trial['phase']}")
    table = pd.DataFrame(trials)
    for trial in trials:
        if not trial["recovered"] or trial["lost"] > MOST_LOST[trial["kind"]]:
            print(f"NOT RECOVERED: {trial}")
    return Result([row for kind in KINDS for row in _rows(context, kind, table.query("kind == @kind"))], table)


EXPERIMENT = Experiment(forecast, run, options=RecoveryOptions)


def draw(seed: int, trials: int) -> list[TrainingFault]:
    """Draw random faults.

    Each kind of fault is drawn once for every phase before any phase repeats. The step and the point within the phase are random.
    """
    random = np.random.default_rng((seed, trials))
    faults: list[TrainingFault] = []
    while len(faults) < trials:
        left = {kind: [str(phase) for phase in random.permutation(_phases(kind))] for kind in KINDS}
        turns = [(kind, left[kind][turn]) for turn in range(len(PHASES)) for kind in KINDS if turn < len(left[kind])]
        for kind, phase in turns[: trials - len(faults)]:
            steps = [step for step in range(1, STEPS + 1) if _possible(kind, phase, step)]
            faults.append(TrainingFault(kind, phase, int(random.choice(steps)), float(random.random())))
    return faults


def _phases(kind: str) -> tuple[str, ...]:
    return ("save",) if kind == "full disk" else PHASES


def _possible(kind: str, phase: str, step: int) -> bool:
    happens = {"evaluation": is_evaluated, "save": is_saved}.get(phase, lambda step: True)
    return happens(step) and checkpoints_before(step) >= _CHECKPOINTS_BEFORE.get(kind, 0)


def _undisturbed(context: Context, task: str) -> dict:
    folder = context.workspace / f"undisturbed-{task}"
    return _process({"folder": str(folder), "task": task, "seed": context.seed, "watch": True})


def _task(number: int, fault: TrainingFault) -> str:
    """Return which model a trial trains: "language" or "images".

    The two models alternate, with one exception: a NaN in the loader always uses "images", because token ids are integers and
    cannot be NaN.
    """
    return "images" if (fault.kind, fault.phase) == ("NaN", "loader") else _TASKS[number % 2]


def _trial(context: Context, whole: dict, number: int, fault: TrainingFault) -> dict:
    """Train until this trial's fault occurs, resume in a second process, and return the outcome."""
    task = _task(number, fault)
    folder = context.workspace / f"trial-{number:03d}"
    params = {"folder": str(folder), "task": task, "seed": context.seed}
    folder.mkdir(parents=True)
    struck = _process({**params, "fault": asdict(fault), "moments": whole[task]["moments"]})
    # Number of finished steps, written by the process immediately before the fault occurred.
    done = int((folder / "struck").read_text())
    # A power cut is simulated after the process has died, by truncating a file of the newest checkpoint.
    damaged = cut_off(folder, np.random.default_rng((context.seed, number))) if fault.kind == "power cut" else ""
    again = _process(params)
    equal = {name: again.get("hashes", {}).get(name) == wanted for name, wanted in whole[task]["hashes"].items()}
    resumed_at = again.get("resumed_at", 0)
    # The checkpoints of a finished trial are no longer needed.
    shutil.rmtree(folder)
    return {
        **asdict(fault),
        "task": task,
        "steps_done": done,
        "ended": struck["ended"],
        "damaged": damaged,
        "then": again["ended"],
        "resumed_at": resumed_at,
        "lost": max(0, done - resumed_at),
        **equal,
        "recovered": all(equal.values()),
    }


def _process(params: dict) -> dict:
    """Train in a separate process and return its result.

    If the process fails, the entry "ended" of the result gives the exit code and the error message.
    """
    Path(params["folder"]).mkdir(parents=True, exist_ok=True)
    try:
        return run_job(Job(in_own_process, params, timeout_s=_TIMEOUT_S), on_line=lambda line: None)
    except JobError as error:
        return {"ended": f"exit code {error.exit_code}: {error.what.splitlines()[0]}"}


def _rows(context: Context, kind: str, trials: pd.DataFrame) -> list[Row]:
    if trials.empty:
        return []
    lost, failed = max(trials["lost"].tolist()), trials["recovered"].tolist().count(False)
    return [
        context.error_row(
            kind,
            "steps_lost",
            lost,
            "the most that may be lost",
            MOST_LOST[kind],
            dtype="fp32",
            params=_params(context, kind),
            n=len(trials),
        ),
        context.row(
            kind,
            "count",
            len(trials) - failed,
            dtype="fp32",
            params=_params(context, kind) | {"what": "trials recovered", "trials": len(trials)},
            **checked(
                "losses, evaluations, weights, optimizer, sampler and generators of an undisturbed run, bit for bit", failed, 0
            ),
        ),
    ]


def _params(context: Context, kind: str) -> dict:
    return {"device": "cpu", "seed": context.seed, "steps": STEPS, "checkpoint_every": EVERY, "may_lose": MOST_LOST[kind]}


def in_own_process(**params: Any) -> dict:
    """Hide all GPUs from this process and call `run_once`.

    Otherwise, saving the state of the GPUs' random generators would create a GPU context in every process.
    """
    os.environ.update({"CUDA_VISIBLE_DEVICES": "-1", "HIP_VISIBLE_DEVICES": "-1"})
    return run_once(**params)


def run_once(
    folder: str, task: str, seed: int, fault: dict | None = None, moments: dict | None = None, watch: bool = False
) -> dict:
    """Train on the CPU until STEPS steps are done. If `folder` has a checkpoint, resume from it.

    Args:
        folder: checkpoint folder.
        task: 'language' or 'images'.
        seed: seed of the weights and the data.
        fault: fields of a TrainingFault, or None for a run without a fault.
        moments: number of moments in each phase, counted in a run without a fault. A moment is a point within a phase, see
            `hyperion.experiments.baselines.recovery_faults`.
        watch: whether to count the moments of this run.

    Returns:
        A dict. Its entry "ended" is "finished", or the error that ended the run. A finished run has three more entries: "hashes"
        (hashes of the losses, the evaluations and the final state), "resumed_at" (the step from which the run was resumed) and
        "moments" (the number of moments in each phase).
    """
    # One thread, because many trials run concurrently on the same cores.
    torch.set_num_threads(1)
    seed_everything(seed)
    engine, batches, validation = {"language": _language, "images": _images}[task](seed)
    phases = Phases(engine, TrainingFault(**fault) if fault else None, moments or {}, Path(folder) / "struck")
    if fault or watch:
        phases.plant(batches)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    plan = TrainingPlan(steps=STEPS, checkpoint_every=EVERY)
    try:
        history = train(engine, batches, plan, validation=validation, folder=Path(folder))
    except (NonFiniteError, CheckpointError) as error:
        return {"ended": f"{type(error).__name__}: {error.what}"}
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)  # this process must still write its result to a file
    evaluations = [record.evaluation for record in history.epochs]
    parts = {
        # The hexadecimal form preserves every bit of a float.
        "losses": [loss.hex() for loss in history.losses],
        "evaluations": [sorted((k, float(v).hex()) for k, v in numbers.items()) for numbers in evaluations if numbers],
        "weights": engine.model.state_dict(),
        "optimizer": engine.optimizer.state_dict(),
        "sampler": batches.state_dict(),
        "generators": rng_state(),
    }
    hashes = {name: _hash(part) for name, part in parts.items()}
    resumed_at = history.resumed_at[-1] if history.resumed_at else 0
    return {"ended": "finished", "hashes": hashes, "resumed_at": resumed_at, "moments": phases.counted}


def _language(seed: int) -> tuple:
    tokens = np.random.default_rng(seed).integers(0, _VOCABULARY, _LENGTH + EPOCH * _BATCH * (_LENGTH + 1))
    batches = LanguageBatches(tokens, _LENGTH, _BATCH, seed)
    # With dropout, the losses depend on the random generator, so the trial also tests that its state is restored.
    model = TransformerLM(TransformerConfig(_VOCABULARY, _LENGTH, width=16, heads=2, layers=2, dropout=0.2))
    engine = LanguageEngine(model, adamw(model, 3e-3), WarmupCosine(3e-3, 3, STEPS), _EXACT, detect_cpu())
    return engine, batches, lambda: evaluation_windows(tokens[:100], _LENGTH, _LENGTH, 0, 4)


def _images(seed: int) -> tuple:
    random = np.random.default_rng(seed)
    images, labels = random.integers(0, 256, (EPOCH * 8, 3, 32, 32), dtype=np.uint8), np.arange(EPOCH * 8) % 10
    scale = ([0.5] * 3, [0.25] * 3)
    batches = ImageBatches(images, labels, 8, scale, seed=seed, augment=("crop", "flip"))
    model = resnet18(width=2)
    engine = ImageEngine(model, sgd_nesterov(model, 0.05), WarmupCosine(0.05, 3, STEPS), _EXACT, detect_cpu())
    return engine, batches, lambda: ImageBatches(images[:16], labels[:16], 8, scale, shuffle=False)


def _hash(value: object) -> str:
    """Return the SHA-256 of a nested value, such as a dict of lists of tensors, including tensor bytes, dtypes and shapes."""
    digest = hashlib.sha256()

    def encode(item: object) -> list:
        if isinstance(item, Tensor):
            digest.update(item.detach().contiguous().cpu().view(-1).numpy().tobytes())
            return [str(item.dtype), list(item.shape)]
        raise TypeError(f"the state of a run contains a {type(item).__name__}, which cannot be hashed")

    digest.update(json.dumps(value, default=encode, sort_keys=True, allow_nan=True).encode())
    return digest.hexdigest()


def is_evaluated(step: int) -> bool:
    """Return True if the run evaluates the model after this step."""
    return step % EPOCH == 0 or step == STEPS


def is_saved(step: int) -> bool:
    """Return True if the run saves a checkpoint after this step."""
    return step % EVERY == 0 or step == STEPS


def checkpoints_before(step: int) -> int:
    """Return the number of checkpoints that the run has written before this step begins."""
    return math.ceil(step / EVERY) - 1
