"""Our way of training a Transformer language model beside the plain public one, in turn on one device."""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import pandas as pd
import torch
from torch import Tensor, nn

from hyperion.chapter.context import Context, Experiment, Forecast, Result
from hyperion.chapter.rows import out_of_memory_reason, sample_frame, timed_columns
from hyperion.data.batches.loaders import LanguageBatches
from hyperion.experiments.baselines.paired_loops import OURS, PLAIN, PairedLoops, wait_for
from hyperion.experiments.baselines.plain_language_model import PlainTraining, filled_up, with_weights_of
from hyperion.experiments.baselines.products_alone import one_pass, products_of
from hyperion.experiments.baselines.step_roof import StepRoof, own_roof, step_roof
from hyperion.hardware import Device
from hyperion.measure import PeakMemoryRegion, Timing, time_interleaved
from hyperion.results import Row
from hyperion.training import LanguageEngine, choose_precision, compile_options
from hyperion.workloads import datasets
from hyperion.workloads.step_comparison import emptied_afterwards
from hyperion.workloads.step_forecasts import NO_CEILINGS
from hyperion.workloads.twins import SCATTER_BF16
from hyperion.workloads.workloads import SIXTEEN_BIT, Workload, workload

GIB = 2**30
# Losses are compared window by window: the scatter of single steps is averaged out, a part of the way that differs is not.
# Over 200 steps of a small model bfloat16 alone moved a window by 0.2 %, a learning rate higher by a tenth by 1.4 %.
WINDOWS = 10
ROOF, OWN_ROOF = "of the step's roof", "of the roof of its own products"
_NO_ROOF = "no roof: this run has measured no ceilings (01_hardware_exploration)"


def forecast(context: Context) -> list[Forecast]:
    """How much faster ours is, then its time and throughput: as if all kernels of both ran at the run's ceilings."""
    counted = datasets.vocabulary_row(context)
    dtype = choose_precision(context.device, context.sizes["precision"]).dtype
    shared = {"variant": context.sizes["model"], "dtype": dtype}
    if counted is None:
        basis = "no estimate: this run has not counted the vocabulary (01_dataset_preparation)"
        return [Forecast(metric="speedup", estimate=None, basis=basis, **shared)]
    work = workload("language", context.sizes, int(counted.value))
    shared |= {"variant": work.name, "params": _params(context, work) | {"loop": OURS}}
    against = shared | {"params": shared["params"] | {"over": PLAIN}}
    roof = step_roof(context, work, dtype)
    if roof is None:
        return [Forecast(metric="speedup", estimate=None, basis=NO_CEILINGS, **against)]
    more = _more_bytes(context, work, dtype)
    ratio = 1 + roof.moving_s(more) / roof.time_s
    told = f"the plain model moves {more / 1e9:.3g} GB more, in float32 and for logits" if more else "both do the same"
    return [
        Forecast(metric="speedup", estimate=ratio, basis=f"{told}; ours: {roof}", **against),
        Forecast(metric="step_time_s", estimate=roof.time_s, basis=str(roof), **shared),
        Forecast(metric="tokens_per_s", estimate=work.items / roof.time_s, basis=str(roof), **shared),
    ]


def run(context: Context, report) -> Result:
    """Both from the same weights over the same batches, in turn: their steps are timed and their losses compared at once."""
    corpus, tokenizer, prepared = datasets.text(context)
    work, tokens = workload("language", context.sizes, tokenizer.vocab_size), prepared.tokens["train"]
    dtype = choose_precision(context.device, context.sizes["precision"]).dtype
    loops = PairedLoops(context, work, dtype, corpus.source, _params(context, work))
    try:
        with emptied_afterwards():
            rows, samples = _compared(loops, tokens, report)
    except torch.OutOfMemoryError as error:
        reason = out_of_memory_reason(error)
        rows = [context.row(work.name, "step_time_s", None, value_reason=reason, **loops.of(OURS))]
        samples = pd.DataFrame()
    return Result(rows, samples, corpus.source)


EXPERIMENT = Experiment(
    forecast, run, isolated=True, reads=("gemm", "bandwidth"), forecast_reads=("text_pipeline",), data=datasets.TEXT
)


