"""The vision baseline: a ResNet-18 whose first layers are adapted to the small images of CIFAR (the "CIFAR stem").

Its options were chosen by the accuracy on held-out training images. The test images are used once, after training.
"""

import gc
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate
from typing import Any, Self

import numpy as np
import pandas as pd
import torch
from pydantic import model_validator
from torch import nn

from hyperion.chapter.context import Context, Experiment, Forecast, Options, Report, Result
from hyperion.data import ImageSet, PreparedImages, channel_statistics
from hyperion.data.images.device_images import ImageBatches
from hyperion.data.images.imageset import CLASS_COUNT
from hyperion.measure import FORMATS
from hyperion.measure.clock.timing import MINIMUM_SAMPLES
from hyperion.measure.steps.compilation import missing_compiler
from hyperion.models import flops_per_image, parameter_count, resnet18
from hyperion.results import Row, mean_estimate, proportion_estimate
from hyperion.training import (
    History,
    ImageEngine,
    Precision,
    TrainingPlan,
    WarmupCosine,
    choose_precision,
    compile_options,
    seed_everything,
    sgd_nesterov,
    train,
)
from hyperion.workloads import datasets
from hyperion.workloads.training_rows import epoch_rows, loss_curve, part_report, seed_statistics, steady_rows, step_forecasts
from hyperion.workloads.twins import captured_parity
from hyperion.workloads.workloads import SGD_BYTES_A_PARAMETER

# Number of activations per image and per unit of width. ResNet-18 has 20 convolutions (1 in the stem, 16 in the blocks, 3 in the
# shortcuts), five at each of four image sizes.
_ACTIVATIONS_PER_WIDTH = 5 * (1024 + 512 + 256 + 128)
# Estimated number of writes and reads of each convolution output in the forward and backward pass, by the convolution, the norm
# and the ReLU.
_PASSES = 12
Images = tuple[np.ndarray, np.ndarray]  # uint8 [N, 3, 32, 32] and labels [N]


class ImageClassifierOptions(Options):
    """Options for the `image_classifier` experiment.

    Args:
        width: number of channels of the first stage.
        batch_size: number of images in a batch.
        epochs: number of training epochs.
        train_images: number of training images to use. None uses all images that are not held out.
        held_out_images: number of training images reserved for evaluation.
        test_images: number of test images to use. None uses all of them.
        learning_rate: peak learning rate, reached at the end of the warm-up. It then falls to zero along a cosine.
        warmup_share: warm-up steps as a share of all steps.
        weight_decay: weight decay of SGD.
        label_smoothing: label smoothing of the training loss.
        border: padding of the random crops, "black" or "reflect".
        hole: side in pixels of the square that is cut out of each training image. 0 cuts out nothing.
        compiled: whether to compile the model for training.
        precision: number format, or "auto".
        evaluate_every: number of epochs between evaluations on the held-out images.
        checkpoint_every: number of steps between checkpoints.
        seeds: number of training runs, each with its own seed.
        compare_with_fp32: whether to train each seed again with float32 tensors, and to compare the test accuracies. If the
            device has TF32 units, matrix products and convolutions use TF32, which is PyTorch's default for convolutions. Needs
            at least two seeds.
        target: held-out accuracy for the metric "time to accuracy", 0 to 1.
        reaches: minimum test accuracy required after training, 0 to 1.
        steady_time_limit_s: timing budget in seconds for single training steps after the training run.
        steady_samples: minimum number of these steps. Use a small number on a CPU, where a step takes long.
    """

    width: int
    batch_size: int
    epochs: int
    train_images: int | None = None
    held_out_images: int
    test_images: int | None = None
    learning_rate: float
    warmup_share: float
    weight_decay: float
    label_smoothing: float
    border: str
    hole: int
    compiled: bool
    precision: str
    evaluate_every: int
    checkpoint_every: int
    seeds: int = 1
    compare_with_fp32: bool = False
    target: float
    reaches: float
    steady_time_limit_s: float
    steady_samples: int = MINIMUM_SAMPLES

    @model_validator(mode="after")
    def _has_seeds_to_compare(self) -> Self:
        if self.compare_with_fp32 and self.seeds < 2:
            raise ValueError("compare_with_fp32 needs at least two seeds")
        return self


