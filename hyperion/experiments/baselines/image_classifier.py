"""The vision baseline: ResNet-18 with the CIFAR stem, chosen on held-out training images and tested once at the end."""

import gc
import math
from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import nn

from hyperion.chapter.context import Context, Experiment, Forecast, Options, Report, Result
from hyperion.data import ImageSet, PreparedImages, channel_statistics
from hyperion.data.images.device_images import ImageBatches
from hyperion.measure import FORMATS
from hyperion.measure.steps.compilation import missing_compiler
from hyperion.models import flops_per_image, parameter_count, resnet18
from hyperion.results import Row, proportion_estimate
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
from hyperion.workloads.training_rows import epoch_rows, loss_curve, seed_statistics, steady_rows, step_forecasts
from hyperion.workloads.twins import captured_parity
from hyperion.workloads.workloads import CLASSES, SGD_BYTES_A_PARAMETER

# Activations per image and unit of width: ResNet-18's 20 convolutions (the stem, 16 in blocks, 3 shortcuts), five at each of
# four sizes. Forward and backward, the output of a convolution passes through memory about twelve times: convolution, norm and
# ReLU each write and read it.
_ACTIVATIONS_PER_WIDTH = 5 * (1024 + 512 + 256 + 128)
_PASSES = 12
Images = tuple[np.ndarray, np.ndarray]  # uint8 [N, 3, 32, 32] and labels [N]


class ImageClassifierOptions(Options):
    """Options of `image_classifier`.

    Args:
        width: channels of the first stage.
        batch_size: images of a batch.
        epochs: length of the training.
        train_images: number of training images to use, None for all that are not held out.
        held_out_images: number of training images to hold out.
        test_images: number of test images to use, None for all.
        learning_rate: after a warm-up over `warmup_share` of all steps; a cosine to zero follows.
        warmup_share: share of all steps.
        weight_decay, label_smoothing: of the training.
        border: padding of random crops, "black" or "reflect".
        hole: side of the square that is cut out of each training image, 0 for none.
        compiled: compile the model for training.
        precision: number format, or "auto".
        evaluate_every: epochs between evaluations on the held-out images.
        checkpoint_every: steps between checkpoints.
        seeds: number of trainings.
        target: held-out accuracy for the time to accuracy.
        reaches: least test accuracy.
        steady_time_limit_s: time limit of the measurement of a steady step.
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
    target: float
    reaches: float
    steady_time_limit_s: float


@dataclass(frozen=True)
class _Splits:
    """Three disjoint sets of images. The last training images are held out to choose by."""

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
    """Return the throughput of a steady step."""
    options = ImageClassifierOptions.of(context)
    width, batch = options.width, options.batch_size
    model, dtype = resnet18(CLASSES, width), choose_precision(context.device, options.precision).dtype
    traffic: dict[str, float] = {
        "optimizer": SGD_BYTES_A_PARAMETER * parameter_count(model),
        "activations": batch * width * _ACTIVATIONS_PER_WIDTH * _PASSES * FORMATS[dtype].bytes,
    }
    return step_forecasts(context, model.name, dtype, "image", batch, flops_per_image(CLASSES, width), traffic)


def run(context: Context, report: Report) -> Result:
    """Train, evaluate as planned, test once, then time a steady step; repeat the training with other seeds."""
    image_set, prepared = datasets.images(context)
    options = ImageClassifierOptions.of(context)
    data = _Data(context, options, image_set, _Splits.of(prepared, options))
    seeds = [context.seed + number for number in range(options.seeds)]
    rows, samples, runs = [], [], []
    for number, seed in enumerate(seeds):

        def report_seed(done: int, total: int, note: str, number: int = number) -> None:
            report(number * total + done, len(seeds) * total, note)

        engine, batches, trained = _train(data, seed, report_seed)
        samples.append(_curve(trained))
        if number == 0:
            rows, steady_samples = _rows(data, trained, engine, batches)
            samples.append(steady_samples)
        runs.append(trained)
        # Frees the device's memory for the next. A compiled model refers to itself, so only a collection finds it.
        del engine, batches
        gc.collect()
    if len(seeds) > 1:
        rows += seed_rows(context, runs, data.best_tested, options.target, image_set.source)
    parity, parity_samples = captured_parity(
        context, runs[0].name, _beginning(data), image_set.source, chaotic=True, compiled=not data.why_not_compiled
    )
    return Result(rows + parity, pd.concat(samples + parity_samples, ignore_index=True), image_set.source)


EXPERIMENT = Experiment(
    forecast, run, options=ImageClassifierOptions, isolated=True, forecast_reads=("gemm", "bandwidth"), data=datasets.IMAGES
)


@dataclass(frozen=True)
class TrainedImages:
    """Results of one training.

    Attributes:
        name, dtype: model, and number format of the training.
        steps: number of optimizer steps.
        tested: numbers of the test split, see `evaluate_images`.
    """

    seed: int
    name: str
    dtype: str
    steps: int
    history: History
    tested: dict[str, float]


@dataclass(frozen=True)
class _Data:
    """What every training of a run shares: options and data."""

    context: Context
    options: ImageClassifierOptions
    image_set: ImageSet
    splits: _Splits

    @property
    def precision(self) -> Precision:
        return choose_precision(self.context.device, self.options.precision)

    @property
    def why_not_compiled(self) -> str:
        """Why the model is not compiled, "" if it is."""
        return missing_compiler(self.context.device) if self.options.compiled else "left out by this profile"

    @property
    def best_tested(self) -> tuple[float | None, str]:
        """Limit of the test accuracy, and its source."""
        return _best_possible(self.image_set, len(self.splits.test[0]) == len(self.image_set.test_images))

    def loader(self, split: Images, seed: int, **options: Any) -> ImageBatches:
        return ImageBatches(
            *split,
            self.options.batch_size,
            channel_statistics(self.splits.train[0]),  # of the images to train on, never of held-out ones
            seed=seed,
            device=self.context.device.torch_device,
            dtype=FORMATS[self.precision.dtype].storage,
            **options,
        )

    def training_batches(self, seed: int) -> ImageBatches:
        changes = {"augment": self.image_set.augmentations, "border": self.options.border, "hole": self.options.hole}
        return self.loader(self.splits.train, seed, **changes)

    def engine(self, steps_per_epoch: int, fast: bool) -> ImageEngine:
        """A fresh engine; `fast` compiles the model where possible, and captures the step."""
        options, device = self.options, self.context.device
        with torch.device(device.torch_device):  # a GPU draws the weights faster
            model = resnet18(CLASSES, options.width)
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
            clip_norm=math.inf,  # the published recipes do not clip
            capture=fast,
            label_smoothing=options.label_smoothing,
        )


def compile_training(model: nn.Module, backend: str = "inductor", options: dict | None = None) -> None:
    """Compile the forward and backward pass in training mode; evaluation stays eager.

    Evaluation would be compiled anew, and once more for its last, smaller batch, which takes longer than evaluating.
    """
    plain, compiled = model.forward, torch.compile(model.forward, backend=backend, options=options)
    model.forward = lambda images: (compiled if model.training else plain)(images)


def seed_rows(
    context: Context, runs: list[TrainedImages], best: tuple[float | None, str], target: float, source: str
) -> list[Row]:
    """Return test accuracy and time to the target of every seed, then mean and deviation of the accuracies."""
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
    """Train with one seed, then evaluate the test images once."""
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
        folder=data.context.workspace / f"seed-{seed}",
        report=report,
    )
    tested = engine.evaluate(data.loader(data.splits.test, seed, shuffle=False, drop_last=False))
    return engine, batches, TrainedImages(seed, name, data.precision.dtype, engine.steps, history, tested)


def _beginning(data: _Data) -> Callable[[bool], tuple[ImageEngine, Callable]]:
    """Return a function that starts the training of the first seed anew: fast, or eager and without capture."""

    def begin(fast: bool) -> tuple[ImageEngine, Callable]:
        batches = data.training_batches(data.context.seed)
        return data.engine(len(batches), fast), batches.next_batch

    return begin


def _rows(data: _Data, run: TrainedImages, engine: ImageEngine, batches: ImageBatches) -> tuple[list[Row], pd.DataFrame]:
    """Return the rows of a training and of a steady step timed after it, with the step's samples."""
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
    flops = flops_per_image(CLASSES, options.width)
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
    )
    return rows + steady, samples


