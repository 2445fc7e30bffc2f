"""Many ranks compute what one device computes, and a replica that drifted by one bit is counted."""

from pathlib import Path

import pytest
import torch
from torch import nn

from hyperion.chapter.context import Context
from hyperion.experiments.distributed.parallel_parity import replicas_row
from hyperion.processes import Job, world
from hyperion.results import RowError
from tests.chapter.toy import perform, toy_context

# Two ranks on the CPU; on GPUs, of which there may be one, the chapter itself shows it.
pytestmark = [pytest.mark.skipif(torch.cuda.is_available(), reason="these two ranks compute on the CPU"), pytest.mark.process]

SIZES = {
    "strategies": ["ddp", "fsdp"],
    "model": "lm_d64_h4_l2",
    "sequence_length": 16,
    "batch_size": 4,
    "steps": 50,
    "learning_rate": 1e-3,
    "cpu_ranks": 2,
    "timeout_s": 300,
}
DIFFER = "parameters that differ between ranks"


def refusal_of(row) -> str:
    try:
        row.validate()
    except RowError as error:
        return str(error)
    return ""


def drifting() -> list[tuple[float, str]]:
    """Counted on this rank, with what the row's own check says: equal replicas, then one bit of rank 1's changed."""
    context = Context(notebook="toy", experiment="parallel_parity", sizes={}, workspace=Path())
    torch.manual_seed(0)
    model, found = nn.Linear(3, 4), []
    for _ in range(2):
        row = replicas_row(context, "ddp", model, "")
        found.append((row.value, refusal_of(row)))
        if world().rank == 1:
            with torch.no_grad():
                model.bias[2] = torch.nextafter(model.bias[2], torch.tensor(9.0))
    return found


def test_a_replica_that_drifted_by_one_bit_is_counted_and_its_row_refused(standing_ranks):
    answers = standing_ranks.run(Job(drifting, ranks=2, timeout_s=300))
    for (clean, nothing), (drifted, refusal) in answers:
        assert (clean, nothing, drifted) == (0, "", 1)
        assert 'failed its check "bits of rank 0\'s parameters, on all ranks"' in refusal


def test_the_losses_are_one_devices_and_the_replicas_equal(ranks_stay, tmp_path):
    rows = perform(toy_context("parallel_parity", SIZES, tmp_path), tmp_path).rows
    differences = {row.variant: row for row in rows if row.metric == "relative_difference"}
    assert set(differences) == {"ddp", "fsdp"} and all(row.params["steps"] == 50 for row in differences.values())
    assert all(row.value < 1e-5 for row in differences.values())
    (counted,) = [row for row in rows if row.params["what"] == DIFFER]
    assert (counted.variant, counted.value, counted.params["ranks"]) == ("ddp", 0, 2)
    assert counted.params["parameters"] > 20
