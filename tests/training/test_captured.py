"""A recorded step is the step itself: what recording does first leaves no trace, and replays agree with steps done one by
one."""

import copy
from dataclasses import replace

import pytest
import torch

from hyperion.hardware import detect, detect_cpu
from hyperion.training import ImageEngine, Precision, choose_precision, compile_options, sgd_nesterov
from hyperion.training.captured import WARM_UP_STEPS, restored, same_tensors, why_not_captured
from hyperion.training.recipe import rng_state, set_rng_state
from tests.hardware.machines import facts
from tests.training.small import small_batches, small_engine
from tests.training.test_engine import image_batches, image_engine


def _everything(engine) -> dict:
    moments = list(engine.optimizer.state.values())
    return copy.deepcopy({"model": engine.model.state_dict(), "moments": moments, "seen": engine._items_seen})


def _assert_same(one, other) -> None:
    torch.testing.assert_close(one, other, rtol=0, atol=0)


@pytest.mark.parametrize("make, batches", [(small_engine, small_batches), (image_engine, image_batches)])
@pytest.mark.parametrize("before", [0, 2])
def test_warming_up_leaves_no_trace(make, batches, before):
    warmed, plain, loader = make(), make(), batches()
    losses = {}
    for engine in (warmed, plain):
        loader.load_state_dict(batches().state_dict())
        torch.manual_seed(3)
        for _ in range(before):
            engine.train_step(loader.next_batch())
        batch = loader.next_batch()
        places = [parameter.data_ptr() for parameter in engine.model.parameters()]
        if engine is warmed:
            with restored(engine.model, engine.optimizer, (engine._items_seen,)):
                for _ in range(WARM_UP_STEPS):
                    engine._step(batch)
                assert not torch.equal(_everything(engine)["seen"], torch.tensor(0))
        losses[engine] = [float(engine.train_step(batch).loss), float(engine.train_step(loader.next_batch()).loss)]
        assert places == [parameter.data_ptr() for parameter in engine.model.parameters()]
    assert losses[warmed] == losses[plain]
    _assert_same(_everything(warmed), _everything(plain))


def test_what_is_loaded_goes_into_the_moments_that_are_there(tmp_path):
    engine, loader = image_engine(), image_batches()
    for _ in range(2):
        engine.train_step(loader.next_batch())
    engine.save(tmp_path)
    saved = _everything(engine)
    engine.train_step(loader.next_batch())
    places = [state["momentum_buffer"].data_ptr() for state in engine.optimizer.state.values()]
    with same_tensors(engine.optimizer):
        engine.load(tmp_path)
    _assert_same(_everything(engine), saved)
    assert places == [state["momentum_buffer"].data_ptr() for state in engine.optimizer.state.values()]


def test_where_nothing_is_recorded_the_engine_says_why_and_trains_on():
    engine, plain, batch = small_engine(capture=True), small_engine(), small_batches().next_batch()
    assert engine.uncaptured == "a CPU has no graphs" and plain.uncaptured == "not asked for"
    losses = []
    for each in (engine, plain):
        torch.manual_seed(0)
        losses.append(float(each.train_step(batch).loss))
    assert losses[0] == losses[1] and engine.capture_time_s is None


def test_the_reasons_against_a_graph():
    gpu = replace(detect_cpu(), kind="cuda")
    assert why_not_captured(gpu, 1, "bf16") == ""
    assert "2 ranks" in why_not_captured(gpu, 2, "bf16") and "loss scale" in why_not_captured(gpu, 1, "fp16")


def _gpu_engine(capture: bool, dtype: str = "fp32"):
    device = detect()
    plain = image_engine()
    model = plain.model.to(device.torch_device)
    options = {"capture": capture, "label_smoothing": 0.1}
    return ImageEngine(model, sgd_nesterov(model, 0.1), plain.schedule, Precision(dtype, "test"), device, **options)


def _gpu_batches():
    return [tuple(part.to(detect().torch_device) for part in image_batches().next_batch()) for _ in range(6)]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")
