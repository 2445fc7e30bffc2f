"""Build the rows that compare this library's training loop with a plain loop."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from hyperion.chapter.context import Context
from hyperion.chapter.rows import sample_frame, speedup_row
from hyperion.measure import Timing
from hyperion.results import Row
from hyperion.workloads.training_rows import NO_SPEEDUP_LIMIT, speed_rows
from hyperion.workloads.workloads import Workload

OURS, PLAIN, CAPTURED = "hyperion", "plain", "plain, captured"  # names of the loops


@dataclass(frozen=True)
class PairedLoops:
    """Builds the rows that compare this library's loop with a plain loop. The attributes are the same for all these rows.

    Attributes:
        context: context of the experiment.
        work: workload of the training step of both loops.
        dtype: number format of both loops.
        source: data source of both loops.
        params: params of every row, including "batch".
    """

    context: Context
    work: Workload
    dtype: str
    source: str
    params: dict

    def of(self, loop: str) -> dict:
        """Return the columns shared by all rows of a loop."""
        return {"dtype": self.dtype, "params": self.params | {"loop": loop}, "data_source": self.source}

    def parity(self, steps: int, difference: float, how: str, tolerance: float, **params: Any) -> Row:
        """Return the row with the difference between the losses of two loops with the same initial weights and batches.

        Args:
            steps: number of steps that both loops have run.
            difference: relative difference between the losses.
            how: what is compared and what justifies the tolerance.
            tolerance: largest allowed difference.
            params: additional params of the row. "of" and "from" name the two loops and default to OURS and PLAIN.
        """
        shared = {"batch": self.params["batch"], "what": "training loss", "of": OURS, "from": PLAIN, "steps": steps}
        return self.context.error_row(
            self.work.name,
            "relative_difference",
            difference,
            f"{how}, same weights and batches",
            tolerance,
            dtype=self.dtype,
            params=shared | params,
            data_source=self.source,
        )

    def curves_frame(self, curves: dict[str, np.ndarray]) -> pd.DataFrame:
        """Return the losses of the loops by step, as samples of the kind "parity"."""
        batch = self.params["batch"]
        return pd.concat(
            [
                pd.DataFrame({"kind": "parity", "loop": name, "batch": batch, "step": range(1, len(curve) + 1), "loss": curve})
                for name, curve in curves.items()
            ],
            ignore_index=True,
        )

    def first_steps(self, seconds: dict[str, float]) -> list[Row]:
        """Return one row per loop with the time of its first steps, which compile the model and capture the step."""
        return [self.context.row(self.work.name, "compile_time_s", time_s, **self.of(loop)) for loop, time_s in seconds.items()]

    def speeds(self, timings: dict[str, Timing], how: dict) -> tuple[list[Row], pd.DataFrame]:
        """Return the rows with the speed of the loops, and the samples of their steps.

        The rows give the step time, throughput and MFU of each loop, and the speed-up of this library's loop over every other
        loop.

        Args:
            timings: a dict that maps each loop's name to its timing. The steps of the loops must have been timed in alternation.
            how: additional params of the speed-up rows.
        """
        rows, frames, work = [], [], self.work
        for loop, timing in timings.items():
            shared = self.of(loop)
            rows += speed_rows(self.context, work.name, work.item, work.items, timing, work.flops, work.least_flops, shared)
            frames.append(sample_frame(timing, work.name, self.dtype, shared["params"]))
        for other in (loop for loop in timings if loop != OURS):
            shared = self.of(OURS)
            shared["params"] |= {"over": other} | how
            rows.append(speedup_row(self.context, work.name, timings[OURS], timings[other], NO_SPEEDUP_LIMIT, **shared))
        return rows, pd.concat(frames, ignore_index=True).assign(kind="step, loader included")
