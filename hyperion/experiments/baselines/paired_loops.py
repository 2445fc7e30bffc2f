"""Rows of a comparison between this library's training loop and a plain one that does the same work."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
import torch

from hyperion.chapter.context import Context
from hyperion.chapter.rows import sample_frame, timed_columns
from hyperion.hardware import Device
from hyperion.measure import Timing
from hyperion.results import Row, ratio_estimate
from hyperion.workloads.training_rows import NO_SPEEDUP_LIMIT, speed_rows
from hyperion.workloads.workloads import Workload

OURS, PLAIN = "hyperion", "plain"


def wait_for(device: Device) -> None:
    """Wait until the device has finished all queued work; on a CPU a call returns when it has finished."""
    if device.kind != "cpu":
        torch.cuda.synchronize(device.torch_device)


@dataclass(frozen=True)
class PairedLoops:
    """What the rows of two compared loops share.

    Attributes:
        dtype: number format of both.
        source: data source.
        params: parameters of every row, "batch" included.
    """

    context: Context
    work: Workload
    dtype: str
    source: str
    params: dict

    def of(self, loop: str) -> dict:
        """Return the columns of a row of one loop."""
        return {"dtype": self.dtype, "params": self.params | {"loop": loop}, "data_source": self.source}

    def parity(self, steps: int, difference: float, how: str, tolerance: float, **params: Any) -> Row:
        """Return the difference between the losses of two loops with the same weights and batches.

        Args:
            steps: steps that both have done.
            difference: relative difference.
            how: what is compared, and the reason for the tolerance.
            params: further parameters; "of" and "from" name the loops, by default OURS and PLAIN.
        """
        shared = {"batch": self.params["batch"], "what": "training loss", "of": OURS, "from": PLAIN, "steps": steps}
        return self.context.row(
            self.work.name,
            "relative_difference",
            difference,
            dtype=self.dtype,
            params=shared | params,
            data_source=self.source,
            check=f"{how}, same weights and batches",
            check_error=difference,
            check_tolerance=tolerance,
        )

    def curves_frame(self, curves: dict[str, np.ndarray]) -> pd.DataFrame:
        """Return the losses of both by step as samples of kind "parity"."""
        batch = self.params["batch"]
        return pd.concat(
            [
                pd.DataFrame({"kind": "parity", "loop": name, "batch": batch, "step": range(1, len(curve) + 1), "loss": curve})
                for name, curve in curves.items()
            ],
            ignore_index=True,
        )

    def first_steps(self, seconds: dict[str, float]) -> list[Row]:
        """Return the time of each loop's first steps, in which it compiles and captures."""
        return [self.context.row(self.work.name, "compile_time_s", time_s, **self.of(loop)) for loop, time_s in seconds.items()]

    def speeds(self, timings: dict[str, Timing], how: dict) -> tuple[list[Row], pd.DataFrame]:
        """Return time, throughput and MFU of both, the speed-up of ours over the plain one, and the samples of the steps.

        Args:
            timings: timings of both loops in turn.
            how: further parameters of the speed-up's row.
        """
        rows, frames, work = [], [], self.work
        for loop, timing in timings.items():
            shared = self.of(loop)
            rows += speed_rows(self.context, work.name, work.item, work.items, timing, work.flops, work.least_flops, shared)
            frames.append(sample_frame(timing, work.name, self.dtype, shared["params"]))
        ratio = ratio_estimate(timings[OURS].samples_s, timings[PLAIN].samples_s)
        shared = self.of(OURS)
        shared["params"] |= {"over": PLAIN} | how
        rows.append(
            self.context.row(
                work.name, "speedup", ratio.value, limit_source=NO_SPEEDUP_LIMIT, **shared, **timed_columns(ratio, timings[OURS])
            )
        )
        return rows, pd.concat(frames, ignore_index=True).assign(kind="step, loader included")
