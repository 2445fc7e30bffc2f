"""Our way of training ResNet-18, loader and augmentation included, beside the plain public one, in turn on one device."""

import copy
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import pandas as pd
import torch

from hyperion.chapter.context import Context, Experiment, Forecast, Result
from hyperion.chapter.rows import out_of_memory_reason, timed_columns
from hyperion.data import PreparedImages, channel_statistics
from hyperion.data.images.device_images import ImageBatches
from hyperion.data.images.imageset import ImageSet
from hyperion.experiments.baselines.paired_loops import OURS, PLAIN, PairedLoops, wait_for
from hyperion.experiments.baselines.plain_image_loop import CLASSES, PlainLoop, copy_weights, plain_model
from hyperion.experiments.baselines.products_alone import ProductsAlone, products_of, time_alone
from hyperion.measure import FORMATS, Timing, time_interleaved
from hyperion.models import resnet18
from hyperion.results import Row
from hyperion.training import ImageEngine, choose_precision, compile_options, seed_everything, sgd_nesterov
from hyperion.workloads import datasets
from hyperion.workloads.step_comparison import emptied_afterwards
from hyperion.workloads.training_rows import step_forecasts
from hyperion.workloads.twins import agreements, train_twins, twin_format
from hyperion.workloads.workloads import Workload, workload

OF_PRODUCTS = "of its products alone"
UNCOMPILED = "plain, not compiled"
_HOST_UNKNOWN = "what the plain loop loses while its host launches kernels one by one, which no data sheet tells"


def forecast(context: Context) -> list[Forecast]:
    """Images per second of ours from ceilings and shapes. The speed-up is to be guessed."""
    dtype = choose_precision(context.device, context.sizes["precision"]).dtype
    ratios, rates = [], []
    for batch in context.sizes["batches"]:
        work = _work(context, batch)
        half = FORMATS[dtype].bytes / 4
        traffic = {name: moved * (half if name == "activations" else 1) for name, moved in work.step_bytes.items()}
        rate = step_forecasts(context, work.name, dtype, "image", batch, work.flops, traffic)[0]
        rates.append(replace(rate, params=_params(batch, OURS)))
        params = _params(batch, OURS) | {"over": PLAIN}
        ratios.append(
            Forecast(variant=work.name, metric="speedup", estimate=None, basis=_HOST_UNKNOWN, dtype=dtype, params=params)
        )
    return ratios + rates


def run(context: Context, report) -> Result:
    """For each batch: both from the same weights over the same batches, then their speeds in turn."""
    image_set, prepared = datasets.images(context)
    torch.backends.cudnn.benchmark = True  # for both; this process ends with the experiment
    rows, frames = [], []
    for number, batch in enumerate(context.sizes["batches"]):
        report(number, len(context.sizes["batches"]), f"batch {batch}")
        with emptied_afterwards():
            try:
                pair = _Pair.built(context, image_set, prepared, batch)
                rows += _parity(context, pair, frames, image_set.source)
                rows += _speeds(context, pair, frames, image_set.source)
                del pair
            except torch.OutOfMemoryError as error:
                name, reason = _work(context, batch).name, out_of_memory_reason(error)
                rows.append(context.row(name, "step_time_s", None, params=_params(batch, OURS), value_reason=reason))
    return Result(rows, pd.concat(frames, ignore_index=True) if frames else pd.DataFrame(), image_set.source)


EXPERIMENT = Experiment(forecast, run, isolated=True, forecast_reads=("gemm", "bandwidth"), data=datasets.IMAGES)


