"""Do all frameworks do the same work? Each of them trains the same steps and is compared with the plain loop.

Rounding differs between frameworks, so the bound on the differences is computed from twins: runs of the plain loop that differ
only in rounding.
"""

import contextlib
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd

from hyperion.chapter.context import Context, Experiment, Forecast, Report, Result
from hyperion.chapter.rows import checked
from hyperion.chapter.variants import processes_at_once
from hyperion.engines import Record, Stack, Work, stack_named, unequal
from hyperion.engines.launch import Outcome, launch, launch_all
from hyperion.errors import HyperionError
from hyperion.experiments.frameworks.works import (
    DATA,
    TWIN_FACTOR,
    WorkOptions,
    differing_tensors,
    loss_difference,
    loss_tolerance,
    parameter_difference,
    parameter_tolerance,
    prepare_work,
)
from hyperion.processes import Job, process_group, run_job
from hyperion.results import Row

PLAIN, TWO_PARTS = "plain loop", "two micro-batches"
WORK, BITS = "differences in the work", "tensors with other bits than two micro-batches of the plain loop"
# For each twin: further arguments of its adapter, number of micro-batches, and what changes the rounding: the seed of another
# rounding of matrix products, or `_ATTENTION` (attention without a fused kernel, as in megatron-core). None: unchanged.
_ATTENTION = "attention"
_TWINS: dict[str, tuple[dict[str, Any], int, int | str | None]] = {
    TWO_PARTS: ({}, 2, None),
    "fused AdamW": ({"fused": True, "foreach": False}, 1, None),
    "AdamW, one tensor after the other": ({"foreach": False}, 1, None),
    "attention without a fused kernel": ({}, 1, _ATTENTION),
    "products rounded in another way": ({}, 1, 1),
    "products rounded in a third way": ({}, 1, 2),
}


class FrameworkParityOptions(WorkOptions):
    """Options for the `framework_parity` experiment.

    Args:
        stacks: names of the frameworks. A framework that is not installed gets a row with the reason.
    """

    stacks: tuple[str, ...]


def forecast(context: Context) -> list[Forecast]:
    """Predict the loss difference, assuming that each step adds one float32 rounding error in a random direction."""
    options = FrameworkParityOptions.of(context)
    estimate = math.sqrt(options.steps) * 2.0**-24 * 5.5
    walk = f"√{options.steps} x 2^-24 x 5.5"
    basis = f"each step adds one rounding error of float32 to a loss of about ln 256, in a random direction: {walk}"
    return [
        Forecast(name, "loss_difference", estimate, basis, options.dtype, _params(context, options, stack_named(name)))
        for name in options.stacks
        if not stack_named(name).why_absent()
    ]


def run(context: Context, report: Report) -> Result:
    """Train the plain loop and its twins in one process, then each framework in separate processes.

    On an accelerator, several frameworks train at the same time, because most of the time of a launch is the start of Python.
    """
    options = FrameworkParityOptions.of(context)
    work, source = prepare_work(context, options)
    report(0, len(options.stacks) + 1, "plain loop and its twins")
    answer = run_job(
        Job(train_twins, {"work": work.as_dict(), "folder": str(context.workspace / "twins")}, timeout_s=options.timeout_s),
        on_line=lambda line: None,
    )
    reference, shifted = Record.of(answer["records"].pop(PLAIN)), {int(key): loss for key, loss in answer["first"].items()}
    twins = {name: Record.of(record) for name, record in answer["records"].items()}
    bounds = loss_tolerance(list(twins.values()), reference), parameter_tolerance(list(twins.values()), reference)

    def launch_one(stack: Stack) -> Record:
        folder = context.workspace / stack.name.replace(" ", "-")
        return launch(stack, work, folder, options.ranks_of(context, stack), options.timeout_s)

    rows, records = _twin_rows(context, options, twins, reference, source), {"plain loop": reference, **twins}
    at_once = 1 if context.device.kind == "cpu" else processes_at_once()
    for done, outcome in enumerate(launch_all(map(stack_named, options.stacks), launch_one, at_once), 1):
        report(done, len(options.stacks) + 1, outcome.stack)
        rows += _stack_rows(context, options, work, outcome, reference, twins[TWO_PARTS], shifted, bounds, source)
        if outcome.record is not None:
            records[outcome.stack] = outcome.record
        elif outcome.log:
            print(f"{outcome.stack} failed: {outcome.log}")
    report(len(options.stacks) + 1, len(options.stacks) + 1, "done")
    # Without times, because frameworks may train at the same time.
    return Result(rows, step_frame(records).drop(columns="time_s"), source)


EXPERIMENT = Experiment(forecast, run, options=FrameworkParityOptions, data=DATA)