def _curve(run: TrainedImages) -> pd.DataFrame:
    """Losses and evaluations; evaluations have the seconds of training until then (`time_s`)."""
    curve = loss_curve(run.history).assign(seed=run.seed)
    ends = {record.step: time_s for record, time_s in zip(run.history.epochs, _training_time_s(run.history), strict=True)}
    evaluated = curve["kind"] == "evaluation"
    return curve.assign(time_s=curve["step"].where(evaluated).map(lambda step: ends.get(step, math.nan)))


def _best_possible(image_set: ImageSet, whole_split: bool) -> tuple[float | None, str]:
    """Return (limit of the accuracy, its source). Only in a whole split is exactly the stated share of labels changed."""
    if image_set.bayes_accuracy is None:
        return 1.0, "every image classified correctly"
    if not whole_split:
        return None, "no limit: how many labels of a part of the split were changed is left to chance"
    return image_set.bayes_accuracy, "share of labels that were not changed: no classifier can know the rest"


def _accuracy_row(
    context: Context, run: TrainedImages, evaluation: dict[str, float], params: dict, best: tuple[float | None, str], source: str
) -> Row:
    """Return the share of images classified correctly, with Wilson's interval.

    Args:
        best: (limit of the accuracy, its source).
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
    """Return seconds of training until the end of each epoch; its untimed warm-up steps count like the timed ones."""
    epochs = history.epochs
    return list(accumulate(e.time_s * e.steps / e.timed_steps if e.timed_steps else math.nan for e in epochs))


def _time_to_accuracy_row(context: Context, run: TrainedImages, target: float, source: str, **params: Any) -> Row:
    """Return seconds of training until the held-out accuracy first reached the target."""
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
