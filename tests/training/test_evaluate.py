"""Held-out numbers are sums over every token or image, each once."""

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from hyperion.data.batches import evaluation_windows
from hyperion.data.images.device_images import ImageBatches
from hyperion.data.packing import IGNORE_INDEX
from hyperion.errors import HyperionError
from hyperion.hardware import detect_cpu
from hyperion.models import TransformerConfig, TransformerLM, resnet18
from hyperion.training import Precision, evaluate_images, evaluate_language
from hyperion.workloads.quality import clustered_mean

FP32, CPU = Precision("fp32", "test"), detect_cpu()
TOKENS = np.random.default_rng(0).integers(1, 13, 101)


@pytest.fixture
def model():
    torch.manual_seed(0)
    return TransformerLM(TransformerConfig(vocab_size=13, context=8, width=16, heads=2, layers=1))


def nll_of_every_token(model, context, stride):
    """One token at a time in float64: each sees what its window holds before it."""
    stream, nll = [0, *TOKENS.tolist()], []
    exact = model.double().eval()
    start = 0
    for target in range(1, len(stream)):
        while target > start + context:
            start = min(start + stride, len(TOKENS) - context)
        logits_V = exact(torch.tensor([stream[start:target]]))[0, -1]
        nll.append(F.cross_entropy(logits_V, torch.tensor(stream[target])).item())
    model.float()
    return np.array(nll)


@pytest.mark.parametrize("stride", [1, 3, 8])
def test_every_token_is_scored_once_with_its_context(model, stride):
    with torch.no_grad():
        expected = nll_of_every_token(model, 8, stride)
    found = evaluate_language(model, evaluation_windows(TOKENS, 8, stride, prefix_id=0, batch_size=5), FP32, CPU)
    assert found.tokens == 101
    assert found.total_nll_nats == pytest.approx(expected.sum(), rel=1e-6)
    assert found.independent_error_nats == pytest.approx(expected.std() / math.sqrt(101), rel=1e-4)
    counts = [
        int((targets_T != IGNORE_INDEX).sum())
        for _, targets_BT in evaluation_windows(TOKENS, 8, stride, prefix_id=0)
        for targets_T in targets_BT
    ]
    clustered = clustered_mean(expected, np.repeat(np.arange(len(counts)), counts))
    assert found.windows == len(counts) and found.interval == pytest.approx((clustered.ci_low, clustered.ci_high), rel=1e-4)
    assert found.loss == pytest.approx(expected.mean(), rel=1e-6)
    assert found.perplexity_token == pytest.approx(math.exp(expected.mean()), rel=1e-5)
    assert found.perplexity_word(40) == pytest.approx(math.exp(expected.sum() / 40), rel=1e-4)


def test_tokens_of_a_window_that_say_the_same_count_once():
    """With equal tokens in each window, the error of the mean is that of the windows, √8 times that of the tokens."""

    class Repeats(torch.nn.Module):
        def forward(self, inputs_BT, targets_BT):
            return inputs_BT[:, :1].expand_as(targets_BT) * 0.01

    windows = [(inputs := torch.randint(100, (5, 8)), inputs) for _ in range(40)]
    found = evaluate_language(Repeats(), windows, FP32, CPU)
    assert found.standard_error_nats / found.independent_error_nats == pytest.approx(math.sqrt(8 * 200 / 199), rel=1e-6)
    one = evaluate_language(Repeats(), [(windows[0][0][:1], windows[0][1][:1])], FP32, CPU)
    assert one.windows == 1 and one.standard_error_nats == one.independent_error_nats == 0


@pytest.mark.parametrize("training", [True, False])
def test_evaluation_leaves_the_mode_and_gradients_alone(model, training):
    model.train(training)
    evaluate_language(model, evaluation_windows(TOKENS, 8, 8, prefix_id=0), FP32, CPU)
    assert model.training is training
    assert all(p.grad is None for p in model.parameters())


def test_images_are_counted_once():
    torch.manual_seed(0)
    model = resnet18(width=4)
    images = np.random.default_rng(0).integers(0, 256, (23, 3, 32, 32), dtype=np.uint8)
    labels = np.arange(23) % 10
    half = ([0.5] * 3, [0.25] * 3)
    batches = ImageBatches(images, labels, 5, half, shuffle=False, drop_last=False)
    found = evaluate_images(model, batches, FP32, CPU)
    model.eval()
    with torch.no_grad():
        logits_BK = model((torch.from_numpy(images).float() / 255 - 0.5) / 0.25)
    assert found.images == 23
    assert found.loss == pytest.approx(F.cross_entropy(logits_BK, torch.from_numpy(labels)).item(), rel=1e-5)
    assert found.accuracy == (logits_BK.argmax(dim=1).numpy() == labels).mean()
    assert found.standard_error == pytest.approx(math.sqrt(found.accuracy * (1 - found.accuracy) / 23))


def test_nothing_to_evaluate_is_an_error(model):
    with pytest.raises(HyperionError, match="no tokens"):
        evaluate_language(model, [], FP32, CPU)
    with pytest.raises(HyperionError, match="no images"):
        evaluate_images(resnet18(width=4), [], FP32, CPU)
