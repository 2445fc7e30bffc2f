"""The vision baseline: ResNet-18 with the CIFAR stem, chosen on held-out training images, tested once at the end."""

from dataclasses import dataclass

import numpy as np
import pandas as pd

from hyperion.data import ImageSet, PreparedImages, channel_statistics
from hyperion.data.device_images import ImageBatches
from hyperion.experiments import datasets
from hyperion.experiments.context import Context, Experiment, Forecast, Result
from hyperion.experiments.training_rows import (
    SGD_BYTES_A_PARAMETER,
    epoch_rows,
    loss_curve,
    steady_rows,
    step_forecasts,
)
from hyperion.measure import FORMATS
from hyperion.models import flops_per_image, parameter_count, resnet18
from hyperion.results import Row, proportion_estimate
from hyperion.training import (
    ImageEngine,
    Plan,
    WarmupCosine,
    choose_precision,
    evaluate_images,
    seed_everything,
    sgd_nesterov,
    train,
)

CLASSES = 10
# ResNet-18's 20 convolutions (the stem, 16 in blocks, 3 shortcuts), five at each of four sizes: activations by image, for
# each unit of width. Forward and backward, a convolution's output passes through memory some twelve times (convolution,
# norm and ReLU, each written and read).
_ACTIVATIONS_PER_WIDTH = 5 * (1024 + 512 + 256 + 128)
_PASSES = 12


@dataclass(frozen=True)
class _Splits:
    """Three disjoint sets of images uint8 [N, 3, 32, 32] and labels: the last `held_out` training images choose, test judges."""

    train: tuple[np.ndarray, np.ndarray]
    held_out: tuple[np.ndarray, np.ndarray]
    test: tuple[np.ndarray, np.ndarray]

    @classmethod
    def of(cls, prepared: PreparedImages, sizes: dict) -> "_Splits":
        arrays = prepared.arrays
        images, labels = arrays["train_images"], arrays["train_labels"]
        first_held_out = len(images) - sizes["held_out_images"]
        used = min(sizes.get("train_images", first_held_out), first_held_out)
        tested = sizes.get("test_images", len(arrays["test_images"]))
        return cls(
            train=(images[:used], labels[:used]),
            held_out=(images[first_held_out:], labels[first_held_out:]),
            test=(arrays["test_images"][:tested], arrays["test_labels"][:tested]),
        )


def forecast(context: Context) -> list[Forecast]:
    """Images per second of a steady step."""
    sizes = context.sizes
    model, batch = resnet18(CLASSES, sizes["width"]), sizes["batch_size"]
    dtype = choose_precision(context.device, sizes["precision"]).dtype
    passing = batch * sizes["width"] * _ACTIVATIONS_PER_WIDTH * _PASSES * FORMATS[dtype].bytes
    traffic = {"optimizer": SGD_BYTES_A_PARAMETER * parameter_count(model), "activations": passing}
    flops = flops_per_image(CLASSES, sizes["width"])
    return step_forecasts(context, model.name, dtype, "image", batch, flops, traffic)


def run(context: Context, report) -> Result:
    """Train, look at the held-out images as planned, test once, then time the steady step."""
    seed_everything(context.seed)
    image_set, prepared = datasets.images(context)
    sizes, splits = context.sizes, _Splits.of(prepared, context.sizes)
    normalisation = channel_statistics(splits.train[0])  # of what is trained on, and of nothing held out

    def loader(split: tuple[np.ndarray, np.ndarray], **options) -> ImageBatches:
        where = context.device.torch_device
        return ImageBatches(*split, sizes["batch_size"], normalisation, seed=context.seed, device=where, **options)

    batches = loader(splits.train, augment=image_set.augmentations)
    engine = _engine(context, len(batches))
    plan = Plan(
        epochs=sizes["epochs"], evaluate_every=sizes["evaluate_every"], checkpoint_every=sizes["checkpoint_every"]
    )
    history = train(
        engine, batches, plan, validation=lambda: loader(splits.held_out, shuffle=False, drop_last=False),
        folder=context.workspace, report=report,
    )  # fmt: skip
    name, dtype, source = engine.model.name, engine.precision.dtype, image_set.source
    rows = epoch_rows(context, name, dtype, engine, history, source)
    for record in history.epochs:
        if record.evaluation is not None:
            params = {"epoch": record.epoch, "step": record.step, "split": "held-out train"}
            found = record.evaluation["accuracy"], record.evaluation["images"]
            rows.append(_accuracy_row(context, name, dtype, *found, params, _best_possible(image_set, False), source))
    whole = len(splits.test[0]) == len(image_set.test_images)
    tested = evaluate_images(
        engine.model, loader(splits.test, shuffle=False, drop_last=False), engine.precision, engine.device
    )
    params = {"split": "test", "step": engine.steps}
    found = tested.accuracy, tested.images
    rows.append(_accuracy_row(context, name, dtype, *found, params, _best_possible(image_set, whole), source))
    flops = flops_per_image(CLASSES, sizes["width"])
    steady, samples = steady_rows(
        context, name, engine, batches.next_batch(), sizes["batch_size"], flops, flops.forward_backward, source
    )
    curves = pd.concat([loss_curve(history), samples], ignore_index=True)
    return Result(rows + steady, curves, source)


EXPERIMENT = Experiment(forecast, run, isolated=True, forecast_reads=("gemm", "bandwidth"), data=datasets.IMAGES)


def _engine(context: Context, steps_per_epoch: int) -> ImageEngine:
    sizes, device = context.sizes, context.device
    model = resnet18(CLASSES, sizes["width"]).to(device.torch_device)
    optimizer = sgd_nesterov(model, sizes["learning_rate"], sizes["weight_decay"])
    total = sizes["epochs"] * steps_per_epoch
    schedule = WarmupCosine(sizes["learning_rate"], max(1, int(sizes["warmup_share"] * total)), total)
    precision = choose_precision(device, sizes["precision"])
    print(f"{model.name}: {total} steps in {precision}")
    return ImageEngine(model, optimizer, schedule, precision, device)


def _best_possible(image_set: ImageSet, whole_split: bool) -> tuple[float | None, str]:
    """(accuracy that no classifier can pass, why). Exactly the stated share of labels is changed in a whole split only."""
    if image_set.bayes_accuracy is None:
        return 1.0, "every image classified correctly"
    if not whole_split:
        return None, "no limit: how many labels of a part of the split were changed is left to chance"
    return image_set.bayes_accuracy, "share of labels that were not changed: no classifier can know the rest"


def _accuracy_row(
    context: Context,
    name: str,
    dtype: str,
    accuracy: float,
    images: int,
    params: dict,
    best: tuple[float | None, str],
    source: str,
) -> Row:
    share = proportion_estimate(round(accuracy * images), images)
    return context.row(
        name, "accuracy", share.value, dtype=dtype, params=params, n=images, ci_low=share.ci_low, ci_high=share.ci_high,
        limit=best[0], limit_source=best[1], data_source=source,
    )  # fmt: skip
