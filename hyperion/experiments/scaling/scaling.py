"""How does training speed scale with the number of devices?

The experiment starts new ranks for each number of devices. This is called a launch. In each launch, the ranks first run float32
steps. The losses of these steps must be the same on any number of devices (parity). Then the ranks time steps with and without
communication, and profile a few steps with communication.

On a GPU, the profiled steps also say whether the host limits the speed: a step of many short kernels takes as long as the host
needs to launch them, on any number of devices. Such a step says nothing about the links between the devices.
"""

import contextlib
import functools
import signal
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import numpy as np
import pandas as pd
import torch
from pydantic import ConfigDict

from hyperion.chapter.context import Context, Experiment, Forecast, Report, Result
from hyperion.chapter.rows import out_of_memory_reason
from hyperion.chapter.variants import RankOptions, merged, run_on_ranks
from hyperion.data.images.imageset import CLASS_COUNT
from hyperion.errors import not_none
from hyperion.hardware import Device
from hyperion.hardware.cpu import read_cpu
from hyperion.measure.clock.timing import device_clock
from hyperion.measure.memory_use.allocation import release_memory
from hyperion.measure.steps.trace import COMMUNICATION, COPIES, CPU_ORDER, GEMM, GPU_ORDER, MEMORY, partition, trace_steps
from hyperion.models import (
    LlamaLM,
    ModelFlops,
    TransformerConfig,
    TransformerLM,
    flops_per_image,
    flops_per_token,
    llama_flops_per_token,
    llama_parameter_count,
    load_llama,
    named_config,
    parameter_count,
    random_llama_shape,
    resnet18,
)
from hyperion.models.resnet import IMAGE_SIZE
from hyperion.parallel import ParallelPlan, parallelize
from hyperion.processes import JobError, World, world
from hyperion.processes.job import INTERRUPTED
from hyperion.results import BUSY_GPU, Estimate, Row, independent_ratio_estimate, median_estimate
from hyperion.training import (
    ImageEngine,
    LanguageEngine,
    Precision,
    TorchEngine,
    adamw,
    add_lora,
    choose_precision,
    seed_everything,
    sgd_nesterov,
)
from hyperion.training.lora import ATTENTION
from hyperion.workloads.fine_tuning import ALPHA, RANK, frozen_dtype
from hyperion.workloads.training_rows import flops_floor
from hyperion.workloads.twins import SCATTER_FP32

# Weak scaling: the batch per device is constant. Strong scaling: the total batch is constant.
MODES = ("weak", "strong")
PARITY = 1e-4
LAUNCH_FAILED = "the launch failed"
EXPOSED = COMMUNICATION  # name of this part of a profiled step
# Share of the computation that can hide communication. DDP overlaps its all-reduce only with the backward pass. FSDP2 overlaps
# its all-gathers with the whole step.
_HIDING = {"ddp": 2 / 3, "fsdp": 1.0}
_IDEAL = "no limit: N devices are ideally N times as fast, and more where each holds and updates a part of the state only"


@dataclass(frozen=True)
class ScaledTraining:
    """One training workload that runs on several numbers of devices.

    The tokens and images are random, because their values do not affect the time.

    Args:
        name: variant of the rows.
        model: name of a configuration of a TransformerLM, or of a randomly initialised Llama with LoRA adapters, or "resnet18".
        strategy: parallelism strategy, "ddp" or "fsdp".
        batch_per_device: number of sequences or images in a step. In weak scaling, it is the number per device. In strong
            scaling, it is the total over all devices.
        sequence_length: number of tokens in a sequence, for language models.
        vocabulary: number of tokens in the vocabulary, for language models.
        width: number of channels of the first stage, for the ResNet-18.
    """

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid", strict=True)

    name: str
    model: str
    strategy: Literal["ddp", "fsdp"]
    batch_per_device: int
    sequence_length: int = 0
    vocabulary: int = 0
    width: int = 0

    def __post_init__(self) -> None:
        needed = ("width",) if self.item == "image" else ("sequence_length", "vocabulary")
        if missing := [name for name in needed if getattr(self, name) < 1]:
            raise ValueError(f"workload {self.name!r} with the model {self.model!r} needs {' and '.join(missing)} of at least 1")

    @property
    def item(self) -> str:
        """What the workload counts: "image" or "token"."""
        return "image" if self.model == "resnet18" else "token"

    @property
    def lora(self) -> bool:
        """True if the workload trains LoRA adapters of a Llama."""
        return "llama" in self.model

    def batch(self, mode: str, ranks: int) -> int:
        """Return the number of sequences or images in a step, summed over all ranks."""
        return self.batch_per_device * (ranks if mode == "weak" else 1)

    def items(self, mode: str, ranks: int) -> int:
        """Return the number of tokens or images in a step, summed over all ranks."""
        return self.batch(mode, ranks) * (self.sequence_length if self.item == "token" else 1)


