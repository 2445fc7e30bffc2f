"""The command `hyperion export`: write the rows and the loss curves of a run for other tools.

Bencher Metric Format (https://bencher.dev/docs/reference/bencher-metric-format/) is JSON in which each value has its interval.
TensorBoard and Weights & Biases are optional packages. Nothing is sent over a network.
"""

import contextlib
import json
import shutil
from collections.abc import Iterable
from datetime import datetime
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hyperion.errors import HyperionError, refused_write
from hyperion.terminal import say

if TYPE_CHECKING:
    from hyperion.results import Row, Run

# Columns that are values of curves over the column `step`. The last two are losses with and without sharding.
_CURVES = ("loss", "accuracy", "perplexity_token", "alone", "sharded")
# All columns of text, and these columns of numbers, tell the curves of a table apart. The values of the first three are written
# without the names of their columns.
_UNNAMED = ("kind", "variant", "dtype")
_NUMBERS = ("seed", "batch", "twin", "ranks", "rank", "round")


class Target(StrEnum):
    """A format of `hyperion export`."""

    BMF = "bmf"
    CSV = "csv"
    TENSORBOARD = "tensorboard"
    WANDB = "wandb"


def export(
    run: Annotated[str, typer.Argument(help="Path or name of a run, or `latest`. With csv also a folder of launches.")],
    to: Annotated[Target, typer.Option(help="bmf (Bencher Metric Format), csv (flat tables), tensorboard, or wandb (offline).")],
    output: Annotated[Path, typer.Option("--output", "--out", help="File for bmf, else a folder. It must not exist.")],
) -> None:
    """Write the values, intervals and loss curves of a run in the format of another tool, or as flat tables."""
    from hyperion.results import Run, find_run, find_runs

    if output.exists():
        raise HyperionError("the output exists already", where=output, next_step="name a new --output, or remove it")
    try:
        if to is Target.CSV:
            written = map(str, write_flat_tables([Run.open(folder) for folder in find_runs(run)], output))
        else:
            written = [f"{output}: {_write(Run.open(find_run(run)), to, output)}"]
    except BaseException as error:
        # A part of the output could be taken for all of it, and the next call would refuse to replace it.
        if output.is_dir():
            shutil.rmtree(output, ignore_errors=True)
        else:
            with contextlib.suppress(OSError):
                output.unlink()
        if not isinstance(error, OSError):  # such as Ctrl-C, or an error of wandb
            raise
        raise refused_write(
            error,
            HyperionError,
            action="cannot write",
            unchanged="nothing of the output is kept",
            where=output,
            elsewhere="name another --output",
        ) from error
    for line in written:
        say(line)


def _write(run: "Run", to: Target, output: Path) -> str:
    """Write a run in a format other than csv. Return what was written, as text."""
    if to is not Target.BMF:
        return f"{(write_tensorboard if to is Target.TENSORBOARD else write_wandb)(run, output)} points"
    document = bencher_metrics(run.rows())
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(json.dumps(document, indent=1, sort_keys=True, allow_nan=False) + "\n", encoding="utf-8")
    return f"{sum(map(len, document.values()))} values of {len(document)} benchmarks"


def benchmark_name(row: "Row") -> str:
    """Return a benchmark name for a row, which contains everything but the metric: "01_x/gemm/torch.mm bf16 k=64 m=64 n=64"."""
    params = [f"{name}={_text(value)}" for name, value in sorted(row.params.items())]
    rank = [] if row.rank is None else [f"rank={row.rank}"]
    words = [word for word in (row.variant, row.dtype, *params, *rank) if word]
    return f"{row.notebook}/{row.experiment}/{' '.join(words)}"


def _text(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value, sort_keys=True)


def bencher_metrics(rows: Iterable["Row"]) -> dict[str, dict[str, dict[str, float]]]:
    """Return rows in Bencher Metric Format: {benchmark: {metric: {"value", "lower_value", "upper_value"}}}.

    Rows without a value are left out. The lower and the upper value are the ends of the 95 % interval, if the row has one.
    """
    document: dict[str, dict[str, dict[str, float]]] = {}
    for row in rows:
        if row.value is None:
            continue
        measure = {"value": float(row.value)}
        if row.ci_low is not None and row.ci_high is not None:
            measure |= {"lower_value": float(row.ci_low), "upper_value": float(row.ci_high)}
        document.setdefault(benchmark_name(row), {})[row.metric] = measure
    return document


def curves(run: "Run") -> dict[str, list[tuple[int, float]]]:
    """Return the curves of a run, such as losses by step, as {tag: [(step, value)]}. No step occurs twice in a curve."""
    found: dict[str, list[tuple[int, float]]] = {}
    for name in sorted(run.experiments()):
        samples: Any = run.samples(*name.split("/"))  # the types of pandas do not know the results of filters
        if "step" not in samples.columns:
            continue
        texts = samples.select_dtypes(exclude=["number", "bool"]).columns
        identity = [column for column in dict.fromkeys((*_UNNAMED, *texts, *_NUMBERS)) if column in samples.columns]
        for column in (column for column in _CURVES if column in samples.columns):
            points = samples[samples["step"].notna() & samples[column].notna()]
            # If columns that are unknown here tell curves apart, the second value of a step belongs to another curve.
            again = points.groupby([*identity, "step"], dropna=False).cumcount().rename("again")
            for values, curve in points.groupby([*identity, again], dropna=False, sort=True):
                words = [
                    _word(name, value)
                    for name, value in zip((*identity, "again"), values, strict=True)
                    if not _missing(value) and (name, value) != ("again", 0)
                ]
                steps = zip(curve["step"].astype(int).tolist(), curve[column].astype(float).tolist(), strict=True)
                found["/".join(filter(None, (name, column, " ".join(words))))] = list(steps)
    return found


