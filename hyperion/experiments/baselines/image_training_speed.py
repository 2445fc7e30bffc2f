"""Speed of this library's ResNet-18 training compared with a plain public training loop, on one device.

The steps of both loops are timed in alternation, so that clock drift affects both. The speed ladder (see `speed_ladder`) leads
from the plain loop to this library's loop. It adds a graph, this library's loader and the fused optimizer one after the other.
"""

import copy
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import pandas as pd
import torch

from hyperion.chapter.context import Context, Experiment, Forecast, Options, Report, Result
from hyperion.chapter.rows import out_of_memory_reason, timed_row
from hyperion.data import ImageSet, PreparedImages, channel_statistics
from hyperion.data.images.device_images import ImageBatches
from hyperion.data.images.imageset import CLASS_COUNT
from hyperion.errors import not_none
from hyperion.experiments.baselines.paired_loops import CAPTURED, OURS, PLAIN, PairedLoops
from hyperion.experiments.baselines.plain_loops import CapturedImageLoop, PlainImageLoop, copy_weights, plain_model, wait_for
from hyperion.experiments.baselines.products_alone import ProductsAlone, products_of, time_alone
from hyperion.experiments.baselines.speed_ladder import Rung, attempt, ladder_rows, time_rungs
from hyperion.measure import FORMATS, Timing, time_interleaved
from hyperion.models import resnet18
from hyperion.results import Row
from hyperion.training import ImageEngine, choose_precision, compile_options, seed_everything, sgd_nesterov
from hyperion.training.captured import why_not_captured
from hyperion.workloads import datasets
from hyperion.workloads.training_rows import memory_released, rate_forecast
from hyperion.workloads.twins import agreements, train_twins, twin_format
from hyperion.workloads.workloads import ImageSizes, Workload, workload

OF_PRODUCTS = "of its products alone"
UNCOMPILED = "plain, not compiled"
OUR_LOADER, FUSED = "plain, our loader", "plain, fused optimizer"
_HOST_UNKNOWN = (
    "no prediction: the time that the plain loop loses because its host launches kernels one by one is not in any data sheet"
)


class ImageTrainingSpeedOptions(Options):
    """Options for the `image_training_speed` experiment.

    Args:
        width: number of channels of the first stage.
        batches: batch sizes at which the loops are compared.
        train_images: number of training images to use. None uses all of them.
        learning_rate: constant learning rate.
        precision: number format, or "auto".
        compiled: whether to compile the model of this library's loop.
        plain_compiled: whether to compile the model of the plain loop.
        parity_steps: number of steps whose losses are compared.
        steps_in_a_row: number of steps that one loop runs before the other takes over.
        time_limit_s: timing budget in seconds for each measurement.
        ladder_s: timing budget in seconds for the speed ladder at each batch size.
    """

    width: int
    batches: tuple[int, ...]
    train_images: int | None = None
    learning_rate: float
    precision: str
    compiled: bool
    plain_compiled: bool
    parity_steps: int
    steps_in_a_row: int
    time_limit_s: float
    ladder_s: float = 1.0

    def work(self, batch: int) -> Workload:
        """Return the workload of the training step at this batch size."""
        return workload(ImageSizes(width=self.width, batch_size=batch))


def forecast(context: Context) -> list[Forecast]:
    """Predict the images per second of this library's loop from measured rates and the model's shapes, but no speed-up."""
    options = ImageTrainingSpeedOptions.of(context)
    dtype = choose_precision(context.device, options.precision).dtype
    ratios, rates = [], []
    for batch in options.batches:
        work = options.work(batch)
        rates.append(replace(rate_forecast(context, work, dtype), params=_params(batch, OURS)))
        params = _params(batch, OURS) | {"over": PLAIN}
        ratios.append(Forecast(work.name, "speedup", None, _HOST_UNKNOWN, dtype=dtype, params=params))
    return ratios + rates


