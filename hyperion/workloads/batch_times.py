"""Measure how fast a variant of a model answers: percentiles of the latency of one example, and the best batch size."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import pandas as pd
import torch
from torch import Tensor

from hyperion.chapter.context import Context
from hyperion.chapter.rows import out_of_memory_reason, sample_frame, timed_row
from hyperion.errors import not_none
from hyperion.hardware import Device
from hyperion.measure import Timing, time_function
from hyperion.measure.clock.clocks import WallClock
from hyperion.results import Row
from hyperion.results.statistics import LEAST_FOR_AN_INTERVAL
from hyperion.workloads.percentiles import LATENCIES, percentile, samples_needed

Call = Callable[[], object]
BEST_BATCH = "best batch"  # role of the rate that is measured again after the search


@dataclass(frozen=True)
class BatchTimes:
    """Times the calls of one variant of a model.

    Args:
        context: context of the experiment.
        variant: name of the variant.
        device: device on which the calls run.
        columns: function that returns the columns of a row for its additional params.
        latency_samples: number of calls for the percentiles of the latency.
        latency_limit_s: time limit in seconds for these calls. A slow variant makes fewer calls. A percentile that needs more
            calls then has no value.
        time_limit_s: seconds of timing. The search for the best batch size ends when a call takes longer.
    """

    context: Context
    variant: str
    device: Device
    columns: Callable[..., dict]
    latency_samples: int
    latency_limit_s: float
    time_limit_s: float

    def latency(self, call: Call) -> tuple[list[Row], pd.DataFrame, Timing]:
        """Return rows with the percentiles of the latency of one example, the samples, and the timing.

        The latency is measured with the host's clock.
        """
        conditions: dict[str, Any] = {"batch": 1, "cache": "hot"}
        one_call_s = second_call_s(call, self.device)
        timing = time_function(
            call,
            self.device,
            cold=False,
            back_to_back=1,  # synchronize after every call, because a caller waits for the result
            minimum_samples=max(LEAST_FOR_AN_INTERVAL, min(self.latency_samples, int(self.latency_limit_s / one_call_s))),
            time_limit_s=self.time_limit_s,
        )
        rows, columns = [], self.columns(**conditions)
        for share, metric in LATENCIES.items():
            count, needed = len(timing.samples_s), samples_needed(share)
            if count < needed:
                reason = f"{count} samples; an interval of this percentile needs {needed}"
                rows.append(self.context.absent_row(self.variant, metric, reason, **columns))
            else:
                rows.append(timed_row(self.context, self.variant, metric, percentile(timing.samples_s, share), timing, **columns))
        return rows, sample_frame(timing, self.variant, columns["dtype"], columns["params"]), timing

    def search(
        self, call_of: Callable[[int], Call], batches: Iterable[int], limit: tuple[float | None, str]
    ) -> tuple[list[Row], list[pd.DataFrame], dict[int, float]]:
        """Time several batch sizes. Return the rows, the samples, and the examples per second of each timed batch size.

        Args:
            call_of: function that takes a batch size and returns a function that runs one batch.
            batches: batch sizes, in ascending order.
            limit: (largest possible number of examples per second, its source), or (None, reason why there is no limit).
        """
        rows: list[Row] = []
        frames: list[pd.DataFrame] = []
        rates: dict[int, float] = {}
        too_long = ""
        for size in batches:
            columns = self.columns(batch=size, cache="hot", role="search")
            if too_long:
                rows.append(self.context.absent_row(self.variant, "samples_per_s", too_long, **columns))
                continue
            try:
                call = call_of(size)
                one_call_s = second_call_s(call, self.device)
                # The smallest batch is always timed, so that each variant has a rate.
                if rates and one_call_s > self.time_limit_s:
                    too_long = f"a call with batch {size} takes {one_call_s:.2g} s; the profile allows {self.time_limit_s:g} s"
                    rows.append(self.context.absent_row(self.variant, "samples_per_s", too_long, **columns))
                    continue
                timing = time_function(
                    call, self.device, cold=False, minimum_samples=LEAST_FOR_AN_INTERVAL, time_limit_s=self.time_limit_s / 4
                )
            except torch.OutOfMemoryError as error:
                rows.append(self.context.absent_row(self.variant, "samples_per_s", out_of_memory_reason(error), **columns))
                continue
            rates[size] = size / timing.estimate.value
            rate = timing.estimate.map(lambda seconds, size=size: size / seconds)
            rows.append(timed_row(self.context, self.variant, "samples_per_s", rate, timing, limit=limit, **columns))
            frames.append(sample_frame(timing, self.variant, columns["dtype"], columns["params"]))
        return rows, frames, rates


def times_table(rows: Iterable[Row]) -> pd.DataFrame:
    """Return a table of variants: percentiles of the latency of one example in ms, and the rate of the best batch size.

    A percentile is followed by its 95 % interval. It is empty if there were too few calls for it. If the best batch size was
    timed again after the search, this second rate is shown. The largest of several measured rates is too high on average.
    """
    lines: dict[tuple, dict[str, str]] = {}
    best: dict[tuple, tuple[bool, float]] = {}
    for row in rows:
        if row.value is None or row.metric not in (*LATENCIES.values(), "samples_per_s") or "beside" in row.params:
            continue
        runtime = row.params.get("runtime")
        key = (row.params["model"], runtime, row.variant)
        line = lines.setdefault(key, {"model": key[0], **({"runtime": runtime} if runtime else {}), "variant": row.variant})
        if row.metric != "samples_per_s":
            text = f"{1e3 * row.value:.3g} ({1e3 * not_none(row.ci_low):.3g} to {1e3 * not_none(row.ci_high):.3g})"
            line[_column(row.metric)] = text
        elif (rank := (row.params.get("role") == BEST_BATCH, row.value)) > best.get(key, (False, 0.0)):
            best[key] = rank
            line["best rate"] = f"{row.value:.4g} examples/s, batch {row.params['batch']}"
    columns = ["model", "runtime", "variant", *(_column(metric) for metric in LATENCIES.values()), "best rate"]
    columns = [column for column in columns if any(column in line for line in lines.values())]
    return pd.DataFrame(list(lines.values()), columns=columns).fillna("")


def _column(metric: str) -> str:
    return f"{metric.split('_')[1]} / ms"


def batch_of(inputs: Tensor, size: int) -> Tensor:
    """Return a batch of inputs [size, ...]. If there are fewer inputs, they are repeated."""
    repeats = -(-size // len(inputs))
    return inputs.repeat(repeats, *[1] * (inputs.ndim - 1))[:size].clone()


def second_call_s(call: Call, device: Device) -> float:
    """Return the time of the second call in seconds, including its work on the device.

    The first call may compile, capture or allocate, so its time does not count.
    """
    _, seconds = WallClock(device, calls=1).sample([call], None, 2)[0]
    return seconds