class ScalingOptions(RankOptions):
    """Options for the `scaling` experiment.

    Args:
        counts: numbers of devices to compare.
        precision: number format of the timed steps. "auto" is bf16 if the device has matrix units for it, otherwise fp32.
        warmup_steps: number of steps before the timed steps.
        steps: number of timed steps.
        traced_steps: number of consecutive steps in a profiled window. Three windows are profiled, and the window whose duration
            is the median is used.
        learning_rate: constant learning rate.
        parity_steps: number of steps of the parity check, in float32.
        parity_batch: number of sequences or images in a batch of the parity check, summed over all ranks.
        parity_length: number of tokens in a sequence of the parity check.
        workloads: training workloads to run.
    """

    counts: tuple[int, ...]
    precision: str
    warmup_steps: int
    steps: int
    learning_rate: float
    parity_steps: int
    parity_batch: int
    parity_length: int
    workloads: tuple[ScaledTraining, ...]
    traced_steps: int = 3

    def dtype(self, context: Context) -> str:
        """Return the number format of the timed steps on this device."""
        return choose_precision(context.device, self.precision).dtype


def forecast(context: Context) -> list[Forecast]:
    """Predict the weak-scaling efficiency on all devices.

    The prediction is computed from the bytes that each rank sends, and from the compute and communication rates that chapters 1.1
    and 1.3 measured.
    """
    options = ScalingOptions.of(context)
    devices, dtype = options.device_count(context), options.dtype(context)
    ranks = max(count for count in options.counts if count <= devices)
    return [_efficiency_forecast(context, training, ranks, dtype) for training in options.workloads]


def run(context: Context, report: Report) -> Result:
    """Run the training workloads on each number of devices. If the ranks fail, the rows have a reason instead of a value."""
    options = ScalingOptions.of(context)
    samples, missing = [], {}
    for ranks in options.counts:
        frames, failures = _launch(context, options, report, ranks)
        samples += frames
        missing |= failures
    frame = pd.concat(samples, ignore_index=True) if samples else pd.DataFrame({"workload": [], "ranks": []})
    rows = []
    for training in options.workloads:
        own = frame.query("workload == @training.name")
        for ranks in options.counts:
            rows += _cells(context, options.dtype(context), training, own, ranks, missing.get((training.name, ranks), ""))
    return Result(rows, frame)


EXPERIMENT = Experiment(forecast, run, forecast_reads=("gemm", "bandwidth", "collectives"), options=ScalingOptions)


def _efficiency_forecast(context: Context, training: ScaledTraining, ranks: int, dtype: str) -> Forecast:
    """Predict the weak-scaling efficiency of one workload on `ranks` devices.

    The step time on several devices is the computation time plus the communication time that computation cannot hide.
    """
    params = {"model": training.model, "strategy": training.strategy, "mode": "weak", "ranks": ranks}
    items = training.items("weak", ranks)
    gemm, busbw = context.best_gemm(dtype), _best_busbw(context)
    estimate, basis = None, "no estimate: this run has not measured products and collectives (chapters 1.1 and 1.3)"
    if ranks == 1:
        basis = "no estimate: this machine has one device"
    elif gemm and gemm.value and busbw:
        flops, sent = _flops_and_bytes(training, ranks, dtype)
        computing = flops * items / ranks / (gemm.value * 1e12)
        exchanging = sent / (busbw * 1e9)
        exposed = max(0.0, exchanging - _HIDING[training.strategy] * computing)
        estimate = computing / (computing + exposed)
        basis = (
            f"{computing * 1e3:.3g} ms of products at the measured {gemm.value:.4g} TFLOPS; {sent / 1e9:.3g} GB per rank at the "
            f"measured {busbw:.4g} GB/s take {exchanging * 1e3:.3g} ms, of which {exposed * 1e3:.3g} ms cannot be hidden"
        )
    params |= {f"{training.item}s": items}
    return Forecast(training.name, "scaling_efficiency", estimate, basis, dtype=dtype, params=params)


