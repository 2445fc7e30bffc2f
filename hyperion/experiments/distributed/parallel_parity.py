"""Parity: the same twenty optimizer steps on one device, under DDP and under FSDP2, loss by loss."""

import numpy as np
import pandas as pd
from torch import nn

from hyperion.chapter.context import Context, Experiment, Forecast, Result
from hyperion.chapter.ranks import ranks_of
from hyperion.chapter.variants import Report, merged, run_on_ranks
from hyperion.parallel import differing_parameters, full_parameter_bytes, is_replicated, local_parameter_bytes
from hyperion.processes import world
from hyperion.results import Row
from hyperion.workloads import datasets
from hyperion.workloads.recipes import Recipe, set_up
from hyperion.workloads.twins import SCATTER_FP32

TOLERANCE = 1e-4


def forecast(context: Context) -> list[Forecast]:
    """How far apart losses may drift: rounding, once a step."""
    steps = context.sizes["steps"]
    basis = f"{steps} steps, each of which rounds sums of another order once: {steps} x 2^-24, the unit of float32"
    return [
        Forecast(
            variant=strategy,
            metric="relative_difference",
            estimate=steps * 2.0**-24,
            basis=basis,
            dtype="fp32",
            params=_params(context),
        )
        for strategy in context.sizes["strategies"]
    ]


def run(context: Context, report: Report) -> Result:
    """One launch: every rank first trains alone, on whole batches; then all share them, strategy after strategy."""
    ranks = run_on_ranks(context, report, steps_on_rank, ranks=ranks_of(context))
    curves, source = ranks[0].samples, ranks[0].source
    rows = [_parity_row(context, curves, strategy, source) for strategy in context.sizes["strategies"]]
    return Result(rows + merged(ranks).rows, curves, source)


EXPERIMENT = Experiment(forecast, run, data=datasets.TEXT)


def steps_on_rank(context: Context, report: Report) -> Result:
    """One device's losses, then each strategy's on the same batches."""
    return merged([_steps(context, report, strategy) for strategy in ("single", *context.sizes["strategies"])])


def _steps(context: Context, report: Report, strategy: str) -> Result:
    sizes = context.sizes
    recipe = Recipe(
        task="language",
        model=sizes["model"],
        strategy=strategy,
        precision="fp32",
        batch_size=sizes["batch_size"],
        sequence_length=sizes["sequence_length"],
        steps=sizes["steps"],
        learning_rate=sizes["learning_rate"],
        weight_decay=0.1,
        evaluation_batches=0,
    )
    training = set_up(context, recipe)
    losses = []
    for step in range(sizes["steps"]):
        losses.append(float(training.engine.train_step(training.batches.next_batch()).loss))
        report(step + 1, sizes["steps"], f"{strategy}: loss {losses[-1]:.3f}")
    curve = pd.DataFrame({"strategy": strategy, "step": range(1, len(losses) + 1), "loss": losses})
    rows = [_bytes_row(context, strategy, training)]
    if is_replicated(training.engine.model):
        unequal = replicas_row(context, strategy, training.engine.model, training.source)  # all ranks take part
        rows += [unequal] if world().rank == 0 else []
    return Result(rows, curve, training.source)


def _bytes_row(context: Context, strategy: str, training) -> Row:
    """How much of the parameters this rank holds, against what the strategy promises: all of them, or its share."""
    here, strategy_ranks = world(), training.engine.ranks
    whole = full_parameter_bytes(training.engine.model)
    share = local_parameter_bytes(training.engine.model) / whole
    promised = 1 / strategy_ranks if strategy == "fsdp" else 1.0
    return context.row(
        strategy,
        "share",
        share,
        dtype="fp32",
        rank=here.rank,
        params={"what": "parameter bytes held", "ranks": strategy_ranks, "bytes": whole},
        check="share that the strategy promises",
        check_error=abs(share / promised - 1),
        check_tolerance=0.1,
        data_source=training.source,
    )


def replicas_row(context: Context, strategy: str, model: nn.Module, source: str) -> Row:
    """How many parameters of a model that each rank keeps whole differ between ranks, in any bit. Called by all ranks."""
    unequal, known = len(differing_parameters(model)), len(list(model.parameters()))
    return context.row(
        strategy,
        "count",
        unequal,
        dtype="fp32",
        params={"what": "parameters that differ between ranks", "parameters": known, "ranks": world().size},
        check="bits of rank 0's parameters, on all ranks",
        check_error=unequal,
        check_tolerance=0,
        data_source=source,
    )


def _parity_row(context: Context, curves: pd.DataFrame, strategy: str, source: str) -> Row:
    losses = {name: curve.sort_values("step")["loss"].to_numpy() for name, curve in curves.groupby("strategy")}
    difference = float(np.max(np.abs(losses[strategy] / losses["single"] - 1)))
    return context.row(
        strategy,
        "relative_difference",
        difference,
        dtype="fp32",
        params=_params(context),
        check=f"losses of one device, step by step; {SCATTER_FP32}",
        check_error=difference,
        check_tolerance=TOLERANCE,
        data_source=source,
    )


def _params(context: Context) -> dict:
    sizes = context.sizes
    return {
        "what": "training loss",
        "model": sizes["model"],
        "ranks": ranks_of(context),
        "steps": sizes["steps"],
        "batch_size": sizes["batch_size"],
        "sequence_length": sizes["sequence_length"],
    }