def _word(column: str, value: object) -> str:
    text = f"{value:g}" if isinstance(value, int | float) else str(value)
    return text if column in _UNNAMED else f"{column}={text}"


def _missing(value: object) -> bool:
    return value is None or value == "" or value != value  # NaN is not equal to itself


def scalars(run: "Run") -> dict[str, list[tuple[int, float]]]:
    """Return all values of a run as {tag: [(step, value)]}: curves, and each row as one point at step 0.

    The ends of the interval of a row have tags of their own, which end in "/ci_low" and "/ci_high".
    """
    found = curves(run)
    for benchmark, metrics in bencher_metrics(run.rows()).items():
        for metric, measure in metrics.items():
            for name, ending in (("value", ""), ("lower_value", "/ci_low"), ("upper_value", "/ci_high")):
                if name in measure:
                    found[f"{benchmark}/{metric}{ending}"] = [(0, measure[name])]
    return found


def write_flat_tables(runs: "list[Run]", folder: Path) -> list[Path]:
    """Write the flat tables of runs into a new folder. Return the paths of the files.

    Raises:
        HyperionError: the runs have no row of any of these tables.
    """
    from hyperion.book.flat_tables import flat_tables

    tables = flat_tables([run.rows() for run in runs])
    if not tables:
        raise HyperionError(
            "no flat table can be made from these rows",
            where=", ".join(str(run.folder) for run in runs),
            next_step="measure one of these experiments first: gemm, bandwidth, batch_scaling, scaling, or a training. Of other "
            "experiments, all rows are in the file rows.csv of the run; `flat_tables` in the figures.py of your own subject can "
            "make further tables",
        )
    for name, table in tables.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        table.to_csv(folder / name, index=False, lineterminator="\n")
    return [folder / name for name in tables]


def write_tensorboard(run: "Run", folder: Path) -> int:
    """Write the scalars of a run as an event file of TensorBoard. Return the number of points.

    TensorBoard stores values as float32. Each point has a time, but no time was recorded with a step. So the first point of a
    curve has the start of its experiment, and each later point has one second more.

    Raises:
        HyperionError: TensorBoard is not installed.
    """
    try:
        from tensorboard.compat.proto.event_pb2 import Event  # pyright: ignore[reportMissingImports]
        from tensorboard.compat.proto.summary_pb2 import Summary  # pyright: ignore[reportMissingImports]
        from tensorboard.summary.writer.event_file_writer import EventFileWriter  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise _not_installed("tensorboard", error) from error

    writer, count, starts_s = EventFileWriter(str(folder)), 0, start_times_s(run)
    for tag, points in scalars(run).items():
        start_s = starts_s["/".join(tag.split("/")[:2])]
        for place, (step, value) in enumerate(points):
            summary = Summary(value=[Summary.Value(tag=tag, simple_value=value)])
            writer.add_event(Event(wall_time=start_s + place, step=step, summary=summary))
            count += 1
    writer.close()
    return count


def start_times_s(run: "Run") -> dict[str, float]:
    """Return when each experiment started, in seconds since 1970: {"notebook/experiment": time}.

    For a run of an earlier version, which did not record it, the time is that of the last change of the file with the rows.
    """
    from hyperion.results.store import ROWS

    changed_s = (run.folder / ROWS).stat().st_mtime
    return {
        name: datetime.fromisoformat(entry["started_at"]).timestamp() if entry.get("started_at") else changed_s
        for name, entry in run.experiments().items()
    }


def write_wandb(run: "Run", folder: Path) -> int:
    """Write a run as an offline run of Weights & Biases, and return the number of points.

    `wandb sync` can upload the offline run later. Curves become the history, and each curve has its own step. Rows become the
    summary. The description of the run becomes the configuration.

    Raises:
        HyperionError: wandb is not installed.
    """
    try:
        import wandb  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise _not_installed("wandb", error) from error

    folder.mkdir(parents=True)
    information, series = run.information(), curves(run)
    settings = wandb.Settings(mode="offline", silent=True, console="off", x_disable_meta=True, x_disable_stats=True)
    options = {"project": "hyperion", "name": run.folder.name, "dir": str(folder), "config": information, "settings": settings}
    try:
        with wandb.init(**options) as offline:
            for tag, points in series.items():
                offline.define_metric(tag, step_metric=f"{tag}/at")
                for step, value in points:
                    offline.log({tag: value, f"{tag}/at": step})
            rows = {tag: points[0][1] for tag, points in scalars(run).items() if tag not in series}
            offline.summary.update(rows)
    finally:
        wandb.teardown()  # wait for the process that writes the file
    return sum(map(len, series.values())) + len(rows)


def _not_installed(package: str, error: ImportError) -> HyperionError:
    return HyperionError(
        f"{package} cannot be imported: {error}",
        where="hyperion export",
        next_step=f"install it into this environment: python -m pip install {package}",
    )
