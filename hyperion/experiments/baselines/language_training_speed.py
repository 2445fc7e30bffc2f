"""Speed of this library's language-model training compared with a plain public training loop, on one device.

The steps of both loops are timed in alternation. Both loops are also compared with a roof, an estimate of the least step time
(see `step_roof`).

The speed ladder (see `speed_ladder`) leads from the plain loop to this library's loop. Its first change is a graph: the step of
the plain loop is captured and replayed. The rungs between both loops train from the same weights on the same batches, and their
losses are compared with those of the plain loop.
"""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import cast

import numpy as np
import pandas as pd
import torch
from torch import Tensor, nn

from hyperion.chapter.context import Context, Experiment, Forecast, Options, Report, Result
from hyperion.chapter.efficiency import TRAINING_STEP, expected_share
from hyperion.chapter.rows import NO_CEILINGS, out_of_memory_reason, sample_frame, speedup_row, timed_row
from hyperion.data.batches import LanguageBatches
from hyperion.errors import not_none
from hyperion.experiments.baselines.paired_loops import CAPTURED, OURS, PLAIN, PairedLoops
from hyperion.experiments.baselines.plain_loops import CapturedLanguageLoop, PlainLanguageLoop, wait_for, with_weights_of
from hyperion.experiments.baselines.products_alone import one_pass, products_of
from hyperion.experiments.baselines.speed_ladder import Rung, attempt, ladder_rows, time_rungs
from hyperion.experiments.baselines.step_roof import StepRoof, own_roof, step_roof
from hyperion.hardware import Device
from hyperion.kernels.token_loss import HAS_TRITON, padded_classes
from hyperion.measure import PeakMemoryRegion, Timing, time_interleaved
from hyperion.models import TransformerLM
from hyperion.results import Row
from hyperion.training import LanguageEngine, choose_precision, compile_options
from hyperion.training.captured import why_not_captured
from hyperion.units import GIB
from hyperion.workloads import datasets
from hyperion.workloads.training_rows import NO_SPEEDUP_LIMIT, memory_released, speed_rows
from hyperion.workloads.twins import SCATTER_BF16
from hyperion.workloads.workloads import NO_VOCABULARY, SIXTEEN_BIT, LanguageSizes, Workload, expected_workload, workload

# The steps are divided into this many windows, whose mean losses are compared. In the mean, the scatter of single steps averages
# out, and a lasting difference remains. In a test over 200 steps of a small model, bfloat16 changed the mean loss of a window by
# 0.2 %, and a 10 % higher learning rate changed it by 1.4 %.
WINDOWS = 10
BF16_STREAM, LOSS_KERNEL = "plain, bf16 stream", "plain, loss kernel"
_ADDS = {
    PLAIN: "",
    CAPTURED: "the step is replayed as a graph",
    BF16_STREAM: "the residual stream is bfloat16",
    LOSS_KERNEL: "this library's loss kernel",
    OURS: "this library's model and training step",
}
ROOF, OWN_ROOF = "of the step's roof", "of the roof of its own products"
_NO_ROOF = "no roof: this run has measured no ceilings (01_hardware_exploration)"


class LanguageTrainingSpeedOptions(Options):
    """Options for the `language_training_speed` experiment.

    Args:
        model: name of the Transformer configuration.
        layers: number of blocks. 0 uses the configuration's number.
        sequence_length: number of tokens in a sequence.
        batch_size: number of sequences in a batch.
        learning_rate: learning rate after the warm-up.
        warmup_steps: number of warm-up steps.
        precision: number format, or "auto".
        compiled: whether to compile both models.
        steps: minimum number of steps whose losses are compared, for each loop or rung.
        steps_in_a_row: number of steps that one loop runs before the other takes over.
        tolerance: largest allowed relative difference between the two loops' mean losses in a window, in addition to the
            difference explained by the padded vocabulary.
        time_limit_s: timing budget in seconds for the loops.
        ladder_s: timing budget in seconds for the speed ladder.
    """

    model: str
    layers: int = 0
    sequence_length: int
    batch_size: int
    learning_rate: float
    warmup_steps: int
    precision: str
    compiled: bool
    steps: int
    steps_in_a_row: int
    tolerance: float
    time_limit_s: float
    ladder_s: float = 1.0

    @property
    def sizes(self) -> LanguageSizes:
        """Dimensions of the model and the batch."""
        return LanguageSizes(**self.model_dump(include=set(LanguageSizes.model_fields)))


