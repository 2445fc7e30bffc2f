"""Flat tables of a run: CSV files with one line per point, under the names and with the columns of the project's documents.

    hardware/precision_results.csv       Size, Precision, Time (s), TFLOPS: square products with cold caches
    hardware/bandwidth_results.csv       Size (M elements), Bandwidth (GB/s): z = x + y in fp32 with cold caches
    scaling/<model>_batch_scaling.csv    one line per batch; a batch that does not fit has the words `out of memory`
    scaling/scaling_analysis.csv         speed-up and efficiency by number of GPUs; `missing` stands for what was not measured
    training/epoch_metrics.csv           one line per epoch, split and rank; a cell is empty if the row does not exist

All values come from rows, so these tables contain nothing that a run did not measure.
"""

import math
from collections.abc import Iterable, Sequence
from statistics import mean, stdev

import pandas as pd

from hyperion.results import Row
from hyperion.units import GIB, MIB

MISSING, REFUSED = "missing", "out of memory"
_IN_MIB = GIB / MIB
# Maps a metric of the steps of a batch to its column and to the factor of the column's unit.
_BATCH = {
    "forward_time_s": ("forward_ms", 1e3),
    "backward_time_s": ("backward_ms", 1e3),
    "optimizer_time_s": ("optimizer_ms", 1e3),
    "step_time_s": ("total_ms", 1e3),
    "peak_memory_gib": ("memory_mib", _IN_MIB),
    "peak_rss_gib": ("memory_mib", _IN_MIB),
    "samples_per_s": ("samples_per_s", 1.0),
}
# Maps a metric of an epoch to its split, its column, and the factor of the column's unit.
_EPOCH = {
    "training_loss": ("train", "loss", 1.0),
    "validation_loss": ("held-out", "loss", 1.0),
    "accuracy": ("held-out", "accuracy", 1.0),
    "images_per_s": ("train", "samples_per_s", 1.0),
    "tokens_per_s": ("train", "tokens_per_s", 1.0),
    "peak_memory_gib": ("train", "peak_allocated_mib", _IN_MIB),
    "reserved_memory_gib": ("train", "peak_reserved_mib", _IN_MIB),
    "learning_rate": ("train", "learning_rate", 1.0),
    "epoch_time_s": ("train", "wall_s", 1.0),
}
_TRAINING = ["experiment", "model", "rank", "epoch", "split"]
_MEASURED = ["loss", "accuracy", "perplexity", "samples_per_s", "tokens_per_s", "peak_allocated_mib", "peak_reserved_mib"]


def flat_tables(runs: Sequence[Sequence[Row]]) -> dict[str, pd.DataFrame]:
    """Return the tables for which there are rows, as {path: table}.

    Args:
        runs: rows of each run. The lines of several runs, such as launches, follow each other, except in scaling_analysis.csv,
            which has their mean, their number and their standard deviation.
    """
    parts: dict[str, list[pd.DataFrame]] = {"scaling/scaling_analysis.csv": [_scaling([row for rows in runs for row in rows])]}
    for rows in runs:
        parts.setdefault("hardware/precision_results.csv", []).append(_precision(rows))
        parts.setdefault("hardware/bandwidth_results.csv", []).append(_bandwidth(rows))
        parts.setdefault("training/epoch_metrics.csv", []).append(_epochs(rows))
        for model in dict.fromkeys(row.variant for row in rows if row.experiment == "batch_scaling"):
            parts.setdefault(f"scaling/{model}_batch_scaling.csv", []).append(_batches(rows, model))
    filled = {path: [table for table in tables if len(table)] for path, tables in parts.items()}
    return {path: pd.concat(tables, ignore_index=True) for path, tables in filled.items() if tables}


def _precision(rows: Iterable[Row]) -> pd.DataFrame:
    lines = []
    for row in rows:
        if (row.experiment, row.metric, row.params.get("cache")) != ("gemm", "gemm_tflops", "cold"):
            continue
        size = row.params["n"]
        if size == row.params["m"] == row.params["k"]:
            time_s = None if row.value is None else 2 * size**3 / (row.value * 1e12)
            lines.append((size, row.dtype.upper(), time_s, row.value))
    return pd.DataFrame(lines, columns=["Size", "Precision", "Time (s)", "TFLOPS"])


