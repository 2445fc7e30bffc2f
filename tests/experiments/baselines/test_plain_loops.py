"""The plain loops do the work of ours: same update, clipping, decay, schedule and loss, so that their times compare."""

import copy
import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from hyperion.experiments.baselines.plain_loops import (
    _PADDING,
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


def image_pair():
    images = np.random.default_rng(0).integers(0, 256, (24, 3, 32, 32), dtype=np.uint8)
    labels = np.arange(24) % 10
    torch.manual_seed(0)
    model = resnet18(width=4)
    other, _ = plain_model(4)
    copy_weights(model, other)
    plain = PlainImageLoop(other, images, labels, (), 8, 0.02, FP32, CPU, compiled=False)
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