def _best_busbw(context: Context) -> float | None:
    rates = [r.value for r in context.upstream if r.metric == "busbw_gb_s" and r.variant == "all_reduce" and r.value]
    return max(rates, default=None)


def _flops_and_bytes(training: ScaledTraining, ranks: int, dtype: str) -> tuple[float, float]:
    """Return (FLOPs per token or image, bytes that each rank sends in a step)."""
    if training.item == "image":
        flops = flops_per_image(CLASS_COUNT, training.width).forward_backward
        parameters = reduced = parameter_count(resnet18(CLASS_COUNT, training.width))
        kept = 0  # not estimated, because its blocks differ in size
    elif training.lora:
        config = random_llama_shape(training.model, training.vocabulary)
        flops = llama_flops_per_token(config, training.sequence_length, RANK, ATTENTION).forward_backward
        parameters, reduced = llama_parameter_count(config), 0  # of the gradients, only those of the adapters are reduced
        layers = config.num_hidden_layers
        kept = parameters - (layers - 1) * (llama_parameter_count(replace(config, num_hidden_layers=layers + 1)) - parameters)
    else:
        config = lm_config(training)
        flops = flops_per_token(config, training.sequence_length).forward_backward
        parameters = reduced = config.parameter_count
        layers = config.layers
        kept = parameters - (layers - 1) * (replace(config, layers=layers + 1).parameter_count - parameters)
    # With the ring algorithm, each rank sends (N - 1) / N of the tensor in a reduce-scatter, and as much in an all-gather. An
    # all-reduce consists of both.
    passes = (ranks - 1) / ranks
    if training.strategy == "ddp":
        return flops, 2 * passes * 4 * reduced  # all-reduce of float32 gradients
    gathered = 2 if dtype == "bf16" else 4
    # All-gather in the forward and backward pass, then reduce-scatter. The last block and the parameters outside of the blocks
    # stay gathered between the two passes (see `parallelize`).
    return flops, passes * (gathered * (2 * parameters - kept) + 4 * reduced)


def _launch(
    context: Context, options: ScalingOptions, report: Report, ranks: int
) -> tuple[list[pd.DataFrame], dict[tuple[str, int], str]]:
    """Start `ranks` ranks and run all workloads on them.

    Return their samples, and a dict that maps (workload, number of ranks) to the reason why its samples are missing.
    """
    names = [training.name for training in options.workloads]
    devices = options.device_count(context)
    if ranks > devices:
        return [], {(name, ranks): f"this machine has {devices} devices" for name in names}
    try:
        results = run_on_ranks(context, report, measure_on_rank, {"names": names}, ranks=ranks)
        return [merged(results).samples], {}
    except JobError as error:
        _raise_if_interrupted(error)
        print(f"{ranks} ranks together: {error.what.splitlines()[0]}; running each training in a launch of its own")
    samples, missing = [], {}
    for name in names:
        try:
            results = run_on_ranks(context, report, measure_on_rank, {"names": [name]}, ranks=ranks)
            samples.append(merged(results).samples)
        except JobError as error:
            _raise_if_interrupted(error)
            missing[name, ranks] = f"{LAUNCH_FAILED}: {error.what.splitlines()[0]}"
    return samples, missing


def _raise_if_interrupted(error: JobError) -> None:
    """Raise `error` again if SIGTERM or Ctrl-C stopped the launch. In this case, this process must also end."""
    if error.exit_code in (INTERRUPTED, 128 + signal.SIGTERM):
        raise error


def _cells(context: Context, dtype: str, training: ScaledTraining, own: pd.DataFrame, ranks: int, reason: str) -> list[Row]:
    """Return the rows of one workload on `ranks` devices.

    A non-empty `reason` means that the workload was not measured. The rows then give this reason instead of a value.
    """
    modes = MODES if ranks > 1 else MODES[:1]
    if reason:
        return [
            context.absent_row(
                training.name,
                "scaling_efficiency",
                reason,
                dtype=dtype,
                params=_params(training, mode, ranks, {}),
                limit_source=_IDEAL,
            )
            for mode in modes
        ]
    rows = [] if ranks == 1 else [_parity_row(context, training, own, ranks)]
    for mode in modes:
        rows += _mode_rows(context, dtype, training, own, mode, ranks)
    return rows


