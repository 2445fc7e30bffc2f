"""Variants of one experiment, each in a process of its own, so that no variant's memory or settings reach another."""

from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import pandas as pd

from hyperion.chapter.context import Context, Result
from hyperion.chapter.subjects import subjects
from hyperion.processes import Job, report_progress, run_job, run_ranks
from hyperion.processes.job import entry_of, load_entry
from hyperion.results import rows_from_csv, rows_to_csv
from hyperion.results.rows import own_metrics, own_metrics_from_json, own_metrics_to_json

Report = Callable[[int, int, str], object]


def run_variant(context: Context, report: Report, function: Callable[..., Result], params: dict | None = None) -> Result:
    """Call `function(context, report, **params) -> Result` in a fresh process.

    Args:
        function: defined at the top level of a module, from which the worker imports it.
        params: JSON-able keyword arguments.

    Raises:
        JobError: the variant raised, was killed, or ran past the profile's `timeout_s` (an hour unless named).
    """
    context.workspace.mkdir(parents=True, exist_ok=True)
    samples_file = context.workspace / "samples.parquet"
    job = Job(
        run_in_worker,
        {"context": packed(context), "function": entry_of(function), "params": params or {}, "samples_file": str(samples_file)},
        timeout_s=context.sizes.get("timeout_s", 3600.0),
    )
    answer = run_job(job, on_progress=report)
    return unpacked(answer, samples_file, context.experiment)


def run_on_ranks(
    context: Context, report: Report, function: Callable[..., Result], params: dict | None = None, *, ranks: int
) -> list[Result]:
    """Call `function(context, report, **params) -> Result` on every rank of a process group; the results in rank order.

    Args:
        function, params: as in `run_variant`. A rank finds its place with `hyperion.processes.world()`, and
            `context.device` is its device.
        ranks: from 1.

    Raises:
        RankError: a rank failed; it is named. Every rank's log is kept in the workspace.
    """
    context.workspace.mkdir(parents=True, exist_ok=True)
    samples_file = context.workspace / "samples.parquet"
    job = Job(
        run_on_rank,
        {"context": packed(context), "function": entry_of(function), "params": params or {}, "samples_file": str(samples_file)},
        timeout_s=context.sizes.get("timeout_s", 3600.0),
        ranks=ranks,
    )
    answers = run_ranks(job, on_progress=report, log_folder=context.workspace / "logs" / function.__name__)
    return [unpacked(answer, _of_rank(samples_file, rank), context.experiment) for rank, answer in enumerate(answers)]


def merged(results: list[Result]) -> Result:
    """The rows and samples of several results as one; all of them took the same data source."""
    rows = [row for result in results for row in result.rows]
    frames = [result.samples for result in results if not result.samples.empty]
    samples = pd.concat(frames, ignore_index=True) if frames else pd.DataFrame()
    return Result(rows, samples, next((result.source for result in results if result.source), ""))


def packed(context: Context) -> dict:
    """Return a context as JSON-able values; the definitions of the upstream rows' own metrics go with them."""
    metrics = own_metrics_to_json(own_metrics(context.upstream))
    upstream = {"upstream": rows_to_csv(context.upstream), "upstream_metrics": metrics}
    return asdict(context) | {"workspace": str(context.workspace)} | upstream


def restored(settings: dict) -> Context:
    """The context that `packed` made values of."""
    metrics = own_metrics_from_json(settings["upstream_metrics"], where="upstream rows")
    upstream = rows_from_csv(settings["upstream"], where="upstream rows", metrics=metrics)
    others = {name: value for name, value in settings.items() if name != "upstream_metrics"}
    return Context(**others | {"workspace": Path(settings["workspace"]), "upstream": upstream})


def unpacked(answer: dict, samples_file: Path, experiment: str) -> Result:
    """The Result that a worker answered with; its samples file is taken away."""
    samples = pd.read_parquet(samples_file)
    samples_file.unlink()
    where = f"answer of {experiment}"
    metrics = own_metrics_from_json(answer["metrics"], where)
    rows = rows_from_csv(answer["rows"], where, validated=False, metrics=metrics)
    return Result(rows, samples, answer["source"])


def run_in_worker(context: dict, function: str, params: dict, samples_file: str) -> dict:
    """The worker's entry: the variant's rows as CSV text, its samples in `samples_file`."""
    subjects()  # a function of a subject outside of the library is found by it
    result = load_entry(function)(restored(context), report_progress, **params)
    result.samples.to_parquet(samples_file, index=False)
    metrics = own_metrics_to_json(own_metrics(result.rows))
    return {"rows": rows_to_csv(result.rows), "metrics": metrics, "source": result.source}


def run_on_rank(context: dict, function: str, params: dict, samples_file: str) -> dict:
    """A rank's entry: as `run_in_worker`, with a samples file of its own."""
    from hyperion.processes import world  # imports torch

    return run_in_worker(context, function, params, str(_of_rank(Path(samples_file), world().rank)))


def _of_rank(samples_file: Path, rank: int) -> Path:
    return samples_file.with_name(f"samples-{rank}.parquet")
