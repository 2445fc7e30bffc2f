"""Ours and a plain training loop that do the same work: the rows that every comparison of the two has."""

from dataclasses import dataclass

import numpy as np
import pandas as pd
import torch

from hyperion.chapter.context import Context
from hyperion.chapter.rows import sample_frame, timed_columns
from hyperion.hardware import Device
from hyperion.measure import Timing
from hyperion.results import Row, ratio_estimate
from hyperion.workloads.training_rows import speed_rows
from hyperion.workloads.workloads import Workload

OURS, PLAIN = "hyperion", "plain"
_NO_LIMIT = "no limit: how far the slower of the two stays below its own limit is not bounded"


def wait_for(device: Device) -> None:
    """Until the device has done all that it was told to; a CPU has when a call returns."""
    if device.kind != "cpu":
        torch.cuda.synchronize(device.torch_device)


@dataclass(frozen=True)
class PairedLoops:
    """What the rows of two compared loops share.

    Attributes:
        dtype: of the products of both.
        source: of the data.
        params: of every row, the batch among them.
    """

    context: Context
    work: Workload
    dtype: str
    source: str
    params: dict

    def of(self, loop: str) -> dict:
        """Columns of a row of one loop."""
        return {"dtype": self.dtype, "params": self.params | {"loop": loop}, "data_source": self.source}

    def parity(self, steps: int, difference: float, how: str, tolerance: float, **params) -> Row:
        """How far the losses of a loop lie from another's, with the same weights and batches.

        Args:
            steps: that both made.
            difference: relative.
            how: what was compared and why the tolerance is what it is.
            params: more that tells this row from others; "of" and "from" name the loops, ours and the plain one unless given.
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
        """The losses of both by step, kind "parity"."""
        batch = self.params["batch"]
        return pd.concat(
            [
                pd.DataFrame({"kind": "parity", "loop": name, "batch": batch, "step": range(1, len(curve) + 1), "loss": curve})
                for name, curve in curves.items()
            ],
            ignore_index=True,
        )

    def first_steps(self, seconds: dict[str, float]) -> list[Row]:
        """Seconds that the first step of each loop took in which something was compiled or recorded."""
        return [self.context.row(self.work.name, "compile_time_s", took, **self.of(loop)) for loop, took in seconds.items()]

    def speeds(self, timings: dict[str, Timing], how: dict) -> tuple[list[Row], pd.DataFrame]:
        """Time, throughput and MFU of both, the speed of ours over the plain one's, and the samples of their steps.

        Args:
            timings: of both loops in turn.
            how: what the row of the ratio tells of the loops beside.
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
                work.name, "speedup", ratio.value, limit_source=_NO_LIMIT, **shared, **timed_columns(ratio, timings[OURS])
            )
        )
        return rows, pd.concat(frames, ignore_index=True).assign(kind="step, loader included")
