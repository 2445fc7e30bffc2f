"""Optimizers, schedules, precisions and seeds; fp16 survives gradients that overflow."""

import copy
import math
import random
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hyperion.checkpoints import CheckpointError, read_state, write_state
from hyperion.errors import HyperionError
from hyperion.hardware import detect_cpu
from hyperion.models import TransformerConfig, TransformerLM, resnet18
from hyperion.training import (
    ImageEngine,
    LanguageEngine,
    NonFiniteError,
    Precision,
    TrainingPlan,
    WarmupCosine,
    adamw,
    choose_precision,
    decay_groups,
    rng_state,
    seed_everything,
    set_rng_state,
    sgd_nesterov,
    train,
)
from hyperion.training.recipe import seed_rank
from tests.training.small import small_batches


def test_matrices_decay_and_vectors_do_not():
    model = TransformerLM(TransformerConfig(7, 4, 8, 2, 1))
    decayed, plain = decay_groups(model, 0.3)
    assert (decayed["weight_decay"], plain["weight_decay"]) == (0.3, 0.0)
    assert {p.ndim for p in plain["params"]} == {1}
    assert {p.ndim for p in decayed["params"]} == {2}
    assert len(decayed["params"]) + len(plain["params"]) == len(list(model.parameters()))


def test_frozen_parameters_are_left_out():
    model = resnet18(width=4)
    model.conv1.weight.requires_grad_(False)
    assert all(p is not model.conv1.weight for group in decay_groups(model, 0.1) for p in group["params"])


def test_the_kinds():
    model = resnet18(width=4)
    assert isinstance(adamw(model, 1e-3), torch.optim.AdamW)
    sgd = sgd_nesterov(model, 0.1)
    assert isinstance(sgd, torch.optim.SGD) and sgd.defaults["nesterov"] and sgd.defaults["momentum"] == 0.9


def test_the_corners():
    rate = WarmupCosine(peak=1.0, warmup_steps=10, total_steps=110, final_fraction=0.2)
    assert rate(1) == pytest.approx(0.1)
    assert rate(10) == 1.0
    assert rate(60) == pytest.approx(0.6)
    assert rate(110) == rate(500) == pytest.approx(0.2)


def test_without_warm_up_the_first_step_is_near_the_peak():
    assert WarmupCosine(1.0, 0, 1000)(1) == pytest.approx(1.0, abs=1e-4)


@pytest.mark.slow
@given(warmup=st.integers(0, 50), extra=st.integers(1, 100), final=st.floats(0, 1))
def test_it_rises_then_falls_and_stays_in_range(warmup, extra, final):
    rate = WarmupCosine(2.0, warmup, warmup + extra, final)
    rates = [rate(step) for step in range(1, warmup + extra + 5)]
    assert all(0 <= value <= 2.0 for value in rates)
    top = max(warmup, 1) - 1
    assert rates[:top] == sorted(rates[:top])
    assert all(a >= b - 1e-12 for a, b in zip(rates[top:], rates[top + 1 :], strict=False))


def test_a_warm_up_longer_than_the_run_is_refused():
    with pytest.raises(HyperionError, match="warmup_steps is 5"):
        WarmupCosine(1.0, 5, 5)


CPU = replace(detect_cpu(), isa=("avx2",))


def gpu(kind, arch):
    return replace(CPU, kind=kind, arch=arch, torch_device="cuda:0")


@pytest.mark.parametrize(
    "device, dtype, reason",
    [
        (gpu("cuda", "sm_90"), "bf16", "tensor cores of sm_90"),
        (gpu("cuda", "sm_70"), "fp32", "would not be faster"),
        (gpu("rocm", "gfx90a"), "bf16", "matrix instructions of gfx90a"),
        (gpu("rocm", "gfx1100"), "bf16", "matrix instructions of gfx1100"),
        (gpu("rocm", "gfx1030"), "fp32", "would not be faster"),
        (CPU, "fp32", "reference precision"),
    ],
)
def test_auto(device, dtype, reason):
    found = choose_precision(device)
    assert found.dtype == dtype
    assert reason in found.reason and reason in str(found)


def test_requests_are_honoured():
    assert choose_precision(gpu("cuda", "sm_90"), "fp32").dtype == "fp32"
    emulated = choose_precision(CPU, "bf16")
    assert emulated.dtype == "bf16" and "emulated" in emulated.reason
    assert choose_precision(gpu("cuda", "sm_90"), "tf32").dtype == "tf32"
    assert choose_precision(gpu("rocm", "gfx90a"), "fp16").dtype == "fp16"


