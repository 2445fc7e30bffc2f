"""The vision baseline: ResNet-18 with the CIFAR stem, chosen on held-out training images, tested once at the end."""

import gc
import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import pandas as pd
import torch
from torch import nn

from hyperion.chapter.context import Context, Experiment, Forecast, Result
from hyperion.data import ImageSet, PreparedImages, channel_statistics
from hyperion.data.images.device_images import ImageBatches
from hyperion.experiments.baselines.captured_parity import captured_parity
from hyperion.experiments.baselines.image_rows import Trained, accuracy_row, seed_rows, time_to_row, training_time_s
from hyperion.measure import FORMATS
from hyperion.measure.steps.compilation import missing_compiler
from hyperion.models import flops_per_image, parameter_count, resnet18
from hyperion.results import Row
from hyperion.training import (
    ImageEngine,
    Plan,
    Precision,
    WarmupCosine,
    choose_precision,
    compile_options,
    seed_everything,
    sgd_nesterov,
    train,
)
from hyperion.workloads import datasets
from hyperion.workloads.training_rows import SGD_BYTES_A_PARAMETER, epoch_rows, loss_curve, steady_rows, step_forecasts

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
    """Train, look at the held-out images as planned, test once, then time the steady step; then again with other seeds."""
    image_set, prepared = datasets.images(context)
    splits = _Splits.of(prepared, context.sizes)
    seeds = [context.seed + number for number in range(context.sizes.get("seeds", 1))]
    best = _best_possible(image_set, len(splits.test[0]) == len(image_set.test_images))
    rows, curves, trained = [], [], []
    for number, seed in enumerate(seeds):

        def told(done: int, total: int, note: str, number: int = number) -> None:
            report(number * total + done, len(seeds) * total, note)

        run = _train(context, image_set, splits, seed, told)
        if number == 0:
            rows, curves = _rows(context, run, image_set, best)
        else:
            curves.append(_curve(run))
        trained.append(replace(run, engine=None, batches=None))
        del run  # leaves the device's memory for the next, once what a compiled model holds of itself is found
        gc.collect()
    if len(seeds) > 1:
        rows += seed_rows(context, trained, best, image_set.source)
    parity, samples = captured_parity(
        context,
        trained[0].name,
        _beginning(context, image_set, splits),
        image_set.source,
        chaotic=True,
        compiled=not _why_not_compiled(context),
    )
    return Result(rows + parity, pd.concat(curves + samples, ignore_index=True), image_set.source)


EXPERIMENT = Experiment(forecast, run, isolated=True, forecast_reads=("gemm", "bandwidth"), data=datasets.IMAGES)


def _train(context: Context, image_set: ImageSet, splits: _Splits, seed: int, report) -> Trained:
    """One training from a seed, and its one look at the test images."""
    seed_everything(seed)
    sizes = context.sizes
    precision, loader = choose_precision(context.device, sizes["precision"]), _loaders(context, splits, seed)
    batches = loader(splits.train, **_changes(context, image_set))
    engine = _engine(context, precision, len(batches), fast=True)
    how = f"not compiled ({reason}), " if (reason := _why_not_compiled(context)) else "compiled, "
    how += "each replayed as one graph" if not engine.uncaptured else f"one by one ({engine.uncaptured})"
    print(f"{engine.model.name}: {sizes['epochs'] * len(batches)} steps in {precision}, {how}")
    plan = Plan(epochs=sizes["epochs"], evaluate_every=sizes["evaluate_every"], checkpoint_every=sizes["checkpoint_every"])
    history = train(
        engine,
        batches,
        plan,
        validation=lambda: loader(splits.held_out, shuffle=False, drop_last=False),
        folder=context.workspace / f"seed-{seed}",
        report=report,
    )
    tested = engine.evaluate(loader(splits.test, shuffle=False, drop_last=False))
    return Trained(seed, engine.model.name, precision.dtype, engine.steps, history, tested, engine, batches)


def _loaders(context: Context, splits: _Splits, seed: int) -> Callable[..., ImageBatches]:
    dtype = choose_precision(context.device, context.sizes["precision"]).dtype
    normalisation = channel_statistics(splits.train[0])  # of what is trained on, and of nothing held out

    def loader(split: tuple[np.ndarray, np.ndarray], **options) -> ImageBatches:
        options |= {"seed": seed, "device": context.device.torch_device, "dtype": FORMATS[dtype].storage}
        return ImageBatches(*split, context.sizes["batch_size"], normalisation, **options)

    return loader