@dataclass
class _Loop:
    """One way of training, its own loader beside it.

    Attributes:
        train_on: does one optimizer step on inputs and targets; the loss before it.
        losses: of all steps so far, on the device.
        first_s: seconds of the steps in which everything is compiled or recorded.
        peak_gib: most memory of tensors in a step, beside what lay in memory before; None on a CPU.
        replayed: whether steps are recorded and replayed.
    """

    train_on: Callable[[Tensor, Tensor], Tensor]
    batches: LanguageBatches
    losses: list[Tensor] = field(default_factory=list)
    first_s: float = math.nan
    peak_gib: float | None = None
    replayed: bool = False

    def step(self) -> None:
        """The next batch, and one optimizer step on it."""
        self.losses.append(self.train_on(*self.batches.next_batch()))


def _compared(loops: PairedLoops, tokens: np.ndarray, report) -> tuple[list[Row], pd.DataFrame]:
    context, sizes = loops.context, loops.context.sizes
    begun = {}
    for done, (name, build) in enumerate({OURS: _ours, PLAIN: _plain}.items()):
        report(done, 3, f"first steps of {name}")
        begun[name] = _begun(loops, tokens, build)
    report(2, 3, "steps of both in turn")
    told, products = _timed(loops, begun)
    parity, losses = _parity(loops, begun)
    speeds, samples = loops.speeds(told, {"replayed": begun[OURS].replayed})
    own, frames = products, [losses, samples]
    if isinstance(products, Timing):
        frame = sample_frame(products, loops.work.name, loops.dtype, loops.params)
        frames.append(frame.assign(kind="its products alone"))
        own = own_roof(context, loops.work, loops.dtype, products) or _NO_ROOF
    roofs = {ROOF: step_roof(context, loops.work, loops.dtype) or _NO_ROOF, OWN_ROOF: own}
    shares = [_share(loops, name, timing, what, roof) for what, roof in roofs.items() for name, timing in told.items()]
    rows = [parity, *speeds, *shares, *_memory(loops, begun)]
    if sizes["compiled"]:
        rows += loops.first_steps({name: loop.first_s for name, loop in begun.items()})
    return rows, pd.concat(frames, ignore_index=True)


def _timed(loops: PairedLoops, begun: dict[str, _Loop]) -> tuple[dict[str, Timing], Timing | str]:
    """Steps of both and the products alone, in turn; where there is no memory for the three, of both and the reason."""
    context, sizes = loops.context, loops.context.sizes
    precision, steps = choose_precision(context.device, sizes["precision"]), [loop.step for loop in begun.values()]
    in_turn = partial(
        time_interleaved,
        device=context.device,
        cold=False,
        time_limit_s=sizes["time_limit_s"],
        minimum_samples=math.ceil(sizes["steps"] / sizes["steps_in_a_row"]),
        back_to_back=sizes["steps_in_a_row"],
    )
    try:
        listed = products_of(loops.work, sizes["compiled"])
        *timings, products = in_turn([*steps, one_pass(listed, precision, context.device)])
    except torch.OutOfMemoryError as error:
        reason = out_of_memory_reason(error)
    else:
        return dict(zip(begun, timings, strict=True)), products
    return dict(zip(begun, in_turn(steps), strict=True)), reason


def _begun(loops: PairedLoops, tokens: np.ndarray, build: Callable) -> _Loop:
    """A loop after three steps: one in which everything is compiled, one whose memory is that of any other, and one that
    is recorded where steps are to be replayed: a graph keeps the memory of its tensors for itself.
    """
    context, device, sizes = loops.context, loops.context.device, loops.context.sizes
    accelerator = device.kind != "cpu"
    before = torch.cuda.memory_allocated(device.torch_device) if accelerator else 0
    batches = LanguageBatches(tokens, sizes["sequence_length"], sizes["batch_size"], context.seed, device.torch_device)
    train_on, engine = build(context, loops.work)
    loop = _Loop(train_on, batches)
    loop.first_s = _seconds_of(loop.step, device)
    with PeakMemoryRegion(device) as region:
        loop.step()
    if accelerator:
        loop.peak_gib = region.peak.gib - before / GIB
    if engine is not None:
        engine.capture()
    third_s = _seconds_of(loop.step, device)
    if engine is not None and not engine.uncaptured:
        loop.first_s, loop.replayed = loop.first_s + third_s, True
    return loop