def _mode_rows(context: Context, dtype: str, training: ScaledTraining, own: pd.DataFrame, mode: str, ranks: int) -> list[Row]:
    times = step_times(own, mode, ranks)
    if not len(times):
        why = own.query("ranks == @ranks and mode == @mode and kind == 'missing'").iloc[0]["reason"]
        return [
            context.absent_row(
                training.name,
                "scaling_efficiency",
                why,
                dtype=dtype,
                params=_params(training, mode, ranks, {}),
                limit_source=_IDEAL,
            )
        ]
    step = median_estimate(times)
    facts = own.query("ranks == @ranks and mode == @mode and kind == 'step'").iloc[0]
    items = int(facts["items"])
    params = _params(training, mode, ranks, {f"{training.item}s": items})
    floor, source = flops_floor(context.device, dtype, float(facts["least_flops"]) / ranks)
    rate = step.map(lambda seconds: items / seconds)
    best = None if floor is None else items / floor
    rows = [
        _row(context, training, "step_time_s", step, dtype, params, limit=floor, limit_source=source),
        _row(context, training, f"{training.item}s_per_s", rate, dtype, params, limit=best, limit_source=source),
    ]
    rows += _busy_rows(context, dtype, training, own, step, params)
    if ranks == 1:
        return rows
    rows += _difference_rows(context, dtype, training, own, times, params)
    rows.append(_exposed_row(context, dtype, training, own, params))
    one = step_times(own, MODES[0], 1)
    if not len(one):
        return rows
    # In weak scaling, N devices do N times the work of one device per step, so the ratio of the times is multiplied by N.
    grown = ranks if mode == "weak" else 1
    speedup = independent_ratio_estimate(times, one).map(lambda ratio: grown * ratio)
    efficiency = speedup.map(lambda times_faster: times_faster / ranks)
    return rows + [
        _row(context, training, "speedup", speedup, dtype, params, limit_source=_IDEAL),
        _row(context, training, "scaling_efficiency", efficiency, dtype, params, limit_source=_IDEAL),
    ]


def _difference_rows(
    context: Context, dtype: str, training: ScaledTraining, own: pd.DataFrame, times: np.ndarray, params: dict
) -> list[Row]:
    """Return two rows that compare a step on all ranks with the same step on a single rank without communication.

    The first row contains the difference of the two times divided by the step time on all ranks. It is negative if the single
    rank is slower, for example because it updates the whole optimizer state. The second row contains the same number as the share
    of communication. A share cannot be negative, so the second row has a value only if the whole confidence interval of the
    difference is above zero.
    """
    alone = step_times(own, params["mode"], params["ranks"], "alone")
    if not len(alone):
        reason = "the twin, which holds the whole state, does not fit"
        metrics = ("alone_difference", "communication_share")
        return [context.absent_row(training.name, metric, reason, dtype=dtype, params=params) for metric in metrics]
    difference = independent_ratio_estimate(times, alone).map(lambda ratio: 1 - ratio)
    row = _row(context, training, "alone_difference", difference, dtype, params)
    if difference.ci_low > 0:
        return [row, _row(context, training, "communication_share", difference, dtype, params)]
    reason = (
        f"no share: the interval of the difference from the step alone, {100 * difference.ci_low:.1f} % to "
        f"{100 * difference.ci_high:.1f} %, is not above zero"
    )
    return [row, context.absent_row(training.name, "communication_share", reason, dtype=dtype, params=params)]


def _profiled(own: pd.DataFrame, params: dict) -> pd.DataFrame:
    """Return the samples of the profiled steps of one workload, one for each rank."""
    return own.query("kind == 'traced' and ranks == @params['ranks'] and mode == @params['mode']")


def _busy_rows(
    context: Context, dtype: str, training: ScaledTraining, own: pd.DataFrame, step: Estimate, params: dict
) -> list[Row]:
    """Return the row with the busy time of the GPUs as a share of the step time, mean of the ranks. No row on a CPU.

    The busy time comes from profiled steps. The step time does not, because the profiler delays the host.
    """
    if context.device.kind == "cpu":
        return []
    traced = _profiled(own, params)
    busy_s = traced["busy_ns"] / traced["steps"] / 1e9
    share = min(float(np.mean(busy_s)) / not_none(step.value), 1.0)
    about, source = params | BUSY_GPU, "the GPU is busy during the whole step"
    columns = {"n": int(np.max(traced["steps"])), "limit": 1.0, "limit_source": source}
    return [context.row(training.name, "share", share, dtype=dtype, params=about, **columns)]


