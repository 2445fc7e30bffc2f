"""What one rank of the scaling experiment does: parity steps in float32, then step times with and without communication."""

import contextlib
import functools
import gc
from dataclasses import dataclass
from typing import ClassVar, Literal

import pandas as pd
import torch
from pydantic import ConfigDict

from hyperion.chapter.context import Context, Report, Result
from hyperion.chapter.rows import out_of_memory_reason
from hyperion.chapter.variants import RankOptions
from hyperion.hardware import Device
from hyperion.hardware.cpu import read_cpu
from hyperion.measure.clock.timing import device_clock
from hyperion.models import (
    LlamaLM,
    ModelFlops,
    TransformerConfig,
    TransformerLM,
    flops_per_token,
    llama_flops_per_token,
    load_llama,
    named_config,
)
from hyperion.parallel import ParallelPlan, add_lora, parallelize
from hyperion.parallel.lora import ATTENTION
from hyperion.processes import World, world
from hyperion.training import LanguageEngine, Precision, TorchEngine, adamw, choose_precision, seed_everything
from hyperion.workloads.fine_tuning import ALPHA, RANK, frozen_dtype

# Weak: constant batch per device, so the work grows with the devices. Strong: constant batch of all devices together.
MODES = ("weak", "strong")


@dataclass(frozen=True)
class ScaledTraining:
    """One training to scale.

    Args:
        name: its variant in the rows.
        model: configuration by name: of a TransformerLM, or of a randomly initialised Llama, which gets LoRA adapters.
        strategy: "ddp" or "fsdp" on several devices.
        batch_per_device: sequences of a step, per device in weak mode, of all devices together in strong mode.
        sequence_length: tokens of a sequence.
        vocabulary: rows of the embedding. Tokens are drawn at random, since their values do not change the time.
    """

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid", strict=True)

    name: str
    model: str
    strategy: Literal["ddp", "fsdp"]
    batch_per_device: int
    sequence_length: int
    vocabulary: int

    @property
    def lora(self) -> bool:
        """Whether it trains LoRA adapters of a Llama."""
        return "llama" in self.model

    def batch(self, mode: str, ranks: int) -> int:
        """Return the number of sequences of a step, of all ranks together."""
        return self.batch_per_device * (ranks if mode == "weak" else 1)