def _seconds_of(step: Callable[[], None], device: Device) -> float:
    wait_for(device)
    started = time.perf_counter()
    step()
    wait_for(device)
    return time.perf_counter() - started


def _ours(context: Context, work: Workload) -> tuple[Callable[[Tensor, Tensor], Tensor], LanguageEngine]:
    def lay_out(model: nn.Module) -> nn.Module:
        if context.sizes["compiled"]:
            model.forward = torch.compile(model.forward, options=compile_options(context.device))
        return model

    engine = work.engine(context.sizes["precision"], context.device, context.seed, lay_out)
    return lambda *batch: engine.train_step(batch).loss, engine


def _plain(context: Context, work: Workload) -> tuple[Callable[[Tensor, Tensor], Tensor], None]:
    device, sizes = context.device, context.sizes
    model = with_weights_of(work.model(device, context.seed))
    precision = choose_precision(device, sizes["precision"])
    return PlainTraining(model, work.schedule, precision, device, sizes["compiled"]).train_on, None


def _parity(loops: PairedLoops, begun: dict[str, _Loop]) -> tuple[Row, pd.DataFrame]:
    """The largest relative difference of mean losses in any window of the steps that both have made.

    The classes that the plain model has beside the vocabulary add at most ln(P / V) to its loss, which is ln V before the
    first step; what comes on top is rounding.
    """
    classes = loops.work.config.vocab_size
    tolerance = loops.context.sizes["tolerance"] + math.log(filled_up(classes) / classes) / math.log(classes)
    steps = min(len(loop.losses) for loop in begun.values())
    curves = {name: torch.stack(loop.losses[:steps]).float().cpu().numpy() for name, loop in begun.items()}
    means = {name: np.array([part.mean() for part in np.array_split(curve, WINDOWS)]) for name, curve in curves.items()}
    difference = float(np.max(np.abs(means[OURS] / means[PLAIN] - 1)))
    how = f"mean loss of each of {WINDOWS} windows of the steps; {SCATTER_BF16}"
    return loops.parity(steps, difference, how, tolerance), loops.curves_frame(curves)


def _share(loops: PairedLoops, name: str, timing: Timing, what: str, roof: StepRoof | str) -> Row:
    """How much of a loop's time a roof would take, or without a value for the reason why there is none."""
    shared = loops.of(name)
    shared["params"] |= {"what": what}
    if isinstance(roof, str):
        return loops.context.row(loops.work.name, "share", None, value_reason=roof, **shared)
    shared["params"] |= roof.params
    share = roof.share_of(timing)
    return loops.context.row(loops.work.name, "share", share.value, **shared, **timed_columns(share, timing))


def _memory(loops: PairedLoops, begun: dict[str, _Loop]) -> list[Row]:
    """Of each loop by itself. (On a CPU the process holds both, and the interpreter.)"""
    limit, source = loops.work.standing_bytes / GIB, f"weights and {loops.work.moments} moments of each in float32"
    return [
        loops.context.row(loops.work.name, "peak_memory_gib", loop.peak_gib, limit=limit, limit_source=source, **loops.of(name))
        for name, loop in begun.items()
        if loop.peak_gib is not None
    ]


def _more_bytes(context: Context, work: Workload, dtype: str) -> float:
    """What the plain model moves beside ours: where autocast leaves sums of the residual stream in float32, two more bytes
    of each of the two a block, written and read; and logits once more, where our kernel leaves their gradient in their
    place at once. Uncompiled in float32 both do the same."""
    if not (context.sizes["compiled"] and dtype in SIXTEEN_BIT):
        return 0.0
    residual = 2 * 2 * 2 * work.config.layers * work.items * work.config.width
    return residual + 2 * work.items * work.config.vocab_size


def _params(context: Context, work: Workload) -> dict:
    return {"batch": work.items, "loader": "included", "compiled": context.sizes["compiled"]}
