"""Train on all ranks of the machine with DDP and with FSDP2.

The experiment returns rows for every rank. It also counts the training examples that two ranks received, and the training
examples that no rank received. Both numbers must be 0.
"""

from collections import Counter

import numpy as np
import pandas as pd
import torch.distributed as dist

from hyperion.chapter.context import Context, Experiment, Forecast, Report, Result
from hyperion.chapter.rows import checked
from hyperion.chapter.variants import RankOptions, merged, run_on_ranks
from hyperion.data.text.tokenizer import GPT2_VOCABULARY
from hyperion.errors import not_none
from hyperion.models import flops_per_token, named_config
from hyperion.processes import world
from hyperion.results import Row, proportion_estimate
from hyperion.training import EpochRecord, History, choose_precision, mean_over_ranks, train
from hyperion.workloads import datasets
from hyperion.workloads.recipes import Recipe, Training, set_up
from hyperion.workloads.training_rows import NOT_TIMED, loss_curve, step_forecasts
from hyperion.workloads.workloads import ADAMW_BYTES_A_PARAMETER

_NO_LIMIT = "no limit: loading is part of it; the steady step of chapter 2.8 has one"
_FITS = "no limit: a model may fit what it is trained on exactly"


class DistributedTrainingOptions(RankOptions):
    """Options for the `distributed_training` experiment.

    Args:
        trainings: recipes of the training runs, in execution order.
    """

    trainings: tuple[Recipe, ...]


def forecast(context: Context) -> list[Forecast]:
    """Return an upper bound on the throughput of all ranks together, in tokens per second.

    The bound ignores communication time, so it is not a prediction.
    """
    options = DistributedTrainingOptions.of(context)
    counted, ranks = datasets.vocabulary_row(context), options.device_count(context)
    vocabulary = int(not_none(counted.value)) if counted else GPT2_VOCABULARY
    forecasts = []
    for recipe in (r for r in options.trainings if r.task == "language"):
        config = named_config(recipe.model, vocab_size=vocabulary, context=recipe.sequence_length)
        dtype = choose_precision(context.device, recipe.precision).dtype
        tokens = recipe.batch_size * recipe.sequence_length
        traffic: dict[str, float] = {"optimizer": ADAMW_BYTES_A_PARAMETER * config.parameter_count}
        alone = step_forecasts(context, recipe.model, dtype, "token", tokens, flops_per_token(config), traffic)[0]
        ceiling = None if alone.ceiling is None else alone.ceiling * ranks
        basis = alone.basis.split("ceiling: ")[-1]
        basis = basis if ceiling is None else f"{ranks} times the ceiling of one device, without communication: {basis}"
        params = _params(recipe, ranks) | {"epoch": 1}
        forecasts.append(Forecast(recipe.name, "tokens_per_s", None, basis, dtype=dtype, params=params, ceiling=ceiling))
    return forecasts


def run(context: Context, report: Report) -> Result:
    """Start the ranks once and run all training runs on them."""
    options = DistributedTrainingOptions.of(context)
    ranks = options.device_count(context)
    results = run_on_ranks(context, report, train_on_rank, ranks=ranks)
    curves = results[0].samples
    curves = curves.query("kind not in ('example', 'of one device')").drop(columns=["example", "source"])
    return Result([*results[0].rows, *_overlap_rows(context, options, results)], curves, results[0].source)


EXPERIMENT = Experiment(
    forecast,
    run,
    forecast_reads=("text_pipeline", "gemm", "bandwidth"),
    data=(*datasets.TEXT, *datasets.IMAGES),
    options=DistributedTrainingOptions,
)


def train_on_rank(context: Context, report: Report) -> Result:
    """Run all training runs on one rank, one after the other.

    Rank 0 returns the rows of all ranks. Each rank's samples list the examples that it received.
    """
    return merged([_train(context, report, recipe) for recipe in DistributedTrainingOptions.of(context).trainings])


def _train(context: Context, report: Report, recipe: Recipe) -> Result:
    training, here = set_up(context, recipe), world()
    examples = {"example": training.batches.examples(0), "of one device": training.batches.examples_of_all_ranks(0)}
    seen = pd.concat([pd.DataFrame({"example": numbers, "kind": kind}) for kind, numbers in examples.items()])
    seen = seen.assign(training=recipe.name, source=training.source)
    history = train(
        training.engine,
        training.batches,
        recipe.plan(),
        validation=training.validation,
        folder=context.workspace / recipe.name,
        report=report,
    )
    # `test_rows` runs collectives, so all ranks must call it before the ranks other than 0 return.
    tested = test_rows(context, recipe, training)
    dist.barrier()
    if here.rank:
        return Result([], seen, training.source)
    curve = loss_curve(history).assign(training=recipe.name)
    rows = epoch_rows(context, recipe, training, history) + mean_rows(context, recipe, training, history) + tested
    return Result(rows, pd.concat([curve, seen], ignore_index=True), training.source)