@dataclass
class _Pair:
    """Both loops at one batch.

    Attributes:
        engine, batches: ours.
        plain: the other, from the same weights.
        published: whose model the other trains.
        fresh_plain, fresh_batches: make the other anew, not compiled, and the batches from the first one on.
    """

    work: Workload
    engine: ImageEngine
    batches: ImageBatches
    plain: PlainLoop
    published: str
    fresh_plain: Callable[[], PlainLoop]
    fresh_batches: Callable[[], ImageBatches]

    @classmethod
    def built(cls, context: Context, image_set: ImageSet, prepared: PreparedImages, batch: int) -> "_Pair":
        sizes, device = context.sizes, context.device
        if sizes["compiled"] or sizes["plain_compiled"]:
            torch.compiler.reset()  # else code of the batch before would be made anew for batches of any size
        precision, rate = choose_precision(device, sizes["precision"]), sizes["learning_rate"]
        count = sizes.get("train_images")
        images, labels = (np.array(prepared.arrays[f"train_{name}"][:count]) for name in ("images", "labels"))

        def fresh_batches() -> ImageBatches:
            return ImageBatches(
                images,
                labels,
                batch,
                channel_statistics(images),
                seed=context.seed,
                augment=image_set.augmentations,
                device=device.torch_device,
                dtype=FORMATS[precision.dtype].storage,
            )

        seed_everything(context.seed)
        model = resnet18(CLASSES, sizes["width"])
        other, published = plain_model(sizes["width"])
        copy_weights(model, other)
        weights = copy.deepcopy(other)

        def fresh_plain(compiled: bool = False) -> PlainLoop:
            return PlainLoop(
                copy.deepcopy(weights), images, labels, image_set.augmentations, batch, rate, precision, device, compiled
            )

        plain, batches = fresh_plain(sizes["plain_compiled"]), fresh_batches()
        model = model.to(device.torch_device)
        # The same update in both: no decay, which the published loop has for norms too, and no clipping.
        engine = ImageEngine(
            model,
            sgd_nesterov(model, rate, weight_decay=0.0),
            lambda step: rate,
            precision,
            device,
            clip_norm=math.inf,
            capture=True,
        )
        if sizes["compiled"]:
            model.compile(options=compile_options(device))
        how = engine.uncaptured or "replayed as a graph"
        print(f"batch {batch}: ours {how}; the plain loop trains the ResNet-18 of {published}")
        return cls(_work(context, batch), engine, batches, plain, published, fresh_plain, fresh_batches)

    def loss(self, loop: str, images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """One optimizer step of a loop on a batch; the loss before it."""
        if loop == PLAIN:
            return self.plain.train_on(images.float(), labels)
        return self.engine.train_step((images, labels)).loss

    def ours(self) -> torch.Tensor:
        """The next batch, and one optimizer step on it."""
        return self.engine.train_step(self.batches.next_batch()).loss


def _parity(context: Context, pair: _Pair, frames: list[pd.DataFrame], source: str) -> list[Row]:
    """Losses of both over the same batches from the same weights, and the seconds that their first steps took."""
    sizes, steps = context.sizes, context.sizes["parity_steps"]
    losses: dict[str, list[torch.Tensor]] = {OURS: [], PLAIN: []}
    first_s: dict[str, float] = {}
    for step in range(steps):
        images, labels = pair.batches.next_batch()
        for name, curve in losses.items():
            started = time.perf_counter()
            curve.append(pair.loss(name, images, labels))
            if step == 0:
                wait_for(context.device)
                first_s[name] = time.perf_counter() - started
    curves = {name: torch.stack(found).float().cpu().numpy() for name, found in losses.items()}
    loops = _loops(context, pair, source)
    twins = train_twins(twin_format(loops.dtype), context.seed, lambda: _plain_losses(pair, steps))
    # Both are compared with what the twins are twins of: a fault of the timed plain loop must not widen the tolerance.
    exact = np.array(_plain_losses(pair, steps))
    rows = [
        loops.parity(
            steps, agreement.difference, agreement.check, agreement.tolerance, of=name, **{"from": UNCOMPILED}, **agreement.params
        )
        for name, curve in curves.items()
        for agreement in agreements(curve, exact, twins)
    ]
    frames += [loops.curves_frame(curves | {UNCOMPILED: exact}), twins.assign(batch=pair.work.items)]
    made = {OURS: sizes["compiled"] or not pair.engine.uncaptured, PLAIN: sizes["plain_compiled"]}
    return rows + loops.first_steps({name: first_s[name] for name, anything in made.items() if anything})


def _plain_losses(pair: _Pair, steps: int) -> list[float]:
    """Losses of another plain loop, not compiled, from the same weights over the same batches."""
    plain, batches = pair.fresh_plain(), pair.fresh_batches()
    losses = []
    for _ in range(steps):
        images, labels = batches.next_batch()
        losses.append(plain.train_on(images.float(), labels))
    return torch.stack(losses).tolist()


def _speeds(context: Context, pair: _Pair, frames: list[pd.DataFrame], source: str) -> list[Row]:
    """Both in turn, some steps at a time, loader included: what a training sees."""
    sizes = context.sizes
    timings = time_interleaved(
        [pair.ours, pair.plain.step],
        context.device,
        cold=False,
        time_limit_s=sizes["time_limit_s"],
        back_to_back=sizes["steps_in_a_row"],
    )
    told = dict(zip((OURS, PLAIN), timings, strict=True))
    how = {
        "compiled": sizes["compiled"],
        "replayed": not pair.engine.uncaptured,
        "plain_compiled": sizes["plain_compiled"],
        "plain_model": pair.published,
    }
    loops = _loops(context, pair, source)
    rows, samples = loops.speeds(told, how)
    frames.append(samples)
    listed, precision = products_of(pair.work, sizes["compiled"]), pair.engine.precision
    alone: ProductsAlone | str
    try:
        alone = time_alone(listed, precision, context.device, sizes["time_limit_s"])
        frames.append(alone.frame(pair.work.name, precision.dtype, {"batch": pair.work.items}))
    except torch.OutOfMemoryError as error:  # both loops are in memory, and what was timed of them stands
        alone = out_of_memory_reason(error)
    return rows + [_of_products(context, loops, name, timing, alone) for name, timing in told.items()]


def _of_products(context: Context, loops: PairedLoops, name: str, timing: Timing, alone: ProductsAlone | str) -> Row:
    """How much of a loop's time its products take alone: the rest is what a better loop could win, at most. Without a value
    for the reason why they were not timed."""
    shared = loops.of(name)
    shared["params"] |= {"what": OF_PRODUCTS}
    if isinstance(alone, str):
        return context.row(loops.work.name, "share", None, value_reason=alone, **shared)
    shared["params"] |= {f"{part}_s": float(f"{seconds:.4g}") for part, seconds in alone.seconds.items()}
    share = alone.share(timing)
    return context.row(loops.work.name, "share", share.value, **shared, **timed_columns(share, timing))


def _loops(context: Context, pair: _Pair, source: str) -> PairedLoops:
    params = {"batch": pair.work.items, "loader": "included"}
    return PairedLoops(context, pair.work, pair.engine.precision.dtype, source, params)


def _work(context: Context, batch: int) -> Workload:
    return workload("image", {"width": context.sizes["width"], "batch_size": batch})


def _params(batch: int, loop: str) -> dict:
    return {"batch": batch, "loop": loop, "loader": "included"}
