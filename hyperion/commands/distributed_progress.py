"""Output of run_distributed.py: progress lines during training and a table of all ranks at the end."""

import math
import time

import pandas as pd

from hyperion.processes import World
from hyperion.results import Run
from hyperion.training import EpochRecord
from hyperion.workloads.recipes import Recipe, Training

LINE_EVERY_S = 5.0
_RATES, _PEAKS = ("tokens_per_s", "images_per_s"), ("peak_memory_gib", "peak_rss_gib")


class Progress:
    """Print the progress of one training: a line every few seconds and for every epoch. Rank 0 prints the first line."""

    def __init__(self, recipe: Recipe, training: Training, here: World):
        self.name, self.engine = recipe.name, training.engine
        self._since: tuple[float, int] | None = None
        if here.rank == 0:
            steps = recipe.plan().total_steps(len(training.batches))
            print(
                f"{recipe.name}: {steps} steps of {recipe.batch_size} on {here.size} ranks in {training.engine.precision}; "
                f"data: {training.source}",
                flush=True,
            )

    def report(self, done: int, total: int, note: str) -> None:
        """Print the rate since the last line. Called after losses were read, when counting items needs no synchronization."""
        now, items = time.perf_counter(), self.engine.tokens_seen
        rate = ""
        if self._since is not None:
            since, before = self._since
            if now - since < LINE_EVERY_S and done < total:
                return
            rate = f", {(items - before) / (now - since):,.0f} {self.engine.item}s/s"
        self._since = now, items
        print(f"{self.name}  step {done}/{total}  {note}{rate}", flush=True)

    def epoch(self, record: EpochRecord) -> None:
        """Print the results of an epoch and restart the clock, because the evaluation does not count as training time."""
        self._since = None
        held_out = "" if record.evaluation is None else f", held out {record.evaluation['loss']:.4f}"
        rate = "" if record.items_per_s is None else f", {record.items_per_s:,.0f} {self.engine.item}s/s"
        print(f"{self.name}  epoch {record.epoch}  loss {record.loss:.4f}{held_out}{rate}", flush=True)


def training_table(run: Run) -> str:
    """Return a table of the last epoch of each training: a line for all ranks together and one for each rank."""
    rows = [row for row in run.rows() if "epoch" in row.params]
    last = {row.variant: max(r.params["epoch"] for r in rows if r.variant == row.variant) for row in rows}
    lines: dict[tuple, dict] = {}
    for row in rows:
        if row.params["epoch"] != last[row.variant]:
            continue
        line = lines.setdefault(
            (row.variant, row.rank),
            {
                "training": row.variant,
                "dtype": row.dtype,
                "epoch": last[row.variant],
                "rank": "all" if row.rank is None else row.rank,
            },
        )
        name = "items/s" if row.metric in _RATES else "peak GiB" if row.metric in _PEAKS else row.metric
        line[name] = row.value
    return _text(pd.DataFrame(list(lines.values())))


def scaling_table(run: Run) -> str:
    """Return a table with a line per training, mode and number of devices, with the reason for missing values."""
    lines: dict[tuple, dict] = {}
    for row in run.rows():
        if "mode" not in row.params:
            continue
        key = {"training": row.variant, "mode": row.params["mode"], "devices": row.params["ranks"]}
        line = lines.setdefault(tuple(key.values()), key)
        line[row.metric] = row.value
        if row.value_reason:
            line["missing"] = row.value_reason
    return _text(pd.DataFrame(list(lines.values())))


def _text(table: pd.DataFrame) -> str:
    return table.map(_cell).to_string(index=False)


def _cell(value: object) -> str:
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return ""
    return f"{value:,.5g}" if isinstance(value, float) else str(value)
