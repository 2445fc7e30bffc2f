"""Compare training steps of several engines by timing them in turn, A B C A B C ….

Speeds that were measured one after the other also differ by the device's clock and temperature.
"""

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import pandas as pd
import torch

from hyperion.chapter.context import Context, Result
from hyperion.chapter.rows import out_of_memory_reason, sample_frame, timed_columns
from hyperion.measure import time_interleaved
from hyperion.results import Row, ratio_estimate
from hyperion.training import TorchEngine
from hyperion.workloads.training_rows import NO_SPEEDUP_LIMIT, speed_rows
from hyperion.workloads.workloads import Batch, Workload


@dataclass(frozen=True)
class Contender:
    """One way to do the step.

    Args:
        name: label of this baseline in the speed-up rows.
        dtype: number format, for its rows.
        params: parameters of its rows in addition to the batch.
        build: makes its engine.
        least_flops: unavoidable FLOPs of one item, None for those of the workload.
    """

    name: str
    dtype: str
    params: dict
    build: Callable[[], TorchEngine]
    least_flops: float | None = None


def compare_steps(
    context: Context, work: Workload, batch: Batch, contenders: list[Contender], source: str, time_limit_s: float
) -> Result:
    """Return step time, throughput and MFU of each contender, and the speed-up of each over the first.

    All engines are in memory at the same time, so peak memory is not measured here. If they do not fit, the rows have no
    value and say why.

    Args:
        time_limit_s: time limit of the measurement of all together.
    """
    try:
        with memory_released():
            steps: list[Callable[[], object]] = [partial(contender.build().train_step, batch) for contender in contenders]
            timings = time_interleaved(steps, context.device, cold=False, time_limit_s=time_limit_s)
            del steps  # the last reference to the engines
    except torch.OutOfMemoryError as error:
        return Result([_absent(context, work, c, out_of_memory_reason(error), source) for c in contenders], pd.DataFrame())
    rows: list[Row] = []
    frames: list[pd.DataFrame] = []
    for contender, timing in zip(contenders, timings, strict=True):
        params = _params(work, contender)
        shared = {"dtype": contender.dtype, "params": params, "data_source": source}
        least = contender.least_flops or work.least_flops
        rows += speed_rows(context, work.name, work.item, work.items, timing, work.flops, least, shared)
        frames.append(sample_frame(timing, work.name, contender.dtype, params).assign(kind="steady step"))
    first = timings[0]
    for contender, timing in zip(contenders[1:], timings[1:], strict=True):
        ratio = ratio_estimate(timing.samples_s, first.samples_s)
        params = _params(work, contender) | {"over": contenders[0].name}
        rows.append(
            context.row(
                work.name,
                "speedup",
                ratio.value,
                dtype=contender.dtype,
                params=params,
                limit_source=NO_SPEEDUP_LIMIT,
                data_source=source,
                **timed_columns(ratio, timing),
            )
        )
    return Result(rows, pd.concat(frames, ignore_index=True), source)


@contextmanager
def memory_released() -> Iterator[None]:
    """Context at whose end unreferenced tensors are collected and the accelerator's cached memory is freed."""
    try:
        yield
    finally:
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


def _params(work: Workload, contender: Contender) -> dict:
    return {"batch": work.items, "step": "steady"} | contender.params


def _absent(context: Context, work: Workload, contender: Contender, reason: str, source: str) -> Row:
    return context.row(
        work.name,
        "step_time_s",
        None,
        dtype=contender.dtype,
        params=_params(work, contender),
        value_reason=reason,
        data_source=source,
    )
