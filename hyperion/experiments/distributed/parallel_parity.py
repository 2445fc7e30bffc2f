"""Parity: the same optimizer steps must give the same losses on one device, with DDP and with FSDP2.

The rows of a batch have different numbers of targets. With equal numbers, a step that gives each rank the same weight, instead of
each token, would have the right loss.
"""

import numpy as np
import pandas as pd
from torch import nn

from hyperion.chapter.context import Context, Experiment, Forecast, Report, Result
from hyperion.chapter.rows import checked
from hyperion.chapter.variants import RankOptions, merged, run_on_ranks
from hyperion.parallel import differing_parameters, full_parameter_bytes, is_replicated, local_parameter_bytes
from hyperion.processes import world
from hyperion.results import Row
from hyperion.workloads import datasets
from hyperion.workloads.recipes import Recipe, Strategy, Training, set_up
from hyperion.workloads.twins import SCATTER_FP32, with_unequal_rows

TOLERANCE = 1e-4


class ShortTrainingOptions(RankOptions):
    """Options for a short language-model training run, shared by the parity, resharding and rank-failure experiments.

    Args:
        model: name of a TransformerLM configuration.
        sequence_length: number of tokens in one example.
        batch_size: number of examples in one step, summed over all ranks.
        learning_rate: peak learning rate.
    """

    model: str
    sequence_length: int
    batch_size: int
    learning_rate: float

    def recipe(self, strategy: Strategy, steps: int, checkpoint_every: int | None = None) -> Recipe:
        """Return a float32 recipe without evaluation. In float32 the parity check can use a small tolerance."""
        return Recipe(
            task="language",
            model=self.model,
            strategy=strategy,
            precision="fp32",
            batch_size=self.batch_size,
            sequence_length=self.sequence_length,
            steps=steps,
            learning_rate=self.learning_rate,
            weight_decay=0.1,
            evaluation_batches=0,
            checkpoint_every=checkpoint_every,
        )


class ParallelParityOptions(ShortTrainingOptions):
    """Options for the `parallel_parity` experiment.

    Args:
        strategies: strategies to compare with one device: "ddp", "fsdp" or both.
        steps: number of optimizer steps.
    """

    strategies: tuple[Strategy, ...]
    steps: int


def forecast(context: Context) -> list[Forecast]:
    """Predict the largest relative difference between a strategy's losses and the losses of one device.

    The prediction assumes that each step adds one rounding error.
    """
    options = ParallelParityOptions.of(context)
    steps = options.steps
    basis = f"each of {steps} steps adds one rounding error of float32, because sums have another order: {steps} x 2^-24"
    return [
        Forecast(strategy, "relative_difference", steps * 2.0**-24, basis, dtype="fp32", params=_params(context, options))
        for strategy in options.strategies
    ]


def run(context: Context, report: Report) -> Result:
    """Start the ranks once and compare the losses of all strategies.

    First every rank trains alone on whole batches. Then all ranks train together with each strategy.
    """
    options = ParallelParityOptions.of(context)
    ranks = run_on_ranks(context, report, steps_on_rank, ranks=options.rank_count(context, options.batch_size))
    curves, source = ranks[0].samples, ranks[0].source
    rows = [_parity_row(context, options, curves, strategy, source) for strategy in options.strategies]
    return Result(rows + merged(ranks).rows, curves, source)


EXPERIMENT = Experiment(forecast, run, data=datasets.TEXT, options=ParallelParityOptions)


def steps_on_rank(context: Context, report: Report) -> Result:
    """Train alone on whole batches, then together with the other ranks with each strategy. Every rank runs this function.

    The samples of the result contain the losses.
    """
    options = ParallelParityOptions.of(context)
    strategies: list[Strategy] = ["single", *options.strategies]
    return merged([_train(context, options, report, strategy) for strategy in strategies])


def _train(context: Context, options: ParallelParityOptions, report: Report, strategy: Strategy) -> Result:
    training = set_up(context, options.recipe(strategy, options.steps))
    losses = []
    first = 0 if training.engine.ranks == 1 else world().rank * (options.batch_size // world().size)
    for step in range(options.steps):
        batch = with_unequal_rows(training.batches.next_batch(), first, options.batch_size)
        losses.append(float(training.engine.train_step(batch).loss))
        report(step + 1, options.steps, f"{strategy}: loss {losses[-1]:.3f}")
    curve = pd.DataFrame({"strategy": strategy, "step": range(1, len(losses) + 1), "loss": losses})
    rows = [_bytes_row(context, strategy, training)]
    if is_replicated(training.engine.model):
        unequal = replicas_row(context, strategy, training.engine.model, training.source)  # all ranks take part
        rows += [unequal] if world().rank == 0 else []
    return Result(rows, curve, training.source)


def _bytes_row(context: Context, strategy: str, training: Training) -> Row:
    """Return the row with the share of all parameter bytes held by this rank.

    The share is 1 with DDP and 1 / ranks with FSDP2.
    """
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
        data_source=training.source,
        # FSDP2 splits tensors along the first dimension. If the size of this dimension is not divisible by the number of ranks,
        # the shards differ in size.
        **checked("share that the strategy promises", abs(share / promised - 1), 0.1),
    )


def replicas_row(context: Context, strategy: str, model: nn.Module, source: str) -> Row:
    """Return the row with the number of parameter tensors that are not bitwise equal on all ranks.

    Every rank must hold all parameters of the model, as with DDP. All ranks must call this function.
    """
    unequal, known = len(differing_parameters(model)), len(list(model.parameters()))
    return context.error_row(
        strategy,
        "count",
        unequal,
        "bits of rank 0's parameters, on all ranks",
        0,
        dtype="fp32",
        params={"what": "parameters that differ between ranks", "parameters": known, "ranks": world().size},
        data_source=source,
    )


def _parity_row(context: Context, options: ParallelParityOptions, curves: pd.DataFrame, strategy: str, source: str) -> Row:
    losses = {name: curve.sort_values("step")["loss"].to_numpy() for name, curve in curves.groupby("strategy")}
    difference = largest_relative_difference(losses[strategy], losses["single"])
    return context.error_row(
        strategy,
        "relative_difference",
        difference,
        f"losses of one device, step by step; {SCATTER_FP32}",
        TOLERANCE,
        dtype="fp32",
        params=_params(context, options),
        data_source=source,
    )


def largest_relative_difference(losses: np.ndarray, expected: np.ndarray) -> float:
    """Return the largest relative difference between the two losses of a step.

    Args:
        losses: loss of every step.
        expected: reference loss of every step.
    """
    return float(np.max(np.abs(losses / expected - 1)))


def _params(context: Context, options: ParallelParityOptions) -> dict:
    return {
        "what": "training loss",
        "model": options.model,
        "ranks": options.rank_count(context, options.batch_size),
        "steps": options.steps,
        "batch_size": options.batch_size,
        "sequence_length": options.sequence_length,
    }
