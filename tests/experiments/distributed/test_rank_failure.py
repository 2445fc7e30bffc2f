"""A rank is killed: the launcher says so, in the row that was foretold, and what it left running would be counted."""

import os
import signal
import subprocess
from dataclasses import replace

import pytest
import torch

from hyperion.chapter import variants
from hyperion.experiments.distributed.rank_failure import _MARK, EXPERIMENT, _marked, _remaining_ranks
from hyperion.processes import run_ranks
from tests.chapter.toy import perform, toy_context

SIZES = {
    "model": "lm_d64_h4_l2",
    "sequence_length": 16,
    "batch_size": 4,
    "steps": 6,
    "checkpoint_every": 2,
    "kill_after": 3,
    "learning_rate": 1e-3,
    "cpu_ranks": 2,
    "timeout_s": 300,
}


@pytest.mark.process
@pytest.mark.long
@pytest.mark.skipif(torch.cuda.is_available(), reason="these two ranks compute on the CPU; on GPUs the chapter shows it")
def test_a_killed_rank_gets_the_row_that_was_foretold_and_leaves_nothing(standing_ranks, tmp_path, monkeypatch):
    # The ranks of which one is killed are launched; the same run is then resumed on the ranks that stay.
    def run(job, **options):
        return (run_ranks if "kill_after" in job.params["params"] else standing_ranks.run)(job, **options)

    monkeypatch.setattr(variants, "run_ranks", run)
    context = toy_context("rank_failure", SIZES, tmp_path)
    (forecast,) = EXPERIMENT.forecast(context)
    detection, left, late, again = perform(context, tmp_path).rows
    assert (forecast.metric, forecast.dtype, forecast.params) == (detection.metric, detection.dtype, detection.params)
    assert detection.params == {"ranks": 2, "rank": 1, "signal": "SIGKILL"} and detection.rank is None
    assert left.value == late.value == 0 and late.params["checkpoint"] > 0
    assert again.value < 1e-6 and again.params["steps"] == 6


def test_a_rank_that_goes_on_is_counted(tmp_path):
    context = replace(toy_context("rank_failure", SIZES, tmp_path), workspace=tmp_path)
    (tmp_path / "pid-0").write_text(str(os.getpid()))
    (tmp_path / "pid-1").write_text(str(2**22 + 1))  # beyond what Linux numbers processes with
    assert _remaining_ranks(context) == {os.getpid()}


@pytest.mark.process
def test_a_rank_that_goes_on_and_its_child_are_two_processes_and_neither_is_counted_twice(tmp_path):
    context = replace(toy_context("rank_failure", SIZES, tmp_path), workspace=tmp_path)
    rank = subprocess.Popen(
        ["sh", "-c", "sleep 60 & echo $!; wait"], env=os.environ | {_MARK: "x"}, stdout=subprocess.PIPE, text=True
    )
    assert rank.stdout is not None
    child = int(rank.stdout.readline())
    try:
        (tmp_path / "pid-0").write_text(str(rank.pid))
        assert _remaining_ranks(context) | _marked("x") == {rank.pid, child}
    finally:
        os.kill(child, signal.SIGKILL)
        rank.wait()
