"""ResNet-18 has the published size and work, and learns."""

import pytest
import torch
import torch.nn.functional as F
from torch.utils.flop_counter import FlopCounterMode

from hyperion.errors import HyperionError
from hyperion.models import flops_per_image, parameter_count, resnet18


@pytest.fixture(autouse=True)
def seeded(one_thread):
    torch.manual_seed(0)


def test_parameter_count_at_the_published_width():
    assert parameter_count(resnet18()) == 11_173_962


def test_a_narrower_net_has_a_name_of_its_own():
    assert resnet18().name == "resnet18"
    assert resnet18(width=16).name == "resnet18_w16"


@pytest.mark.parametrize("width, size", [(64, 32), (16, 32), (16, 9)])
def test_flops_agree_with_torch(width, size):
    with torch.device("meta"):
        model, images_BCYX = resnet18(width=width), torch.zeros(2, 3, size, size)
    with FlopCounterMode(display=False) as counter:
        logits_BK = model(images_BCYX)
        forward = counter.get_total_flops()
        logits_BK.sum().backward()
    flops = flops_per_image(width=width, image_size=size)
    assert forward == 2 * flops.forward
    assert counter.get_total_flops() == 2 * flops.forward_backward


def test_flops_at_the_published_width():
    assert flops_per_image().forward == pytest.approx(1.1108e9, rel=1e-4)


def test_the_cifar_stem_keeps_the_resolution():
    model = resnet18(width=4)
    with torch.no_grad():
        assert model.conv1(torch.zeros(1, 3, 32, 32)).shape == (1, 4, 32, 32)
        sizes, x = [], model.conv1(torch.zeros(1, 3, 32, 32))
        for block in model.blocks:
            x = block(x)
            sizes.append(tuple(x.shape[1:]))
    assert sizes == [(4, 32, 32)] * 2 + [(8, 16, 16)] * 2 + [(16, 8, 8)] * 2 + [(32, 4, 4)] * 2


def test_gradients_are_finite_and_reach_every_parameter():
    model = resnet18(width=4)
    F.cross_entropy(model(torch.randn(8, 3, 32, 32)), torch.arange(8)).backward()
    for name, p in model.named_parameters():
        assert torch.isfinite(p.grad).all(), name
        assert p.grad.abs().max() > 0, name


@pytest.mark.slow
def test_memorises_a_few_images():
    model = resnet18(width=4)
    images, labels = torch.randn(20, 3, 32, 32), torch.arange(20) % 10
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, nesterov=True)
    for _ in range(30):
        F.cross_entropy(model(images), labels).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert (model(images).argmax(dim=1) == labels).float().mean() == 1.0


def test_bad_sizes_are_refused():
    with pytest.raises(HyperionError, match="width is 0"):
        resnet18(width=0)
