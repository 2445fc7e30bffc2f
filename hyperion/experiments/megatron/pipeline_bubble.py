"""How long does a stage of a pipeline wait?

With p stages and m micro-batches, a stage works for m of the m + p - 1 times that a micro-batch takes. The rest is the bubble.
"""

import numpy as np
import pandas as pd

from hyperion.chapter.context import Context, Experiment, Forecast, Report, Result
from hyperion.chapter.rows import all_samples, sample_frame
from hyperion.chapter.variants import RankOptions, merged, run_on_ranks
from hyperion.experiments.megatron.bytes_of_text import VOCABULARY, batches
from hyperion.experiments.megatron.megatron_parity import ToyOptions, initial_llama, why_not
from hyperion.measure import RanksClock, time_interleaved
from hyperion.models.llama import random_llama_shape
from hyperion.parallel.megatron.layouts import MegatronLayout
from hyperion.parallel.megatron.release import adapted_copy, use_adapted
from hyperion.processes import world
from hyperion.results.statistics import estimates_of_medians

STAGES = 2


class PipelineBubbleOptions(RankOptions, ToyOptions):
    """Options of `pipeline_bubble`. `batch_size` is the number of sequences of a micro-batch, and `steps` is not used.

    Args:
        micro_batches: numbers of micro-batches of a step, at least two.
        time_limit_s: seconds of sampling.
    """

    micro_batches: tuple[int, ...]
    time_limit_s: float
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
    """Time the schedule with each number of micro-batches, interleaved, on two ranks."""
    options = PipelineBubbleOptions.of(context)
    if reason := why_not(options.device_count(context), STAGES):
        rows = [
            context.absent_row("1F1B", "bubble_fraction", reason, dtype="fp32", params=_params(options, count))
            for count in options.micro_batches
        ]
        return Result(rows, pd.DataFrame())
    adapted_copy()
    results = run_on_ranks(context, report, time_on_rank, ranks=STAGES)
    return Result(merged(results[:1]).rows, results[0].samples)


EXPERIMENT = Experiment(forecast, run, options=PipelineBubbleOptions)


def time_on_rank(context: Context, report: Report) -> Result:
    """On one rank, time the schedule. A sample is the time of the slowest rank."""
    options = PipelineBubbleOptions.of(context)
    use_adapted()
    from hyperion.parallel.megatron import gpt

    layout = MegatronLayout(pipeline=STAGES)
    noise = np.random.default_rng(context.seed).integers(0, VOCABULARY, 10_000)
    with gpt.model_parallel(layout):
        shape = random_llama_shape(options.model, VOCABULARY)
        model = gpt.build_gpt(shape, layout, options.sequence_length)
        gpt.load_llama_weights(model, initial_llama(context, options.model).state_dict(), shape, layout)
        model = model.to(context.device.torch_device)
        functions, trainers = [], []
        for count in options.micro_batches:
            tokens = batches(noise, 1, options.batch_size * count, options.sequence_length, context.seed)[0]
            tokens = tokens.to(context.device.torch_device)
            trainer = gpt.MegatronTrainer(model, MegatronLayout(pipeline=STAGES, micro_batches=count), gpt.Adam(1e-3))
            trainers.append(trainer)
            functions.append(lambda trainer=trainer, tokens=tokens: (trainer.clear(), trainer.gradients(tokens)))
            functions[-1]()
        clock = RanksClock(world(), lambda: None, lambda what: None)
        timings = time_interleaved(functions, context.device, cold=False, time_limit_s=options.time_limit_s, clock=clock)
    if world().rank:
        return Result([], pd.DataFrame())
    counts = np.array(options.micro_batches)
    estimates = estimates_of_medians([timing.samples_s for timing in timings], lambda medians: bubbles(counts, medians))
    rows = [
        context.row("1F1B", "bubble_fraction", estimate, dtype="fp32", params=_params(options, count))
        for count, estimate in zip(options.micro_batches, estimates, strict=True)
    ]
    frames = [
        sample_frame(timing, "1F1B", "fp32", _params(options, count))
        for count, timing in zip(options.micro_batches, timings, strict=True)
    ]
    return Result(rows, all_samples(frames))


def ideal_bubble(stages: int, micro_batches: int) -> float:
    """Return the bubble fraction of a schedule in which all stages take equally long: (p - 1) / (m + p - 1)."""
    return (stages - 1) / (micro_batches + stages - 1)


def bubbles(micro_batches: np.ndarray, times_s: np.ndarray) -> list[float]:
    """Return the bubble fraction for each number of micro-batches: the share of the step beyond m times the time of one of them.

    The time of one micro-batch is the slope of a line through the times of the steps.

    Args:
        micro_batches: numbers of micro-batches.
        times_s: time of a step with each number.
    """
    slope_s, _ = np.polyfit(micro_batches, times_s, 1)
    return [1 - slope_s * count / time_s for count, time_s in zip(micro_batches, times_s, strict=True)]


def _params(options: PipelineBubbleOptions, count: int) -> dict:
    return {
        "model": options.model,
        "stages": STAGES,
        "micro_batches": count,
        "micro_batch_size": options.batch_size,
        "sequence_length": options.sequence_length,
    }
