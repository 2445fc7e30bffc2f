"""The speed ladder: a list of training steps from a plain loop to this library's loop, each with one more change.

A step of the list is called a rung. The steps of all rungs are timed alternately, so that a drift of the clock affects all of
them. The ratio of the times of a rung and of the rung before it is what the change of this rung gains, at this place in the list.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeVar

import pandas as pd
import torch

from hyperion.chapter.rows import out_of_memory_reason, sample_frame, speedup_row, timed_row
from hyperion.experiments.baselines.plain_loops import PairedLoops
from hyperion.measure import Timing, time_interleaved
from hyperion.results import Row
from hyperion.workloads.training_rows import NO_SPEEDUP_LIMIT, flops_floor

# Number of samples of each rung at least. Each sample is the mean of several steps, and five of them take a few seconds where a
# step of all rungs takes a third of a second.
_SAMPLES = 5
Built = TypeVar("Built")


@dataclass(frozen=True)
class Rung:
    """One training step of the ladder.

    Attributes:
        name: name of the step.
        adds: what the step changes, compared with the rung before it.
        step: function that runs one optimizer step, or the reason why this device cannot run it. The next rung then leaves out
            this change.
    """

    name: str
    adds: str
    step: Callable[[], object] | str


def attempt(build: Callable[[], Built]) -> Built | str:
    """Build a rung: return the result of `build`, or the reason why PyTorch refused to capture or to run the step."""
    try:
        return build()
    except torch.OutOfMemoryError as error:
        return out_of_memory_reason(error)
    except RuntimeError as error:
        return f"PyTorch refused the step: {str(error).splitlines()[0]}"


def climb(
    loops: PairedLoops, rungs: Sequence[Rung], time_limit_s: float, steps_in_a_row: int
) -> tuple[dict[str, Timing], list[Row], pd.DataFrame]:
    """Time the steps of all rungs alternately.

    Args:
        loops: makes the rows that compare the loops.
        rungs: the rungs, from the plain loop to this library's loop. Each one that can run has run at least one step.
        time_limit_s: seconds of timing. There are at least `_SAMPLES` samples of each rung, even if they take longer.
        steps_in_a_row: number of steps of a sample.

    Returns:
        (timings by the name of the rung, rows, samples). Each rung has a row with its step time, or with the reason why there is
        none. Each rung after the first that was timed has a row with its speed-up over the last rung before it that was timed.
    """
    context, work = loops.context, loops.work
    present = {rung.name: rung.step for rung in rungs if not isinstance(rung.step, str)}
    in_turn = partial(time_interleaved, cold=False, minimum_samples=_SAMPLES, time_limit_s=time_limit_s)
    timings: dict[str, Timing] = {}
    try:
        measured = in_turn(list(present.values()), context.device, back_to_back=steps_in_a_row)
        timings = dict(zip(present, measured, strict=True))
    except torch.OutOfMemoryError as error:  # a graph keeps its memory, so the loops may not fit beside each other
        rungs = [replace(rung, step=out_of_memory_reason(error)) for rung in rungs]
    rows, frames, before = [], [], ""
    floor = flops_floor(context.device, loops.dtype, work.least_flops * work.items)
    for rung in rungs:
        params = loops.params | {"rung": rung.name, "adds": rung.adds}
        columns = {"dtype": loops.dtype, "params": params, "data_source": loops.source}
        if isinstance(rung.step, str):
            rows.append(context.absent_row(work.name, "step_time_s", rung.step, **columns))
            continue
        timing = timings[rung.name]
        rows.append(timed_row(context, work.name, "step_time_s", timing.estimate, timing, limit=floor, **columns))
        frames.append(sample_frame(timing, work.name, loops.dtype, params))
        if before:
            columns["params"] = params | {"over": before}
            rows.append(speedup_row(context, work.name, timing, timings[before], NO_SPEEDUP_LIMIT, **columns))
        before = rung.name
    samples = pd.concat(frames, ignore_index=True) if frames else pd.DataFrame()
    return timings, rows, samples.assign(kind="step of the ladder, loader included")