def _exposed_row(context: Context, dtype: str, training: ScaledTraining, own: pd.DataFrame, params: dict) -> Row:
    """Return the row with the exposed communication: the share of a step in which a rank communicates but does not compute.

    The value comes from profiled steps and is the mean over the ranks.
    """
    about = params | {"what": EXPOSED, "of": "profiled step, mean of the ranks"}
    traced = _profiled(own, params)
    if traced.empty:
        return context.absent_row(training.name, "share", "no step was profiled", dtype=dtype, params=about)
    return context.row(
        training.name, "share", float(np.mean(traced["share"])), dtype=dtype, params=about, n=int(np.max(traced["steps"]))
    )


def step_times(own: pd.DataFrame, mode: str, ranks: int, kind: str = "step") -> np.ndarray:
    """Return the time in seconds of each step on its slowest rank.

    Args:
        own: samples of one workload.
        mode: "weak" or "strong".
        ranks: number of ranks.
        kind: "step" for steps of all ranks together, or "alone" for steps of each rank without communication.
    """
    chosen = own.query("ranks == @ranks and mode == @mode and kind == @kind")
    # A step ends when its slowest rank has finished, so take the maximum over the ranks.
    return np.asarray(chosen.groupby("index")["time_s"].max())


def _parity_row(context: Context, training: ScaledTraining, own: pd.DataFrame, ranks: int) -> Row:
    losses = own.query("kind in ('parity', 'parity alone')").drop_duplicates(["kind", "ranks", "index"]).sort_values("index")

    def of(kind: str, count: int) -> np.ndarray:
        return np.asarray(losses.query("kind == @kind and ranks == @count")["loss"])

    here = of("parity", ranks)
    alone = of("parity alone", ranks) if training.item == "image" else of("parity", 1)
    params = {"what": "training loss", "model": training.model, "strategy": training.strategy, "ranks": ranks, "steps": len(here)}
    if len(alone) != len(here):
        return context.absent_row(
            training.name, "relative_difference", "one device alone is missing", dtype="fp32", params=params
        )
    difference = float(np.max(np.abs(here / alone - 1)))
    return context.error_row(
        training.name,
        "relative_difference",
        difference,
        f"losses of one device, step by step; {SCATTER_FP32}",
        PARITY,
        dtype="fp32",
        params=params,
    )


def _row(context: Context, training: ScaledTraining, metric: str, estimate: Estimate, dtype: str, params: dict, **columns) -> Row:
    return context.row(training.name, metric, estimate, dtype=dtype, params=params, **columns)


def _params(training: ScaledTraining, mode: str, ranks: int, more: dict) -> dict:
    return {"model": training.model, "strategy": training.strategy, "mode": mode, "ranks": ranks} | more


def lm_config(training: ScaledTraining) -> TransformerConfig:
    """Return the configuration of the workload's TransformerLM."""
    return named_config(training.model, vocab_size=training.vocabulary)


