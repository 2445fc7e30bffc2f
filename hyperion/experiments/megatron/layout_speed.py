"""How long does a training step take in each layout of megatron-core, and in this library?

Every training starts from the weights of the same Llama and gets the same tokens, so the losses must agree. All matrix products
are in float32. This library divides only the batch (DDP) or also the state (FSDP2), so it has no counterpart of TP and PP.

megatron-core keeps the groups of its layout in global variables, so two layouts cannot exist at the same time. In each round, all
trainings are built anew and timed one after another.
"""

import copy
import gc
import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
import pandas as pd
import torch
import torch.distributed as dist
from torch import Tensor, nn

from hyperion.chapter.context import Context, Experiment, Forecast, Report, Result
from hyperion.chapter.rows import checked
from hyperion.chapter.variants import RankOptions, merged, run_on_ranks
from hyperion.experiments.megatron.bytes_of_text import VOCABULARY, batches
from hyperion.experiments.megatron.megatron_parity import TOLERANCE, LayoutTable, initial_llama, mean_over_ranks, why_not
from hyperion.models import llama_flops_per_token
from hyperion.models.llama import LlamaLM, random_llama_shape
from hyperion.parallel import ParallelPlan, parallelize
from hyperion.parallel.megatron.layouts import MegatronLayout
from hyperion.parallel.megatron.release import adapted_copy, use_adapted
from hyperion.processes import world
from hyperion.results import Row, independent_ratio_estimate
from hyperion.results.series import series_estimate
from hyperion.training import LanguageEngine, Precision, adamw
from hyperion.workloads.training_rows import flops_floor

OURS = {"ddp": "this library, DDP", "fsdp": "this library, FSDP2"}
_WEIGHT_DECAY, _BETAS, _EPSILON, _CLIP = 0.1, (0.9, 0.95), 1e-8, 1.0
_WARMUP_STEPS = 2
_LEAST_RANKS = 2  # on one rank, there is nothing to divide


class LayoutSpeedOptions(RankOptions):
    """Options of `layout_speed`.

    Args:
        model: name of the model configuration.
        sequence_length: number of input tokens in a sequence.
        batch_size: number of sequences per step, on all ranks together.
        learning_rate: learning rate of all steps.
        layouts: the layouts of megatron-core. The first one is the reference of the speed-ups.
        rounds: number of times that each training is built and timed.
        steps: number of timed steps of a training in a round.
    """

    model: str
    sequence_length: int
    batch_size: int
    learning_rate: float
    layouts: tuple[LayoutTable, ...]
    rounds: int
    steps: int


def forecast(context: Context) -> list[Forecast]:
    """Predict the speed relative to the first layout: the same, except for the bubble of a pipeline.

    The prediction contains no communication and assumes equally fast kernels. The measured value shows what both cost.
    """
    options = LayoutSpeedOptions.of(context)
    ranks = _ranks(context, options)
    forecasts = []
    for table in options.layouts[1:]:
        stages, count = table.pipeline, table.micro_batches
        basis = "each rank computes the same number of FLOPs; communication and unequal kernels are not counted"
        if stages > 1:
            basis = f"a stage works for m / (m + p - 1) of the step, with p = {stages} stages and m = {count} micro-batches"
        name, params = _name(table.layout(), ranks), _params(options, ranks) | {"over": _reference(options, ranks)}
        forecasts.append(Forecast(name, "speedup", count / (count + stages - 1), basis, dtype="fp32", params=params))
    return forecasts


def run(context: Context, report: Report) -> Result:
    """Start the ranks once, and time all trainings on them."""
    options = LayoutSpeedOptions.of(context)
    ranks = _ranks(context, options)
    params = _params(options, ranks)
    if reason := why_not(options.device_count(context), _LEAST_RANKS):
        names = [_name(table.layout(), ranks) for table in options.layouts]
        rows = [context.absent_row(name, "step_time_s", reason, dtype="fp32", params=params) for name in names]
        return Result(rows, pd.DataFrame())
    adapted_copy()  # before the ranks start, because each of them would create it
    samples = merged(run_on_ranks(context, report, time_on_rank, ranks=ranks)).samples
    return Result(speed_rows(context, options, ranks, samples), samples)


EXPERIMENT = Experiment(forecast, run, options=LayoutSpeedOptions, stand_in=("megatron-core, DP 2", "step_time_s"))


def speed_rows(context: Context, options: LayoutSpeedOptions, ranks: int, samples: pd.DataFrame) -> list[Row]:
    """Return the step time of each training, and its speed-up over the first layout.

    Args:
        context, options: context and sizes of the experiment.
        ranks: number of ranks.
        samples: a row per rank and step, with the columns training, round, step, time_s and loss. The time is NaN in the steps
            of the warm-up.
    """
    params = _params(options, ranks)
    flops = llama_flops_per_token(random_llama_shape(options.model, VOCABULARY), options.sequence_length).forward_backward
    floor, source = flops_floor(context.device, "fp32", flops * options.batch_size * options.sequence_length / ranks)
    # A step ends when its slowest rank ends.
    steps = samples.groupby(["training", "round", "step"], sort=False).agg(time_s=("time_s", "max"), loss=("loss", "first"))
    times = {str(name): part.time_s.dropna().to_numpy() for name, part in steps.groupby("training", sort=False)}
    losses = {name: steps.loss[name] for name in times}
    # The reference of the losses is this library, which shares no code with megatron-core.
    expected = losses[OURS["ddp"]]
    rows = []
    for name, series in times.items():
        error = float(np.max(np.abs((losses[name] / expected - 1).to_numpy())))  # the maximum of a Series would omit NaN
        check = checked(f"losses of {OURS['ddp']}, step by step", error, TOLERANCE)
        common = {"dtype": "fp32", **check}
        rows.append(
            context.row(name, "step_time_s", series_estimate(series), params=params, limit=floor, limit_source=source, **common)
        )
        reference = _reference(options, ranks)
        if name != reference:
            ratio = independent_ratio_estimate(series, times[reference])
            common["limit_source"] = "no limit: it depends on what the reference waits for"
            rows.append(context.row(name, "speedup", ratio, params=params | {"over": reference}, **common))
    return rows