@dataclass(frozen=True)
class _Splits:
    """Training, held-out and test images. The held-out images are the last images of the training split."""

    train: Images
    held_out: Images
    test: Images

    @classmethod
    def of(cls, prepared: PreparedImages, options: ImageClassifierOptions) -> "_Splits":
        arrays = prepared.arrays
        images, labels = arrays["train_images"], arrays["train_labels"]
        first_held_out = len(images) - options.held_out_images
        used = min(options.train_images or first_held_out, first_held_out)
        tested = options.test_images or len(arrays["test_images"])
        return cls(
            train=(images[:used], labels[:used]),
            held_out=(images[first_held_out:], labels[first_held_out:]),
            test=(arrays["test_images"][:tested], arrays["test_labels"][:tested]),
        )


def forecast(context: Context) -> list[Forecast]:
    """Predict the throughput of a training step after warm-up."""
    options = ImageClassifierOptions.of(context)
    width, batch = options.width, options.batch_size
    model, dtype = resnet18(CLASS_COUNT, width), choose_precision(context.device, options.precision).dtype
    traffic: dict[str, float] = {
        "optimizer": SGD_BYTES_A_PARAMETER * parameter_count(model),
        "activations": batch * width * _ACTIVATIONS_PER_WIDTH * _PASSES * FORMATS[dtype].bytes,
    }
    return step_forecasts(context, model.name, dtype, "image", batch, flops_per_image(CLASS_COUNT, width), traffic)


def run(context: Context, report: Report) -> Result:
    """Train with each seed, and evaluate on the test images once after each training run.

    After the run with the first seed, time its training step.
    """
    image_set, prepared = datasets.images(context)
    options = ImageClassifierOptions.of(context)
    data = _Data(context, options, image_set, _Splits.of(prepared, options))
    seeds = [context.seed + number for number in range(options.seeds)]
    rows, samples, runs = [], [], []
    parts = len(seeds) * (2 if options.compare_with_fp32 else 1)
    for number, seed in enumerate(seeds):
        report_seed = part_report(report, number, parts)
        engine, batches, trained = _train(data, seed, report_seed)
        samples.append(_curve(trained))
        if number == 0:
            rows, steady_samples = _rows(data, trained, engine, batches)
            samples.append(steady_samples)
        runs.append(trained)
        # Free the device memory for the next training run. A compiled model is part of a reference cycle, so `del` alone does not
        # free it.
        del engine, batches
        gc.collect()
    if len(seeds) > 1:
        rows += seed_rows(context, runs, data.best_tested, options.target, image_set.source)
    if options.compare_with_fp32:
        found, curves = _compared_with_fp32(data, runs, report)
        rows += found
        samples += curves
    parity, parity_samples = captured_parity(
        context, runs[0].name, _beginning(data), image_set.source, chaotic=True, compiled=not data.why_not_compiled
    )
    return Result(rows + parity, pd.concat(samples + parity_samples, ignore_index=True), image_set.source)


EXPERIMENT = Experiment(
    forecast, run, options=ImageClassifierOptions, isolated=True, forecast_reads=("gemm", "bandwidth"), data=datasets.IMAGES
)


@dataclass(frozen=True)
class TrainedImages:
    """Results of one training run.

    Attributes:
        name: name of the model.
        dtype: number format of the training run.
        steps: number of optimizer steps.
        history: losses, times and evaluations of the epochs.
        tested: metrics on the test split, as returned by `evaluate_images`.
    """

    seed: int
    name: str
    dtype: str
    steps: int
    history: History
    tested: dict[str, float]


