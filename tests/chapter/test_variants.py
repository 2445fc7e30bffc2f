"""Variants side by side: each in a process of its own, and one that fails is told."""

import os

import pandas as pd
import pytest
import torch

from hyperion.chapter.context import Result
from hyperion.chapter.variants import run_counted, run_side_by_side
from hyperion.processes import JobError
from tests.chapter.toy import toy_context


def variant(context, report, name: str) -> Result:
    """What a variant leaves: a row with its process and threads, or an error."""
    if name == "broken":
        raise ValueError("a variant that fails")
    params = {"process": os.getpid(), "threads": torch.get_num_threads()}
    return Result([context.row(name, "count", 1.0, params=params)], pd.DataFrame({"name": [name]}))


@pytest.mark.process
def test_a_failing_variant_raises_with_its_own_words(tmp_path):
    told = []
    with pytest.raises(JobError, match="a variant that fails"):
        run_side_by_side(
            toy_context("toy", {}, tmp_path),
            lambda *report: told.append(report),
            variant,
            [{"name": "sound"}, {"name": "broken"}],
        )
    assert len(told) <= 1


def test_on_a_cpu_what_is_counted_runs_here_in_order(tmp_path):
    variants = [{"name": "first"}, {"name": "second"}]
    results = run_counted(toy_context("toy", {}, tmp_path), lambda *report: None, variant, variants)
    assert [result.rows[0].variant for result in results] == ["first", "second"]
    assert {result.rows[0].params["process"] for result in results} == {os.getpid()}