class ScalingOptions(RankOptions):
    """Options of the experiment.

    Args:
        counts: numbers of devices.
        precision: of the timed steps; "auto" is bf16 where matrix units support it, else fp32.
        warmup_steps: steps before the timed ones.
        steps: timed steps.
        learning_rate: constant learning rate.
        parity_steps: steps of the parity check, in float32.
        parity_batch: sequences of its batch, of all ranks together.
        parity_length: tokens of its sequences.
        workloads: the trainings.
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

    def dtype(self, context: Context) -> str:
        """Return the number format of the timed steps on this device."""
        return choose_precision(context.device, self.precision).dtype


def lm_config(training: ScaledTraining) -> TransformerConfig:
    """Return the configuration of a TransformerLM."""
    return named_config(training.model, vocab_size=training.vocabulary)


def measure_on_rank(context: Context, report: Report, names: list[str]) -> Result:
    """Run the named trainings in turn: the losses of the parity steps, then the step times of each mode."""
    options = ScalingOptions.of(context)
    chosen = [training for training in options.workloads if training.name in names]
    if context.device.kind == "cpu":
        # A single rank would use all cores, so a second one could not speed it up.
        torch.set_num_threads(max(1, read_cpu().cores // options.device_count(context)))
    frames = []
    for place, training in enumerate(chosen):
        report(place, len(chosen), f"{training.name} on {world().size}")
        frames.append(_parity(context, options, training))
        frames += _timed(context, options, training)
    return Result([], pd.concat(frames, ignore_index=True).assign(ranks=world().size, rank=world().rank))


def _parity(context: Context, options: ScalingOptions, training: ScaledTraining) -> pd.DataFrame:
    """Losses of float32 steps on a batch of constant size, the same on any number of ranks."""
    here = world()
    strategy = training.strategy if here.size > 1 else "single"
    engine, _ = _engine(context, options, training, here, strategy, Precision("fp32", "parity is judged in float32"))
    losses = []
    for step in range(options.parity_steps):
        batch = _batch(context, training, options.parity_batch, options.parity_length, here, step)
        losses.append(float(engine.train_step(batch).loss))
    _release(engine)
    return pd.DataFrame({"kind": "parity", "index": range(len(losses)), "loss": losses, "workload": training.name})


def _timed(context: Context, options: ScalingOptions, training: ScaledTraining) -> list[pd.DataFrame]:
    """Times of steps that all ranks share, mode by mode; then of the same steps on each rank alone.

    Alone, a rank uses the same strategy in a process group of its own: it neither communicates nor shares the state.
    """
    here = world()
    precision = choose_precision(context.device, options.precision)
    wanted = MODES if here.size > 1 else MODES[:1]  # on one device the modes are the same
    modes = [mode for mode in wanted if training.batch(mode, here.size) % here.size == 0]
    reason = f"{here.size} devices do not divide its batch"
    frames = [_missing(training, mode, reason) for mode in wanted if mode not in modes]
    try:
        # Also on one device under the strategy: the comparison is of one program on different numbers of devices.
        frames += _mode_times(context, options, training, modes, "step", here, precision)
    except torch.OutOfMemoryError as error:
        if here.size > 1:
            raise  # the other ranks wait for this one, so the launch must fail
        return [*frames, *(_missing(training, mode, out_of_memory_reason(error)) for mode in modes)]
    if here.size > 1:
        alone = here.alone()
        with contextlib.suppress(torch.OutOfMemoryError):  # alone, a rank holds the whole state; no other rank waits for it
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
    """Seconds of each step of one engine. The number of steps is fixed: ranks that stopped at a time limit of their own would
    leave the others waiting.
    """
    here, clock = world(), device_clock(context.device)
    engine, least_flops = _engine(context, options, training, sharers, training.strategy, precision)
    frames = []
    for mode in modes:
        count = training.batch(mode, here.size)
        tokens = count * training.sequence_length
        batch = _batch(context, training, count, training.sequence_length, here, 0)
        step = functools.partial(engine.train_step, batch)
        clock.sample([step], None, options.warmup_steps)
        times = clock.sample([step], None, options.steps)[0]
        frame = pd.DataFrame({"index": range(len(times)), "time_s": times})
        frames.append(frame.assign(workload=training.name, mode=mode, kind=kind, tokens=tokens, least_flops=least_flops * tokens))
    _release(engine)
    return frames


def _missing(training: ScaledTraining, mode: str, reason: str) -> pd.DataFrame:
    return pd.DataFrame([{"workload": training.name, "mode": mode, "kind": "missing", "reason": reason}])


def _engine(
    context: Context, options: ScalingOptions, training: ScaledTraining, here: World, strategy: str, precision: Precision
) -> tuple[TorchEngine, float]:
    """Return an engine with the same weights on every rank, parallelized over `here`, and the least FLOPs per token.

    Causal attention needs only half of the attention matrix, so the least FLOPs are those of half the sequence length.
    """
    seed_everything(context.seed)
    device = context.device
    sixteen_bit = strategy == "fsdp" and precision.dtype == "bf16"
    plan = ParallelPlan(strategy=strategy, param_dtype="bf16" if sixteen_bit else None)
    if training.lora:
        model, flops = lora_model(
            training.model, training.vocabulary, training.sequence_length // 2, device, frozen_dtype(precision)
        )
    else:
        config = lm_config(training)
        with torch.device(device.torch_device):  # drawing a billion weights takes ten seconds on the host
            model, flops = TransformerLM(config), flops_per_token(config, training.sequence_length // 2)
    model = parallelize(model, plan, here)
    rate = options.learning_rate
    engine = LanguageEngine(model, adamw(model, rate), lambda step: rate, precision, device, world=here)
    return engine, float(flops.forward_backward)


def _batch(
    context: Context, training: ScaledTraining, count: int, length: int, here: World, step: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return this rank's part of a batch of `count` sequences, which is the same on any number of ranks."""
    generator = torch.Generator().manual_seed(context.seed * 1000 + step)
    tokens = torch.randint(training.vocabulary, (count, length + 1), generator=generator)
    own = tokens.chunk(here.size)[here.rank].to(context.device.torch_device)
    return own[:, :-1].contiguous(), own[:, 1:].contiguous()


def _release(engine: TorchEngine) -> None:
    """Free the model and the optimizer, so that the next ones fit into memory."""
    del engine.model, engine.optimizer
    gc.collect()
    if engine.device.kind != "cpu":
        torch.cuda.empty_cache()


def lora_model(
    name: str, vocabulary: int, sequence_length: int, device: Device, dtype: torch.dtype = torch.float32
) -> tuple[LlamaLM, ModelFlops]:
    """Return a randomly initialised Llama with LoRA adapters, and its FLOPs per token. Uses torch's current generators."""
    model = load_llama(name, vocab_size=vocabulary, dtype=dtype, device=device.torch_device)
    flops = llama_flops_per_token(model.config, sequence_length, RANK, ATTENTION)
    return LlamaLM(add_lora(model, RANK, ALPHA)), flops
