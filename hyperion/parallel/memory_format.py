"""Memory format of models that process images."""

import torch
from torch import nn

# Channels that oneDNN's kernels for AVX2 process together.
_ONEDNN_BLOCK = 8


def image_memory_format(model: nn.Module) -> torch.memory_format:
    """Return the memory format in which a model should have its weights and its images [B, C, Y, X].

    It is channels-last, in which convolutions are fastest, if `convolution_memory_format` is channels-last for all convolutions.
    Otherwise it is PyTorch's default, NCHW.
    """
    formats = {
        convolution_memory_format(module.in_channels // module.groups, max(module.kernel_size), max(module.stride))
        for module in model.modules()
        if isinstance(module, nn.Conv2d)
    }
    return torch.contiguous_format if torch.contiguous_format in formats else torch.channels_last


def convolution_memory_format(channels: int, kernel: int, stride: int) -> torch.memory_format:
    """Return the memory format of the images and weights of a convolution with square kernels.

    It is PyTorch's default, NCHW, for strided 1 × 1 convolutions with fewer than eight input channels, and channels-last for all
    others. For such a convolution in channels-last format, oneDNN's kernels for AVX2 write past the end of a buffer: the gradient
    of the weights is wrong, or the process ends with SIGSEGV (https://github.com/uxlfoundation/oneDNN/issues/6035, seen with
    PyTorch 2.13). With so few channels, channels-last gains nothing, so the same rule applies to all devices.

    Args:
        channels: input channels of a group.
        kernel: height and width of the kernel.
        stride: step between two positions of the kernel.
    """
    unsafe = kernel == 1 and stride > 1 and channels < _ONEDNN_BLOCK
    return torch.contiguous_format if unsafe else torch.channels_last
