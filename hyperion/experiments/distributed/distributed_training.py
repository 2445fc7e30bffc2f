"""Training on all ranks, strategy by strategy: a row from every rank, and counts of who trained on what."""

from collections import Counter

import numpy as np
import pandas as pd
import torch.distributed as dist

from hyperion.chapter.context import Context, Experiment, Forecast, Result
from hyperion.chapter.ranks import devices_here
from hyperion.chapter.variants import Report, merged, run_on_ranks
from hyperion.models import flops_per_token, named_config
from hyperion.parallel import assert_ranks_agree
from hyperion.processes import world
from hyperion.results import Row, proportion_estimate
from hyperion.training import EpochRecord, History, choose_precision, mean_over_ranks, train
from hyperion.workloads import datasets
from hyperion.workloads.recipes import Recipe, Training, set_up
from hyperion.workloads.training_rows import ADAMW_BYTES_A_PARAMETER, loss_curve, step_forecasts

_NO_LIMIT = "no limit: loading is part of it; the steady step of chapter 2.8 has one"
_FITS = "no limit: a model may fit what it is trained on exactly"


def forecast(context: Context) -> list[Forecast]:
    """Tokens per second of all ranks together, as if they did not wait for each other."""
    counted = datasets.vocabulary_row(context)
    found = []
    for recipe in (r for r in _recipes(context) if r.task == "language"):
        config = named_config(recipe.model, vocab_size=int(counted.value) if counted else 50257, context=recipe.sequence_length)
        dtype = choose_precision(context.device, recipe.precision).dtype
        tokens = recipe.batch_size * recipe.sequence_length
        traffic = {"optimizer": ADAMW_BYTES_A_PARAMETER * config.parameter_count}
        alone = step_forecasts(context, recipe.model, dtype, "token", tokens, flops_per_token(config), traffic)[0]
        estimate = None if alone.estimate is None else alone.estimate * devices_here(context)
        basis = alone.basis if estimate is None else f"{devices_here(context)} times one device: {alone.basis}"
        found.append(
            Forecast(
                variant=recipe.name,
                metric="tokens_per_s",
                estimate=estimate,
                basis=basis,
                dtype=dtype,
                params=_params(recipe, devices_here(context)) | {"epoch": 1},
            )
        )
    return found


def run(context: Context, report: Report) -> Result:
    """All trainings of the profile in one launch."""
    ranks = devices_here(context)
    results = run_on_ranks(context, report, train_on_rank, ranks=ranks)
    curves = results[0].samples
    curves = curves[~curves["kind"].isin(["example", "of one device"])].drop(columns=["example", "source"])
    return Result([*results[0].rows, *_overlap_rows(context, results)], curves, results[0].source)


EXPERIMENT = Experiment(
    forecast, run, forecast_reads=("text_pipeline", "gemm", "bandwidth"), data=(*datasets.TEXT, *datasets.IMAGES)
)


def train_on_rank(context: Context, report: Report) -> Result:
    """Every recipe in turn; rank 0's rows hold those of all ranks, every rank's samples say what it trained on."""
    return merged([_trained(context, report, recipe) for recipe in _recipes(context)])


def _trained(context: Context, report: Report, recipe: Recipe) -> Result:
    training, here = set_up(context, recipe), world()
    told = {"example": training.batches.examples(0), "of one device": training.batches.examples_of_all_ranks(0)}
    seen = pd.concat([pd.DataFrame({"example": which, "kind": kind}) for kind, which in told.items()])
    seen = seen.assign(training=recipe.name, source=training.source)
    history = train(
        training.engine,
        training.batches,
        recipe.plan(),
        validation=training.validation,
        folder=context.workspace / recipe.name,
        report=report,
    )
    assert_ranks_agree(training.engine.model)
    tested = test_rows(context, recipe, training)
    dist.barrier()
    if here.rank:
        return Result([], seen, training.source)
    curve = loss_curve(history).assign(training=recipe.name)
    rows = epoch_rows(context, recipe, training, history) + mean_rows(context, recipe, training, history) + tested
    return Result(rows, pd.concat([curve, seen], ignore_index=True), training.source)


def epoch_rows(context: Context, recipe: Recipe, training: Training, history: History) -> list[Row]:
    """Loss, throughput and memory of every epoch: of all ranks together (no rank) and of each; the held-out loss of all."""
    rows = []
    ranks = Counter(record.epoch for record in history.rank_epochs)  # an epoch of a resumed run may have had others
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
    }
    params = _params(recipe, ranks) | {"epoch": record.epoch}
    return [
        context.row(
            recipe.name,
            metric,
            value,
            dtype=training.engine.precision.dtype,
            rank=record.rank,
            params=params,
            value_reason="" if value is not None else "no step of this epoch was timed, or the system cannot tell",
            limit_source=source,
            data_source=training.source,
        )
        for metric, (value, source) in values.items()
    ]


def mean_rows(context: Context, recipe: Recipe, training: Training, history: History) -> list[Row]:
    """The loss of the last epoch against the mean recomputed from the ranks' own. None where the two differ by right: parts
    of unequal size (completions), or an epoch that another number of ranks began.
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
            check="loss of all ranks together",
            check_error=abs(mean / last.loss - 1),
            check_tolerance=1e-5,
            data_source=training.source,
        )
    ]


def test_rows(context: Context, recipe: Recipe, training: Training) -> list[Row]:
    """The share of test images classified correctly by the trained model, on rank 0; all ranks call it, once, at the end."""
    if training.test is None:
        return []
    found = training.engine.evaluate(training.test())
    if world().rank:
        return []
    images = int(found["images"])
    share = proportion_estimate(round(found["accuracy"] * images), images)
    return [
        context.row(
            recipe.name,
            "accuracy",
            share.value,
            dtype=training.engine.precision.dtype,
            n=images,
            ci_low=share.ci_low,
            ci_high=share.ci_high,
            params=_params(recipe, world().size) | {"split": "test", "step": training.engine.steps},
            limit=1.0,
            limit_source="every image classified correctly",
            data_source=training.source,
        )
    ]


def _overlap_rows(context: Context, results: list[Result]) -> list[Row]:
    """How many examples of the first epoch went to two ranks, and how many of one device's epoch to none."""
    rows = []
    for recipe in _recipes(context):
        seen = [result.samples[result.samples["training"] == recipe.name] for result in results]
        parts = [frame.loc[frame["kind"] == "example", "example"].to_numpy(dtype=np.int64) for frame in seen]
        whole = set(seen[0].loc[seen[0]["kind"] == "of one device", "example"].astype(np.int64))
        times, source = Counter(np.concatenate(parts).tolist()), seen[0]["source"].dropna().iloc[0]  # curves name none
        counts = {
            "examples given to two ranks": sum(n > 1 for n in times.values()),
            "examples given to no rank": len(whole - times.keys()),
        }
        params = _params(recipe, len(parts)) | {"examples": len(whole)}
        rows += [
            context.row(
                recipe.name,
                "count",
                number,
                params=params | {"what": what},
                check="none",
                check_error=number,
                check_tolerance=0,
                data_source=source,
            )
            for what, number in counts.items()
        ]
    return rows


def _recipes(context: Context) -> list[Recipe]:
    return [Recipe(**settings) for settings in context.sizes["trainings"]]


def _params(recipe: Recipe, ranks: int) -> dict:
    return {"strategy": recipe.strategy, "ranks": ranks, "batch_size": recipe.batch_size}