def test_unknown_and_impossible_requests_are_refused():
    with pytest.raises(HyperionError, match="'fp12'"):
        choose_precision(CPU, "fp12")
    with pytest.raises(HyperionError, match="TF32 is a format of GPU matrix units"):
        choose_precision(CPU, "tf32")
    with pytest.raises(HyperionError, match="gfx90a has no TF32"):
        choose_precision(gpu("rocm", "gfx90a"), "tf32")


def test_autocast_computes_in_that_type():
    a = torch.ones(2, 2)
    for name, dtype in (("bf16", torch.bfloat16), ("fp16", torch.float16), ("fp32", torch.float32)):
        with choose_precision(CPU, name).autocast(CPU):
            assert (a @ a).dtype == dtype


@pytest.mark.parametrize("dtype, products", [("fp32", "ieee"), ("tf32", "tf32"), ("bf16", None)])
def test_float32_products_use_tf32_units_only_where_it_says_so_and_the_switches_are_put_back(dtype, products):
    switches = torch.backends.cuda.matmul, torch.backends.cudnn.conv
    before = [switch.fp32_precision for switch in switches]
    with Precision(dtype, "test").products():
        assert [switch.fp32_precision for switch in switches] == ([products] * 2 if products else before)
    assert [switch.fp32_precision for switch in switches] == before


def engine_in(dtype: str) -> LanguageEngine:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = TransformerLM(TransformerConfig(vocab_size=19, context=8, width=16, heads=2, layers=2))
    return LanguageEngine(model, adamw(model, 3e-3), lambda step: 3e-3, choose_precision(CPU, dtype), CPU)


def overflow_next(engine: LanguageEngine, times: int = 1) -> None:
    """Make one gradient infinite in each of the next `times` backward passes, as a scale that is too large does."""
    left = [times]

    def spoil(gradient):
        left[0] -= 1
        if not left[0]:
            handle.remove()
        return gradient * math.inf

    handle = engine.model.final_norm.weight.register_hook(spoil)


def weights_of(engine: LanguageEngine) -> torch.Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in engine.model.parameters()])


def updates_of(engine: LanguageEngine) -> int:
    """Updates by the optimizer's own count."""
    return int(next(iter(engine.optimizer.state.values()))["step"])


def test_a_gradient_that_overflows_skips_the_step_and_halves_the_scale():
    engine, batches = engine_in("fp16"), small_batches()
    assert not engine.train_step(batches.next_batch()).skipped
    weights, scale = weights_of(engine), engine.scaler.scale
    overflow_next(engine)
    metrics = engine.train_step(batches.next_batch())
    assert bool(metrics.skipped) and not math.isfinite(metrics.gradient_norm) and math.isfinite(metrics.loss)
    torch.testing.assert_close(weights_of(engine), weights, rtol=0, atol=0)
    assert engine.scaler.scale == scale / 2
    assert (engine.steps, updates_of(engine), engine.scaler.skipped_steps) == (2, 1, 1)
    assert not engine.train_step(batches.next_batch()).skipped
    assert (engine.steps, updates_of(engine), engine.scaler.skipped_steps) == (3, 2, 1)
    assert not torch.equal(weights_of(engine), weights)


@pytest.mark.slow
def test_sgd_begins_without_momentum_although_its_first_step_was_skipped():
    torch.set_num_threads(1)
    torch.manual_seed(0)
    images, labels = torch.randn(8, 3, 32, 32), torch.arange(8)
    weights = []
    for overflows in (0, 1):
        model = resnet18(width=4, num_classes=10)
        model.load_state_dict(weights[0][0] if weights else model.state_dict())
        start = copy.deepcopy(model.state_dict())
        optimizer = sgd_nesterov(model, 0.1)
        engine = ImageEngine(model, optimizer, lambda step: 0.1, Precision("fp16", "test"), CPU)
        if overflows:
            handle = model.classifier.bias.register_hook(lambda gradient: gradient * math.inf)
            assert engine.train_step((images, labels)).skipped
            handle.remove()
            assert all(not state["momentum_buffer"].any() for state in optimizer.state.values())
            engine.model.load_state_dict(start)  # the running statistics of the skipped step
        for _ in range(2):
            assert not engine.train_step((images, labels)).skipped
        weights.append((start, torch.cat([p.detach().flatten() for p in model.parameters()])))
    torch.testing.assert_close(weights[1][1], weights[0][1], rtol=1e-3, atol=1e-5)


