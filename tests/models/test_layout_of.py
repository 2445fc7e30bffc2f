"""The blocks of models that are not ours."""

import pytest
import torch
from torch import nn

from hyperion.compat import import_torchvision
from hyperion.errors import HyperionError
from hyperion.models import Layout, TransformerLM, layout_of
from hyperion.training import add_lora
from tests.parallel import small


def resnet50():
    with torch.device("meta"):
        return import_torchvision().models.resnet50()


MODELS = {
    "llama": (small.tiny_llama, 2),
    "llama with adapters": (lambda: add_lora(small.tiny_llama(), rank=2), 2),
    "transformer with adapters": (lambda: add_lora(TransformerLM(small.CONFIG), rank=2, targets=("query", "value")), 3),
    "resnet50": (resnet50, 16),
}


@pytest.mark.parametrize(("make", "blocks"), MODELS.values(), ids=MODELS)
def test_stem_blocks_and_head_hold_every_parameter_once(make, blocks):
    model = make()
    layout = layout_of(model)
    held = [p for name in layout.stem + layout.blocks + layout.head for p in model.get_submodule(name).parameters()]
    assert len(held) == len({id(p) for p in held})
    assert {id(p) for p in held} == {id(p) for p in model.parameters()}
    assert len(layout.blocks) == blocks
    assert len({type(model.get_submodule(name)) for name in layout.blocks}) == 1


def test_a_tied_head_is_told():
    model = small.tiny_llama()
    assert layout_of(model).tied == ()
    model.config.tie_word_embeddings = True
    assert layout_of(add_lora(model, rank=2)).tied == (("base_model.model.lm_head", "base_model.model.model.embed_tokens"),)


def test_our_own_models_tell_themselves():
    model = TransformerLM(small.CONFIG)
    assert layout_of(model) == model.layout()


def test_an_unknown_model_is_refused():
    with pytest.raises(HyperionError, match="blocks of a Linear are not known"):
        layout_of(nn.Linear(2, 2))


@pytest.mark.parametrize("part", ["stem", "blocks", "head", "tied"])
def test_a_name_that_is_no_submodule_is_refused(part):
    model = nn.Sequential(nn.Linear(2, 2))
    names = {"stem": (), "blocks": ("0",), "head": ()}
    given = (("0", "embed"),) if part == "tied" else ("embed",)
    model.layout = lambda: Layout(**names | {part: given})
    with pytest.raises(HyperionError, match="the layout names 'embed', but the Sequential has no such submodule") as caught:
        layout_of(model)
    assert caught.value.next_step.endswith("its children are 0")
