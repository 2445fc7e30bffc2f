"""The plain loops do the work of ours: same update, clipping, decay, schedule and loss, so that their times compare."""

import copy
import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from hyperion.data import channel_statistics
from hyperion.experiments.baselines.plain_loops import (
    _PADDING,
    CapturedLanguageLoop,
    PlainImageLoop,
    PlainLanguageLoop,
    copy_weights,
    plain_model,
    with_weights_of,
)
from hyperion.hardware import detect_cpu
from hyperion.kernels.token_loss import padded_classes
from hyperion.models import TransformerConfig, TransformerLM, resnet18
from hyperion.training import ImageEngine, LanguageEngine, Precision, WarmupCosine, adamw, sgd_nesterov

CPU, FP32 = detect_cpu(), Precision("fp32", "test")
STEPS = 6
# A vocabulary of a multiple of 64: the plain model then has no class more than ours.
CONFIG = TransformerConfig(vocab_size=64, context=8, width=16, heads=2, layers=2)
SCHEDULE = WarmupCosine(2e-2, 3, STEPS)


def language_pair():
    torch.manual_seed(0)
    model = TransformerLM(CONFIG)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(8 if parameter.ndim >= 2 else 1)  # gradients above a norm of 1, which are clipped
    assert padded_classes(CONFIG.vocab_size) == CONFIG.vocab_size
    plain = PlainLanguageLoop(with_weights_of(model), SCHEDULE, FP32, CPU, compiled=False)
    return LanguageEngine(model, adamw(model, SCHEDULE(1)), SCHEDULE, FP32, CPU), plain


def text(step):
    tokens = torch.randint(64, (4, 9), generator=torch.Generator().manual_seed(step))
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def gradients_at_update(optimizer, found):
    def look(optimizer, args, kwargs):
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        found.append(torch.cat([p.grad.flatten() for p in parameters]))

    optimizer.register_step_pre_hook(look)


def test_the_plain_language_loop_clips_gradients_to_a_norm_of_1():
    _, plain = language_pair()
    reference, found = copy.deepcopy(plain.model), []
    gradients_at_update(plain.optimizer, found)
    inputs, targets = text(0)
    plain.train_on(inputs, targets)
    F.cross_entropy(reference(inputs).flatten(0, 1), targets.flatten()).backward()
    norm = math.sqrt(sum(float(p.grad.square().sum()) for p in reference.parameters()))
    assert norm > 1.5
    assert float(found[0].norm()) == pytest.approx(1.0, rel=1e-4)
    assert all(parameter.grad is None for parameter in plain.model.parameters())


def test_the_plain_language_loop_makes_the_steps_of_the_engine():
    engine, plain = language_pair()
    ours, theirs = [], []
    gradients_at_update(engine.optimizer, ours)
    gradients_at_update(plain.optimizer, theirs)
    norms = []
    for step in range(STEPS):
        metrics = engine.train_step(text(step))
        loss = plain.train_on(*text(step))
        norms.append(float(metrics.gradient_norm))
        assert float(loss) == pytest.approx(float(metrics.loss), rel=1e-4)
        assert [group["lr"] for group in plain.optimizer.param_groups] == [SCHEDULE(step + 1)] * 2
        assert metrics.learning_rate == SCHEDULE(step + 1)
        assert float(theirs[-1].norm()) == pytest.approx(float(ours[-1].norm()), rel=1e-3)
    assert max(norms) > 1.5
    assert max(norms) / min(norms) > 1.05, "steps clipped by different factors, which Adam does not undo"
    after = dict(with_weights_of(engine.model).named_parameters())
    for name, plains in plain.model.named_parameters():
        kept = slice(None)
        if name.endswith("qkv.bias"):  # a bias of all keys changes no softmax: its gradient is rounding, which Adam scales up
            kept = [*range(CONFIG.width), *range(2 * CONFIG.width, 3 * CONFIG.width)]
        torch.testing.assert_close(plains[kept], after[name][kept], rtol=2e-3, atol=2e-4)


def test_the_captured_language_loop_makes_the_steps_of_the_plain_loop(monkeypatch):
    class EagerGraph:  # a CPU has no graphs
        def __init__(self, step, batch, model, optimizer, sharing):
            self.replay, self.sharing = step, sharing

    monkeypatch.setattr("hyperion.experiments.baselines.plain_loops.StepGraph", EagerGraph)
    (_, plain), (_, other), (_, third) = (language_pair() for _ in range(3))
    captured = CapturedLanguageLoop(other)
    for step in range(STEPS):
        assert float(captured.train_on(*text(step))) == pytest.approx(float(plain.train_on(*text(step))), rel=1e-6)
        assert float(captured.learning_rate) == pytest.approx(SCHEDULE(step + 1)), "the graph reads this tensor"
    for group in other.optimizer.param_groups:
        assert group["lr"] is captured.learning_rate and group["capturable"]
    expected = dict(plain.model.named_parameters())
    for name, parameter in other.model.named_parameters():
        if not name.endswith("qkv.bias"):  # the gradients of the keys' biases are only rounding
            torch.testing.assert_close(parameter, expected[name], rtol=1e-4, atol=1e-6)
    sharing = CapturedLanguageLoop(third, captured)
    sharing.train_on(*text(0))
    assert captured._graph is not None and sharing._graph.sharing is captured._graph and captured._graph.sharing is None


