"""Which ranks a hang report names. (That a hung rank ends a job: tests/commands/test_collective_check.py.)"""

from hypothesis import given
from hypothesis import strategies as st

from hyperion.processes import roll_call
from hyperion.processes.hang_detection import RankProgress, hang_report, ranks_behind

WAITS = ('  File "/site/torch/distributed/distributed_c10d.py", line 1, in all_reduce\n',)
ELSEWHERE = ('  File "/home/reader/step.py", line 7, in load\n', "    time.sleep(600)\n")
RANKS = st.lists(
    st.builds(RankProgress, st.integers(0, 3), st.sampled_from(["a, fp32", "b"]), st.sampled_from([WAITS, ELSEWHERE, ()])),
    min_size=2,
    max_size=8,
)


@given(RANKS)
def test_not_all_ranks_are_behind_and_those_furthest_behind_are_named(ranks):
    behind = ranks_behind(ranks)
    others = [one for rank, one in enumerate(ranks) if rank not in behind]
    assert others
    assert all(ranks[rank].steps <= one.steps for rank in behind for one in ranks)
    if len({one.steps for one in ranks}) > 1:
        assert behind == [rank for rank, one in enumerate(ranks) if one.steps == min(o.steps for o in ranks)]


@given(RANKS)
def test_the_report_names_exactly_the_ranks_behind(ranks):
    report = hang_report(ranks, 20.0)
    for rank in range(len(ranks)):
        assert (f"rank {rank} is missing" in report) == (rank in ranks_behind(ranks))
    assert ("suspect the connection between the ranks, not one rank" in report) == (ranks_behind(ranks) == [])


def test_the_number_of_collectives_decides_first():
    ranks = [
        RankProgress(8, "all_gather", ELSEWHERE),
        RankProgress(7, "all_reduce, fp32", WAITS),
        RankProgress(2**62, "barrier", ()),
    ]
    report = hang_report(ranks, 12.0)
    assert "rank 1 is missing: the last collective that it entered was collective 7 (all_reduce, fp32)" in report
    assert "rank 0 reached collective 8 (all_gather)" in report and "rank 2 reached the end of the work" in report


def test_then_a_rank_that_does_not_respond_then_one_that_does_not_wait():
    assert ranks_behind([RankProgress(3, "x", WAITS), RankProgress(3, "x", ELSEWHERE), RankProgress(3, "x", ())]) == [2]
    assert ranks_behind([RankProgress(3, "x", WAITS), RankProgress(3, "x", ELSEWHERE)]) == [1]
    assert ranks_behind([RankProgress(3, "x", WAITS)] * 4) == [] == ranks_behind([RankProgress(3, "x", ELSEWHERE)] * 4)
    assert "none: it is stopped" in hang_report([RankProgress(3, "x", WAITS), RankProgress()], 3.0)
    assert "time.sleep(600)" in hang_report([RankProgress(3, "x", WAITS), RankProgress(3, "x", ELSEWHERE)], 3.0)


def test_a_single_rank_is_not_watched():
    with roll_call(0.01) as roll:
        roll.step("all_reduce")
    assert roll.steps == 1
