"""Rows of the vision baseline: accuracies, how soon a stated one was reached, and what they are from seed to seed."""

import math
from dataclasses import dataclass
from itertools import accumulate

from hyperion.chapter.context import Context
from hyperion.data.images.device_images import ImageBatches
from hyperion.results import Row, proportion_estimate
from hyperion.training import History, ImageEngine
from hyperion.workloads.training_rows import seed_statistics


@dataclass(frozen=True)
class Trained:
    """A training that has ended.

    Attributes:
        name, dtype: of the model, and what it was trained in.
        steps: that it took.
        tested: numbers of the test split, see `evaluate_images`.
        engine, batches: to go on with; None when they were given up.
    """

    seed: int
    name: str
    dtype: str
    steps: int
    history: History
    tested: dict[str, float]
    engine: ImageEngine | None
    batches: ImageBatches | None


def accuracy_row(
    context: Context, run: Trained, found: dict[str, float], params: dict, best: tuple[float | None, str], source: str
) -> Row:
    """The share of images classified correctly, with Wilson's interval.

    Args:
        best: (accuracy that no classifier can pass, why).
    """
    images = int(found["images"])
    share = proportion_estimate(round(found["accuracy"] * images), images)
    return context.row(
        run.name,
        "accuracy",
        share.value,
        dtype=run.dtype,
        params=params,
        n=images,
        ci_low=share.ci_low,
        ci_high=share.ci_high,
        limit=best[0],
        limit_source=best[1],
        data_source=source,
    )


def training_time_s(history: History) -> list[float]:
    """Seconds of training until the end of each epoch; its first steps, which warmed up untimed, count like the others."""
    epochs = history.epochs
    return list(accumulate(e.time_s * e.steps / e.timed_steps if e.timed_steps else math.nan for e in epochs))


def time_to_row(context: Context, run: Trained, source: str, **params) -> Row:
    """Seconds of training after which the held-out images were first classified as well as the profile's `target`."""
    target = context.sizes["target"]
    reached = [
        time_s
        for time_s, record in zip(training_time_s(run.history), run.history.epochs, strict=True)
        if record.evaluation is not None and record.evaluation["accuracy"] >= target
    ]
    value = reached[0] if reached and math.isfinite(reached[0]) else None
    reason = f"{target:.0%} of the held-out images was reached by no epoch that was timed" if value is None else ""
    return context.row(
        run.name,
        "time_to_accuracy_s",
        value,
        dtype=run.dtype,
        value_reason=reason,
        data_source=source,
        params={"target": target, "split": "held-out train", "without": "compiling, evaluating, saving"} | params,
        limit_source="no limit: how few steps suffice is not known",
    )


def seed_rows(context: Context, runs: list[Trained], best: tuple[float | None, str], source: str) -> list[Row]:
    """Test accuracy and time to the target of every seed, then the mean of both and the accuracies' deviation."""
    rows = []
    for run in runs:
        params = {"split": "test, every seed", "seed": run.seed, "step": run.steps}
        rows.append(accuracy_row(context, run, run.tested, params, best, source))
        rows.append(time_to_row(context, run, source, seed=run.seed))
    name, dtype = runs[0].name, runs[0].dtype
    params = {"split": "test, mean of seeds", "seeds": len(runs), "step": runs[0].steps}
    shared = {"dtype": dtype, "params": params, "data_source": source}
    accuracies = [run.tested["accuracy"] for run in runs]
    return rows + seed_statistics(context, name, "accuracy", accuracies, best, shared, most=1.0)
