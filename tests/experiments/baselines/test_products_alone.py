"""The products listed for a step are the step's: their FLOPs, counted by PyTorch, are those of the whole model."""

import time

import numpy as np
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from hyperion.experiments.baselines.products_alone import (
    ProductAlone,
    ProductsAlone,
    image_products,
    language_products,
    one_pass,
    time_alone,
)
from hyperion.hardware import detect_cpu
from hyperion.hardware.telemetry import Telemetry
from hyperion.measure import Timing
from hyperion.models import TransformerConfig, TransformerLM, resnet18
from hyperion.training import Precision

CONFIG, BATCH = TransformerConfig(vocab_size=70, context=8, width=16, heads=2, layers=3), 5


def flops_of(function):
    with FlopCounterMode(display=False) as counter:
        function()
    return counter.get_total_flops()


def flops_listed(products):
    calls = [(product.count, product.make(torch.float32, torch.device("cpu"))) for product in products]
    return sum(count * flops_of(call) for count, call in calls)


def test_those_of_a_language_model():
    model, tokens = TransformerLM(CONFIG), torch.randint(70, (BATCH, 9))
    whole = flops_of(lambda: model.loss(tokens[:, :-1], tokens[:, 1:]).backward())
    assert flops_listed(language_products(CONFIG, BATCH, compiled=False)) == whole
    # Compiled, the head has 58 columns more, with three products of 2 x 40 x 16 FLOPs for each.
    assert flops_listed(language_products(CONFIG, BATCH, compiled=True)) == whole + 3 * 2 * 40 * 16 * 58


def test_those_of_a_resnet():
    model, images = resnet18(10, 4), torch.randn(2, 3, 32, 32)
    assert flops_listed(image_products(4, 2)) == flops_of(lambda: model(images).sum().backward())


def test_a_pass_does_all_of_them_layer_by_layer(one_thread):
    done = []
    listed = [
        ProductAlone("part", name, count, lambda dtype, device, name=name: lambda: done.append(name))
        for name, count in (("in a layer", 3), ("in a layer too", 3), ("head", 1))
    ]
    again = one_pass(listed, Precision("fp32", "test"), detect_cpu())
    assert done == ["in a layer", "in a layer too", "head", *["in a layer", "in a layer too"] * 2]
    again()
    assert len(done) == 14
    real = one_pass(language_products(CONFIG, BATCH, compiled=True), Precision("fp32", "test"), detect_cpu())
    assert flops_of(real) == flops_listed(language_products(CONFIG, BATCH, compiled=True))


def products(lines):
    def waiting(seconds):
        return lambda dtype, device: lambda: time.sleep(seconds)

    return [ProductAlone(part, name, count, waiting(seconds)) for part, name, count, seconds in lines]


def test_each_part_takes_the_time_of_its_products_as_often_as_they_are_done(one_thread):
    listed = products([("slow", "a", 3, 4e-3), ("slow", "b", 1, 8e-3), ("fast", "c", 2, 1e-3)])
    alone = time_alone(listed, Precision("fp32", "test"), detect_cpu(), time_limit_s=0.2)
    seconds = alone.seconds
    assert set(seconds) == {"slow", "fast"} and seconds["slow"] >= 20e-3 and seconds["fast"] >= 2e-3
    assert seconds["slow"] > 3 * seconds["fast"], "ten times the sleep"
    frame = alone.frame("toy", "fp32", {"batch": 5})
    assert frame.groupby("params").time_s.median().tolist() == [timing.estimate.value for timing in alone.timings]


def timing(samples):
    return Timing(np.array(samples), (), True, False, "interval", Telemetry())


def test_a_share_is_as_uncertain_as_the_step_and_each_product():
    noise = np.random.default_rng(0).normal(1, 0.05, 400)
    listed = products([("a", "first", 2, 0), ("a", "second", 1, 0)])
    exact, noisy = [1.0] * 400, noise
    shares = {
        (steady_products, steady_step): ProductsAlone(
            listed, [timing(exact if steady_products else noisy), timing([4.0] * 400)]
        ).share(timing(np.array(exact if steady_step else noisy) * 10))
        for steady_products in (True, False)
        for steady_step in (True, False)
    }
    assert (shares[True, True].ci_low, shares[True, True].ci_high) == (pytest.approx(0.6), pytest.approx(0.6))
    width = {how: share.ci_high - share.ci_low for how, share in shares.items()}
    assert 0 < width[False, True] < width[True, False] < width[False, False]
    assert all(share.value == pytest.approx(0.6, rel=0.02) and share.n == 400 for share in shares.values())


def test_a_product_that_drifts_widens_the_share_as_its_own_interval():
    drifting = timing(np.linspace(1.0, 1.2, 400))
    share = ProductsAlone(products([("a", "first", 2, 0)]), [drifting]).share(timing([10.0] * 400))
    own = drifting.estimate
    assert drifting.drift.present and share.value == pytest.approx(0.2 * own.value)
    assert share.ci_low <= 0.2 * own.ci_low and share.ci_high >= 0.2 * own.ci_high


def test_operands_lie_in_memory_as_in_the_step():
    convolution = image_products(4, 2)[0]
    strides = [
        cell.cell_contents.stride()
        for cell in convolution.make(torch.float32, torch.device("cpu")).__closure__
        if isinstance(cell.cell_contents, torch.Tensor) and cell.cell_contents.dim() == 4
    ]
    assert strides and all(stride[1] == 1 for stride in strides), "channels last"
