"""How long does a stage of a pipeline wait?

With p stages and m micro-batches, a step takes m + p - 1 times as long as one micro-batch takes on a stage. A stage works for m
of these m + p - 1 units of time, and it waits for the rest. This waiting time is called the bubble.

A stage waits while it runs neither a forward nor a backward pass. The experiment measures the times of these passes inside the
schedule of megatron-core. The bubble cannot be computed from the slope of the step time over m: every fixed cost of a step would
count as bubble, and the waiting time of stages that wait for each other in turn would not.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any

import numpy as np
import pandas as pd
import torch
import torch.distributed as dist

from hyperion.chapter.context import Context, Experiment, Forecast, Report, Result
from hyperion.chapter.variants import RankOptions, run_on_ranks
from hyperion.errors import HyperionError
from hyperion.experiments.megatron.bytes_of_text import VOCABULARY, batches
from hyperion.experiments.megatron.megatron_parity import ToyOptions, initial_llama, why_not
from hyperion.hardware import Device
from hyperion.models.llama import random_llama_shape
from hyperion.parallel.megatron.layouts import MegatronLayout
from hyperion.parallel.megatron.release import adapted_copy, use_adapted
from hyperion.processes import world
from hyperion.results import median_estimate

STAGES = 2


class PipelineBubbleOptions(RankOptions, ToyOptions):
    """Options for the `pipeline_bubble` experiment.

    `batch_size` is the number of sequences in a micro-batch, and `steps` is not used.

    Args:
        micro_batches: numbers of micro-batches of a step.
        rounds: number of timed steps with each number of micro-batches, in alternation.
    """

    micro_batches: tuple[int, ...]
    rounds: int
    steps: int = 1


def forecast(context: Context) -> list[Forecast]:
    """Predict (p - 1) / (m + p - 1): all stages take equally long, and transfers take no time."""
    options = PipelineBubbleOptions.of(context)
    basis = "(p - 1) / (m + p - 1): equal stages, transfers take no time"
    return [
        Forecast("1F1B", "bubble_fraction", ideal_bubble(STAGES, count), basis, dtype="fp32", params=_params(options, count))
        for count in options.micro_batches
    ]


def run(context: Context, report: Report) -> Result:
    """Time the schedule and its passes with each number of micro-batches, in alternation, on two ranks."""
    options = PipelineBubbleOptions.of(context)
    if reason := why_not(options.device_count(context), STAGES):
        rows = [
            context.absent_row("1F1B", "bubble_fraction", reason, dtype="fp32", params=_params(options, count))
            for count in options.micro_batches
        ]
        return Result(rows, pd.DataFrame())
    adapted_copy()
    results = run_on_ranks(context, report, time_on_rank, ranks=STAGES)
    samples = pd.concat([result.samples for result in results], ignore_index=True)
    rows = [
        context.row("1F1B", "bubble_fraction", median_estimate(values), dtype="fp32", params=_params(options, count))
        for count, values in waits(samples).items()
    ]
    return Result(rows, samples)


EXPERIMENT = Experiment(forecast, run, options=PipelineBubbleOptions)


def waits(samples: pd.DataFrame) -> dict[int, list[float]]:
    """Return the fraction of each step during which a stage waits (mean over the stages), by number of micro-batches.

    Args:
        samples: a row per rank and step, with the columns micro_batches, round, step_s and busy_s. `busy_s` is the time of the
            forward and backward passes of the rank.
    """
    # A step ends when its slowest rank ends.
    steps = samples.groupby(["micro_batches", "round"]).agg(step_s=("step_s", "max"), busy_s=("busy_s", "mean"))
    shares = 1 - steps.busy_s / steps.step_s
    return {int(str(count)): values.tolist() for count, values in shares.groupby(level="micro_batches")}


def time_on_rank(context: Context, report: Report) -> Result:
    """On one rank, time each step and the passes in it."""
    options = PipelineBubbleOptions.of(context)
    use_adapted()
    from hyperion.parallel.megatron import gpt

    layout, lines = MegatronLayout(pipeline=STAGES), []
    noise = np.random.default_rng(context.seed).integers(0, VOCABULARY, 10_000)
    with gpt.model_parallel(layout):
        shape = random_llama_shape(options.model, VOCABULARY)
        model = gpt.build_gpt(shape, layout, options.sequence_length)
        gpt.load_llama_weights(model, initial_llama(context, options.model).state_dict(), shape, layout)
        model = model.to(context.device.torch_device)
        steps = {}
        for count in options.micro_batches:
            tokens = batches(noise, 1, options.batch_size * count, options.sequence_length, context.seed)[0]
            trainer = gpt.MegatronTrainer(model, MegatronLayout(pipeline=STAGES, micro_batches=count), gpt.Adam(1e-3))
            steps[count] = trainer, tokens.to(context.device.torch_device)
            trainer.gradients(steps[count][1])  # the first call chooses and loads kernels
        # The reduction of the gradients follows the schedule and is not part of the bubble.
        model.config.finalize_model_grads_func = None
        with _timed_passes(context.device) as passes:
            for number in range(options.rounds):
                report(number, options.rounds, "steps")
                for count, (trainer, tokens) in steps.items():
                    trainer.clear()
                    dist.barrier()
                    step_s, busy_s = passes.time(lambda trainer=trainer, tokens=tokens: trainer.gradients(tokens), count)
                    lines.append({"micro_batches": count, "round": number, "step_s": step_s, "busy_s": busy_s})
    return Result([], pd.DataFrame(lines).assign(variant="1F1B", dtype="fp32", rank=world().rank))


class _Passes:
    """Timer of a step and of its passes. On a GPU, it records events, so that the timing does not block the schedule."""

    def __init__(self, device: Device):
        self._on_cpu = device.kind == "cpu"
        self._marks: list[tuple[Any, Any]] = []

    def _now(self) -> Any:
        if self._on_cpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _seconds(self, start: Any, end: Any) -> float:
        return end - start if self._on_cpu else start.elapsed_time(end) / 1e3

    def timed(self, function: Callable) -> Callable:
        """Wrap a function, so that the start and the end of each call are recorded."""

        @wraps(function)
        def call(*args, **kwargs):
            start = self._now()
            result = function(*args, **kwargs)
            self._marks.append((start, self._now()))
            return result

        return call

    def time(self, step: Callable[[], object], micro_batches: int) -> tuple[float, float]:
        """Run a step. Return its time and the time of its passes, in seconds.

        Raises:
            HyperionError: the schedule did not run a forward and a backward pass for each micro-batch.
        """
        self._marks.clear()
        start = self._now()
        step()
        end = self._now()
        if not self._on_cpu:
            torch.cuda.synchronize()
        if len(self._marks) != 2 * micro_batches:
            raise HyperionError(
                f"the schedule ran {len(self._marks)} passes for {micro_batches} micro-batches, not {2 * micro_batches}",
                where="megatron.core.pipeline_parallel.schedules",
                next_step="use the release of megatron-core that this library names",
            )
        return self._seconds(start, end), sum(self._seconds(*mark) for mark in self._marks)


@contextmanager
def _timed_passes(device: Device) -> Iterator[_Passes]:
    """Context manager in which the schedules of megatron-core record the time of each forward and backward pass."""
    from megatron.core.pipeline_parallel import schedules  # pyright: ignore[reportMissingImports] in its own environment

    passes, original = _Passes(device), (schedules.forward_step, schedules.backward_step)
    schedules.forward_step, schedules.backward_step = map(passes.timed, original)
    try:
        yield passes
    finally:
        schedules.forward_step, schedules.backward_step = original


def ideal_bubble(stages: int, micro_batches: int) -> float:
    """Return the bubble fraction of a schedule in which all stages take equally long: (p - 1) / (m + p - 1)."""
    return (stages - 1) / (micro_batches + stages - 1)


def _params(options: PipelineBubbleOptions, count: int) -> dict:
    return {
        "model": options.model,
        "stages": STAGES,
        "micro_batches": count,
        "micro_batch_size": options.batch_size,
        "sequence_length": options.sequence_length,
    }
