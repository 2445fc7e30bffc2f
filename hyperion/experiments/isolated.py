"""An experiment in a process of its own, through the Job contract."""

from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import pandas as pd

from hyperion.experiments.context import Context, Result
from hyperion.experiments.registry import experiment_named
from hyperion.processes import Job, report_progress, run_job
from hyperion.results import rows_from_csv, rows_to_csv


def run_isolated(context: Context, report: Callable[[int, int, str], object]) -> Result:
    """Run the context's experiment in a worker process; its timeout is the profile's `timeout_s`, an hour unless named."""
    context.workspace.mkdir(parents=True, exist_ok=True)
    samples_file = context.workspace / "samples.parquet"
    settings = asdict(context) | {"workspace": str(context.workspace), "upstream": rows_to_csv(context.upstream)}
    params = {"context": settings, "samples_file": str(samples_file)}
    job = Job("hyperion.experiments.isolated:run_in_worker", params, timeout_s=context.sizes.get("timeout_s", 3600.0))
    answer = run_job(job, on_progress=report)
    samples = pd.read_parquet(samples_file)
    samples_file.unlink()
    return Result(rows_from_csv(answer["rows"], where=f"answer of {context.experiment}"), samples, answer["source"])


def run_in_worker(context: dict, samples_file: str) -> dict:
    """The worker's entry: the experiment's rows as CSV text, its samples in `samples_file`."""
    upstream = rows_from_csv(context["upstream"], where="upstream rows")
    restored = Context(**context | {"workspace": Path(context["workspace"]), "upstream": upstream})
    result = experiment_named(restored.experiment).run(restored, report_progress)
    result.samples.to_parquet(samples_file, index=False)
    return {"rows": rows_to_csv(result.rows), "source": result.source}
