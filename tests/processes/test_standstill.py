"""Who is named when nothing goes on. (That a hung rank ends a job: tests/commands/test_collective_check.py.)"""

from hypothesis import given
from hypothesis import strategies as st

from hyperion.processes import roll_call
from hyperion.processes.standstill import Standing, behind, told

WAITS = ('  File "/site/torch/distributed/distributed_c10d.py", line 1, in all_reduce\n',)
ELSEWHERE = ('  File "/home/reader/step.py", line 7, in load\n', "    time.sleep(600)\n")
STANDS = st.lists(
    st.builds(Standing, st.integers(0, 3), st.sampled_from(["a, fp32", "b"]), st.sampled_from([WAITS, ELSEWHERE, ()])),
    min_size=2,
    max_size=8,
)


@given(STANDS)
def test_somebody_is_always_left_who_waits_and_the_furthest_behind_are_named(stand):
    late = behind(stand)
    others = [one for rank, one in enumerate(stand) if rank not in late]
    assert others
    assert all(stand[rank].steps <= one.steps for rank in late for one in stand)
    if len({one.steps for one in stand}) > 1:
        assert late == [rank for rank, one in enumerate(stand) if one.steps == min(o.steps for o in stand)]


@given(STANDS)
def test_the_account_names_each_of_them_and_no_other(stand):
    account = told(stand, 20.0)
    for rank in range(len(stand)):
        assert (f"rank {rank} did not arrive" in account) == (rank in behind(stand))
    assert ("not one of them" in account) == (behind(stand) == [])


def test_the_number_of_collectives_decides_before_all_else():
    stand = [Standing(8, "all_gather", ELSEWHERE), Standing(7, "all_reduce, fp32", WAITS), Standing(2**62, "the verdict", ())]
    account = told(stand, 12.0)
    assert "rank 1 did not arrive: the last it entered was collective 7 (all_reduce, fp32)" in account
    assert "rank 0 arrived at collective 8 (all_gather)" in account and "rank 2 arrived at the end of the work" in account


def test_then_a_rank_that_does_not_answer_then_one_that_is_elsewhere():
    assert behind([Standing(3, "x", WAITS), Standing(3, "x", ELSEWHERE), Standing(3, "x", ())]) == [2]
    assert behind([Standing(3, "x", WAITS), Standing(3, "x", ELSEWHERE)]) == [1]
    assert behind([Standing(3, "x", WAITS)] * 4) == [] == behind([Standing(3, "x", ELSEWHERE)] * 4)
    assert "it does not say" in told([Standing(3, "x", WAITS), Standing()], 3.0)
    assert "time.sleep(600)" in told([Standing(3, "x", WAITS), Standing(3, "x", ELSEWHERE)], 3.0)


def test_alone_nobody_is_waited_for():
    with roll_call(0.01) as roll:
        roll.step("all_reduce")
    assert roll.steps == 1
