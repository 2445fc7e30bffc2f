"""The reference models are the published ones: parameters, work, structure; a smaller one has a name of its own."""

import sys

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

import hyperion.models.reference
from hyperion.errors import HyperionError
from hyperion.models import REFERENCE_MODELS, parameter_count, reference_model
from hyperion.models.reference import Encoder, ResNet50, VisionTransformer

PUBLISHED = {"resnet50": 25_557_032, "vit_b_16": 86_567_656, "encoder_d512_h8_l6": 18_914_304}
NAMES = list(REFERENCE_MODELS)


@pytest.fixture(autouse=True)
def seeded(one_thread):
    torch.manual_seed(0)


@pytest.fixture(scope="module")
def built():
    with torch.device("meta"):
        return {name: reference_model(name).build() for name in NAMES}


def test_published_counts(built):
    assert {name: parameter_count(built[name]) for name in PUBLISHED} == PUBLISHED
    assert {name: reference_model(name).parameter_count for name in PUBLISHED} == PUBLISHED


def test_the_image_models_are_those_of_torchvision(built):
    from torchvision.models import resnet50, vit_b_16

    with torch.device("meta"):
        theirs = {"resnet50": resnet50(weights=None), "vit_b_16": vit_b_16(weights=None)}
    for name, model in theirs.items():
        assert str(built[name]) == str(model)
        assert {n: p.shape for n, p in built[name].named_parameters()} == {n: p.shape for n, p in model.named_parameters()}


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_work_agrees_with_torch(built, name):
    model = reference_model(name)
    with torch.device("meta"):
        inputs = torch.zeros(2, *model.sample_shape)
    with FlopCounterMode(display=False) as counter:
        outputs = built[name](inputs)
        forward = counter.get_total_flops()
        outputs.sum().backward()
    assert forward == 2 * model.flops.forward
    assert counter.get_total_flops() == 2 * model.flops.forward_backward


@pytest.mark.parametrize("name", NAMES)
def test_activations_are_what_convolutions_and_products_write(built, name):
    written = []
    model = reference_model(name)

    def count(module, inputs, output):
        written.append(output.numel())

    kinds = (torch.nn.Conv2d,) if isinstance(model, ResNet50) else (torch.nn.Conv2d, torch.nn.Linear)
    hooks = [m.register_forward_hook(count) for m in built[name].modules() if isinstance(m, kinds)]
    with torch.device("meta"):
        built[name](torch.zeros(1, *model.sample_shape))
    for hook in hooks:
        hook.remove()
    total = sum(written)
    if not isinstance(model, ResNet50):
        # Attention calls its four projections without their modules; class token and classifier are left out.
        T, D = model.positions, model.width
        total += 4 * model.layers * T * D + model.layers * T * D
    assert total == pytest.approx(model.activations, rel=0.05)


@pytest.mark.parametrize("name", NAMES)
def test_layout_names_blocks_of_one_type_that_hold_most_of_the_model(built, name):
    layout = reference_model(name).layout()
    blocks = [built[name].get_submodule(block) for block in layout.blocks]
    assert len({type(block) for block in blocks}) == 1
    held = [p for part in layout.stem + layout.blocks + layout.head for p in built[name].get_submodule(part).parameters()]
    assert len({id(p) for p in held}) == len(held)
    left_out = {n for n, p in built[name].named_parameters() if id(p) not in {id(h) for h in held}}
    assert left_out == ({"class_token", "encoder.pos_embedding"} if name.startswith("vit") else set())


def test_a_smaller_model_never_bears_the_full_name():
    assert ResNet50(width=32).name == "resnet50_w32_224px" and ResNet50(image_size=64).name == "resnet50_w64_64px"
    assert VisionTransformer(layers=11).name == "vit_d768_l11_224px"
    assert Encoder(layers=5).name == "encoder_d512_h8_l5"


def test_another_model_is_refused(monkeypatch):
    convolutions = lambda self: torch.nn.Sequential(torch.nn.Conv2d(3, 64, 7), torch.nn.Linear(128, 1000))  # noqa: E731
    monkeypatch.setattr(VisionTransformer, "_make", convolutions)
    with pytest.raises(HyperionError, match="vit_b_16 has 86,567,656 parameters, but the built model has 138,472"):
        reference_model("vit_b_16").build()


def test_without_torchvision_nothing_stands_in(monkeypatch):
    def absent():
        raise HyperionError("torchvision cannot be imported: no module", where=sys.executable)

    monkeypatch.setattr(hyperion.models.reference, "import_torchvision", absent)
    with pytest.raises(HyperionError, match="torchvision cannot be imported"):
        reference_model("resnet50").build()


def test_an_unknown_name_is_refused_with_the_known_ones():
    with pytest.raises(HyperionError, match="no reference model is named 'resnet51'") as refusal:
        reference_model("resnet51")
    assert "resnet50" in refusal.value.next_step


@pytest.mark.slow
@pytest.mark.parametrize("name", ["resnet50_w16_64px", "vit_d192_l4_64px", "encoder_d128_h2_l2"])
def test_losses_and_targets_can_be_learned(name):
    model = reference_model(name)
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(4, *model.sample_shape, generator=generator)
    targets = model.targets(inputs, generator)
    module = model.build()
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-3)
    losses = []
    for _ in range(6):
        loss = model.loss(module(inputs), targets)
        losses.append(loss.item())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert losses[-1] < 0.9 * losses[0]


def test_the_encoders_target_is_the_mean_of_its_sequence_and_of_unit_variance():
    model = reference_model("encoder_d128_h2_l2")
    inputs_BTD = torch.randn(64, *model.sample_shape)
    targets_BTD = model.targets(inputs_BTD, torch.Generator())
    assert torch.equal(targets_BTD[:, 0], targets_BTD[:, -1])
    assert targets_BTD.std() == pytest.approx(1.0, abs=0.05)
    # A network that ignores its input cannot do better than the variance; the exact answer has no error.
    assert model.loss(torch.zeros_like(targets_BTD), targets_BTD) == pytest.approx(1.0, abs=0.05)
    assert model.loss(targets_BTD, targets_BTD) == 0