def forecast(context: Context) -> list[Forecast]:
    """Predict the speed-up of this library's loop, and the time and throughput of its step.

    The ceilings are the highest rates measured in this run. The predicted speed-up assumes that all kernels of both loops run at
    the ceilings. The predicted throughput is the throughput at the ceilings times the share of it that a reference machine
    reached.
    """
    options = LanguageTrainingSpeedOptions.of(context)
    dtype = choose_precision(context.device, options.precision).dtype
    work = expected_workload(context, options.sizes)
    if work is None:
        return [Forecast(options.model, "speedup", None, NO_VOCABULARY, dtype=dtype)]
    ours = partial(Forecast, variant=work.name, dtype=dtype)
    params = _params(options, work) | {"loop": OURS}
    roof = step_roof(context, work, dtype)
    if roof is None:
        return [ours(metric="speedup", estimate=None, basis=NO_CEILINGS, params=params | {"over": PLAIN})]
    more = _additional_bytes(options, work, dtype)
    # The plain loop takes the time of the roof plus the time of its additional traffic.
    ratio = 1 + roof.moving_s(more) / roof.time_s
    expected = expected_share(context.device, TRAINING_STEP, work.items / roof.time_s, str(roof))
    rate = expected.forecast(work.name, "tokens_per_s", dtype, params)
    basis = f"the plain model moves {more / 1e9:.3g} GB more" if more else "both loops do the same work"
    return [
        ours(
            metric="speedup",
            estimate=ratio,
            basis=f"{basis}; roof of this library's step: {roof}",
            params=params | {"over": PLAIN},
        ),
        _time_forecast(rate, work.items),
        rate,
    ]


def _time_forecast(rate: Forecast, items: int) -> Forecast:
    """Return the prediction of the step time, computed from the predicted throughput.

    Args:
        rate: predicted throughput.
        items: number of tokens or images in a step.
    """
    estimate, low, high = (None if value is None else items / value for value in (rate.estimate, rate.high, rate.low))
    return replace(rate, metric="step_time_s", estimate=estimate, low=low, high=high, ceiling=None)


def run(context: Context, report: Report) -> Result:
    """Train both loops from the same weights on the same batches, time their steps in alternation, and compare their losses."""
    options = LanguageTrainingSpeedOptions.of(context)
    corpus, tokenizer, prepared = datasets.text(context)
    work = workload(options.sizes.model_copy(update={"vocabulary": tokenizer.vocab_size}))
    dtype = choose_precision(context.device, options.precision).dtype
    loops = PairedLoops(context, work, dtype, corpus.source, _params(options, work))
    try:
        with memory_released():
            rows, samples = _compared(options, loops, prepared.tokens["train"], report)
    except torch.OutOfMemoryError as error:
        reason = out_of_memory_reason(error)
        rows = [context.absent_row(work.name, "step_time_s", reason, **loops.of(OURS))]
        samples = pd.DataFrame()
    return Result(rows, samples, corpus.source)


EXPERIMENT = Experiment(
    forecast,
    run,
    options=LanguageTrainingSpeedOptions,
    isolated=True,
    reads=("gemm", "bandwidth"),
    forecast_reads=("text_pipeline",),
    data=datasets.TEXT,
)


@dataclass
class _Loop:
    """One training loop, with its own loader.

    Attributes:
        train_on: function that takes inputs and targets, runs one optimizer step, and returns the loss before the update.
        batches: loader of this loop.
        losses: losses of all steps so far, on the device.
        first_s: time in seconds of the first steps, which compile the model and capture the step as a graph.
        peak_gib: peak memory of the tensors in a step in GiB, without tensors that existed before the loop was built. None on a
            CPU.
        replayed: whether the step is captured as a CUDA graph that later steps replay.
    """

    train_on: Callable[[Tensor, Tensor], Tensor]
    batches: LanguageBatches
    losses: list[Tensor] = field(default_factory=list)
    first_s: float = math.nan
    peak_gib: float | None = None
    replayed: bool = False

    def step(self) -> None:
        """Run one optimizer step on the next batch."""
        self.losses.append(self.train_on(*self.batches.next_batch()))


