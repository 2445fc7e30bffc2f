"""Run an experiment or its variants in processes of their own, so that none sees the memory or the settings of another."""

import json
import os
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict, replace
from pathlib import Path

import pandas as pd
from pydantic import TypeAdapter

from hyperion.chapter.context import Context, Options, Report, Result
from hyperion.chapter.subjects import experiment_named
from hyperion.errors import HyperionError
from hyperion.processes import Job, report_progress, run_job, run_ranks
from hyperion.processes.job import entry_of, load_entry
from hyperion.results import Row

# A new process spends longer on starting Python and torch than on its work, and keeps a core busy while it starts.
_CORES_EACH, _FEWEST, _MOST = 2, 2, 8
_CONTEXT, _ROWS = TypeAdapter(Context), TypeAdapter(list[Row])


def run_isolated(context: Context, report: Report) -> Result:
    """Run the context's experiment in a fresh process, within its `timeout_s`.

    Raises:
        JobError: the experiment raised, was killed, or ran past `timeout_s`.
    """
    return run_variant(context, report, run_experiment)


def run_experiment(context: Context, report: Report) -> Result:
    """Run the context's experiment; the entry point of `run_isolated`'s process."""
    return experiment_named(context.experiment).run(context, report)


def run_variant(context: Context, report: Report, function: Callable[..., Result], params: dict | None = None) -> Result:
    """Call `function(context, report, **params) -> Result` in a fresh process.

    Args:
        function: defined at the top level of a module, from which the worker imports it.
        params: JSON-able keyword arguments.

    Raises:
        JobError: the variant raised, was killed, or ran past the experiment's `timeout_s`.
    """
    answer = run_job(_job(run_in_worker, context, function, params), on_progress=report)
    return unpacked(answer, _samples_file(context))


def run_on_ranks(
    context: Context, report: Report, function: Callable[..., Result], params: dict | None = None, *, ranks: int
) -> list[Result]:
    """Call `function(context, report, **params) -> Result` on every rank of a process group.

    Args:
        function, params: as in `run_variant`. `hyperion.processes.world()` returns the rank's number, and `context.device` is
            its device.
        ranks: number of ranks, at least 1.

    Returns:
        The results in rank order.

    Raises:
        RankError: a rank failed; the error names it. The workspace keeps the log of every rank.
    """
    job = _job(run_on_rank, context, function, params, ranks)
    answers = run_ranks(job, on_progress=report, log_folder=context.workspace / "logs" / function.__name__)
    return [unpacked(answer, _samples_file(context, rank)) for rank, answer in enumerate(answers)]


class RankOptions(Options):
    """Options of an experiment on several ranks.

    Args:
        ranks: largest number of ranks; fewer where the machine has fewer devices.
        cpu_ranks: ranks that share the CPU of a machine without accelerators.
    """

    ranks: int = 8
    cpu_ranks: int = 2

    def device_count(self, context: Context) -> int:
        """Return the number of accelerators of this machine, or `cpu_ranks` if it has none."""
        import torch  # here, because this module is imported where pages are made without torch

        return self.cpu_ranks if context.device.kind == "cpu" else torch.cuda.device_count()

    def rank_count(self, context: Context, batch_size: int) -> int:
        """Return the number of ranks of the experiment: all devices, at most `ranks`.

        Args:
            batch_size: examples of one step over all ranks together.

        Raises:
            HyperionError: `batch_size` is not divisible by the number of ranks.
        """
        ranks = min(self.device_count(context), self.ranks)
        if batch_size % ranks:
            raise HyperionError(
                f"{ranks} ranks do not divide a batch of {batch_size}",
                where=f"{context.notebook}.{context.experiment}",
                next_step=f"set batch_size to a multiple of {ranks}, or ranks to a divisor of {batch_size}, in the profile",
            )
        return ranks


