"""An engine's step is the textbook step, and its state comes back whole."""

import copy
import functools
import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from hyperion.data.images.device_images import ImageBatches
from hyperion.data.packing import IGNORE_INDEX
from hyperion.errors import HyperionError
from hyperion.hardware import detect, detect_cpu
from hyperion.models import resnet18
from hyperion.training import ImageEngine, Precision, WarmupCosine, sgd_nesterov
from hyperion.training import engine as engines
from hyperion.training.engine import _why_not_captured
from tests.training.small import small_batches, small_engine


def image_engine(seed=0):
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    model = resnet18(width=4)
    return ImageEngine(model, sgd_nesterov(model, 0.1), WarmupCosine(0.1, 2, 10), Precision("fp32", "test"), detect_cpu())


def image_batches():
    images = np.random.default_rng(0).integers(0, 256, (40, 3, 32, 32), dtype=np.uint8)
    return ImageBatches(images, np.arange(40) % 10, 10, ([0.5] * 3, [0.25] * 3), seed=1, augment=("crop", "flip"))


def test_one_step_is_clipped_adamw_at_the_scheduled_rate():
    engine = small_engine(clip_norm=0.1)
    engine.model.eval()
    model = copy.deepcopy(engine.model)
    engine.model.train = lambda mode=True: engine.model  # no dropout, so that both see the same loss
    inputs_BT, targets_BT = batch = small_batches().next_batch()
    metrics = engine.train_step(batch)

    loss = F.cross_entropy(model(inputs_BT).flatten(0, 1), targets_BT.flatten())
    loss.backward()
    gradients = torch.cat([p.grad.flatten() for p in model.parameters()])
    assert metrics.loss.item() == pytest.approx(loss.item(), rel=1e-6)
    assert metrics.gradient_norm.item() == pytest.approx(gradients.norm().item(), rel=1e-5)
    assert metrics.learning_rate == pytest.approx(3e-3 / 4)
    assert int(metrics.items) == inputs_BT.numel() == engine.tokens_seen
    scale = min(1.0, 0.1 / gradients.norm().item())
    for p, q in zip(engine.model.parameters(), model.parameters(), strict=True):
        decay = 0.1 if q.ndim >= 2 else 0.0
        clipped = q.grad * scale
        expected = q * (1 - metrics.learning_rate * decay) - metrics.learning_rate * clipped / (clipped.abs() + 1e-8)
        torch.testing.assert_close(p, expected, rtol=1e-4, atol=1e-6)


def test_an_optimizer_without_some_parameters_of_the_model_is_refused():
    model = resnet18(width=4)
    rest = (WarmupCosine(0.1, 2, 10), Precision("fp32", "test"), detect_cpu())
    with pytest.raises(HyperionError, match="the optimizer does not have 62 parameters of the model"):
        ImageEngine(model, sgd_nesterov(resnet18(width=4), 0.1), *rest)
    *_, head = model.children()
    with pytest.raises(HyperionError, match="the optimizer does not have 60 parameters .*, such as conv1.weight"):
        ImageEngine(model, torch.optim.SGD(head.parameters(), 0.1), *rest)
    model.requires_grad_(False)
    head.requires_grad_(True)
    assert ImageEngine(model, torch.optim.SGD(head.parameters(), 0.1), *rest)


def test_gradients_that_something_else_left_do_not_count():
    batch = small_batches().next_batch()
    engines = [small_engine(), small_engine()]
    sum(parameter.square().sum() for parameter in engines[1].model.parameters()).backward()
    for engine in engines:
        torch.manual_seed(0)
        engine.train_step(batch)
    for ours, theirs in zip(*(engine.model.parameters() for engine in engines), strict=True):
        assert torch.equal(ours, theirs)


def test_a_rank_whose_part_of_a_batch_is_padding_has_the_loss_zero(monkeypatch):
    engine = small_engine()
    engine.ranks = 2
    monkeypatch.setattr(engines, "start_sum", lambda values, ranks: lambda: values + 5)  # the other rank has five items
    inputs_BT, targets_BT = small_batches().next_batch()
    metrics = engine.train_step((inputs_BT, torch.full_like(targets_BT, IGNORE_INDEX)))
    assert (int(metrics.items), int(metrics.rank_items), metrics.rank_loss.item()) == (5, 0, 0.0)


def test_groups_with_different_learning_rates_are_refused():
    model = resnet18(width=4)
    *body, head = model.children()
    rest = [parameter for module in body for parameter in module.parameters()]
    groups = [{"params": rest, "lr": 1e-5}, {"params": list(head.parameters()), "lr": 1e-2}]
    with pytest.raises(HyperionError, match="learning rates 1e-05, 0.01, but the schedule sets one rate"):
        ImageEngine(model, torch.optim.SGD(groups), WarmupCosine(0.1, 2, 10), Precision("fp32", "test"), detect_cpu())


