import math
from pathlib import Path

import pytest
import torch

from hyperion.checkpoints import read_state
from hyperion.training.snapshots import is_finite, non_finite

GOOD, NO_LOSS, NO_NORM = (1.0, 2.0, 1.0), (math.nan, 2.0, math.nan), (1.0, math.inf, 1.0)


@pytest.mark.parametrize("numbers, finite", [(GOOD, True), (NO_LOSS, False), (NO_NORM, False)])
def test_every_number_must_be_one(numbers, finite):
    assert is_finite(numbers) is finite


@pytest.mark.parametrize("bad, words", [(NO_LOSS, "loss nan, gradient norm 2.0"), (NO_NORM, "loss 1.0, gradient norm inf")])
def test_the_first_bad_step_and_its_batch_are_kept(tmp_path, bad, words):
    batches = [torch.full((2,), value) for value in (1.0, 2.0, 3.0)]
    error = non_finite(tmp_path, 11, [GOOD, bad, bad], batches)
    assert error.what.startswith(f"step 12: {words}")
    evidence = read_state(Path(error.where).parent)
    assert evidence["step"] == 12
    assert torch.equal(evidence["batch"], batches[1])


def test_without_a_folder_the_batch_is_kept_in_a_temporary_one(monkeypatch, tmp_path):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    error = non_finite(None, 1, [NO_LOSS], [torch.ones(1)])
    assert tmp_path in Path(error.where).parents and Path(error.where).is_file()