def measure_on_rank(context: Context, report: Report, names: list[str]) -> Result:
    """Run the named workloads: first the steps whose losses are compared, then the timed steps. Every rank runs this function."""
    options = ScalingOptions.of(context)
    chosen = [training for training in options.workloads if training.name in names]
    if context.device.kind == "cpu":
        # Give each rank its share of the cores. Otherwise a single rank would use all cores, and two ranks could not be faster.
        torch.set_num_threads(max(1, read_cpu().cores // options.device_count(context)))
    frames = []
    for place, training in enumerate(chosen):
        report(place, len(chosen), f"{training.name} on {world().size}")
        if options.device_count(context) > 1:  # otherwise there is nothing to compare with
            frames += _parity(context, options, training)
        frames += _timed(context, options, training)
    return Result([], pd.concat(frames, ignore_index=True).assign(ranks=world().size, rank=world().rank))


def _parity(context: Context, options: ScalingOptions, training: ScaledTraining) -> list[pd.DataFrame]:
    """Run training steps in float32 and return tables of their losses. The batches are the same on any number of ranks.

    The batch normalization of a ResNet normalizes each rank's part of a batch separately, so the losses of a ResNet depend on the
    number of ranks. They are compared with the losses of a single rank that runs the parts one after the other.
    """
    here = world()
    frames = [_parity_losses(context, options, training, here, 1).assign(kind="parity")]
    if training.item == "image" and here.size > 1:
        frames.append(_parity_losses(context, options, training, here.alone(), here.size).assign(kind="parity alone"))
    return frames


def _parity_losses(
    context: Context, options: ScalingOptions, training: ScaledTraining, sharers: World, micro_batches: int
) -> pd.DataFrame:
    strategy = training.strategy if sharers.size > 1 else "single"
    precision = Precision("fp32", "parity is judged in float32")
    engine, _ = _engine(context, options, training, sharers, strategy, precision, micro_batches)
    losses = []
    for step in range(options.parity_steps):
        batch = _batch(context, training, options.parity_batch, options.parity_length, sharers, step)
        losses.append(float(engine.train_step(batch).loss))
    _release(engine)
    return pd.DataFrame({"index": range(len(losses)), "loss": losses, "workload": training.name})


def _timed(context: Context, options: ScalingOptions, training: ScaledTraining) -> list[pd.DataFrame]:
    """Time the steps of all ranks together, then the same steps on each rank without communication.

    Both are timed in each scaling mode, weak and strong.

    For the steps without communication, each rank is the only member of its process group. It uses the same strategy (DDP or
    FSDP), so it holds the whole state of the model and the optimizer.
    """
    here = world()
    precision = choose_precision(context.device, options.precision)
    wanted = MODES if here.size > 1 else MODES[:1]  # on one device both modes are the same
    modes = [mode for mode in wanted if training.batch(mode, here.size) % here.size == 0]
    reason = f"{here.size} devices do not divide its batch"
    frames = [_missing(training, mode, reason) for mode in wanted if mode not in modes]
    try:
        # Use the strategy also on one device, so that the same program runs on every number of devices.
        frames += _mode_times(context, options, training, modes, "step", here, precision)
    except torch.OutOfMemoryError as error:
        if here.size > 1:
            raise  # the other ranks wait for this rank in a collective, so the whole launch must fail
        return [*frames, *(_missing(training, mode, out_of_memory_reason(error)) for mode in modes)]
    if here.size > 1:
        alone = here.alone()
        with contextlib.suppress(torch.OutOfMemoryError):  # a single rank holds the whole state; no other rank waits for it
            frames += _mode_times(context, options, training, modes, "alone", alone, precision)
    return frames


def _mode_times(
    context: Context,
    options: ScalingOptions,
    training: ScaledTraining,
    modes: list[str],
    kind: str,
    sharers: World,
    precision: Precision,
) -> list[pd.DataFrame]:
    """Return the time in seconds of each step on this rank, as one table per scaling mode.

    All ranks run the same number of steps. If they ran for a given time instead, a rank could stop while the others wait for it.
    """
    here, clock = world(), device_clock(context.device)
    engine, least_flops = _engine(context, options, training, sharers, training.strategy, precision)
    frames = []
    for mode in modes:
        count = training.batch(mode, here.size)
        items = training.items(mode, here.size)
        batch = _batch(context, training, count, training.sequence_length, here, 0)
        step = functools.partial(engine.train_step, batch)
        # Warm-up with the same sampling as the timing. The result is discarded.
        clock.sample([step], None, options.warmup_steps)
        times = clock.sample([step], None, options.steps)[0]
        frame = pd.DataFrame({"index": range(len(times)), "time_s": times})
        frames.append(frame.assign(workload=training.name, mode=mode, kind=kind, items=items, least_flops=least_flops * items))
        if kind == "step" and (here.size > 1 or context.device.kind != "cpu"):
            # Profile after the timing, because the profiler slows steps down.
            frames.append(_traced(step, context.device, options.traced_steps).assign(workload=training.name, mode=mode))
    _release(engine)
    return frames


def _traced(step: Callable[[], object], device: Device, steps: int) -> pd.DataFrame:
    """Profile some steps. Return a table with three times of this rank in nanoseconds, each summed over the steps.

    These are the time in which the rank only communicates, the time in which the device computes, copies or communicates, and the
    whole time. A rank only communicates during times in which no kernels run except those of collectives. If this rank is ahead
    of the others, the time in which it waits for them counts, too.
    """
    trace = trace_steps(step, None, device, steps)
    order = CPU_ORDER if device.kind == "cpu" else GPU_ORDER
    parts = partition(trace.events, trace.start_ns, trace.end_ns, order)
    exposed, window = parts[COMMUNICATION], trace.end_ns - trace.start_ns
    busy = sum(parts[kind] for kind in (GEMM, MEMORY, COMMUNICATION, COPIES))
    found = {"kind": "traced", "index": 0, "exposed_ns": exposed, "busy_ns": busy, "window_ns": window, "steps": steps}
    return pd.DataFrame([found | {"share": exposed / window}])


def _missing(training: ScaledTraining, mode: str, reason: str) -> pd.DataFrame:
    return pd.DataFrame([{"workload": training.name, "mode": mode, "kind": "missing", "reason": reason}])


def _engine(
    context: Context,
    options: ScalingOptions,
    training: ScaledTraining,
    here: World,
    strategy: str,
    precision: Precision,
    micro_batches: int = 1,
) -> tuple[TorchEngine, float]:
    """Return a training engine for the ranks in `here`, and the minimum FLOPs per token or image.

    The model is parallelized over these ranks. Its initial weights are the same on every rank.

    Causal attention needs only half of the attention matrix, so the minimum FLOPs are computed with half of the sequence length.
    """
    seed_everything(context.seed)
    device = context.device
    sixteen_bit = strategy == "fsdp" and precision.dtype == "bf16"
    plan = ParallelPlan(strategy=strategy, param_dtype="bf16" if sixteen_bit else None)
    rate = options.learning_rate
    if training.item == "image":
        model = parallelize(resnet18(CLASS_COUNT, training.width).to(device.torch_device), plan, here)
        optimizer = sgd_nesterov(model, rate)
        engine = ImageEngine(model, optimizer, lambda step: rate, precision, device, micro_batches=micro_batches, world=here)
        return engine, float(flops_per_image(CLASS_COUNT, training.width).forward_backward)
    if training.lora:
        model, flops = lora_model(
            training.model, training.vocabulary, training.sequence_length // 2, device, frozen_dtype(precision)
        )
    else:
        config = lm_config(training)
        with torch.device(device.torch_device):  # draw the weights there, because a billion weights take ten seconds on the host
            model, flops = TransformerLM(config), flops_per_token(config, training.sequence_length // 2)
    model = parallelize(model, plan, here)
    engine = LanguageEngine(model, adamw(model, rate), lambda step: rate, precision, device, world=here)
    return engine, float(flops.forward_backward)


def _batch(
    context: Context, training: ScaledTraining, count: int, length: int, here: World, step: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return this rank's part of a batch of `count` sequences of `length` tokens, or of `count` images.

    The whole batch does not depend on the number of ranks.
    """
    # Every rank draws the whole batch on the host and takes its part of it, so that all parts belong to the same batch.
    generator = torch.Generator().manual_seed(context.seed * 1000 + step)
    device = context.device.torch_device
    if training.item == "image":
        images = torch.randn(count, 3, IMAGE_SIZE, IMAGE_SIZE, generator=generator)
        labels = torch.randint(CLASS_COUNT, (count,), generator=generator)
        return images.tensor_split(here.size)[here.rank].to(device), labels.tensor_split(here.size)[here.rank].to(device)
    tokens = torch.randint(training.vocabulary, (count, length + 1), generator=generator)
    own = tokens.tensor_split(here.size)[here.rank].to(device)
    return own[:, :-1].contiguous(), own[:, 1:].contiguous()


def _release(engine: TorchEngine) -> None:
    """Free the model and the optimizer, so that the next model fits into memory."""
    del engine.model, engine.optimizer
    release_memory()


def lora_model(
    name: str, vocabulary: int, sequence_length: int, device: Device, dtype: torch.dtype = torch.float32
) -> tuple[LlamaLM, ModelFlops]:
    """Return a randomly initialised Llama with LoRA adapters, and its FLOPs per token.

    The weights are drawn with PyTorch's default generators.
    """
    model = load_llama(name, vocab_size=vocabulary, dtype=dtype, device=device.torch_device)
    flops = llama_flops_per_token(model.config, sequence_length, RANK, ATTENTION)
    return LlamaLM(add_lora(model, RANK, ALPHA)), flops
