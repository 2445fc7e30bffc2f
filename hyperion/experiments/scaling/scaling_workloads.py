"""What the scaling chapter trains, and a rank's side of it: parity in float32, then times with and without communication."""

import contextlib
import functools
import gc
from dataclasses import dataclass

import pandas as pd
import torch

from hyperion.chapter.context import Context, Result
from hyperion.chapter.ranks import devices_here
from hyperion.chapter.rows import out_of_memory_reason
from hyperion.chapter.variants import Report
from hyperion.hardware.cpu import read_cpu
from hyperion.measure.clock.timing import device_clock
from hyperion.models import TransformerConfig, TransformerLM, flops_per_token, named_config
from hyperion.parallel import ParallelPlan, parallelize
from hyperion.processes import World, world
from hyperion.training import LanguageEngine, Precision, TorchEngine, adamw, choose_precision, seed_everything
from hyperion.workloads.llama_setup import frozen_dtype, lora_model

# Weak: the batch of a device stays, so the work grows with the devices. Strong: the batch of all devices stays.
MODES = ("weak", "strong")


@dataclass(frozen=True)
class Workload:
    """One training that is scaled, as the profile describes it.

    Args:
        name: its variant in the rows.
        model: configuration by name: a TransformerLM's, or a random-initialised Llama's that gets LoRA adapters.
        strategy: how several devices share it.
        batch_per_device: sequences a device trains on in a step, weak mode; all devices together in strong mode.
        sequence_length: tokens of each.
        vocabulary: entries of the embedding; the tokens are drawn from it, since no time depends on what they say.
    """

    name: str
    model: str
    strategy: str
    batch_per_device: int
    sequence_length: int
    vocabulary: int

    @property
    def lora(self) -> bool:
        return "llama" in self.model

    def batch(self, mode: str, ranks: int) -> int:
        """Sequences of all ranks together."""
        return self.batch_per_device * (ranks if mode == "weak" else 1)


def lm_config(workload: Workload) -> TransformerConfig:
    """The configuration of a workload that is no Llama."""
    return named_config(workload.model, vocab_size=workload.vocabulary)


def workloads_of(context: Context) -> list[Workload]:
    """The profile's workloads."""
    return [Workload(**settings) for settings in context.sizes["workloads"]]


def dtype_here(context: Context) -> str:
    """What the timed steps compute in on this device."""
    return choose_precision(context.device, context.sizes["precision"]).dtype