def _bandwidth(rows: Iterable[Row]) -> pd.DataFrame:
    chosen = ("bandwidth", "add", "bandwidth_gb_s", "fp32", "cold")
    found = [r for r in rows if (r.experiment, r.variant, r.metric, r.dtype, r.params.get("cache")) == chosen]
    lines = [(row.params["elements"] / 1e6, row.value) for row in found]
    return pd.DataFrame(lines, columns=["Size (M elements)", "Bandwidth (GB/s)"])


def _batches(rows: Iterable[Row], model: str) -> pd.DataFrame:
    lines: dict[int, dict] = {}
    for row in rows:
        if (row.experiment, row.variant) != ("batch_scaling", model) or "batch" not in row.params or row.metric not in _BATCH:
            continue
        line = lines.setdefault(row.params["batch"], {"model": model, "batch": row.params["batch"]})
        column, factor = _BATCH[row.metric]
        if row.value is not None:
            line[column] = factor * row.value
        elif row.value_reason.startswith(REFUSED):
            line |= dict.fromkeys((name for name, _ in _BATCH.values()), REFUSED)
    columns = ["model", "batch", *dict.fromkeys(name for name, _ in _BATCH.values())]
    return pd.DataFrame([lines[batch] for batch in sorted(lines)], columns=columns)


def _scaling(rows: Iterable[Row]) -> pd.DataFrame:
    rows = [row for row in rows if row.experiment == "scaling" and "mode" in row.params]
    trainings = list(dict.fromkeys(row.variant for row in rows))
    lines = []
    for mode in dict.fromkeys(row.params["mode"] for row in rows):
        for ranks in sorted({row.params["ranks"] for row in rows}):
            line = {"gpus": ranks, "ideal": ranks, "mode": mode}
            for training in trainings:
                line |= _scaling_cells(training, [row for row in rows if row.variant == training], mode, ranks)
            lines.append(line)
    columns = [f"{training}_{what}" for what in ("speedup", "efficiency") for training in trainings]
    columns += ["mode", *(f"{training}_{what}" for what in ("n_runs", "stdev") for training in trainings)]
    return pd.DataFrame(lines, columns=["gpus", "ideal", *columns])


def _scaling_cells(training: str, rows: list[Row], mode: str, ranks: int) -> dict:
    """Return the mean speed-up and efficiency of a training, the number of runs, and the deviation of the speed-up."""

    def values(metric: str) -> list[float]:
        own = [row for row in rows if row.metric == metric and row.params["ranks"] == ranks and row.value is not None]
        # Relative to itself, one rank has the speed-up 1 in both modes.
        return [1.0 for _ in own] if ranks == 1 else [float(row.value or 0) for row in own if row.params["mode"] == mode]

    speedups = values("step_time_s" if ranks == 1 else "speedup")
    efficiencies = values("step_time_s" if ranks == 1 else "scaling_efficiency")
    return {
        f"{training}_speedup": mean(speedups) if speedups else MISSING,
        f"{training}_efficiency": mean(efficiencies) if efficiencies else MISSING,
        f"{training}_n_runs": len(speedups),
        f"{training}_stdev": stdev(speedups) if len(speedups) > 1 else MISSING,
    }


def _epochs(rows: Iterable[Row]) -> pd.DataFrame:
    lines: dict[tuple, dict] = {}
    of_tokens = set()  # trainings whose loss is per token, so that its exponential is the perplexity
    for row in rows:
        if "epoch" not in row.params or row.metric not in _EPOCH or row.value is None:
            continue
        split, column, factor = _EPOCH[row.metric]
        identity = (row.experiment, row.variant, row.rank, row.params["epoch"], split)
        lines.setdefault(identity, dict(zip(_TRAINING, identity, strict=True)))[column] = factor * row.value
        if row.metric == "tokens_per_s":
            of_tokens.add(identity[:2])
    for identity, line in lines.items():
        if identity[:2] in of_tokens and "loss" in line:
            line["perplexity"] = math.exp(line["loss"])
    table = pd.DataFrame(list(lines.values()), columns=[*_TRAINING, *_MEASURED, "learning_rate", "wall_s"])
    return table.astype({"rank": "Int64"})