def epoch_rows(context: Context, recipe: Recipe, training: Training, history: History) -> list[Row]:
    """Return the rows with the results of every epoch.

    Loss, throughput and memory have one row for all ranks together, with rank None, and one row for each rank. The held-out loss
    has only the row for all ranks together.
    """
    rows = []
    ranks = Counter(
        record.epoch for record in history.rank_epochs
    )  # number of ranks in each epoch; it differs between epochs if the run was resumed on another number of ranks
    for record in [*history.epochs, *history.rank_epochs]:
        rows += _record_rows(context, recipe, training, record, ranks[record.epoch])
    for record in history.epochs:
        if record.evaluation is not None:
            rows.append(
                context.row(
                    recipe.name,
                    "validation_loss",
                    record.evaluation["loss"],
                    dtype=training.engine.precision.dtype,
                    params=_params(recipe, ranks[record.epoch]) | {"epoch": record.epoch},
                    limit_source="no limit: the entropy of the held-out data is not known",
                    data_source=training.source,
                )
            )
    return rows


def _record_rows(context: Context, recipe: Recipe, training: Training, record: EpochRecord, ranks: int) -> list[Row]:
    values = {
        "training_loss": (record.loss, _FITS),
        f"{training.engine.item}s_per_s": (record.items_per_s, _NO_LIMIT),
        record.peak_memory_metric: (record.peak_memory_gib, "no limit: the least memory of a step is not derived yet"),
        "epoch_time_s": (record.wall_s, ""),
    }
    if record.reserved_memory_gib is not None:
        values["reserved_memory_gib"] = (record.reserved_memory_gib, "")
    params = _params(recipe, ranks) | {"epoch": record.epoch}
    return [
        context.row(
            recipe.name,
            metric,
            value,
            dtype=training.engine.precision.dtype,
            rank=record.rank,
            params=params,
            value_reason="" if value is not None else NOT_TIMED,
            limit_source=source,
            data_source=training.source,
        )
        for metric, (value, source) in values.items()
    ]


def mean_rows(context: Context, recipe: Recipe, training: Training, history: History) -> list[Row]:
    """Return a row that compares two losses of the last epoch: the loss over all ranks, and the mean of the ranks' losses.

    In two cases the two losses can differ, and the list is empty: if the examples are completions of different lengths, and if
    the epoch began on another number of ranks.
    """
    last = history.epochs[-1]
    parts = [record for record in history.rank_epochs if record.epoch == last.epoch]
    if recipe.task == "llama" or any(part.steps != last.steps for part in parts):
        return []
    mean = mean_over_ranks(parts)
    return [
        context.row(
            recipe.name,
            "training_loss",
            mean,
            dtype=training.engine.precision.dtype,
            params=_params(recipe, len(parts)) | {"what": "mean of the ranks' losses"},
            limit_source=_FITS,
            data_source=training.source,
            # The two losses add the same numbers in different orders. In float32, they differ by less than this tolerance.
            **checked("loss of all ranks together", abs(mean / last.loss - 1), 1e-5),
        )
    ]


def test_rows(context: Context, recipe: Recipe, training: Training) -> list[Row]:
    """On rank 0, return a row with the share of test images that the trained model classifies correctly.

    All ranks must call this function after training.
    """
    if training.test is None:
        return []
    scored = training.engine.evaluate(training.test())
    if world().rank:
        return []
    images = int(scored["images"])
    share = proportion_estimate(round(scored["accuracy"] * images), images)
    return [
        context.row(
            recipe.name,
            "accuracy",
            share,
            dtype=training.engine.precision.dtype,
            n=images,
            params=_params(recipe, world().size) | {"split": "test", "step": training.engine.steps},
            limit=1.0,
            limit_source="every image classified correctly",
            data_source=training.source,
        )
    ]


def _overlap_rows(context: Context, options: DistributedTrainingOptions, results: list[Result]) -> list[Row]:
    """Return rows that count the examples of the first epoch that two ranks received, and those that no rank received."""
    rows = []
    for recipe in options.trainings:
        seen = [result.samples.loc[result.samples["training"] == recipe.name] for result in results]
        parts = [frame.loc[frame["kind"] == "example", "example"].to_numpy(dtype=np.int64) for frame in seen]
        whole = set(seen[0].loc[seen[0]["kind"] == "of one device", "example"].astype(np.int64))
        times = Counter(np.concatenate(parts).tolist())
        source = next(iter(seen[0].loc[seen[0]["kind"] == "example", "source"]))
        counts = {
            "examples given to two ranks": sum(n > 1 for n in times.values()),
            "examples given to no rank": len(whole - times.keys()),
        }
        params = _params(recipe, len(parts)) | {"examples": len(whole)}
        rows += [
            context.error_row(recipe.name, "count", number, "none", 0, params=params | {"what": what}, data_source=source)
            for what, number in counts.items()
        ]
    return rows


def _params(recipe: Recipe, ranks: int) -> dict:
    return {"strategy": recipe.strategy, "ranks": ranks, "batch_size": recipe.batch_size}