def time_on_rank(context: Context, report: Report) -> Result:
    """On one rank, time the steps of all trainings. Return a sample for each step."""
    options, here = LayoutSpeedOptions.of(context), world()
    use_adapted()
    initial = initial_llama(context, options.model)
    noise = np.random.default_rng(context.seed).integers(0, VOCABULARY, 100_000)
    tokens = batches(noise, _WARMUP_STEPS + options.steps, options.batch_size, options.sequence_length, context.seed)
    tokens_SBT = tokens.to(here.device.torch_device)
    trainings: dict[str, Callable] = {name: _our_training(strategy) for strategy, name in OURS.items()}
    for table in options.layouts:
        trainings[_name(table.layout(), here.size)] = _megatron_training(table.layout())
    lines = []
    for number in range(options.rounds):
        report(number, options.rounds, "rounds")
        for name, training in trainings.items():
            with training(options, initial) as step:
                for index, tokens_BT in enumerate(tokens_SBT):
                    dist.barrier()
                    seconds, loss = _timed(step, tokens_BT)
                    line = {"training": name, "round": number, "step": index, "loss": loss}
                    lines.append(line | {"time_s": math.nan if index < _WARMUP_STEPS else seconds})
            gc.collect()  # the next training needs the memory of this one
    return Result([], pd.DataFrame(lines).assign(variant="step", dtype="fp32", rank=here.rank))


def _timed(step: Callable[[Tensor], Callable[[], float]], tokens_BT: Tensor) -> tuple[float, float]:
    """Run a step. Return its time in seconds and its loss."""
    if tokens_BT.is_cuda:
        torch.cuda.synchronize()
    start = time.perf_counter()
    read_loss = step(tokens_BT)
    if tokens_BT.is_cuda:
        torch.cuda.synchronize()
    return time.perf_counter() - start, read_loss()


def _our_training(strategy: str) -> Callable:
    """Return a context manager that builds a training of this library and gives its step.

    The step takes the whole batch, and returns a function that returns the mean loss of all ranks.
    """

    @contextmanager
    def training(options: LayoutSpeedOptions, initial: nn.Module) -> Iterator[Callable[[Tensor], Callable[[], float]]]:
        here = world()
        model = parallelize(LlamaLM(copy.deepcopy(initial)), ParallelPlan(strategy), here)
        engine = LanguageEngine(
            model,
            adamw(model, options.learning_rate, _WEIGHT_DECAY, _BETAS, _EPSILON),
            lambda step: options.learning_rate,
            Precision("fp32", "as in megatron-core"),
            here.device,
            clip_norm=_CLIP,
        )

        def step(tokens_BT: Tensor) -> Callable[[], float]:
            mine_BT = tokens_BT.chunk(here.size)[here.rank]
            loss = engine.train_step((mine_BT[:, :-1], mine_BT[:, 1:])).loss
            return lambda: float(loss)

        yield step

    return training


def _megatron_training(layout: MegatronLayout) -> Callable:
    """Return the same as `_our_training`, for a layout of megatron-core."""

    @contextmanager
    def training(options: LayoutSpeedOptions, initial: nn.Module) -> Iterator[Callable[[Tensor], Callable[[], float]]]:
        from hyperion.parallel.megatron import gpt

        shape, device = random_llama_shape(options.model, VOCABULARY), torch.device(world().device.torch_device)
        adam = gpt.Adam(options.learning_rate, _WEIGHT_DECAY, *_BETAS, epsilon=_EPSILON, clip_norm=_CLIP)
        with gpt.model_parallel(layout):
            model = gpt.build_gpt(shape, layout, options.sequence_length)
            gpt.load_llama_weights(model, initial.state_dict(), shape, layout)
            trainer = gpt.MegatronTrainer(model.to(device), layout, adam)

            def step(tokens_BT: Tensor) -> Callable[[], float]:
                loss, _ = trainer.step(tokens_BT)
                return lambda: mean_over_ranks(loss, device)

            yield step

    return training


def _ranks(context: Context, options: LayoutSpeedOptions) -> int:
    return max(_LEAST_RANKS, options.rank_count(context, options.batch_size))


def _reference(options: LayoutSpeedOptions, ranks: int) -> str:
    return _name(options.layouts[0].layout(), ranks)


def _name(layout: MegatronLayout, ranks: int) -> str:
    return f"megatron-core, {layout.name(ranks)}"


def _params(options: LayoutSpeedOptions, ranks: int) -> dict:
    return {"model": options.model, "ranks": ranks, "batch_size": options.batch_size, "sequence_length": options.sequence_length}