def train_twins(work: dict, folder: str) -> dict:
    """Train the plain loop and its twins in this process.

    Return their records, and the mean loss of the first step for each distance between inputs and targets (label shift).
    """
    from torch.nn.attention import SDPBackend, sdpa_kernel

    from hyperion.engines import plain
    from hyperion.engines.observer import Observer
    from hyperion.workloads.twins import OtherRounding

    base = Work.of(work)
    records = {}
    with process_group():
        for name, (how, parts, rounding) in {PLAIN: ({}, 1, None), **_TWINS}.items():
            what = replace(base, micro_batches=parts)
            observer = Observer(what, name, ("transformers",), Path(folder) / name.replace(" ", "-"))
            changed: Any = contextlib.nullcontext()
            if rounding == _ATTENTION:
                changed = sdpa_kernel(SDPBackend.MATH)
            elif rounding is not None:
                changed = OtherRounding(base.dtype, int(rounding))
            with changed:
                records[name] = plain.train(what, observer, **how)
        return {"records": records, "first": plain.first_losses(base, observer.device)}


def _twin_rows(context: Context, options: WorkOptions, twins: dict[str, Record], reference: Record, source: str) -> list[Row]:
    """Return a row with the loss difference of each twin from the plain loop. Its check requires at most 0.01 nats."""
    rows = []
    for name, twin in twins.items():
        error = loss_difference(twin, reference)
        params = options.params() | {"twin": True}
        check = checked("twin of the plain loop", error, 1e-2)
        rows.append(context.row(name, "loss_difference", error, dtype=options.dtype, params=params, data_source=source, **check))
    return rows


def _stack_rows(
    context: Context,
    options: FrameworkParityOptions,
    work: Work,
    outcome: Outcome,
    reference: Record,
    two_parts: Record,
    shifted: dict[int, float],
    bounds: tuple[float, float],
    source: str,
) -> list[Row]:
    stack, record = stack_named(outcome.stack), outcome.record
    shared: dict[str, Any] = {"dtype": options.dtype, "data_source": source}
    params = _params(context, options, stack)
    if record is None:
        return [context.absent_row(stack.name, "loss_difference", outcome.reason, params=params, **shared)]
    if differences := unequal(work, record, reference, shifted):
        reason = "refused, the work is not equal: " + "; ".join(map(str, differences))
        return [context.absent_row(stack.name, "loss_difference", reason[:2000], params=params, **shared)]
    name = f"plain loop, {TWIN_FACTOR:g} x the largest difference of its {len(_TWINS)} twins"
    try:
        parameters = parameter_difference(record, reference), bounds[1]
    except HyperionError as error:  # the state has other names or shapes, so the adapter is wrong
        return [context.absent_row(stack.name, "loss_difference", f"failed: {error.what}", params=params, **shared)]
    errors = {"loss_difference": (loss_difference(record, reference), bounds[0]), "parameter_difference": parameters}
    measured = {"what": WORK, "ranks": record.ranks, **as_measured(record)}
    bits = {"what": BITS, "ranks": record.ranks}
    return [
        *(
            context.error_row(stack.name, metric, error, name, bound, params=params, **shared)
            for metric, (error, bound) in errors.items()
        ),
        context.row(stack.name, "count", 0, params=measured, **shared, **checked("judge of equal work", 0, 0)),
        context.row(stack.name, "count", differing_tensors(record, two_parts), params=bits, **shared),
    ]


def as_measured(record: Record) -> dict[str, Any]:
    """Return what a run did, as params for a row. All values were read from the run."""
    decayed = [group for group in record.groups if group.weight_decay]
    return {
        "engine": record.engine,
        "versions": record.versions,
        "optimizer": sorted({group.optimizer for group in record.groups}),
        "learning_rates": sorted({rate for group in record.groups for rate in group.learning_rates}),
        "betas": sorted({beta for group in record.groups for beta in group.betas}),
        "eps": sorted({group.eps for group in record.groups if group.eps is not None}),
        "weight_decay": sorted({group.weight_decay for group in record.groups}),
        "decayed_elements": round(sum(group.elements for group in decayed)),
        "other_elements": round(sum(group.elements for group in record.groups if not group.weight_decay)),
        "master_dtype": sorted({group.dtype for group in record.groups}),
        "reduced_dtypes": sorted(record.reduced),
        "optimizer_steps": record.optimizer_steps,
        "tokens": record.counted_tokens,
        "first_norm": record.norms[0],
        "largest_clipped_norm": max(record.clipped_norms, default=0.0),
        "initial_state": record.initial_sha256[:12],
    }


def step_frame(records: dict[str, Record]) -> pd.DataFrame:
    """Return a table with one line for each step of each run."""
    return pd.concat(
        [
            pd.DataFrame(
                {
                    "variant": name,
                    "step": range(1, len(record.losses) + 1),
                    "loss": record.losses,
                    "norm": record.norms,
                    "clipped_norm": record.clipped_norms,
                    "time_s": record.step_times_s,
                }
            )
            for name, record in records.items()
        ],
        ignore_index=True,
    )


def _params(context: Context, options: FrameworkParityOptions, stack: Stack) -> dict[str, Any]:
    return options.params() | {"ranks": options.ranks_of(context, stack)}
