"""An engine's step is the textbook step, and its state comes back whole."""

import copy
import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from hyperion.data.images.device_images import ImageBatches
from hyperion.errors import HyperionError
from hyperion.hardware import detect, detect_cpu
from hyperion.models import resnet18
from hyperion.training import ImageEngine, Precision, WarmupCosine, sgd_nesterov
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