@dataclass(frozen=True)
class _Data:
    """Data and options shared by all training runs of this experiment."""

    context: Context
    options: ImageClassifierOptions
    image_set: ImageSet
    splits: _Splits

    @property
    def precision(self) -> Precision:
        return choose_precision(self.context.device, self.options.precision)

    @cached_property  # cached, because the evaluation after each epoch needs the values again
    def normalisation(self) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """Mean and standard deviation of each channel of the training images, without held-out and test images."""
        return channel_statistics(self.splits.train[0])

    @property
    def why_not_compiled(self) -> str:
        """Reason why the model is not compiled, or an empty string if it is."""
        return missing_compiler(self.context.device) if self.options.compiled else "left out by this profile"

    @property
    def best_tested(self) -> tuple[float | None, str]:
        """Pair (largest possible test accuracy, source of this limit), or (None, reason why there is no limit)."""
        return _best_possible(self.image_set, len(self.splits.test[0]) == len(self.image_set.test_images))

    def loader(self, split: Images, seed: int, **options: Any) -> ImageBatches:
        return ImageBatches(
            *split,
            self.options.batch_size,
            self.normalisation,
            seed=seed,
            device=self.context.device.torch_device,
            dtype=FORMATS[self.precision.dtype].storage,
            **options,
        )

    def training_batches(self, seed: int) -> ImageBatches:
        changes = {"augment": self.image_set.augmentations, "border": self.options.border, "hole": self.options.hole}
        return self.loader(self.splits.train, seed, **changes)

    def engine(self, steps_per_epoch: int, fast: bool) -> ImageEngine:
        """Return a new training engine. If `fast` is True, compile the model where possible and run the step as a CUDA graph."""
        options, device = self.options, self.context.device
        with torch.device(device.torch_device):  # on a GPU, drawing the initial weights is faster
            model = resnet18(CLASS_COUNT, options.width)
        if fast and not self.why_not_compiled:
            compile_training(model, options=compile_options(device))
        total = options.epochs * steps_per_epoch
        warmup = max(1, int(options.warmup_share * total))
        return ImageEngine(
            model,
            sgd_nesterov(model, options.learning_rate, options.weight_decay),
            WarmupCosine(options.learning_rate, warmup, total, final_fraction=0.0),
            self.precision,
            device,
            clip_norm=math.inf,  # the published recipes do not clip gradients
            capture=fast,
            label_smoothing=options.label_smoothing,
        )


def _compared_with_fp32(data: _Data, runs: list[TrainedImages], report: Report) -> tuple[list[Row], list[pd.DataFrame]]:
    """Train again with the same seeds and float32 tensors, and compare the test accuracies.

    Return (rows, curves): the rows of these training runs and of the accuracy differences, and the curves of these runs.
    """
    context, options, source = data.context, data.options, data.image_set.source
    dtype = "tf32" if context.device.supports("tf32")[0] else "fp32"
    params = {"split": "test, mean of seeds", "seeds": len(runs), "step": runs[0].steps, "from": dtype}
    if runs[0].dtype == dtype:
        reason = f"no difference: the training itself runs in {dtype}"
        return [context.absent_row(runs[0].name, "accuracy_difference", reason, dtype=dtype, params=params)], []
    other = replace(data, options=options.model_copy(update={"precision": dtype}))
    trained = []
    for number, run in enumerate(runs):
        trained.append(_train(other, run.seed, part_report(report, len(runs) + number, 2 * len(runs)))[2])
        gc.collect()  # see `run`
    rows = seed_rows(context, trained, data.best_tested, options.target, source)
    differences = [run.tested["accuracy"] - one.tested["accuracy"] for run, one in zip(runs, trained, strict=True)]
    rows.append(
        context.row(
            runs[0].name,
            "accuracy_difference",
            mean_estimate(differences),
            dtype=runs[0].dtype,
            params=params,
            data_source=source,
        )
    )
    # The curves get a different "kind", because the figures draw only the curves of the first precision.
    curves = [_curve(one) for one in trained]
    return rows, [curve.assign(kind=curve["kind"] + f", {dtype}") for curve in curves]


