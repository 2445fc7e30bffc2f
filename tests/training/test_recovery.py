"""No number that is none gets into a checkpoint, out of one, or past an evaluation."""

import math
from pathlib import Path

import pytest
import torch

from hyperion.checkpoints import newest_good, read_state, write_sharded
from hyperion.checkpoints.sharded import non_finite_tensor
from hyperion.training import NonFiniteError, TrainingPlan, train
from hyperion.training.snapshots import is_finite, non_finite, read_run
from tests.training.small import STEPS, small_batches, small_engine, small_validation

PLAN = TrainingPlan(steps=9, checkpoint_every=3)


def weight_after_step(engine, step, value=math.nan):
    """Let the optimizer write this value into one weight at that step, after loss and gradient were checked."""
    update = engine.scaler.step

    def planted(*args):
        skipped = update(*args)
        if engine.steps + 1 == step:
            with torch.no_grad():
                engine.model.final_norm.weight[3] = value
        return skipped

    engine.scaler.step = planted


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_weights_that_are_no_numbers_are_not_saved(tmp_path, value):
    engine = small_engine()
    weight_after_step(engine, 6, value)  # a step that is saved
    with pytest.raises(NonFiniteError, match="model/final_norm.weight contains") as caught:
        train(engine, small_batches(), PLAN, folder=tmp_path)
    assert "step 6" in str(caught.value.where)
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000003"]
    resumed = train(small_engine(seed=1), small_batches(), PLAN, folder=tmp_path)
    assert resumed.resumed_at == [3]
    assert resumed.losses == train(small_engine(), small_batches(), TrainingPlan(steps=9)).losses


def test_a_checkpoint_with_nan_is_refused_and_the_one_before_used(tmp_path, capsys, monkeypatch):
    def poisoned(folder, state):  # as when memory breaks between the check and the bytes
        if state["steps"] == 9:
            next(iter(state["optimizer"]["state"].values()))["exp_avg"].view(-1)[0] = math.nan
        write_sharded(folder, state)

    monkeypatch.setattr("hyperion.training.engine.write_sharded", poisoned)
    train(small_engine(), small_batches(), PLAN, folder=tmp_path)
    engine = small_engine(seed=1)
    assert newest_good(tmp_path, lambda path: read_run(path, engine, 9))[0]["step"] == 6
    assert "exp_avg contains an infinity or a NaN" in capsys.readouterr().err
    assert engine.steps == 6


def test_an_evaluation_that_is_no_number_stops_the_run_before_it_is_saved(tmp_path):
    engine = small_engine()
    engine.evaluate = lambda batches: {"loss": math.nan}
    with pytest.raises(NonFiniteError, match="evaluation after step 7: loss nan"):
        train(
            engine, small_batches(), TrainingPlan(steps=STEPS, checkpoint_every=3), validation=small_validation, folder=tmp_path
        )
    resumed = train(small_engine(seed=1), small_batches(), TrainingPlan(steps=9), validation=small_validation, folder=tmp_path)
    assert resumed.resumed_at == [6] and math.isfinite(resumed.epochs[0].evaluation["loss"])


def test_the_first_tensor_that_is_off_is_named():
    state = {"a": torch.ones(3), "b": [torch.tensor([1, 2]), {"c": torch.tensor([0.0, -math.inf])}], "d": math.nan}
    assert non_finite_tensor(state) == "b/1/c"
    assert non_finite_tensor({"a": torch.ones(2), "n": 3}) is None
    assert non_finite_tensor({}) is None


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
