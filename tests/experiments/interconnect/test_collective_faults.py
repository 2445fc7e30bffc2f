"""A rank hangs in an operation that no other test breaks so: hang detection ends the job, with its name.

A wrong value ends a job in tests/measure/collectives/test_collectives.py, a rank that dies while hang detection watches in
tests/processes/test_ranks.py.
"""

import time

import pytest

from hyperion.processes import Job, RankError, run_ranks
from tests.measure import collective_ranks


@pytest.mark.process
@pytest.mark.long
def test_a_hung_rank(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setenv("HIP_VISIBLE_DEVICES", "")
    started = time.monotonic()
    with pytest.raises(RankError, match="rank 1 is missing") as error:
        run_ranks(Job(collective_ranks.hangs, {"name": "reduce"}, timeout_s=100, ranks=2), on_line=lambda line: None)
    assert time.monotonic() - started < 60
    assert error.value.rank == 1