def test_the_norm_and_the_clipping_are_those_of_the_true_gradient():
    batch = small_batches().next_batch()
    scaled, reference = engine_in("fp16").train_step(batch), engine_in("fp32").train_step(batch)
    assert float(scaled.gradient_norm) == pytest.approx(float(reference.gradient_norm), rel=0.01)
    assert float(scaled.loss) == pytest.approx(float(reference.loss), rel=1e-3)


def test_the_scale_is_part_of_the_checkpoint(tmp_path):
    engine, batches = engine_in("fp16"), small_batches()
    overflow_next(engine, times=2)
    for _ in range(4):
        engine.train_step(batches.next_batch())
    engine.save(tmp_path)
    other = engine_in("fp16")
    other.load(tmp_path)
    assert other.scaler.state_dict() == engine.scaler.state_dict()
    assert (other.scaler.skipped_steps, other.scaler.scale) == (2, 65536 / 4)
    batch = batches.next_batch()
    assert float(other.train_step(batch).loss) == float(engine.train_step(batch).loss)
    torch.testing.assert_close(weights_of(other), weights_of(engine), rtol=0, atol=0)
    with pytest.raises(CheckpointError, match="saved in fp16"):
        engine_in("fp32").load(tmp_path)


def test_training_goes_on_over_an_overflow_but_not_over_gradients_that_are_no_numbers():
    engine = engine_in("fp16")
    overflow_next(engine, times=3)
    assert len(train(engine, small_batches(), TrainingPlan(steps=6)).losses) == 6
    assert engine.scaler.skipped_steps == 3
    # Halved from 65536 until below 1, the scale is not to blame any more.
    overflow_next(engine, times=100)
    with pytest.raises(NonFiniteError, match="gradient norm"):
        train(engine, small_batches(), TrainingPlan(steps=30))
    assert engine.scaler.skipped_steps == 3 + 14


def test_bf16_and_fp32_scale_nothing():
    for dtype in ("fp32", "bf16"):
        engine = engine_in(dtype)
        assert engine.scaler.scale == 1 and engine.scaler.state_dict() == {}
        overflow_next(engine)
        with pytest.raises(NonFiniteError):
            train(engine, small_batches(), TrainingPlan(steps=2))


def draws():
    return [random.random(), random.gauss(0, 1), np.random.rand(), np.random.randn(), torch.rand(3).tolist()]


def test_a_seed_repeats_every_generator():
    seed_everything(11)
    first = draws()
    seed_everything(11)
    assert draws() == first
    seed_everything(12)
    assert draws() != first


def test_every_rank_and_every_start_draws_its_own_numbers():
    drawn = []
    for seed, step, rank in [(3, 0, 0), (3, 0, 1), (3, 9, 0), (4, 0, 0), (2**63, 0, 0), (3, 0, 0)]:
        seed_rank(seed, step, rank)
        drawn.append(tuple(map(str, draws())))
    assert drawn[0] == drawn[-1]
    assert len(set(drawn)) == len(drawn) - 1


def test_the_state_survives_a_file(tmp_path):
    seed_everything(3)
    draws()
    np.random.randn(1)  # numpy keeps the second half of a pair of normal numbers
    write_state(tmp_path, rng_state())
    expected = draws()
    set_rng_state(read_state(tmp_path))
    assert draws() == expected


def test_the_state_includes_the_second_of_two_normal_numbers_that_numpy_keeps():
    seed_everything(0)
    np.random.standard_normal()
    state = rng_state()
    drawn = np.random.standard_normal(3).tolist()
    set_rng_state(state)
    assert np.random.standard_normal(3).tolist() == drawn


@pytest.fixture
def restore_determinism():
    before = torch.are_deterministic_algorithms_enabled()
    yield
    torch.use_deterministic_algorithms(before)


@pytest.mark.parametrize("seed", [-1, 2**32, 2**64, True, 0.5])
def test_a_seed_that_a_generator_does_not_take_is_refused_before_any_is_seeded(seed):
    seed_everything(3)
    expected = random.Random(3).random()
    with pytest.raises(HyperionError, match="seed is ") as refusal:
        seed_everything(seed)
    assert random.random() == expected and "SEED=0" in refusal.value.next_step


def test_deterministic_mode_is_torchs(restore_determinism):
    seed_everything(0, deterministic=True)
    assert torch.are_deterministic_algorithms_enabled()