def test_replays_agree_with_steps_one_by_one(tmp_path):
    """Each step starts from the same state: convolutions round differently from run to run, and training amplifies that."""
    plain, captured, rates = _gpu_engine(False), _gpu_engine(True), []
    for number, batch in enumerate(_gpu_batches()):
        plain.save(tmp_path / str(number))
        captured.load(tmp_path / str(number))
        before = [parameter.detach().clone() for parameter in plain.model.parameters()]
        steps = [engine.train_step(batch) for engine in (plain, captured)]
        rates.append([step.learning_rate for step in steps])
        for name in ("loss", "gradient_norm"):
            ours, theirs = (getattr(step, name).cpu() for step in steps[::-1])
            torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-4)
        weights = (list(engine.model.parameters()) for engine in (plain, captured))
        for old, one, other in zip(before, *weights, strict=True):
            assert (one - other).norm() <= 1e-2 * (one - old).norm() + 1e-6, "the replay updates the weights as the step does"
    assert captured.tokens_seen == 60 and all(rate == other for rate, other in rates) and rates[1][1] == pytest.approx(0.1)
    assert captured.uncaptured == "" and captured.capture_time_s > 0
    smaller = tuple(part[:5] for part in _gpu_batches()[0])
    assert int(captured.train_step(smaller).items) == 5, "another shape is done as ever"


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")
def test_a_recorded_engine_goes_on_from_a_checkpoint(tmp_path):
    batches, engine = _gpu_batches(), _gpu_engine(True)
    for batch in batches[:3]:
        engine.train_step(batch)
    engine.save(tmp_path)
    expected = [float(engine.train_step(batch).loss) for batch in batches[3:]]
    for other in (engine, _gpu_engine(True)):  # one that has a graph already, and a fresh one
        other.load(tmp_path)
        assert other.steps == 3 and other.tokens_seen == 30
        assert [float(other.train_step(batch).loss) for batch in batches[3:]] == pytest.approx(expected, rel=1e-3)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")
def test_dropout_draws_anew_in_every_replay():
    device = detect()
    engine = small_engine(device=device, capture=True)
    engine.schedule = lambda step: 0.0  # the same weights, so that only what is dropped differs
    batch = tuple(part.to(device.torch_device) for part in small_batches().next_batch())
    losses = [float(engine.train_step(batch).loss) for _ in range(8)]
    assert choose_precision(device).dtype == engine.precision.dtype and len(set(losses)) > 4


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")
def test_replays_drop_what_steps_one_by_one_would():
    """Also after a checkpoint: replays draw from the device's generator, and move it on, as launches do."""
    device, losses = detect(), {}
    batches = [tuple(part.to(device.torch_device) for part in small_batches().next_batch()) for _ in range(6)]
    for capture in (False, True):
        engine = small_engine(device=device, capture=capture)
        torch.manual_seed(3)
        losses[capture] = [float(engine.train_step(batch).loss) for batch in batches[:3]]
        state = rng_state()
        ahead = [float(engine.train_step(batch).loss) for batch in batches[3:]]
        losses[capture] += [*ahead, float(torch.rand((), device=device.torch_device))]
        set_rng_state(state)
        engine.schedule = lambda step: 0.0
        again = [float(engine.train_step(batches[0]).loss) for _ in range(2)]
        set_rng_state(state)
        assert again == pytest.approx([float(engine.train_step(batches[0]).loss) for _ in range(2)], rel=1e-5)
        assert again[0] != pytest.approx(again[1], rel=1e-5), "other numbers are dropped"
    assert losses[True] == pytest.approx(losses[False], rel=1e-3)


def test_kernels_are_combined_on_nvidia_alone():
    assert compile_options(detect(facts("H200"))) == {"combo_kernels": True}
    assert compile_options(detect(facts("MI250X"))) is None, "there PyTorch 2.9 could store wrong scalars"
    assert compile_options(detect_cpu()) is None
