"""Variants side by side: each in a process of its own, and one that fails is reported."""

import os

import pandas as pd
import pytest
import torch

from hyperion.chapter import variants
from hyperion.chapter.context import Result
from hyperion.chapter.rows import out_of_memory_reason
from hyperion.chapter.variants import on_few_threads, run_counted, run_side_by_side
from hyperion.errors import HyperionError
from hyperion.processes import Job, JobError
from hyperion.processes.job import entry_of, load_entry
from tests.chapter.toy import toy_context


def variant(context, report, name: str) -> Result:
    """What a variant leaves: a row with its process and threads, or an error."""
    if name == "broken":
        raise ValueError("a variant that fails")
    params = {"process": os.getpid(), "threads": torch.get_num_threads()}
    return Result([context.row(name, "count", 1.0, params=params)], pd.DataFrame({"name": [name]}))


@pytest.mark.process
def test_a_failing_variant_raises_with_its_own_words(tmp_path):
    reports = []
    with pytest.raises(JobError, match="a variant that fails"):
        run_side_by_side(
            toy_context("toy", {}, tmp_path),
            lambda *report: reports.append(report),
            variant,
            [{"name": "sound"}, {"name": "broken"}],
        )
    assert len(reports) <= 1


def test_on_a_cpu_what_is_counted_runs_here_in_order(tmp_path):
    both = [{"name": "first"}, {"name": "second"}]
    results = run_counted(toy_context("toy", {}, tmp_path), lambda *report: None, variant, both)
    assert [result.rows[0].variant for result in results] == ["first", "second"]
    assert {result.rows[0].params["process"] for result in results} == {os.getpid()}


def short_of_memory(context, report, name: str, folder: str, failures: int, raises: str) -> Result:
    """A variant whose first `failures` attempts find no memory: it raises the error, or reports it in a row."""
    with open(f"{folder}/{name}.txt", "a+") as file:
        file.write("attempt\n")
        file.seek(0)
        attempt = len(file.readlines())
    if attempt > failures:
        return Result([context.row(name, "count", float(attempt))], pd.DataFrame())
    if raises == "library":
        raise RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`")
    error = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 6.14 GiB.")
    if raises == "torch":
        raise error
    return Result([context.row(name, "count", None, value_reason=out_of_memory_reason(error))], pd.DataFrame())


def run_short_of_memory(folder, plans: list[tuple[str, int, str]]) -> list[Result]:
    params = [{"name": name, "folder": str(folder), "failures": count, "raises": kind} for name, count, kind in plans]
    return run_side_by_side(toy_context("toy", {}, folder), lambda *report: None, short_of_memory, params)


def run_here(job: Job, on_line=print, on_progress=None) -> dict:
    """Run a job in this process, with the errors of `run_job`. The tests of failures start real processes."""
    try:
        return load_entry(job.entry)(**job.params)
    except HyperionError as error:
        raise JobError(error.what, where=error.where, next_step=error.next_step) from None


def test_a_variant_that_ran_out_of_memory_beside_others_is_repeated_alone(tmp_path, monkeypatch):
    monkeypatch.setattr(variants, "run_job", run_here)
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(6)))
    threads = []
    monkeypatch.setattr(torch, "set_num_threads", threads.append)
    repeated, large = run_short_of_memory(tmp_path, [("torch", 1, "torch"), ("large", 9, "row")])
    assert (repeated.rows[0].variant, repeated.rows[0].value) == ("torch", 2)
    assert large.rows[0].value_reason == "out of memory: CUDA out of memory. Tried to allocate 6.14 GiB."
    assert (tmp_path / "large.txt").read_text().count("attempt") == 2
    assert threads == [2, 2, 6, 6], "beside others a variant has its share of the cores, and alone it has all"


@pytest.mark.process
def test_a_variant_that_runs_out_of_memory_alone_fails(tmp_path):
    with pytest.raises(JobError, match="out of memory: CUDA out of memory. Tried to allocate"):
        run_short_of_memory(tmp_path, [("large", 9, "torch")])
    assert (tmp_path / "large.txt").read_text().count("attempt") == 2


@pytest.mark.parametrize("kind", ["torch", "library"])
def test_an_allocation_that_fails_is_an_error_that_says_what_to_change(kind, tmp_path, monkeypatch):
    monkeypatch.setattr(torch, "set_num_threads", lambda threads: None)  # it would hold for the tests after this one
    params = {"name": "large", "folder": str(tmp_path), "failures": 9, "raises": kind}
    context = toy_context("toy", {}, tmp_path)
    with pytest.raises(HyperionError, match="^out of memory: CUDA ") as raised:
        on_few_threads(context, lambda *report: None, entry_of(short_of_memory), params, 1)
    assert raised.value.next_step.startswith("end other processes") and "smaller batch or model" in raised.value.next_step
