"""Training steps of several engines in turn, A B C A B C …: the only comparison of speeds that a claim may rest on."""

import gc
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass

import pandas as pd
import torch

from hyperion.chapter.context import Context, Result
from hyperion.chapter.rows import out_of_memory_reason, sample_frame, timed_columns
from hyperion.measure import time_interleaved
from hyperion.results import Row, ratio_estimate
from hyperion.training import TorchEngine
from hyperion.workloads.training_rows import speed_rows
from hyperion.workloads.workloads import Batch, Workload

_NO_LIMIT = "no limit: how far the slower of the two stays below its own limit is not bounded"


@dataclass(frozen=True)
class Contender:
    """One way to do the step.

    Args:
        name: what the others' speed-ups over it are called by.
        dtype: of its rows.
        params: what tells its rows from the others', beside the batch.
        build: makes its engine.
        least_flops: of one item; None for the workload's own.
    """

    name: str
    dtype: str
    params: dict
    build: Callable[[], TorchEngine]
    least_flops: float | None = None


def compare_steps(context: Context, work: Workload, batch: Batch, contenders: list[Contender], source: str) -> Result:
    """Step time, throughput and MFU of each, and the speed of each but the first over the first.

    All engines lie in memory at once, which changes no time; peaks of memory are not taken here. When they do not fit,
    the rows say so.
    """
    try:
        with emptied_afterwards():
            steps = [_step(contender, batch) for contender in contenders]
            limit_s = context.sizes["time_limit_s"]
            timings = time_interleaved(steps, context.device, cold=False, time_limit_s=limit_s)
            del steps
    except torch.OutOfMemoryError as error:
        return Result([_absent(context, work, c, out_of_memory_reason(error), source) for c in contenders], pd.DataFrame())
    rows: list[Row] = []
    frames = []
    for contender, timing in zip(contenders, timings, strict=True):
        params = _params(work, contender)
        shared = {"dtype": contender.dtype, "params": params, "data_source": source}
        least = contender.least_flops or work.least_flops
        rows += speed_rows(context, work.name, work.item, work.items, timing, work.flops, least, shared)
        frames.append(sample_frame(timing, work.name, contender.dtype, params).assign(kind="steady step"))
    first = timings[0]
    for contender, timing in list(zip(contenders, timings, strict=True))[1:]:
        ratio = ratio_estimate(timing.samples_s, first.samples_s)
        params = _params(work, contender) | {"over": contenders[0].name}
        rows.append(
            context.row(
                work.name,
                "speedup",
                ratio.value,
                dtype=contender.dtype,
                params=params,
                limit_source=_NO_LIMIT,
                data_source=source,
                **timed_columns(ratio, timing),
            )
        )
    return Result(rows, pd.concat(frames, ignore_index=True), source)


@contextmanager
def emptied_afterwards():
    """What was made inside and is not referred to any more leaves the accelerator's memory for others."""
    try:
        yield
    finally:
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


def _step(contender: Contender, batch: Batch) -> Callable[[], object]:
    engine = contender.build()
    return lambda: engine.train_step(batch)


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
