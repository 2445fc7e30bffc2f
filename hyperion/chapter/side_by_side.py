"""Variants apart from each other, several processes at once: for memory and losses, which neighbours do not change. Not for
speed.
"""

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import replace

import torch

from hyperion.chapter.context import Context, Result
from hyperion.chapter.variants import run_variant
from hyperion.processes.job import entry_of, load_entry

Report = Callable[[int, int, str], object]
# Starting Python and torch takes a variant longer than its work, and keeps one core busy.
_CORES_EACH, _FEWEST, _MOST = 2, 2, 8


def run_side_by_side(context: Context, report: Report, function: Callable[..., Result], variants: list[dict]) -> list[Result]:
    """Call `function(context, report, **params) -> Result` for each of `variants`, each in a fresh process.

    As many run at once as the host has cores for; each computes on its share of them.

    Args:
        function: as in `run_variant`.
        variants: JSON-able keyword arguments.

    Returns:
        Their results in the order of `variants`.

    Raises:
        JobError: as soon as one has failed; those that run are waited for, the others are not started.
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
    """As `run_side_by_side`, for functions that count the bytes of their own tensors.

    On an accelerator its allocator is asked as well, so each has a process of its own. On a CPU the count is all there is,
    no neighbour changes it, and they run here, one after another.
    """
    if context.device.kind != "cpu":
        return run_side_by_side(context, report, function, variants)
    results = []
    for done, params in enumerate(variants):
        report(done, len(variants), "variants, one after another")
        results.append(function(context, report, **params))
    return results


def on_few_threads(context: Context, report: Report, function: str, params: dict, threads: int) -> Result:
    """The worker's side: the function, on its share of the cores."""
    torch.set_num_threads(threads)
    return load_entry(function)(context, report, **params)