def test_the_rungs_of_the_plain_model_compute_the_same_loss():
    torch.manual_seed(0)
    ours = TransformerLM(CONFIG)
    inputs, targets = text(0)
    loss = with_weights_of(ours)(inputs, targets)
    torch.testing.assert_close(with_weights_of(ours, loss_kernel=True)(inputs, targets), loss)
    rounded, streams = with_weights_of(ours, bf16_stream=True), []
    for block in rounded.blocks:
        block.register_forward_hook(lambda block, inputs, output: streams.append((inputs[0].dtype, output.dtype)))
    with torch.autocast("cpu", torch.bfloat16):
        assert rounded(inputs, targets).item() == pytest.approx(loss.item(), rel=1e-2)
    assert streams == [(torch.bfloat16, torch.bfloat16)] * CONFIG.layers
    assert with_weights_of(ours, loss_kernel=True)(inputs).shape == (4, 8, 64)


def test_the_loss_of_the_rung_comes_from_the_librarys_function(monkeypatch):
    seen = []

    def loss(x_MD, weight_PD, targets_M):
        seen.append((tuple(x_MD.shape), tuple(weight_PD.shape), tuple(targets_M.shape)))
        return x_MD.sum(1)

    monkeypatch.setattr("hyperion.experiments.baselines.plain_loops.token_loss", loss)
    with_weights_of(TransformerLM(CONFIG), loss_kernel=True)(*text(0))
    with_weights_of(TransformerLM(CONFIG))(*text(0))
    assert seen == [((32, 16), (64, 16), (32,))]


def settings_of(optimizer):
    """Of each group: how many numbers it trains, and every option but the rate and the choice of kernels."""
    left_out = ("params", "lr", "fused", "foreach", "initial_lr")
    return [
        (sum(p.numel() for p in group["params"]), {name: value for name, value in group.items() if name not in left_out})
        for group in optimizer.param_groups
    ]


def test_both_language_loops_decay_the_same_weights_by_the_same_share():
    engine, plain = language_pair()
    ours, theirs = settings_of(engine.optimizer), settings_of(plain.optimizer)
    assert ours == theirs
    assert [options["weight_decay"] for _, options in theirs] == [0.1, 0.0] and theirs[0][0] > theirs[1][0] > 0


def image_pair(fused=False):
    images = np.random.default_rng(0).integers(0, 256, (24, 3, 32, 32), dtype=np.uint8)
    labels = np.arange(24) % 10
    torch.manual_seed(0)
    model = resnet18(width=4)
    other, _ = plain_model(4)
    copy_weights(model, other)
    plain = PlainImageLoop(other, images, labels, channel_statistics(images), (), 8, 0.02, FP32, CPU, compiled=False, fused=fused)
    # As hyperion.experiments.baselines.image_training_speed builds ours.
    optimizer = sgd_nesterov(model, 0.02, weight_decay=0.0)
    return ImageEngine(model, optimizer, lambda step: 0.02, FP32, CPU, clip_norm=math.inf), plain


def test_the_plain_image_loop_makes_the_steps_of_the_engine():
    engine, plain = image_pair()
    for _ in range(3):
        images, labels = plain.next_batch()
        ours = engine.train_step((images.clone(), labels))
        assert float(plain.train_on(images, labels)) == pytest.approx(float(ours.loss), rel=1e-4)
    for mine, plains in zip(engine.model.parameters(), plain.model.parameters(), strict=True):
        torch.testing.assert_close(plains, mine, rtol=1e-3, atol=1e-5)
    wanted = {"weight_decay": 0, "momentum": 0.9, "nesterov": True, "dampening": 0, "lr": 0.02}
    for group in [*engine.optimizer.param_groups, *plain.optimizer.param_groups]:
        assert {name: group[name] for name in wanted} == wanted
    assert engine.label_smoothing == 0.0


def test_the_fused_update_of_the_plain_image_loop_is_the_default_one():
    (_, plain), (_, other) = image_pair(), image_pair(fused=True)
    assert [loop.optimizer.param_groups[0]["fused"] for loop in (plain, other)] == [None, True]
    for _ in range(3):
        batch = plain.next_batch()
        assert float(other.train_on(*batch)) == pytest.approx(float(plain.train_on(*batch)), rel=1e-5)


def test_a_plain_epoch_holds_each_image_once_normalised():
    _, plain = image_pair()
    torch.testing.assert_close(plain.images.mean(dim=(0, 2, 3)), torch.zeros(3), atol=1e-4, rtol=0)
    torch.testing.assert_close(plain.images.std(dim=(0, 2, 3)), torch.ones(3), atol=1e-2, rtol=0)
    seen = torch.cat([plain.next_batch()[0] for _ in range(3)])
    order = torch.cdist(seen.flatten(1), plain.images.flatten(1)).argmin(dim=1)
    assert sorted(order.tolist()) == list(range(24))
    assert torch.equal(seen, plain.images[order])
    again = torch.cat([plain.next_batch()[0] for _ in range(3)])
    assert not torch.equal(seen, again), "the next epoch has an order of its own"


@pytest.mark.parametrize("augment", [("crop",), ("flip",), ("crop", "flip")])
def test_plain_augmentation_shifts_and_mirrors_as_it_is_told(augment):
    _, plain = image_pair()
    plain.augment = augment
    torch.manual_seed(1)
    images, _ = plain.next_batch()
    sources = plain.images[plain.order[:8]]
    padded = F.pad(sources, [_PADDING] * 4)
    found = set()
    for image, source in zip(images, padded, strict=True):
        matches = {
            (mirrored, top, left)
            for mirrored in (False, True)
            for top in range(2 * _PADDING + 1)
            for left in range(2 * _PADDING + 1)
            if torch.equal(image, (source.flip(2) if mirrored else source)[:, top : top + 32, left : left + 32])
        }
        assert len(matches) == 1
        found |= matches
    assert {mirrored for mirrored, _, _ in found} == ({False, True} if "flip" in augment else {False})
    assert (len({place[1:] for place in found}) > 3) == ("crop" in augment)