def measure_on_rank(context: Context, report: Report, names: list[str]) -> Result:
    """Every named workload in turn: losses of the parity steps, then step times, mode by mode."""
    chosen = [workload for workload in workloads_of(context) if workload.name in names]
    if context.device.kind == "cpu":
        # One rank alone would take all cores, and could not become faster by having another beside it.
        torch.set_num_threads(max(1, read_cpu().cores // devices_here(context)))
    frames = []
    for place, workload in enumerate(chosen):
        report(place, len(chosen), f"{workload.name} on {world().size}")
        frames.append(_parity(context, workload))
        frames += _timed(context, workload)
    return Result([], pd.concat(frames, ignore_index=True).assign(ranks=world().size, rank=world().rank))


def _parity(context: Context, workload: Workload) -> pd.DataFrame:
    """Losses of float32 steps on a batch of fixed size, the same on any number of ranks."""
    sizes, here = context.sizes, world()
    strategy = workload.strategy if here.size > 1 else "single"
    engine, _ = _engine(context, workload, here, strategy, Precision("fp32", "parity is judged in float32"))
    losses = []
    for step in range(sizes["parity_steps"]):
        batch = _batch(context, workload, sizes["parity_batch"], sizes["parity_length"], here, step)
        losses.append(float(engine.train_step(batch).loss))
    _release(engine)
    return pd.DataFrame({"kind": "parity", "index": range(len(losses)), "loss": losses, "workload": workload.name})


def _timed(context: Context, workload: Workload) -> list[pd.DataFrame]:
    """Times of equally many steps on every rank, mode by mode; then of a twin on the same batches that talks to nobody.

    The twin is laid out by the same strategy in a group of its own: what it does not do is communicate, and share the state.
    """
    here = world()
    precision = choose_precision(context.device, context.sizes["precision"])
    wanted = MODES if here.size > 1 else MODES[:1]  # on one device the two are the same
    modes = [mode for mode in wanted if workload.batch(mode, here.size) % here.size == 0]
    reason = f"{here.size} devices do not divide its batch"
    frames = [_missing(workload, mode, reason) for mode in wanted if mode not in modes]
    try:
        # On one device too: what is compared is one program on different numbers of devices.
        frames += _mode_times(context, workload, modes, "step", here, precision)
    except torch.OutOfMemoryError as error:
        if here.size > 1:
            raise  # peers that had enough wait for this rank: the launch ends, and says so
        return [*frames, *(_missing(workload, mode, out_of_memory_reason(error)) for mode in modes)]
    if here.size > 1:
        alone = here.alone()
        with contextlib.suppress(torch.OutOfMemoryError):  # the twin holds the whole state, and waits for nobody
            frames += _mode_times(context, workload, modes, "alone", alone, precision)
    return frames


def _mode_times(
    context: Context, workload: Workload, modes: list[str], kind: str, sharers: World, precision: Precision
) -> list[pd.DataFrame]:
    """Seconds of each step of one engine. A fixed number of steps: ranks that stopped by their own clocks would wait for
    each other.
    """
    here, sizes, clock = world(), context.sizes, device_clock(context.device)
    engine, least_flops = _engine(context, workload, sharers, workload.strategy, precision)
    frames = []
    for mode in modes:
        count = workload.batch(mode, here.size)
        tokens = count * workload.sequence_length
        batch = _batch(context, workload, count, workload.sequence_length, here, 0)
        step = functools.partial(engine.train_step, batch)
        clock.sample([step], None, sizes["warmup_steps"])
        times = clock.sample([step], None, sizes["steps"])[0]
        frame = pd.DataFrame({"index": range(len(times)), "time_s": times})
        frames.append(frame.assign(workload=workload.name, mode=mode, kind=kind, tokens=tokens, least_flops=least_flops * tokens))
    _release(engine)
    return frames


def _missing(workload: Workload, mode: str, reason: str) -> pd.DataFrame:
    return pd.DataFrame([{"workload": workload.name, "mode": mode, "kind": "missing", "reason": reason}])


def _engine(context: Context, workload: Workload, here: World, strategy: str, precision: Precision) -> tuple[TorchEngine, float]:
    """A fresh model with the same weights on every rank, laid out over `here`; and the FLOPs of a token that no
    implementation can avoid: only half of the attention matrix is causal.
    """
    seed_everything(context.seed)
    device = context.device
    halved = strategy == "fsdp" and precision.dtype == "bf16"
    plan = ParallelPlan(strategy=strategy, param_dtype="bf16" if halved else None)
    if workload.lora:
        model, flops = lora_model(
            workload.model, workload.vocabulary, workload.sequence_length // 2, device, frozen_dtype(precision)
        )
    else:
        config = lm_config(workload)
        with torch.device(device.torch_device):  # a billion weights are drawn in a moment there, and in ten seconds here
            model, flops = TransformerLM(config), flops_per_token(config, workload.sequence_length // 2)
    model = parallelize(model, plan, here)
    rate = context.sizes["learning_rate"]
    engine = LanguageEngine(model, adamw(model, rate), lambda step: rate, precision, device, world=here)
    return engine, float(flops.forward_backward)


def _batch(context: Context, workload: Workload, count: int, length: int, here: World, step: int):
    """This rank's part of a batch of `count` sequences that is the same on any number of ranks."""
    generator = torch.Generator().manual_seed(context.seed * 1000 + step)
    tokens = torch.randint(workload.vocabulary, (count, length + 1), generator=generator)
    own = tokens.chunk(here.size)[here.rank].to(context.device.torch_device)
    return own[:, :-1].contiguous(), own[:, 1:].contiguous()


def _release(engine: TorchEngine) -> None:
    """Free the model before the next one is built: two at once would say nothing about what fits."""
    engine.model = engine.optimizer = None
    gc.collect()
    if engine.device.kind != "cpu":
        torch.cuda.empty_cache()
