"""What two ranks do once for all tests of this folder, which judge it."""

import pytest

from hyperion.processes import Job
from tests.parallel import on_ranks


@pytest.fixture(scope="session")
def answers(standing_ranks) -> list[dict]:
    """Results of tests.parallel.on_ranks on each of two ranks, which compute on the CPU even if there are GPUs."""
    return standing_ranks.run(Job(on_ranks.everything, ranks=2, timeout_s=300))
