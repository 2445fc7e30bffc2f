"""The speed ladder: a list of training steps from a plain loop to this library's loop, each with one more change.

A step of the list is called a rung. The steps of all rungs are timed in alternation, so that clock drift affects all of them. A
rung's speed-up over the previous rung is what its change gains at this place in the list.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import pandas as pd
import torch

from hyperion.chapter.rows import out_of_memory_reason, sample_frame, speedup_row, timed_row
from hyperion.experiments.baselines.paired_loops import PairedLoops
from hyperion.hardware import Device
from hyperion.measure import Timing, time_interleaved
from hyperion.results import Row
from hyperion.results.series import LEAST_FOR_DRIFT
from hyperion.workloads.training_rows import NO_SPEEDUP_LIMIT, flops_floor

Built = TypeVar("Built")


@dataclass(frozen=True)
class Rung:
    """One training step of the ladder.

    Attributes:
        name: name of the rung.
        adds: what the step changes compared with the previous rung.
        step: function that runs one optimizer step, or the reason why this device cannot run it. In that case the next rung omits
            this change.
    """

    name: str
    adds: str
    step: Callable[[], object] | str


def attempt(build: Callable[[], Built]) -> Built | str:
    """Call `build`, which builds or times rungs, and return its result. If PyTorch raises an error, return the reason."""
    try:
        return build()
    except torch.OutOfMemoryError as error:
        return out_of_memory_reason(error)
    except RuntimeError as error:
        return f"PyTorch refused the step: {str(error).splitlines()[0]}"


def time_rungs(device: Device, rungs: Sequence[Rung], time_limit_s: float, steps_in_a_row: int) -> dict[str, Timing]:
    """Time the steps of all rungs that can run, in alternation. Return their timings by name.

    Args:
        device: device of the rungs.
        rungs: the rungs, from the plain loop to this library's loop. Each rung that can run must have run at least one step.
        time_limit_s: timing budget in seconds. Each rung gets at least `LEAST_FOR_DRIFT` samples, which are enough to show a
            drift, even if they take longer.
        steps_in_a_row: number of steps in a sample.

    Raises:
        torch.OutOfMemoryError: the loops do not fit into memory together. A graph does not free its memory.
    """
    present = {rung.name: rung.step for rung in rungs if not isinstance(rung.step, str)}
    timings = time_interleaved(
        list(present.values()),
        device,
        cold=False,
        minimum_samples=LEAST_FOR_DRIFT,
        time_limit_s=time_limit_s,
        back_to_back=steps_in_a_row,
    )
    return dict(zip(present, timings, strict=True))


def ladder_rows(
    loops: PairedLoops, rungs: Sequence[Rung], timings: Mapping[str, Timing] | str
) -> tuple[list[Row], list[pd.DataFrame]]:
    """Return the rows of the ladder and the samples of its steps.

    Each rung has a row with its step time, or with the reason why it has none. Each timed rung except the first also has a row
    with its speed-up over the previous timed rung.

    Args:
        loops: builder of the rows that compare the loops.
        rungs: the rungs, from the plain loop to this library's loop.
        timings: timings by rung name, measured in alternation, or the reason why the rungs could not be timed.
    """
    context, work = loops.context, loops.work
    rows, frames, before = [], [], ""
    floor = flops_floor(context.device, loops.dtype, work.least_flops * work.items)
    for rung in rungs:
        params = loops.params | {"rung": rung.name, "adds": rung.adds}
        columns = {"dtype": loops.dtype, "params": params, "data_source": loops.source}
        if isinstance(timings, str) or isinstance(rung.step, str):
            reason = rung.step if isinstance(rung.step, str) else str(timings)
            rows.append(context.absent_row(work.name, "step_time_s", reason, **columns))
            continue
        timing = timings[rung.name]
        rows.append(timed_row(context, work.name, "step_time_s", timing.estimate, timing, limit=floor, **columns))
        frames.append(sample_frame(timing, work.name, loops.dtype, params).assign(kind="step of the ladder, loader included"))
        if before:
            columns["params"] = params | {"over": before}
            rows.append(speedup_row(context, work.name, timing, timings[before], NO_SPEEDUP_LIMIT, **columns))
        before = rung.name
    return rows, frames
