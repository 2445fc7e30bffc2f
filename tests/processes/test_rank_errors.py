"""The root-cause rank of ranks that fail together, from what they and torchrun wrote."""

import faulthandler
import signal
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hyperion.processes import Job
from hyperion.processes.rank_errors import (
    RankExit,
    RankStack,
    collective_timed_out,
    collective_timeout_error,
    first_failure,
    job_timeout_error,
    missing_rank,
    rank_error,
    read_stack,
)
from tests.processes import rank_entries

JOB = Job(rank_entries.total, ranks=4)
RAISED = {
    "time": 100.5,
    "raised": "ValueError: no",
    "traceback": "Traceback\nValueError: no\n",
    "error": None,
    "exit_code": 1,
    "lost_peer": False,
    "timed_out": False,
}
LOST = RAISED | {"raised": "RuntimeError: Connection closed by peer", "lost_peer": True}
MESSAGE = {"what": "the file is damaged", "where": "a.bin", "next_step": "copy it again"}
SAVED = RAISED | {"raised": "Interrupted", "error": MESSAGE, "exit_code": 75}


def raised(rank, record=RAISED, time=100.5):
    return RankExit(rank, record | {"time": time}, code=record["exit_code"], time=int(time))


def killed(rank, number=signal.SIGKILL, time=101, **others):
    return RankExit(rank, code=-number, time=time, **others)


@pytest.mark.parametrize(
    ("ends", "cause"),
    [
        ([RankExit(0, {"answer": 1}), RankExit(1, {"answer": 2})], None),
        ([raised(0, time=100.6), raised(1, time=100.5)], 1),
        # Its connection broke before the launcher or torchrun noticed the death of its peer.
        ([raised(0, LOST, time=100.1), killed(1)], 1),
        ([raised(0, LOST, time=100.1), RankExit(1, code=-signal.SIGKILL)], 1),  # torchrun did not notice in time
        ([raised(0, LOST, time=100.1), raised(1, time=100.4)], 1),
        ([raised(0, LOST, time=100.2), raised(1, LOST, time=100.1)], 1),
        # torchrun ends the peers with SIGTERM, the launcher those that ignore it with SIGKILL.
        ([killed(0, signal.SIGTERM), raised(1)], 1),
        ([killed(0, time=105, killed_by_launcher=True), raised(1)], 1),
        ([killed(0, signal.SIGTERM), killed(1, signal.SIGTERM, failed_first=True)], 1),
        ([killed(0), killed(1, failed_first=True)], 1),
        # A peer's watchdog aborts it because of the failure, not the other way round.
        ([killed(0, signal.SIGABRT, time=100), raised(1, time=100.5)], 1),
        ([killed(0, signal.SIGTERM), killed(1, signal.SIGABRT)], 1),
        ([raised(0, SAVED, time=100.1), raised(1, time=100.4)], 1),
        ([raised(0, LOST, time=100.1), raised(1, SAVED, time=100.4)], 1),
        ([RankExit(0, {"answer": 1}), RankExit(1, code=3, time=100)], 1),
        ([RankExit(0, {"answer": 1}), RankExit(1, code=0, time=100)], 1),
    ],
)
def test_the_root_cause_is_found_and_not_its_consequence(ends, cause):
    for order in (ends, ends[::-1]):
        end = first_failure(order)
        assert (None if end is None else end.rank) == cause


def test_the_error_of_a_rank_that_raised_has_its_traceback():
    error = rank_error(JOB, raised(2), "", "here")
    assert str(error).startswith("rank 2 of 4 raised ValueError: no\nTraceback") and (error.rank, error.signal) == (2, "")


def test_a_ranks_own_error_keeps_its_text_and_exit_code():
    error = rank_error(JOB, raised(2, SAVED), "", "here")
    assert str(error) == "the file is damaged\n  where: a.bin (rank 2 of 4)\n  next:  copy it again"
    assert error.exit_code == 75


@pytest.mark.parametrize(
    ("end", "cause", "name"),
    [
        (killed(1), "was killed by SIGKILL", "SIGKILL"),
        (killed(1, signal.SIGSEGV), "was killed by SIGSEGV", "SIGSEGV"),
        (RankExit(1, code=3), "failed with exit code 3", ""),
        (RankExit(1, code=0), "ended without an answer", ""),
    ],
)
def test_a_rank_that_wrote_no_error_is_explained_by_its_exit_and_its_log(end, cause, name):
    error = rank_error(JOB, end, 'begun\n@progress [1, 2, ""]\nframe #0: x\nlast words\n', "here")
    assert error.what == f"rank 1 of 4 {cause} in {JOB.entry}\nbegun\nlast words"
    assert error.signal == name


def hangs_here(file):
    faulthandler.dump_traceback(file)


def test_a_stack_starts_with_the_innermost_frame(tmp_path):
    with open(tmp_path / "stack", "w") as file:
        hangs_here(file)
    found = read_stack(1, (tmp_path / "stack").read_text(), finished=False)
    assert found.frames[0].startswith("hangs_here (test_rank_errors.py:") and "test_a_stack" in found.frames[1]
    assert not found.waiting and str(found).startswith("rank 1 was in hangs_here (test_rank_errors.py:")


def test_a_rank_that_waits_for_its_gpu_is_seen_to_wait():
    stack = 'Current thread 0x1 (most recent call first):\n  File "/x/torch/cuda/__init__.py", line 3 in synchronize\n'
    assert read_stack(0, stack, finished=False).waiting


def test_a_rank_in_a_collective_is_seen_to_wait():
    stack = 'Current thread 0x1 (most recent call first):\n  File "/x/torch/distributed/c10d.py", line 3 in all_reduce\n'
    found = read_stack(0, stack, finished=False)
    assert found.waiting and str(found) == "rank 0 was waiting for other ranks in all_reduce (c10d.py:3)"


@given(st.text())
def test_any_stack_is_read(text):
    assert read_stack(0, text, finished=False).rank == 0


def stacks(*waiting):
    return [RankStack(rank, ("f (a.py:1)",), one, finished=False) for rank, one in enumerate(waiting)]


@pytest.mark.parametrize(
    ("waiting", "late"),
    [((True, False), 1), ((True, False, True), 1), ((True, True), None), ((False, False), None), ((False,), None)],
)
def test_one_rank_that_does_not_wait_is_missing(waiting, late):
    assert missing_rank(stacks(*waiting)) == late
    assert job_timeout_error(JOB, stacks(*waiting), "here").rank == late


def test_the_missing_rank_is_named_and_not_the_one_that_timed_out():
    waiter = rank_error(JOB, raised(0, LOST | {"timed_out": True}), "", "here")
    error = collective_timeout_error(JOB, waiter, stacks(False, False))
    assert error.rank == 1
    assert error.what.startswith(
        "rank 1 of 4 did not join the collective in which rank 0 timed out\nrank 0 of 4 raised RuntimeError"
    )
    assert error.what.endswith("rank 1 was in f (a.py:1)")


def test_an_abort_by_the_watchdog_differs_from_other_aborts():
    aborted = killed(0, signal.SIGABRT)
    assert collective_timed_out(aborted, "[rank0] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=4)")
    assert not collective_timed_out(aborted, "double free or corruption")
    assert not collective_timed_out(replace(aborted, code=-signal.SIGKILL), "collective operation timeout")
    assert collective_timed_out(raised(0, LOST | {"timed_out": True}), "") and not collective_timed_out(raised(0, LOST), "")