def _compared(
    options: LanguageTrainingSpeedOptions, loops: PairedLoops, tokens: np.ndarray, report: Report
) -> tuple[list[Row], pd.DataFrame]:
    context, started = loops.context, {}
    for number, (name, build) in enumerate({OURS: _ours, PLAIN: _plain}.items()):
        report(number, 4, f"first steps of the loop {name}")
        started[name] = _start(options, loops, tokens, build)
    report(2, 4, "steps of both loops, alternately")
    timings, products = _timed(options, loops, started)
    parity, losses = _parity(options, loops, started)
    how = {"replayed": started[OURS].replayed}
    speeds, samples = loops.speeds(timings, how)
    frames = [losses, samples]
    own: StepRoof | str
    if isinstance(products, Timing):
        frame = sample_frame(products, loops.work.name, loops.dtype, loops.params)
        frames.append(frame.assign(kind="its products alone"))
        own = own_roof(context, loops.work, loops.dtype, products) or _NO_ROOF
    else:
        own = products
    roofs = {ROOF: step_roof(context, loops.work, loops.dtype) or _NO_ROOF, OWN_ROOF: own}
    shares = [_share_row(loops, name, timing, what, roof) for what, roof in roofs.items() for name, timing in timings.items()]
    rows = [parity, *speeds, *shares, *_memory_rows(loops, started)]
    if options.compiled:
        rows += loops.first_steps({name: loop.first_s for name, loop in started.items()})
    report(3, 4, "steps of the speed ladder, alternately")
    climbed, more = _climbed(options, loops, tokens, started, timings, how)
    return rows + climbed, pd.concat(frames + more, ignore_index=True)


def _climbed(
    options: LanguageTrainingSpeedOptions,
    loops: PairedLoops,
    tokens: np.ndarray,
    started: dict[str, _Loop],
    timings: dict[str, Timing],
    how: dict,
) -> tuple[list[Row], list[pd.DataFrame]]:
    """Build the missing rungs of the speed ladder, time all rungs in alternation, and compare the losses of the new rungs.

    The first and the last rung are the two loops, which exist already.

    Args:
        options: options of the experiment.
        loops: builder of the rows that compare the loops.
        tokens: token ids of the training split.
        started: both loops, after the steps of the comparison.
        timings: timings of both loops, reused if no other rung runs on this device.
        how: additional params of the row that compares this library's loop with the captured plain loop.

    Returns:
        (rows, tables of samples).
    """
    between, rungs = _rungs(options, loops, tokens, started)
    context, name, work = loops.context, loops.work.name, loops.work
    climb = partial(time_rungs, context.device, rungs, options.ladder_s, options.steps_in_a_row)
    climbed = attempt(climb) if between else timings
    rows, frames = ladder_rows(loops, rungs, climbed)
    shared, ratio = loops.of(CAPTURED), loops.of(OURS)
    ratio["params"] |= {"over": CAPTURED} | how
    if CAPTURED in between and not isinstance(climbed, str):
        timing = climbed[CAPTURED]
        rows += speed_rows(context, name, work.item, work.items, timing, work.flops, work.least_flops, shared)
        rows.append(speedup_row(context, name, climbed[OURS], timing, NO_SPEEDUP_LIMIT, **ratio))
        rows += loops.first_steps({CAPTURED: between[CAPTURED].first_s})
        frames.append(sample_frame(timing, name, loops.dtype, shared["params"]).assign(kind="step, loader included"))
    else:
        reason = next(row.value_reason for row in rows if row.params["rung"] == CAPTURED)
        rows.append(context.absent_row(name, "speedup", reason, **ratio))
    for rung, loop in between.items():
        parity, losses = _parity(options, loops, {rung: loop, PLAIN: started[PLAIN]})
        rows.append(parity)
        frames.append(losses.query("loop == @rung"))
    return rows, frames


def _rungs(
    options: LanguageTrainingSpeedOptions, loops: PairedLoops, tokens: np.ndarray, started: dict[str, _Loop]
) -> tuple[dict[str, _Loop], list[Rung]]:
    """Build the rungs of the speed ladder between both loops, and run each new rung for the loss comparison.

    Returns:
        (loops of the new rungs that run on this device, by name; all rungs of the ladder, including both loops).
    """
    context, device, dtype = loops.context, loops.context.device, loops.dtype
    uncaptured = why_not_captured(device, 1, dtype)
    between: dict[str, _Loop] = {}
    rungs = [Rung(PLAIN, _ADDS[PLAIN], started[PLAIN].step)]
    changes: dict[str, bool] = {}
    sharing: CapturedLanguageLoop | None = None

    def build(changed: dict[str, bool]) -> tuple[CapturedLanguageLoop, _Loop]:
        train = CapturedLanguageLoop(_plain_loop(options, context, loops.work, **changed), sharing)
        loop = _Loop(train.train_on, _batches(options, context, tokens))
        loop.first_s = _seconds_of(loop.step, device)
        for _ in range(options.steps - 1):  # steps for the loss comparison, because the timing alone runs too few steps
            loop.step()
        return train, loop

    for name, change, missing in (
        (CAPTURED, {}, ""),
        (BF16_STREAM, {"bf16_stream": True}, "" if dtype == "bf16" else f"in {dtype} the residual stream is not bfloat16"),
        (LOSS_KERNEL, {"loss_kernel": True}, "" if HAS_TRITON else "Triton is not installed"),
    ):
        built = uncaptured or missing or attempt(partial(build, changes | change))
        if not isinstance(built, str):
            sharing, between[name] = built
            changes |= change
        rungs.append(Rung(name, _ADDS[name], built if isinstance(built, str) else built[1].step))
    return between, [*rungs, Rung(OURS, _ADDS[OURS], started[OURS].step)]