def run(context: Context, report: Report) -> Result:
    """For each batch size, compare the losses of both loops on the same batches, then time their steps in alternation."""
    options = ImageTrainingSpeedOptions.of(context)
    image_set, prepared = datasets.images(context)
    # Applies to both loops. It need not be restored, because the process ends with the experiment.
    torch.backends.cudnn.benchmark = True
    rows, frames = [], []
    for number, batch in enumerate(options.batches):
        report(number, len(options.batches), f"batch {batch}")
        with memory_released():
            try:
                pair = _Pair.build(context, options, image_set, prepared, batch)
                rows += _parity(pair, frames)
                rows += _speeds(pair, frames)
                del pair
            except torch.OutOfMemoryError as error:
                name, reason = options.work(batch).name, out_of_memory_reason(error)
                rows.append(context.absent_row(name, "step_time_s", reason, params=_params(batch, OURS)))
    return Result(rows, pd.concat(frames, ignore_index=True) if frames else pd.DataFrame(), image_set.source)


EXPERIMENT = Experiment(
    forecast, run, options=ImageTrainingSpeedOptions, isolated=True, forecast_reads=("gemm", "bandwidth"), data=datasets.IMAGES
)


@dataclass
class _Pair:
    """Both loops at one batch size, with the same initial weights.

    Attributes:
        options: options of the experiment.
        loops: builder of the rows that compare both loops.
        engine: training engine of this library's loop.
        batches: loader of this library's loop.
        plain: the plain loop.
        published: name of the library that defines the plain loop's model.
        fresh_plain: function that returns a new plain loop with the initial weights. Its arguments `compiled` and `fused` are
            those of `PlainImageLoop`, False by default.
        fresh_batches: function that returns a new loader that starts at the first batch.
        captured: the plain loop whose step runs as a CUDA graph, or None if this device cannot capture the step.
    """

    options: ImageTrainingSpeedOptions
    loops: PairedLoops
    engine: ImageEngine
    batches: ImageBatches
    plain: PlainImageLoop
    captured: CapturedImageLoop | None
    published: str
    fresh_plain: Callable[..., PlainImageLoop]
    fresh_batches: Callable[[], ImageBatches]

    @classmethod
    def build(
        cls, context: Context, options: ImageTrainingSpeedOptions, image_set: ImageSet, prepared: PreparedImages, batch: int
    ) -> "_Pair":
        device = context.device
        if options.compiled or options.plain_compiled:
            torch.compiler.reset()  # otherwise torch.compile would compile for dynamic sizes, because the batch size changes
        precision, rate = choose_precision(device, options.precision), options.learning_rate
        images, labels = (np.array(prepared.arrays[f"train_{name}"][: options.train_images]) for name in ("images", "labels"))
        normalisation = channel_statistics(images)

        def fresh_batches() -> ImageBatches:
            return ImageBatches(
                images,
                labels,
                batch,
                normalisation,
                seed=context.seed,
                augment=image_set.augmentations,
                device=device.torch_device,
                dtype=FORMATS[precision.dtype].storage,
            )

        seed_everything(context.seed)
        model = resnet18(CLASS_COUNT, options.width)
        other, published = plain_model(options.width)
        copy_weights(model, other)
        # An untrained copy of the weights, from which each new plain loop starts.
        weights = copy.deepcopy(other)

        def fresh_plain(compiled: bool = False, fused: bool = False) -> PlainImageLoop:
            return PlainImageLoop(
                copy.deepcopy(weights),
                images,
                labels,
                normalisation,
                image_set.augmentations,
                batch,
                rate,
                precision,
                device,
                compiled,
                fused,
            )

        plain, batches = fresh_plain(options.plain_compiled), fresh_batches()
        model = model.to(device.torch_device)
        # Both loops must do the same update. The published loop applies weight decay to norms too and does not clip gradients, so
        # weight decay and clipping are off in both.
        engine = ImageEngine(
            model,
            sgd_nesterov(model, rate, weight_decay=0.0),
            lambda step: rate,
            precision,
            device,
            clip_norm=math.inf,
            capture=True,
        )
        if options.compiled:
            model.compile(options=compile_options(device))
        how = engine.uncaptured or "replayed as a graph"
        print(f"batch {batch}: ours {how}; the plain loop trains the ResNet-18 of {published}")
        params = {"batch": batch, "loader": "included"}
        loops = PairedLoops(context, options.work(batch), precision.dtype, image_set.source, params)
        captured = (
            None if why_not_captured(device, 1, precision.dtype) else CapturedImageLoop(fresh_plain(options.plain_compiled))
        )
        return cls(options, loops, engine, batches, plain, captured, published, fresh_plain, fresh_batches)

    def train_on(self, loop: str, images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Run one optimizer step on a given batch with the named loop. Return the loss before the update."""
        if loop == PLAIN:
            # The plain loop stores its images as float32, so it receives this format here as well.
            return self.plain.train_on(images.float(), labels)
        if loop == CAPTURED:
            return not_none(self.captured).train_on(images.float(), labels)
        return self.engine.train_step((images, labels)).loss

    def our_step(self) -> torch.Tensor:
        """Run one optimizer step of this library's loop on its next batch. Return the loss before the update."""
        return self.engine.train_step(self.batches.next_batch()).loss


def _parity(pair: _Pair, frames: list[pd.DataFrame]) -> list[Row]:
    """Compare the losses of the loops with those of an uncompiled plain loop on the same batches.

    Returns:
        The rows of the comparison, and one row with the first step's time for each loop whose first step compiles or captures.
    """
    options, loops, steps = pair.options, pair.loops, pair.options.parity_steps
    losses: dict[str, list[torch.Tensor]] = {OURS: [], PLAIN: []} | ({} if pair.captured is None else {CAPTURED: []})
    first_s: dict[str, float] = {}
    for step in range(steps):
        images, labels = pair.batches.next_batch()
        for name, curve in losses.items():
            started = time.perf_counter()
            curve.append(pair.train_on(name, images, labels))
            # Wait only for the first step, which compiles. Waiting in every step would slow the loops down.
            if step == 0:
                wait_for(loops.context.device)
                first_s[name] = time.perf_counter() - started
    curves = {name: torch.stack(curve).float().cpu().numpy() for name, curve in losses.items()}
    twins = train_twins(twin_format(loops.dtype), loops.context.seed, lambda: _plain_losses(pair, steps))
    # The reference is an uncompiled plain loop. The tolerance comes from this reference and its twins, so a fault in the timed
    # plain loop cannot widen the tolerance.
    uncompiled = np.array(_plain_losses(pair, steps))
    rows = [
        loops.parity(
            steps, agreement.difference, agreement.check, agreement.tolerance, of=name, **{"from": UNCOMPILED}, **agreement.params
        )
        for name, curve in curves.items()
        for agreement in agreements(curve, uncompiled, twins)
    ]
    frames += [loops.curves_frame(curves | {UNCOMPILED: uncompiled}), twins.assign(batch=loops.work.items)]
    slow_first = {OURS: options.compiled or not pair.engine.uncaptured, PLAIN: options.plain_compiled, CAPTURED: True}
    return rows + loops.first_steps({name: seconds for name, seconds in first_s.items() if slow_first[name]})


def _plain_losses(pair: _Pair, steps: int) -> list[float]:
    """Train a new, uncompiled plain loop from the initial weights on the same batches. Return the loss of every step."""
    plain, batches = pair.fresh_plain(), pair.fresh_batches()
    losses = []
    for _ in range(steps):
        images, labels = batches.next_batch()
        losses.append(plain.train_on(images.float(), labels))
    return torch.stack(losses).tolist()


def _speeds(pair: _Pair, frames: list[pd.DataFrame]) -> list[Row]:
    """Time the steps of all loops, the steps of the speed ladder, and each matrix product of the step alone.

    The steps of the loops are timed in alternation, and so are those of the ladder. Both timings include the loaders.
    """
    options, loops, device = pair.options, pair.loops, pair.loops.context.device
    steps: dict[str, Callable[[], torch.Tensor]] = {OURS: pair.our_step, PLAIN: pair.plain.step}
    if pair.captured is not None:
        steps[CAPTURED] = pair.captured.step
    timings = time_interleaved(
        list(steps.values()), device, cold=False, time_limit_s=options.time_limit_s, back_to_back=options.steps_in_a_row
    )
    by_loop: dict[str, Timing] = dict(zip(steps, timings, strict=True))
    how = {
        "compiled": options.compiled,
        "replayed": not pair.engine.uncaptured,
        "plain_compiled": options.plain_compiled,
        "plain_model": pair.published,
    }
    rows, samples = loops.speeds(by_loop, how)
    if pair.captured is None:
        columns = loops.of(OURS)
        columns["params"] |= {"over": CAPTURED} | how
        reason = why_not_captured(device, 1, loops.dtype)
        rows.append(loops.context.absent_row(loops.work.name, "speedup", reason, **columns))
    frames.append(samples)
    rows += _climbed(pair, by_loop, frames)
    products, precision = products_of(loops.work, options.compiled), pair.engine.precision
    alone: ProductsAlone | str
    try:
        alone = time_alone(products, precision, device, options.time_limit_s)
        frames.append(alone.frame(loops.work.name, precision.dtype, {"batch": loops.work.items}))
    except torch.OutOfMemoryError as error:  # both loops are still in memory; their timings remain valid
        alone = out_of_memory_reason(error)
    return rows + [_products_row(loops, name, timing, alone) for name, timing in by_loop.items()]


def _climbed(pair: _Pair, timings: dict[str, Timing], frames: list[pd.DataFrame]) -> list[Row]:
    """Time the steps of all rungs of the speed ladder in alternation, loaders included.

    Args:
        pair: both loops.
        timings: timings of the loops. If the plain step cannot be captured, no other rung runs, and these timings are reused.
        frames: list to which the samples are appended.
    """
    options, loops, device, captured = pair.options, pair.loops, pair.loops.context.device, pair.captured
    adds = {
        PLAIN: "",
        CAPTURED: "the step is replayed as a graph",
        OUR_LOADER: "this library's loader",
        FUSED: "the fused update of SGD",
        OURS: "this library's model and training step",
    }
    steps: dict[str, Callable[[], torch.Tensor] | str] = {PLAIN: pair.plain.step, OURS: pair.our_step}
    if captured is None:
        steps |= dict.fromkeys((CAPTURED, OUR_LOADER, FUSED), why_not_captured(device, 1, loops.dtype))
    else:

        def on_our_batches(loop: CapturedImageLoop) -> torch.Tensor:
            images, labels = pair.batches.next_batch()
            return loop.train_on(images.float(), labels)

        def fused() -> Callable[[], torch.Tensor]:
            step = partial(on_our_batches, CapturedImageLoop(pair.fresh_plain(options.plain_compiled, fused=True)))
            step()
            wait_for(device)
            return step

        steps |= {CAPTURED: captured.step, OUR_LOADER: partial(on_our_batches, captured), FUSED: attempt(fused)}
    rungs = [Rung(name, change, steps[name]) for name, change in adds.items()]
    climb = partial(time_rungs, device, rungs, options.ladder_s, options.steps_in_a_row)
    rows, samples = ladder_rows(loops, rungs, timings if captured is None else attempt(climb))
    frames += samples
    return rows


def _products_row(loops: PairedLoops, name: str, timing: Timing, alone: ProductsAlone | str) -> Row:
    """Return a row that states what fraction of the step time the step's matrix products take if each is timed alone.

    Args:
        loops: builder of the rows that compare both loops.
        name: name of the loop whose step time is used.
        timing: timing of the loop's steps.
        alone: timings of the matrix products, or the reason why they could not be timed. The row then has the reason instead of
            a value.
    """
    columns = loops.of(name)
    columns["params"] |= {"what": OF_PRODUCTS}
    if isinstance(alone, str):
        return loops.context.absent_row(loops.work.name, "share", alone, **columns)
    columns["params"] |= {f"{part}_s": float(f"{seconds:.4g}") for part, seconds in alone.seconds.items()}
    share = alone.share(timing)
    return timed_row(loops.context, loops.work.name, "share", share, timing, **columns)


def _params(batch: int, loop: str) -> dict:
    return {"batch": batch, "loop": loop, "loader": "included"}