def _changes(context: Context, image_set: ImageSet) -> dict:
    sizes = context.sizes
    return {"augment": image_set.augmentations, "border": sizes["border"], "hole": sizes["hole"]}


def _beginning(context: Context, image_set: ImageSet, splits: _Splits) -> Callable[[bool], tuple[ImageEngine, Callable]]:
    """What begins a training from the first seed: as it is made, or eager and one step after the other."""
    precision = choose_precision(context.device, context.sizes["precision"])

    def begin(fast: bool) -> tuple[ImageEngine, Callable]:
        batches = _loaders(context, splits, context.seed)(splits.train, **_changes(context, image_set))
        return _engine(context, precision, len(batches), fast), batches.next_batch

    return begin


def _engine(context: Context, precision: Precision, steps_per_epoch: int, fast: bool) -> ImageEngine:
    """Args:
    fast: compiled where that is possible, and recorded.
    """
    sizes, device = context.sizes, context.device
    with torch.device(device.torch_device):  # weights are drawn where they stay
        model = resnet18(CLASSES, sizes["width"])
    if fast and not _why_not_compiled(context):
        compile_training(model, options=compile_options(device))
    optimizer = sgd_nesterov(model, sizes["learning_rate"], sizes["weight_decay"])
    total = sizes["epochs"] * steps_per_epoch
    warmup = max(1, int(sizes["warmup_share"] * total))
    schedule = WarmupCosine(sizes["learning_rate"], warmup, total, final_fraction=0.0)
    # Nothing is clipped, as in the published recipes.
    return ImageEngine(
        model, optimizer, schedule, precision, device, clip_norm=math.inf, capture=fast, label_smoothing=sizes["label_smoothing"]
    )


def _why_not_compiled(context: Context) -> str:
    if not context.sizes["compiled"]:
        return "left out by this profile"
    return missing_compiler(context.device)


def compile_training(model: nn.Module, backend: str = "inductor", options: dict | None = None) -> None:
    """Compile a model's forward and backward pass as they are in training. Evaluation stays eager: it would be compiled
    anew, and once more for its last batch, which is smaller, and is over in less time than that.
    """
    plain, compiled = model.forward, torch.compile(model.forward, backend=backend, options=options)
    model.forward = lambda images: (compiled if model.training else plain)(images)


def _rows(
    context: Context, run: Trained, image_set: ImageSet, best: tuple[float | None, str]
) -> tuple[list[Row], list[pd.DataFrame]]:
    """Rows and curves of a training, and of a steady step, timed after it."""
    source, engine = image_set.source, run.engine
    rows = epoch_rows(context, run.name, run.dtype, engine, run.history, source)
    for record in run.history.epochs:
        if record.evaluation is not None:
            params = {"epoch": record.epoch, "step": record.step, "split": "held-out train"}
            rows.append(accuracy_row(context, run, record.evaluation, params, _best_possible(image_set, False), source))
    rows.append(accuracy_row(context, run, run.tested, {"split": "test", "step": run.steps}, best, source))
    rows.append(time_to_row(context, run, source))
    if engine.capture_time_s is not None:
        compiled = {"compiled": not _why_not_compiled(context)}
        what = {"what": "the step, warmed up and recorded as a graph"} | compiled
        rows.append(
            context.row(run.name, "compile_time_s", engine.capture_time_s, dtype=run.dtype, params=what, data_source=source)
        )
    sizes = context.sizes
    flops = flops_per_image(CLASSES, sizes["width"])
    steady, samples = steady_rows(
        context, run.name, engine, run.batches.next_batch(), sizes["batch_size"], flops, flops.forward_backward, source
    )
    return rows + steady, [_curve(run), samples]


def _curve(run: Trained) -> pd.DataFrame:
    curve = loss_curve(run.history).assign(seed=run.seed)
    ends = {record.step: time_s for record, time_s in zip(run.history.epochs, training_time_s(run.history), strict=True)}
    evaluated = curve["kind"] == "evaluation"
    return curve.assign(time_s=curve["step"].where(evaluated).map(ends))


def _best_possible(image_set: ImageSet, whole_split: bool) -> tuple[float | None, str]:
    """(accuracy that no classifier can pass, why). Exactly the stated share of labels is changed in a whole split only."""
    if image_set.bayes_accuracy is None:
        return 1.0, "every image classified correctly"
    if not whole_split:
        return None, "no limit: how many labels of a part of the split were changed is left to chance"
    return image_set.bayes_accuracy, "share of labels that were not changed: no classifier can know the rest"