def compile_training(model: nn.Module, backend: str = "inductor", options: dict | None = None) -> None:
    """Compile the forward and backward pass in training mode. In evaluation mode the model stays eager.

    Evaluation mode would need two more compilations, for full batches and for the smaller last batch. They would take longer than
    the evaluation itself.
    """
    plain, compiled = model.forward, torch.compile(model.forward, backend=backend, options=options)
    model.forward = lambda images: (compiled if model.training else plain)(images)


def seed_rows(
    context: Context, runs: list[TrainedImages], best: tuple[float | None, str], target: float, source: str
) -> list[Row]:
    """Return the rows with the test accuracy and the time to accuracy for every seed.

    The last two rows give the mean and the standard deviation of the test accuracies over the seeds.

    Args:
        runs: results of the training runs, one per seed.
        best: (largest possible accuracy, source of this limit), or (None, reason why there is no limit).
        target: held-out accuracy whose time is measured, 0 to 1.
        source: data source.
    """
    rows = []
    for run in runs:
        params = {"split": "test, every seed", "seed": run.seed, "step": run.steps}
        rows.append(_accuracy_row(context, run, run.tested, params, best, source))
        rows.append(_time_to_accuracy_row(context, run, target, source, seed=run.seed))
    name, dtype = runs[0].name, runs[0].dtype
    params = {"split": "test, mean of seeds", "seeds": len(runs), "step": runs[0].steps}
    shared = {"dtype": dtype, "params": params, "data_source": source}
    accuracies = [run.tested["accuracy"] for run in runs]
    return rows + seed_statistics(context, name, "accuracy", accuracies, best, shared, most=1.0)


def _train(data: _Data, seed: int, report: Report) -> tuple[ImageEngine, ImageBatches, TrainedImages]:
    """Train a new model with one seed, then evaluate it once on the test images."""
    seed_everything(seed)
    options, batches = data.options, data.training_batches(seed)
    engine = data.engine(len(batches), fast=True)
    name = str(engine.model.name)
    how = f"not compiled ({reason}), " if (reason := data.why_not_compiled) else "compiled, "
    how += "each replayed as one graph" if not engine.uncaptured else f"one by one ({engine.uncaptured})"
    print(f"{name}: {options.epochs * len(batches)} steps in {data.precision}, {how}")
    plan = TrainingPlan(epochs=options.epochs, evaluate_every=options.evaluate_every, checkpoint_every=options.checkpoint_every)
    history = train(
        engine,
        batches,
        plan,
        validation=lambda: data.loader(data.splits.held_out, seed, shuffle=False, drop_last=False),
        folder=data.context.workspace / f"seed-{seed}-{data.precision.dtype}",
        report=report,
    )
    tested = engine.evaluate(data.loader(data.splits.test, seed, shuffle=False, drop_last=False))
    return engine, batches, TrainedImages(seed, name, data.precision.dtype, engine.steps, history, tested)


def _beginning(data: _Data) -> Callable[[bool], tuple[ImageEngine, Callable]]:
    """Return a function that builds a new engine and a new loader for the first seed.

    Its argument is True to compile the model and run the step as a CUDA graph, and False to run the step eagerly.
    """

    def begin(fast: bool) -> tuple[ImageEngine, Callable]:
        batches = data.training_batches(data.context.seed)
        return data.engine(len(batches), fast), batches.next_batch

    return begin


