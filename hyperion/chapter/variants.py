"""Run an experiment or its variants in separate processes, which share neither memory nor settings."""

import json
import sys
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from dataclasses import asdict, replace
from pathlib import Path

import pandas as pd
from pydantic import TypeAdapter

from hyperion.chapter.context import Context, Options, Report, Result
from hyperion.chapter.subjects import experiment_named, module_of
from hyperion.errors import HyperionError
from hyperion.hardware.cpu import usable_cpus
from hyperion.processes import Job, JobError, report_progress, run_job, run_ranks, world
from hyperion.processes.job import entry_of, load_entry
from hyperion.results import Row
from hyperion.results.files import encode_samples
from hyperion.results.rows import OUT_OF_MEMORY

# Number of cores per process, and minimum and maximum number of processes. With fewer cores per process, the variants would not
# end earlier, because a new process spends most of its time starting Python and torch, which occupies a whole core.
_CORES_EACH, _FEWEST, _MOST = 2, 2, 8
_CONTEXT, _ROWS = TypeAdapter(Context), TypeAdapter(list[Row])


def run_isolated(context: Context, report: Report) -> Result:
    """Run the experiment of a context in a new process. The process is killed after the experiment's `timeout_s` seconds.

    Raises:
        JobError: the experiment raised an exception, was killed, or took longer than `timeout_s`.
    """
    return run_variant(context, report, run_experiment)


def run_experiment(context: Context, report: Report) -> Result:
    """Run the experiment of a context. Called by `run_isolated` in the new process."""
    return require_result(context.experiment, experiment_named(context.experiment).run(context, report))


def require_result(experiment: str, result: object) -> Result:
    """Return what an experiment returned if it can be stored.

    Raises:
        HyperionError: it is no `Result`, or one without rows or samples.
    """
    if not isinstance(result, Result):
        fault = f"returned {type(result).__name__}, not a Result"
    elif wrong := not_a_list_of(Row, result.rows):
        fault = f"returned a Result whose rows are {wrong}"
    elif not result.rows:
        fault = "returned no rows"
    elif not isinstance(result.samples, pd.DataFrame):
        fault = f"returned samples of type {type(result.samples).__name__}, not a DataFrame"
    else:
        return result
    raise HyperionError(
        f"the experiment {experiment!r} {fault}",
        where=f"the function run of {module_of(experiment)}",
        next_step="return Result(rows, samples) with at least one row; context.absent_row states why nothing was measured",
    )


def not_a_list_of(kind: type, found: object) -> str:
    """Return what `found` is instead of a list or tuple of objects of this class, or "" if it is one."""
    if not isinstance(found, list | tuple):
        return f"{type(found).__name__}, not a list of {kind.__name__}"
    wrong = next((type(one).__name__ for one in found if not isinstance(one, kind)), "")
    return f"a list with {wrong}, not of {kind.__name__}" if wrong else ""


def run_variant(context: Context, report: Report, function: Callable[..., Result], params: dict | None = None) -> Result:
    """Call `function(context, report, **params) -> Result` in a new process.

    Args:
        context: context of the experiment.
        report: function called with the progress.
        function: function to call. It must be defined at the top level of a module, so that the new process can import it.
        params: keyword arguments of the function. They must be JSON-compatible.

    Raises:
        JobError: the function raised an exception, the process was killed, or it took longer than the experiment's `timeout_s`.
    """
    answer = run_job(_job(run_in_worker, context, function, params), on_progress=report)
    return unpacked(answer, _samples_file(context))


def run_on_ranks(
    context: Context, report: Report, function: Callable[..., Result], params: dict | None = None, *, ranks: int, mpirun: str = ""
) -> list[Result]:
    """Call `function(context, report, **params) -> Result` on every rank of a process group.

    Args:
        context, report, function, params: as in `run_variant`. On a rank, `hyperion.processes.world().rank` is the rank's number,
            and `context.device` is its device.
        ranks: number of ranks, at least 1.
        mpirun: path of the mpirun that starts the ranks; "" if torchrun starts them.

    Returns:
        The results in rank order.

    Raises:
        RankError: a rank failed. The message names the rank. The logs of all ranks remain in the workspace.
    """
    job = replace(_job(run_on_rank, context, function, params, ranks), mpirun=mpirun)
    answers = run_ranks(job, on_progress=report, log_folder=context.workspace / "logs" / function.__name__)
    return [unpacked(answer, _samples_file(context, rank)) for rank, answer in enumerate(answers)]


