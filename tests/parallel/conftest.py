"""The one launch of two ranks that the tests of this folder judge."""

import pytest
import torch

from hyperion.processes import Job, run_ranks
from tests.parallel import on_ranks


@pytest.fixture(scope="session")
def answers() -> list[dict]:
    """Results of tests.parallel.on_ranks on each of two ranks, which compute on the CPU even if there are GPUs."""
    if torch.cuda.device_count() == 1:
        pytest.skip("two ranks are not started on a machine of one GPU")
    job = Job(on_ranks.everything, ranks=2, timeout_s=300)
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("CUDA_VISIBLE_DEVICES", "")
        environment.setenv("HIP_VISIBLE_DEVICES", "")
        return run_ranks(job, on_line=lambda line: None)
