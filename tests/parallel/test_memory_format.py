"""Gradients in the chosen memory format agree with float64, also where oneDNN's channels-last kernels are wrong."""

import copy

import pytest
import torch
from torch import nn

from hyperion.models import resnet18
from hyperion.parallel import image_memory_format


def shortcut(channels: int) -> nn.Module:
    return nn.Conv2d(channels, 8, kernel_size=1, stride=2, bias=False)


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        (shortcut(4), torch.contiguous_format),
        (shortcut(8), torch.channels_last),
        (nn.Conv2d(32, 32, 1, stride=2, groups=8), torch.contiguous_format),
        (nn.Conv2d(4, 8, 1), torch.channels_last),
        (nn.Conv2d(4, 8, 3, stride=2), torch.channels_last),
        (resnet18(10, width=4), torch.contiguous_format),
        (resnet18(10, width=8), torch.channels_last),
    ],
)
def test_only_models_with_an_unsafe_convolution_keep_the_default_format(model, expected):
    assert image_memory_format(model) == expected


# On a CPU with AVX2 and without AVX-512, channels-last format fails this test for 4 and 7 channels (oneDNN issue 6035).
@pytest.mark.parametrize("channels", [4, 7, 8, 12])
def test_gradients_of_a_strided_shortcut_agree_with_float64(channels):
    torch.manual_seed(0)
    model = shortcut(channels)
    exact = copy.deepcopy(model).double()
    images = torch.randn(16, channels, 32, 32)
    memory_format = image_memory_format(model)
    model.to(memory_format=memory_format)
    output = model(images.contiguous(memory_format=memory_format))
    gradient = torch.randn_like(output)
    output.backward(gradient)
    exact(images.double()).backward(gradient.double())
    # 16 · 16² products are added, each rounded to 24 bits.
    error = (model.weight.grad - exact.weight.grad).abs().max() / exact.weight.grad.abs().max()
    assert error < 16 * 16**2 * 2**-24
