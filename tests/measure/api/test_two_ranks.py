"""`measure.time`, `measure.compare` and `measure.explain` on two ranks, which run everything once."""

import pytest

from hyperion.measure.steps.trace import COMMUNICATION
from hyperion.processes import Job
from tests.measure import timing_ranks

pytestmark = pytest.mark.process
# A generous bound on a hang, not a target.
HANG_S = 240


@pytest.fixture(scope="module")
def answers(standing_ranks):
    return standing_ranks.run(Job(timing_ranks.everything, {}, timeout_s=HANG_S, ranks=2))


def test_ranks_take_the_same_number_of_samples_and_fail_together(answers):
    first, second = answers
    assert first["collective"]["samples"] == second["collective"]["samples"], "the slowest rank's times, on both"
    assert first["collective"]["calls"] == second["collective"]["calls"]
    assert first["compared"] == second["compared"] and len(first["compared"][0]) >= 3
    assert min(first["without communication"]) >= 5e-3, "rank 1 sleeps that long, and rank 0 does not wait for it"
    assert first["alone"] is not None and second["alone"] is None
    assert "the call did not write to it" in second["refused"] and "failed on rank 1" in first["refused"]
    assert "3 samples do not fit" in first["too slow"] and "3 samples do not fit" in second["too slow"]
    assert "rank 1 did not call this timing function within" in first["missing"] and second["missing"] == ""


def test_ranks_take_the_same_steps_and_see_their_communication(answers):
    explained = [rank["explained"] for rank in answers]
    assert len({str(rank["samples"]) for rank in explained}) == 1, "the slowest rank's time, on both"
    for rank in explained:
        assert rank["shares"][COMMUNICATION] > 0.05 and sum(rank["shares"].values()) == pytest.approx(1)