class _Half(torch.nn.Module):
    """A classifier with a layer that no loss depends on until `both` is set."""

    def __init__(self):
        super().__init__()
        self.used, self.idle, self.both = torch.nn.Linear(3072, 10), torch.nn.Linear(3072, 10), False

    def forward(self, images_BCYX):
        x_BD = images_BCYX.flatten(1)
        return self.used(x_BD) + (self.idle(x_BD) if self.both else 0.0)


@pytest.mark.parametrize("optimizer", [torch.optim.AdamW, functools.partial(torch.optim.SGD, momentum=0.9), torch.optim.SGD])
def test_a_parameter_without_gradients_so_far_resumes_and_can_be_trained_later(tmp_path, optimizer):
    def engine(seed):
        torch.manual_seed(seed)
        model = _Half()
        return ImageEngine(
            model, optimizer(model.parameters(), lr=0.1), lambda step: 0.1, Precision("fp32", "test"), detect_cpu()
        )

    batches = [image_batches().next_batch() for _ in range(6)]
    first, other = engine(0), engine(1)
    for batch in batches[:3]:
        first.train_step(batch)
    first.save(tmp_path)
    other.load(tmp_path)
    for each in (first, other):
        each.model.both = True
    losses = [[float(each.train_step(batch).loss) for batch in batches[3:]] for each in (first, other)]
    assert losses[0] == losses[1]


def test_a_checkpoint_does_not_change_how_the_optimizer_computes(tmp_path):
    engines = [image_engine(), image_engine()]
    for group in engines[1].optimizer.param_groups:
        group.update(fused=None, foreach=True)
    for engine in engines:
        engine.train_step(image_batches().next_batch())
    engines[0].save(tmp_path)
    engines[1].load(tmp_path)
    assert [(group["fused"], group["foreach"]) for group in engines[1].optimizer.param_groups] == [(None, True)] * 2


@pytest.mark.parametrize(
    ("batch", "optimizer", "reason"),
    [
        ("pair", functools.partial(torch.optim.AdamW, fused=True), ""),
        ("pair", functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9), ""),
        ("dict", functools.partial(torch.optim.AdamW, fused=True), "no tuple of tensors"),
        ("pair", torch.optim.AdamW, "counts its steps on the host"),
        ("pair", torch.optim.NAdam, "not known of NAdam"),
        ("pair", functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9, dampening=0.5), "dampening"),
    ],
)
def test_steps_that_a_graph_would_compute_wrongly_are_not_captured(batch, optimizer, reason):
    x, y = small_batches().next_batch()
    why = _why_not_captured((x, y) if batch == "pair" else {"x": x, "y": y}, optimizer(torch.nn.Linear(2, 2).parameters()))
    assert reason in why and bool(why) == bool(reason)


def test_a_step_trains_a_model_that_was_left_in_evaluation():
    engine = small_engine()
    engine.model.eval()
    engine.train_step(small_batches().next_batch())
    assert all(module.training for module in engine.model.modules())


def test_an_image_engine_learns_and_evaluates():
    engine, batches = image_engine(), image_batches()
    losses = [float(engine.train_step(batches.next_batch()).loss) for _ in range(12)]
    assert min(losses[-3:]) < losses[0]
    assert engine.tokens_seen == 120 and engine.item == "image"
    result = engine.evaluate(image_batches())
    assert result["images"] == 40 and 0 <= result["accuracy"] <= 1 and math.isfinite(result["loss"])


@pytest.mark.parametrize("make, batches", [(small_engine, small_batches), (image_engine, image_batches)])
def test_saved_and_loaded_into_a_fresh_engine(tmp_path, make, batches):
    loader = batches()
    engine = make()
    for _ in range(3):
        engine.train_step(loader.next_batch())
    engine.save(tmp_path)
    torch.manual_seed(7)
    expected = [float(engine.train_step(batch).loss) for batch in (loader.next_batch(), loader.next_batch())]
    other = make(seed=1)
    other.load(tmp_path)
    assert (other.steps, other.tokens_seen) == (3, engine.tokens_seen * 3 // 5)
    loader = batches()
    for _ in range(3):
        loader.next_batch()
    torch.manual_seed(7)
    assert [float(other.train_step(batch).loss) for batch in (loader.next_batch(), loader.next_batch())] == expected


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")
def test_the_host_waits_neither_for_a_batch_nor_in_a_step():
    device = detect()
    batches, engine = small_batches(device.torch_device), small_engine(device=device)
    engine.train_step(batches.next_batch())
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(8):  # into the next epoch
            metrics = engine.train_step(batches.next_batch())
        with pytest.raises(RuntimeError, match="synchroniz"):  # what a wait would have come to
            metrics.loss.item()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert engine.steps == 9 and math.isfinite(metrics.loss.item())
