"""`measure.time`, `measure.compare` and `measure.explain` on two ranks, which are started once: each loads torch for seconds."""

import pytest

from hyperion.measure.steps.trace import COMMUNICATION
from hyperion.processes import Job, run_ranks
from tests.measure import timing_ranks

pytestmark = pytest.mark.process
# A generous bound on a hang, not a target.
HANG_S = 240


@pytest.fixture(scope="module")
def told():
    with pytest.MonkeyPatch.context() as patch:
        for visible in ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES"):
            patch.setenv(visible, "")
        return run_ranks(Job(timing_ranks.everything, {}, timeout_s=HANG_S, ranks=2), on_line=lambda line: None)


def test_ranks_take_the_same_number_of_samples_and_fail_together(told):
    first, second = told
    assert first["collective"]["samples"] == second["collective"]["samples"], "the slowest rank's times, on both"
    assert first["collective"]["calls"] == second["collective"]["calls"]
    assert first["compared"] == second["compared"] and len(first["compared"][0]) >= 3
    assert first["alone"] is not None and second["alone"] is None
    assert "the call did not write to it" in second["refused"] and "failed on rank 1" in first["refused"]
    assert "3 samples do not fit" in first["too slow"] and "3 samples do not fit" in second["too slow"]
    assert "rank 1 did not call this timing function within" in first["missing"] and second["missing"] == ""


def test_ranks_take_the_same_steps_and_see_their_communication(told):
    explained = [rank["explained"] for rank in told]
    assert len({str(rank["samples"]) for rank in explained}) == 1, "the slowest rank's time, on both"
    for rank in explained:
        assert rank["shares"][COMMUNICATION] > 0.05 and sum(rank["shares"].values()) == pytest.approx(1)