def _batches(options: LanguageTrainingSpeedOptions, context: Context, tokens: np.ndarray) -> LanguageBatches:
    where = context.device.torch_device
    return LanguageBatches(tokens, options.sequence_length, options.batch_size, context.seed, where)


def _start(options: LanguageTrainingSpeedOptions, loops: PairedLoops, tokens: np.ndarray, build: Callable) -> _Loop:
    """Build a loop and run its first three steps.

    The first step compiles the model. The peak memory is measured in the second step. The third step is captured as a CUDA graph.
    The memory is measured before the capture, because a graph has its own memory pool.
    """
    context, device = loops.context, loops.context.device
    accelerator = device.kind != "cpu"
    # While the second loop is built, the first loop still holds its tensors. Their memory is subtracted.
    before = torch.cuda.memory_allocated(device.torch_device) if accelerator else 0
    train_on, engine = build(options, context, loops.work)
    loop = _Loop(train_on, _batches(options, context, tokens))
    loop.first_s = _seconds_of(loop.step, device)
    with PeakMemoryRegion(device) as region:
        loop.step()
    if accelerator:
        loop.peak_gib = not_none(region.peak.gib) - before / GIB
    if engine is not None:
        engine.capture()
    third_s = _seconds_of(loop.step, device)
    if engine is not None and not engine.uncaptured:
        loop.first_s, loop.replayed = loop.first_s + third_s, True
    return loop


def _seconds_of(step: Callable[[], None], device: Device) -> float:
    # Work that is still queued must not count as time of this step.
    wait_for(device)
    started = time.perf_counter()
    step()
    wait_for(device)
    return time.perf_counter() - started


def _ours(
    options: LanguageTrainingSpeedOptions, context: Context, work: Workload
) -> tuple[Callable[[Tensor, Tensor], Tensor], LanguageEngine]:
    def wrap(model: nn.Module) -> nn.Module:
        if options.compiled:
            model.forward = torch.compile(model.forward, options=compile_options(context.device))
        return model

    engine = cast(LanguageEngine, work.engine(options.precision, context.device, context.seed, wrap))
    return lambda *batch: engine.train_step(batch).loss, engine


def _plain(
    options: LanguageTrainingSpeedOptions, context: Context, work: Workload
) -> tuple[Callable[[Tensor, Tensor], Tensor], None]:
    return _plain_loop(options, context, work).train_on, None


def _plain_loop(options: LanguageTrainingSpeedOptions, context: Context, work: Workload, **changes: bool) -> PlainLanguageLoop:
    """Return a new plain loop. `changes` are arguments of `with_weights_of`."""
    model = with_weights_of(cast(TransformerLM, work.model(context.device, context.seed)), **changes)
    precision = choose_precision(context.device, options.precision)
    return PlainLanguageLoop(model, work.schedule, precision, context.device, options.compiled)


def _timed(
    options: LanguageTrainingSpeedOptions, loops: PairedLoops, started: dict[str, _Loop]
) -> tuple[dict[str, Timing], Timing | str]:
    """Time the steps of both loops and the matrix products of a step in alternation.

    If the operands of the matrix products do not fit into memory, time only the steps.

    Returns:
        A pair: a dict that maps each loop's name to its timing, and the timing of the matrix products or the reason why they
        could not be timed.
    """
    device, steps = loops.context.device, [loop.step for loop in started.values()]
    in_turn = partial(
        time_interleaved,
        device=device,
        cold=False,
        time_limit_s=options.time_limit_s,
        # One sample covers `steps_in_a_row` steps.
        minimum_samples=math.ceil(options.steps / options.steps_in_a_row),
        back_to_back=options.steps_in_a_row,
    )
    try:
        products = products_of(loops.work, options.compiled)
        # The products alternate with the steps, so that both run at the same clock.
        *timings, together = in_turn([*steps, one_pass(products, choose_precision(device, options.precision), device)])
    except torch.OutOfMemoryError as error:
        reason = out_of_memory_reason(error)
    else:
        return dict(zip(started, timings, strict=True)), together
    return dict(zip(started, in_turn([*steps]), strict=True)), reason


