"""A layout names modules that exist and, together, hold every parameter exactly once."""

import pytest
import torch

from hyperion.models import TransformerConfig, TransformerLM, parameter_count, resnet18

MODELS = {
    "transformer": lambda: TransformerLM(TransformerConfig(vocab_size=11, context=8, width=8, heads=2, layers=3)),
    "resnet18": lambda: resnet18(width=4),
}


@pytest.mark.parametrize("make", MODELS.values(), ids=MODELS)
def test_stem_blocks_and_head_hold_every_parameter_once(make):
    model = make()
    layout = model.layout()
    held = [p for name in layout.stem + layout.blocks + layout.head for p in model.get_submodule(name).parameters()]
    assert len({id(p) for p in held}) == len(held)
    assert {id(p) for p in held} == {id(p) for p in model.parameters()}


@pytest.mark.parametrize("make", MODELS.values(), ids=MODELS)
def test_blocks_are_alike_and_stand_in_order(make):
    model = make()
    blocks = [model.get_submodule(name) for name in model.layout().blocks]
    assert blocks == list(model.blocks)
    assert len({type(block) for block in blocks}) == 1


@pytest.mark.parametrize("make", MODELS.values(), ids=MODELS)
def test_models_know_no_device(make):
    with torch.device("meta"):
        model = make()
    assert {p.device.type for p in model.parameters()} == {"meta"}


def test_parameter_count_counts_a_shared_parameter_once():
    layer = torch.nn.Linear(3, 3)
    assert parameter_count(torch.nn.Sequential(layer, layer)) == 12
