"""The products listed for a step are the step's: their FLOPs, counted by PyTorch, are those of the whole model."""

import time

import torch
from torch.utils.flop_counter import FlopCounterMode

from hyperion.experiments.products_alone import ProductAlone, image_products, language_products, seconds_alone
from hyperion.hardware import detect_cpu
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


def test_each_part_takes_the_time_of_its_products_as_often_as_they_are_done(one_thread):
    def waiting(seconds):
        return lambda dtype, device: lambda: time.sleep(seconds)

    told = [("slow", 3, 4e-3), ("slow", 1, 8e-3), ("fast", 2, 1e-3)]
    products = [ProductAlone(part, count, waiting(seconds)) for part, count, seconds in told]
    alone = seconds_alone(products, Precision("fp32", "test"), detect_cpu(), time_limit_s=0.2)
    assert set(alone) == {"slow", "fast"} and alone["slow"] >= 20e-3 and alone["fast"] >= 2e-3
    assert alone["slow"] > 3 * alone["fast"], "ten times the sleep"


def test_operands_lie_in_memory_as_in_the_step():
    convolution = image_products(4, 2)[0]
    strides = [cell.cell_contents.stride() for cell in convolution.make(torch.float32, torch.device("cpu")).__closure__
               if isinstance(cell.cell_contents, torch.Tensor) and cell.cell_contents.dim() == 4]  # fmt: skip
    assert strides and all(stride[1] == 1 for stride in strides), "channels last"
