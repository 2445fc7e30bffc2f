"""Run the training workloads on the ranks of one launch, and return the samples of each rank.

The samples of all ranks form one table. Its columns `workload`, `ranks`, `rank` and `kind` say what a line belongs to:

    parity          loss of a float32 step; its number is `index`
    parity alone    the same, of a single rank that runs the parts of all ranks; only for a ResNet on several ranks
    step            `time_s` of a step on all ranks, with its scaling mode, `items` and `least_flops`
    alone           the same, of a step that each rank runs without communication
    traced          times of the profiled steps, in nanoseconds (see `_traced`)
    not traced      the reason why the profiler gave no times
    missing         the reason why a scaling mode was not measured
"""

import contextlib
import functools
from collections.abc import Callable

import pandas as pd
import torch

from hyperion.chapter.context import Context, Report, Result
from hyperion.chapter.rows import out_of_memory_reason
from hyperion.data.images.imageset import CLASS_COUNT
from hyperion.errors import HyperionError
from hyperion.experiments.scaling.scaled_training import MODES, ScaledTraining, ScalingOptions, lm_config
from hyperion.hardware import Device
from hyperion.hardware.cpu import read_cpu
from hyperion.measure.clock.timing import device_clock
from hyperion.measure.memory_use.allocation import release_memory
from hyperion.measure.steps.trace import COMMUNICATION, COPIES, CPU_ORDER, GEMM, GPU_ORDER, MEMORY, partition, trace_steps
from hyperion.models import (
    LlamaLM,
    ModelFlops,
    TransformerLM,
    flops_per_image,
    flops_per_token,
    llama_flops_per_token,
    load_llama,
    resnet18,
)
from hyperion.models.resnet import IMAGE_SIZE
from hyperion.parallel import ParallelPlan, parallelize
from hyperion.processes import World, world
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
    try:
        trace = trace_steps(step, None, device, steps)
    except HyperionError as error:  # the profiler may lack a permission; all ranks have run the same steps
        return pd.DataFrame([{"kind": "not traced", "index": 0, "reason": error.what}])
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


def lora_model(
    name: str, vocabulary: int, sequence_length: int, device: Device, dtype: torch.dtype = torch.float32
) -> tuple[LlamaLM, ModelFlops]:
    """Return a randomly initialised Llama with LoRA adapters, and its FLOPs per token.

    The weights are drawn with PyTorch's default generators.
    """
    model = load_llama(name, vocab_size=vocabulary, dtype=dtype, device=device.torch_device)
    flops = llama_flops_per_token(model.config, sequence_length, RANK, ATTENTION)
    return LlamaLM(add_lora(model, RANK, ALPHA)), flops


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
