"""Does a run survive? Signals, power cuts, NaNs and a full disk at random moments of every phase; each run starts again.

Each trial is two real processes: one in which a fault strikes, and one that goes on from what it left. The second must end
exactly as a run that nothing ever happened to, in every bit.
"""

import shutil
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pandas as pd

from hyperion.chapter.context import Context, Experiment, Forecast, Result
from hyperion.chapter.variants import Report
from hyperion.experiments.baselines.recovery_faults import KINDS, PHASES, Fault, cut_off
from hyperion.experiments.baselines.recovery_run import EVERY, STEPS, checkpoints_before, in_own_process, is_evaluated, is_saved
from hyperion.hardware.cpu import usable_cpus
from hyperion.processes import Job, JobError, run_job
from hyperion.results import Row

MOST_LOST = {"SIGTERM": 1, "SIGKILL": EVERY, "power cut": 2 * EVERY, "NaN": EVERY, "full disk": EVERY}
_TASKS = ("language", "images")
_MOST_WORKERS = 16
_TIMEOUT_S = 120.0
# Checkpoints that must stand before the fault: a power cut takes one of them, a NaN may spoil the one being made.
_STANDING = {"power cut": 2, "NaN": 1, "full disk": 1}


def forecast(context: Context) -> list[Forecast]:
    """The most steps that each kind of fault may cost, by what a checkpoint promises."""
    basis = {
        "SIGTERM": "the step in progress is finished and saved",
        "SIGKILL": f"a checkpoint every {EVERY} steps: all since the last one",
        "power cut": f"as SIGKILL, and the newest checkpoint is lost with it: 2 x {EVERY}",
    }
    struck = {fault.kind for fault in draw(context.seed, context.sizes["trials"])}
    return [
        Forecast(
            variant=kind,
            metric="steps_lost",
            estimate=0 if kind == "SIGTERM" else MOST_LOST[kind],
            basis=basis[kind],
            dtype="fp32",
            params=_params(context, kind),
        )
        for kind in basis
        if kind in struck
    ]


def run(context: Context, report: Report) -> Result:
    """Undisturbed runs first, then all trials, as many at once as there are cores."""
    shutil.rmtree(context.workspace, ignore_errors=True)
    faults = draw(context.seed, context.sizes["trials"])
    print(f"{len(faults)} faults drawn with seed {context.seed}")
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
    return Result([row for kind in KINDS for row in _rows(context, kind, table[table["kind"] == kind])], table)


EXPERIMENT = Experiment(forecast, run)


def draw(seed: int, trials: int) -> list[Fault]:
    """So many faults, kind after kind: each in every phase once before any comes again, at random steps and moments."""
    random = np.random.default_rng((seed, trials))
    faults: list[Fault] = []
    while len(faults) < trials:
        left = {kind: [str(phase) for phase in random.permutation(_phases(kind))] for kind in KINDS}
        turns = [(kind, left[kind][turn]) for turn in range(len(PHASES)) for kind in KINDS if turn < len(left[kind])]
        for kind, phase in turns[: trials - len(faults)]:
            steps = [step for step in range(1, STEPS + 1) if _possible(kind, phase, step)]
            faults.append(Fault(kind, phase, int(random.choice(steps)), float(random.random())))
    return faults


def _phases(kind: str) -> tuple[str, ...]:
    return ("save",) if kind == "full disk" else PHASES


def _possible(kind: str, phase: str, step: int) -> bool:
    happens = {"evaluation": is_evaluated, "save": is_saved}.get(phase, lambda step: True)
    # An evaluation comes before the save of its step; both when the step is done.
    return happens(step) and checkpoints_before(step) >= _STANDING.get(kind, 0)


def _undisturbed(context: Context, task: str) -> dict:
    folder = context.workspace / f"undisturbed-{task}"
    return _process({"folder": str(folder), "task": task, "seed": context.seed, "watch": True})


def _task(number: int, fault: Fault) -> str:
    """Both in turn; but tokens are whole numbers, and what a loader may deliver as NaN are images."""
    return "images" if (fault.kind, fault.phase) == ("NaN", "loader") else _TASKS[number % 2]


def _trial(context: Context, whole: dict, number: int, fault: Fault) -> dict:
    """One fault and what came of it."""
    task = _task(number, fault)
    folder = context.workspace / f"trial-{number:03d}"
    params = {"folder": str(folder), "task": task, "seed": context.seed}
    folder.mkdir(parents=True)
    struck = _process({**params, "fault": asdict(fault), "moments": whole[task]["moments"]})
    done = int((folder / "struck").read_text())
    damaged = cut_off(folder, np.random.default_rng((context.seed, number))) if fault.kind == "power cut" else ""
    again = _process(params)
    equal = {name: again.get("hashes", {}).get(name) == wanted for name, wanted in whole[task]["hashes"].items()}
    resumed_at = again.get("resumed_at", 0)
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
    """Run one process; a signal or an error that it did not tell of is how it ended."""
    Path(params["folder"]).mkdir(parents=True, exist_ok=True)
    try:
        return run_job(Job(in_own_process, params, timeout_s=_TIMEOUT_S), on_line=lambda line: None)
    except JobError as error:
        return {"ended": f"exit code {error.exit_code}: {error.what.splitlines()[0]}"}


def _rows(context: Context, kind: str, trials: pd.DataFrame) -> list[Row]:
    if trials.empty:
        return []
    lost, failed = int(trials["lost"].max()), int((~trials["recovered"]).sum())
    return [
        context.row(
            kind,
            "steps_lost",
            lost,
            dtype="fp32",
            params=_params(context, kind),
            n=len(trials),
            check="the most that may be lost",
            check_error=lost,
            check_tolerance=MOST_LOST[kind],
        ),
        context.row(
            kind,
            "count",
            len(trials) - failed,
            dtype="fp32",
            params=_params(context, kind) | {"what": "trials recovered", "trials": len(trials)},
            check="losses, evaluations, weights, optimizer, sampler and generators of an undisturbed run, bit for bit",
            check_error=failed,
            check_tolerance=0,
        ),
    ]


def _params(context: Context, kind: str) -> dict:
    return {"device": "cpu", "seed": context.seed, "steps": STEPS, "checkpoint_every": EVERY, "may_lose": MOST_LOST[kind]}
