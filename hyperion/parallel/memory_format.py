"""Memory format of models that process images."""

import torch
from torch import nn

# Channels that oneDNN's kernels for AVX2 process together.
_ONEDNN_BLOCK = 8


def image_memory_format(model: nn.Module) -> torch.memory_format:
    """Return the memory format in which a model should have its weights and its images [B, C, Y, X].

    Convolutions are fastest in channels-last format. This format is returned if `convolution_memory_format` returns it for every
    convolution of the model. Otherwise PyTorch's default, NCHW, is returned.
    """
    formats = {
        convolution_memory_format(module.in_channels // module.groups, max(module.kernel_size), max(module.stride))
        for module in model.modules()
        if isinstance(module, nn.Conv2d)
    }
    return torch.contiguous_format if torch.contiguous_format in formats else torch.channels_last


def convolution_memory_format(channels: int, kernel: int, stride: int) -> torch.memory_format:
    """Return the memory format of the images and weights of a convolution with square kernels.

    The format is channels-last, except for strided 1 × 1 convolutions with fewer than eight input channels. Their format is
    PyTorch's default, NCHW. This exception avoids a bug: for such a convolution in channels-last format, oneDNN's AVX2 kernels
    write past the end of a buffer. Then the gradient of the weights is wrong, or the process ends with SIGSEGV
    (https://github.com/uxlfoundation/oneDNN/issues/6035, seen with PyTorch 2.13). The exception applies to all devices, because
    channels-last gains nothing with so few channels.

    Args:
        channels: input channels of a group.
        kernel: height and width of the kernel.
        stride: step between two positions of the kernel.
    """
    unsafe = kernel == 1 and stride > 1 and channels < _ONEDNN_BLOCK
    return torch.contiguous_format if unsafe else torch.channels_last