def run_side_by_side(context: Context, report: Report, function: Callable[..., Result], variants: list[dict]) -> list[Result]:
    """Call `function(context, report, **params) -> Result` for each of `variants`, each in a fresh process.

    Several run at the same time, each on its share of the CPU cores. Use this for memory and losses, which other processes do
    not change, never for speed.

    Args:
        function: as in `run_variant`.
        variants: JSON-able keyword arguments.

    Returns:
        The results in the order of `variants`.

    Raises:
        JobError: a variant failed. Running variants are waited for, the others are not started.
    """
    cores = len(os.sched_getaffinity(0))
    at_once = min(_MOST, max(_FEWEST, cores // _CORES_EACH))
    threads = max(1, cores // at_once)
    with ThreadPoolExecutor(at_once) as pool:
        jobs = [
            pool.submit(
                run_variant,
                replace(context, workspace=context.workspace / f"variant-{number}"),
                lambda done, total, note: None,
                on_few_threads,
                {"function": entry_of(function), "params": params, "threads": threads},
            )
            for number, params in enumerate(variants)
        ]
        try:
            for done, job in enumerate(as_completed(jobs), 1):
                job.result()
                report(done, len(jobs), "variants, each in a process of its own")
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    return [job.result() for job in jobs]


def run_counted(context: Context, report: Report, function: Callable[..., Result], variants: list[dict]) -> list[Result]:
    """Run variants that count the bytes of their own tensors; arguments and result as in `run_side_by_side`.

    On an accelerator each variant has a process of its own, because its allocator's statistics are read as well. On a CPU
    only the tensors are counted. Other variants do not change that count, so they run one after another in this process.
    """
    if context.device.kind != "cpu":
        return run_side_by_side(context, report, function, variants)
    results = []
    for done, params in enumerate(variants):
        report(done, len(variants), "variants, one after another")
        results.append(function(context, report, **params))
    return results


def merged(results: list[Result]) -> Result:
    """Return the rows and samples of several results as one result. All of them use the same data source."""
    rows = [row for result in results for row in result.rows]
    frames = [result.samples for result in results if not result.samples.empty]
    samples = pd.concat(frames, ignore_index=True) if frames else pd.DataFrame()
    return Result(rows, samples, next((result.source for result in results if result.source), ""))


def _job(
    entry: Callable[..., dict], context: Context, function: Callable[..., Result], params: dict | None, ranks: int | None = None
) -> Job:
    context.workspace.mkdir(parents=True, exist_ok=True)
    values = {"context": packed(context), "function": entry_of(function), "params": params or {}, "import_path": sys.path}
    return Job(entry, values, timeout_s=context.sizes.get("timeout_s", 3600.0), ranks=ranks)


def _samples_file(context: Context, rank: int | None = None) -> Path:
    return context.workspace / ("samples.parquet" if rank is None else f"samples-{rank}.parquet")


def packed(context: Context) -> dict:
    """Return a context as JSON-able values, with the definitions of the upstream rows' metrics."""
    upstream = [replace(row, own_metric=row.definition) for row in context.upstream]
    return _CONTEXT.dump_python(replace(context, upstream=upstream), mode="json")


def restored(values: dict) -> Context:
    """Return the context from the values of `packed`."""
    return _CONTEXT.validate_python(values)


def unpacked(answer: dict, samples_file: Path) -> Result:
    """Return the Result in a worker's answer. Deletes its samples file."""
    samples = pd.read_parquet(samples_file)
    samples_file.unlink()
    return Result(_ROWS.validate_python(answer["rows"]), samples, answer["source"])


def run_in_worker(context: dict, function: str, params: dict, import_path: list[str], rank: int | None = None) -> dict:
    """Run a variant; the worker's entry point. Return its rows as JSON values; its samples go to a file in the workspace.

    Args:
        import_path: `sys.path` of the caller, on which the function may be in a folder of HYPERION_SUBJECTS.
    """
    sys.path += [folder for folder in import_path if folder not in sys.path]
    here = restored(context)
    result = load_entry(function)(here, report_progress, **params)
    result.samples.to_parquet(_samples_file(here, rank), index=False)
    rows = json.dumps([asdict(row) for row in result.rows], default=float)  # NumPy's scalars become plain numbers
    return {"rows": json.loads(rows), "source": result.source}


def run_on_rank(context: dict, function: str, params: dict, import_path: list[str]) -> dict:
    """Run a variant on a rank; its entry point. As `run_in_worker`, with a samples file for each rank."""
    from hyperion.processes import world  # imports torch

    return run_in_worker(context, function, params, import_path, world().rank)


def on_few_threads(context: Context, report: Report, function: str, params: dict, threads: int) -> Result:
    """Call a function with PyTorch limited to `threads` CPU threads; the entry point of `run_side_by_side`'s processes."""
    import torch

    torch.set_num_threads(threads)
    return load_entry(function)(context, report, **params)