class RankOptions(Options):
    """Options for an experiment on several ranks.

    Args:
        ranks: maximum number of ranks. If the machine has fewer devices, one rank per device is used.
        cpu_ranks: number of ranks that share the CPU on a machine without accelerators.
    """

    ranks: int = 8
    cpu_ranks: int = 2

    def device_count(self, context: Context) -> int:
        """Return the number of accelerators of this machine, or `cpu_ranks` if it has none."""
        import torch  # here, because this module is imported where pages are made without torch

        return self.cpu_ranks if context.device.kind == "cpu" else torch.cuda.device_count()

    def rank_count(self, context: Context, batch_size: int) -> int:
        """Return the experiment's number of ranks: the number of devices, but at most `ranks`.

        Args:
            context: context of the experiment.
            batch_size: number of examples in one step, summed over all ranks.

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


def processes_at_once() -> int:
    """Return how many processes should run concurrently, so that all of them end as early as possible."""
    # The cores of this process, not of the machine: a container or a batch system may allow only some of them.
    return min(_MOST, max(_FEWEST, len(usable_cpus()) // _CORES_EACH))


def run_side_by_side(context: Context, report: Report, function: Callable[..., Result], variants: list[dict]) -> list[Result]:
    """Call `function(context, report, **params) -> Result` for each variant, each in a new process.

    Several processes run concurrently, each on its share of the CPU cores. Use this function only to measure memory and losses,
    which do not depend on other processes, and never to measure speed. The processes share the device, so a variant that runs
    out of memory is repeated alone after the others have ended. Only then is its failure accepted.

    Args:
        context, report, function: as in `run_variant`.
        variants: keyword arguments of the function for each variant. They must be JSON-compatible.

    Returns:
        The results in the order of `variants`.

    Raises:
        JobError: a variant failed. Variants that are already running are finished, and no other variant is started.
    """
    cores, at_once = len(usable_cpus()), processes_at_once()
    threads = max(1, cores // at_once)

    def run(number: int, threads: int) -> Result:
        workspace = context.workspace / f"variant-{number}"
        call = {"function": entry_of(function), "params": variants[number], "threads": threads}
        return run_variant(replace(context, workspace=workspace), lambda done, total, note: None, on_few_threads, call)

    results, done = {}, 0
    with ThreadPoolExecutor(at_once) as pool:
        jobs = {pool.submit(run, number, threads): number for number in range(len(variants))}
        try:
            for job in as_completed(jobs):
                if not _ran_out_of_memory(job):
                    results[jobs[job]] = job.result()
                    done += 1
                    report(done, len(jobs), "variants, each in its own process")
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    for number in range(len(variants)):
        if number not in results:
            results[number] = run(number, cores)
            done += 1
            report(done, len(jobs), "variants; this one ran out of memory beside others and was repeated alone")
    return [results[number] for number in range(len(variants))]


def _ran_out_of_memory(job: Future[Result]) -> bool:
    """Return True if a variant raised an out-of-memory error, or recorded one as the reason of a row without a value."""
    error = job.exception()
    if error is not None:
        return isinstance(error, JobError) and error.what.startswith(OUT_OF_MEMORY)
    return any(row.value is None and (row.value_reason or "").startswith(OUT_OF_MEMORY) for row in job.result().rows)


def run_counted(context: Context, report: Report, function: Callable[..., Result], variants: list[dict]) -> list[Result]:
    """Run variants that measure memory by counting the bytes of their tensors.

    On an accelerator, a variant also reads the statistics of the memory allocator, so each variant runs in its own process. On a
    CPU, a variant counts only its own tensors, so all variants run one after another in this process. Arguments and result are
    the same as for `run_side_by_side`.
    """
    if context.device.kind != "cpu":
        return run_side_by_side(context, report, function, variants)
    results = []
    for done, params in enumerate(variants):
        report(done, len(variants), "variants, one after another")
        results.append(function(context, report, **params))
    return results


def merged(results: list[Result]) -> Result:
    """Return one result with the rows and samples of several results, which must all have the same data source."""
    rows = [row for result in results for row in result.rows]
    frames = [result.samples for result in results if not result.samples.empty]
    samples = pd.concat(frames, ignore_index=True) if frames else pd.DataFrame()
    return Result(rows, samples, next((result.source for result in results if result.source), ""))


def _job(
    entry: Callable[..., dict], context: Context, function: Callable[..., Result], params: dict | None, ranks: int | None = None
) -> Job:
    context.workspace.mkdir(parents=True, exist_ok=True)
    values = {"context": packed(context), "function": entry_of(function), "params": params or {}, "import_path": sys.path}
    timeout_s = context.sizes.get("timeout_s", Options.model_fields["timeout_s"].default)
    return Job(entry, values, timeout_s=timeout_s, ranks=ranks)


def _samples_file(context: Context, rank: int | None = None) -> Path:
    return context.workspace / ("samples.parquet" if rank is None else f"samples-{rank}.parquet")


def packed(context: Context) -> dict:
    """Return a context as a JSON-compatible dict, with the metric definitions of the rows in `upstream`."""
    upstream = [replace(row, own_metric=row.definition) for row in context.upstream]
    return _CONTEXT.dump_python(replace(context, upstream=upstream), mode="json")


def restored(values: dict) -> Context:
    """Return the context from a dict made by `packed`."""
    return _CONTEXT.validate_python(values)


def unpacked(answer: dict, samples_file: Path) -> Result:
    """Return the result of a worker process from its answer and its samples file. The file is deleted."""
    samples = pd.read_parquet(samples_file)
    samples_file.unlink()
    return Result(_ROWS.validate_python(answer["rows"]), samples, answer["source"])


def run_in_worker(context: dict, function: str, params: dict, import_path: list[str], rank: int | None = None) -> dict:
    """Run a variant in a worker process. Return its rows as JSON values, and write its samples to a file in the workspace.

    Args:
        context: context as returned by `packed`.
        function: name of the function.
        params: keyword arguments of the function.
        import_path: `sys.path` of the caller. It may contain folders of HYPERION_SUBJECTS in which the function is defined.
        rank: number of the rank, or None without a process group.
    """
    sys.path += [folder for folder in import_path if folder not in sys.path]
    here = restored(context)
    result = load_entry(function)(here, report_progress, **params)
    _samples_file(here, rank).write_bytes(encode_samples(result.samples, f"{here.notebook} / {here.experiment}"))
    rows = json.dumps([asdict(row) for row in result.rows], default=float)  # NumPy scalars become plain numbers
    return {"rows": json.loads(rows), "source": result.source}


def run_on_rank(context: dict, function: str, params: dict, import_path: list[str]) -> dict:
    """Run a variant on a rank, as `run_in_worker` does. Each rank writes its own samples file."""
    return run_in_worker(context, function, params, import_path, world().rank)


def on_few_threads(context: Context, report: Report, function: str, params: dict, threads: int) -> Result:
    """Limit PyTorch to `threads` CPU threads and call a function. Called by `run_side_by_side` in each new process.

    Raises:
        HyperionError: the device's memory did not suffice. The message starts with `hyperion.results.rows.OUT_OF_MEMORY`.
    """
    import torch

    from hyperion.chapter.rows import out_of_memory_reason

    torch.set_num_threads(threads)
    try:
        return load_entry(function)(context, report, **params)
    except RuntimeError as error:
        # The libraries of NVIDIA and AMD report a failed allocation of their own by an error of another type.
        if not isinstance(error, torch.OutOfMemoryError) and "ALLOC_FAILED" not in str(error):
            raise
        raise HyperionError(
            out_of_memory_reason(error),
            where=f"{context.notebook}.{context.experiment}, {params}",
            next_step="end other processes that use this device, or choose a smaller batch or model in the profile",
        ) from error