def _rows(data: _Data, run: TrainedImages, engine: ImageEngine, batches: ImageBatches) -> tuple[list[Row], pd.DataFrame]:
    """Return the rows of one training run, and the rows and samples of training steps timed after it."""
    context, source, options = data.context, data.image_set.source, data.options
    rows = epoch_rows(context, run.name, run.dtype, engine, run.history, source)
    for record in run.history.epochs:
        if record.evaluation is not None:
            params = {"epoch": record.epoch, "step": record.step, "split": "held-out train"}
            best = _best_possible(data.image_set, False)
            rows.append(_accuracy_row(context, run, record.evaluation, params, best, source))
    params = {"split": "test", "step": run.steps}
    rows.append(_accuracy_row(context, run, run.tested, params, data.best_tested, source))
    rows.append(_time_to_accuracy_row(context, run, options.target, source))
    if engine.capture_time_s is not None:
        params = {"what": "the step, warmed up and recorded as a graph", "compiled": not data.why_not_compiled}
        columns = {"dtype": run.dtype, "params": params, "data_source": source}
        rows.append(context.row(run.name, "compile_time_s", engine.capture_time_s, **columns))
    flops = flops_per_image(CLASS_COUNT, options.width)
    steady, samples = steady_rows(
        context,
        run.name,
        engine,
        batches.next_batch(),
        options.batch_size,
        flops,
        flops.forward_backward,
        source,
        options.steady_time_limit_s,
        options.steady_samples,
    )
    return rows + steady, samples


def _curve(run: TrainedImages) -> pd.DataFrame:
    """Return a table with the loss of each step and the evaluations.

    For evaluations, the column "time_s" gives the training time in seconds up to that point.
    """
    curve = loss_curve(run.history).assign(seed=run.seed)
    ends = {record.step: time_s for record, time_s in zip(run.history.epochs, _training_time_s(run.history), strict=True)}
    evaluated = curve["kind"] == "evaluation"
    return curve.assign(time_s=curve["step"].where(evaluated).map(lambda step: ends.get(step, math.nan)))


def _best_possible(image_set: ImageSet, whole_split: bool) -> tuple[float | None, str]:
    """Return (largest possible accuracy, source of this limit), or (None, reason why there is no limit).

    A known share of the synthetic labels is deliberately wrong, so no model can reach an accuracy of 1. The share is exact only
    for the whole split, so part of a split has no limit.

    Args:
        image_set: set of images.
        whole_split: whether all images of the test split are used.
    """
    if image_set.bayes_accuracy is None:
        return 1.0, "every image classified correctly"
    if not whole_split:
        return None, "no limit: how many labels of a part of the split were changed is left to chance"
    return image_set.bayes_accuracy, "share of labels that were not changed: no classifier can know the rest"


def _accuracy_row(
    context: Context, run: TrainedImages, evaluation: dict[str, float], params: dict, best: tuple[float | None, str], source: str
) -> Row:
    """Return the row with the accuracy and its Wilson score interval.

    Args:
        best: (largest possible accuracy, source of this limit), or (None, reason why there is no limit).
    """
    images = int(evaluation["images"])
    share = proportion_estimate(round(evaluation["accuracy"] * images), images)
    return context.row(
        run.name,
        "accuracy",
        share,
        dtype=run.dtype,
        params=params,
        n=images,
        limit=best[0],
        limit_source=best[1],
        data_source=source,
    )


def _training_time_s(history: History) -> list[float]:
    """Return the training time in seconds from the start of the run to the end of each epoch.

    The warm-up steps of an epoch are not timed. Each counts as the mean time of the timed steps of the same epoch.
    """
    epochs = history.epochs
    return list(accumulate(e.time_s * e.steps / e.timed_steps if e.timed_steps else math.nan for e in epochs))


def _time_to_accuracy_row(context: Context, run: TrainedImages, target: float, source: str, **params: Any) -> Row:
    """Return the row with the training time in seconds until the held-out accuracy first reached `target`."""
    reached = [
        time_s
        for time_s, record in zip(_training_time_s(run.history), run.history.epochs, strict=True)
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
