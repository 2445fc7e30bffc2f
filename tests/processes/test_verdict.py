"""Who is blamed when ranks fail together, from what they and torchrun wrote down."""

import faulthandler
import signal
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hyperion.processes import Job
from hyperion.processes.verdict import (
    End,
    Standing,
    first_failure,
    late_rank,
    rank_error,
    standing,
    timeout_error,
    waited,
    waited_in_vain,
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
TOLD = {"what": "the file is damaged", "where": "a.bin", "next_step": "copy it again"}
SAVED = RAISED | {"raised": "Interrupted", "error": TOLD, "exit_code": 75}


def raised(rank, record=RAISED, time=100.5):
    return End(rank, record | {"time": time}, code=record["exit_code"], time=int(time))


def killed(rank, number=signal.SIGKILL, time=101, **others):
    return End(rank, code=-number, time=time, **others)


@pytest.mark.parametrize(
    ("ends", "blamed"),
    [
        ([End(0, {"answer": 1}), End(1, {"answer": 2})], None),
        ([raised(0, time=100.6), raised(1, time=100.5)], 1),
        # Its connection broke before the launcher or torchrun noticed whose death broke it.
        ([raised(0, LOST, time=100.1), killed(1)], 1),
        ([raised(0, LOST, time=100.1), End(1, code=-signal.SIGKILL)], 1),  # which torchrun did not come to notice
        ([raised(0, LOST, time=100.1), raised(1, time=100.4)], 1),
        ([raised(0, LOST, time=100.2), raised(1, LOST, time=100.1)], 1),
        # torchrun ends the peers with SIGTERM, the launcher those that do not listen with SIGKILL.
        ([killed(0, signal.SIGTERM), raised(1)], 1),
        ([killed(0, time=105, swept=True), raised(1)], 1),
        ([killed(0, signal.SIGTERM), killed(1, signal.SIGTERM, first=True)], 1),
        ([killed(0), killed(1, first=True)], 1),
        # A peer's watchdog aborts it because of the failure, not the other way round.
        ([killed(0, signal.SIGABRT, time=100), raised(1, time=100.5)], 1),
        ([killed(0, signal.SIGTERM), killed(1, signal.SIGABRT)], 1),
        ([raised(0, SAVED, time=100.1), raised(1, time=100.4)], 1),
        ([raised(0, LOST, time=100.1), raised(1, SAVED, time=100.4)], 1),
        ([End(0, {"answer": 1}), End(1, code=3, time=100)], 1),
        ([End(0, {"answer": 1}), End(1, code=0, time=100)], 1),
    ],
)
def test_the_cause_is_blamed_and_not_its_consequence(ends, blamed):
    for order in (ends, ends[::-1]):
        end = first_failure(order)
        assert (None if end is None else end.rank) == blamed


def test_a_rank_that_raised_is_told_by_its_traceback():
    error = rank_error(JOB, raised(2), "", "here")
    assert str(error).startswith("rank 2 of 4 raised ValueError: no\nTraceback") and (error.rank, error.signal) == (2, "")


def test_a_rank_that_refused_is_told_in_its_own_words_and_code():
    error = rank_error(JOB, raised(2, SAVED), "", "here")
    assert str(error) == "the file is damaged\n  where: a.bin (rank 2 of 4)\n  next:  copy it again"
    assert error.exit_code == 75


@pytest.mark.parametrize(
    ("end", "cause", "name"),
    [
        (killed(1), "was killed by SIGKILL", "SIGKILL"),
        (killed(1, signal.SIGSEGV), "was killed by SIGSEGV", "SIGSEGV"),
        (End(1, code=3), "failed with exit code 3", ""),
        (End(1, code=0), "ended without an answer", ""),
    ],
)
def test_a_rank_without_a_word_is_told_by_its_end_and_its_log(end, cause, name):
    error = rank_error(JOB, end, 'begun\n@progress [1, 2, ""]\nframe #0: x\nlast words\n', "here")
    assert error.what == f"rank 1 of 4 {cause} in {JOB.entry}\nbegun\nlast words"
    assert error.signal == name


def hangs_here(file):
    faulthandler.dump_traceback(file)


def test_a_stack_is_read_from_the_inside(tmp_path):
    with open(tmp_path / "stack", "w") as file:
        hangs_here(file)
    found = standing(1, (tmp_path / "stack").read_text(), answered=False)
    assert found.frames[0].startswith("hangs_here (test_verdict.py:") and "test_a_stack" in found.frames[1]
    assert not found.waiting and str(found).startswith("rank 1 was in hangs_here (test_verdict.py:")


def test_a_rank_in_a_collective_is_seen_to_wait():
    stack = 'Current thread 0x1 (most recent call first):\n  File "/x/torch/distributed/c10d.py", line 3 in all_reduce\n'
    found = standing(0, stack, answered=False)
    assert found.waiting and str(found) == "rank 0 waited for other ranks in all_reduce (c10d.py:3)"


@given(st.text())
def test_any_stack_is_read(text):
    assert standing(0, text, answered=False).rank == 0


def stood(*waiting):
    return [Standing(rank, ("f (a.py:1)",), one, answered=False) for rank, one in enumerate(waiting)]


@pytest.mark.parametrize(
    ("waiting", "late"),
    [((True, False), 1), ((True, False, True), 1), ((True, True), None), ((False, False), None), ((False,), None)],
)
def test_one_rank_that_does_not_wait_is_late(waiting, late):
    assert late_rank(stood(*waiting)) == late
    assert timeout_error(JOB, stood(*waiting), "here").rank == late


def test_who_did_not_come_is_named_rather_than_who_waited():
    waiter = rank_error(JOB, raised(0, LOST | {"timed_out": True}), "", "here")
    error = waited_in_vain(JOB, waiter, stood(False, False))
    assert error.rank == 1
    assert error.what.startswith("rank 1 of 4 did not come, and rank 0 waited in vain\nrank 0 of 4 raised RuntimeError")
    assert error.what.endswith("rank 1 was in f (a.py:1)")


def test_an_abort_by_the_watchdog_is_told_from_other_aborts():
    aborted = killed(0, signal.SIGABRT)
    assert waited(aborted, "[rank0] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=4)")
    assert not waited(aborted, "double free or corruption")
    assert not waited(replace(aborted, code=-signal.SIGKILL), "collective operation timeout")
    assert waited(raised(0, LOST | {"timed_out": True}), "") and not waited(raised(0, LOST), "")
