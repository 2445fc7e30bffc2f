"""A wrong value, a dead rank and a hung rank in the operations that no other test breaks so: each ends the job, with its name."""

import signal
import time
from collections.abc import Callable

import pytest

from hyperion.processes import Job, RankError, run_ranks
from tests.measure import collective_ranks

pytestmark = pytest.mark.process


def ended(entry: Callable, name: str) -> RankError:
    """How a job of two ranks ends."""
    started = time.monotonic()
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("CUDA_VISIBLE_DEVICES", "")
        environment.setenv("HIP_VISIBLE_DEVICES", "")
        with pytest.raises(RankError) as error:
            job = Job(entry, {"name": name}, timeout_s=100, ranks=2)
            run_ranks(job, on_line=lambda line: None)
    assert time.monotonic() - started < 60
    assert error.value.rank == 1
    return error.value


@pytest.mark.parametrize("name", ["reduce", "send_recv"])
def test_a_wrong_value(name):
    error = ended(collective_ranks.wrong_value, name)
    assert error.exit_code == 1
    assert f"rank 1: 1 of 2,048 values of {name}, bf16, 4,096 bytes are wrong before it was timed: element 3" in error.what


def test_a_hung_rank():
    assert "rank 1 is missing" in ended(collective_ranks.hangs, "reduce").what


def test_a_dead_rank():
    assert signal.SIGKILL.name in ended(collective_ranks.dies, "send_recv").what