def _parity(options: LanguageTrainingSpeedOptions, loops: PairedLoops, started: dict[str, _Loop]) -> tuple[Row, pd.DataFrame]:
    """Compare the mean losses of a loop and of the plain loop in each window of the steps that both have run.

    A window is a number of consecutive steps. The row's value is the largest relative difference over all windows. The plain
    model pads the vocabulary from V to P classes, which raises its loss by at most ln(P / V); the initial loss of this library's
    model is ln V. The tolerance for this library's loop includes this difference. The rest of the tolerance covers rounding.

    Args:
        options: options of the experiment.
        loops: builder of the row.
        started: the plain loop and one other loop, by name.
    """
    name, tolerance = next(name for name in started if name != PLAIN), options.tolerance
    if name == OURS:
        classes = not_none(loops.work.config).vocab_size
        tolerance += math.log(padded_classes(classes) / classes) / math.log(classes)
    # The loops may have run different numbers of steps. Only common steps are compared.
    steps = min(len(loop.losses) for loop in started.values())
    curves = {name: torch.stack(loop.losses[:steps]).float().cpu().numpy() for name, loop in started.items()}
    means = {
        name: np.array([part.mean() for part in np.array_split(curve, min(WINDOWS, steps))]) for name, curve in curves.items()
    }
    difference = float(np.max(np.abs(means[name] / means[PLAIN] - 1)))
    how = f"mean loss of each of {min(WINDOWS, steps)} windows of the steps; {SCATTER_BF16}"
    return loops.parity(steps, difference, how, tolerance, of=name), loops.curves_frame(curves)


def _share_row(loops: PairedLoops, name: str, timing: Timing, what: str, roof: "StepRoof | str") -> Row:
    """Return the row with the least step time (the roof) divided by a loop's step time.

    Args:
        loops: builder of the rows that compare both loops.
        name: name of the loop.
        timing: timing of the loop's steps.
        what: name of this share, stored in the row.
        roof: the roof, or the reason why there is none. The row then gives the reason instead of a value.
    """
    columns = loops.of(name)
    columns["params"] |= {"what": what}
    if isinstance(roof, str):
        return loops.context.absent_row(loops.work.name, "share", roof, **columns)
    columns["params"] |= roof.params
    share = roof.share_of(timing)
    return timed_row(loops.context, loops.work.name, "share", share, timing, **columns)


def _memory_rows(loops: PairedLoops, started: dict[str, _Loop]) -> list[Row]:
    """Return one row per loop with the peak memory of its steps.

    On a CPU there are no rows, because both loops share the memory of one process.
    """
    limit, source = loops.work.standing_bytes / GIB, f"weights and {loops.work.moments} moments of each in float32"
    return [
        loops.context.row(loops.work.name, "peak_memory_gib", loop.peak_gib, limit=limit, limit_source=source, **loops.of(name))
        for name, loop in started.items()
        if loop.peak_gib is not None
    ]


def _params(options: LanguageTrainingSpeedOptions, work: Workload) -> dict:
    return {"batch": work.items, "loader": "included", "compiled": options.compiled}


def _additional_bytes(options: LanguageTrainingSpeedOptions, work: Workload, dtype: str) -> float:
    """Return how many more bytes a step of the plain model moves than a step of this library's model.

    Each block makes two additions to the residual stream. Under autocast the plain model keeps both sums in float32, so each
    write and each read of an element moves two more bytes. The plain model also reads the logits once more. This library's kernel
    does not need this read, because it overwrites the logits with their gradient. Without compilation or in float32, both models
    move the same number of bytes.
    """
    if not (options.compiled and dtype in SIXTEEN_BIT):
        return 0.0
    config = not_none(work.config)
    # Two additions per block, each written and read once, with two more bytes per element.
    residual = 2 * 2 * 2 * config.layers * work.items * config.width
    return residual + 2 * work.items * config.vocab_size
