"""ResNet-18 with the CIFAR stem, for 32 x 32 images.

The stem is a 3x3 convolution of stride 1 without max-pool. The ImageNet stem (7x7, stride 2, max-pool) would reduce a CIFAR
image to 8 x 8 pixels before the first block. Four stages of two basic blocks follow, with w, 2w, 4w and 8w channels.

Shape suffixes: B batch, C channels, Y rows, X columns, K classes.

Source: He et al. 2015, arXiv 1512.03385.
"""

from collections.abc import Iterator

import torch.nn.functional as F
from torch import Tensor, nn

from hyperion.errors import HyperionError
from hyperion.models.layout import Layout, ModelFlops

BLOCKS_PER_STAGE = (2, 2, 2, 2)
IMAGE_SIZE = 32  # height and width of a CIFAR-10 image in pixels


def _conv3x3(channels_in: int, channels_out: int, stride: int = 1) -> nn.Conv2d:
    # No bias: BatchNorm subtracts the mean, so a bias before it would have no effect.
    return nn.Conv2d(channels_in, channels_out, kernel_size=3, stride=stride, padding=1, bias=False)


class BasicBlock(nn.Module):
    """Two 3x3 convolutions with BatchNorm, and a shortcut that adds the input to their result.

    If the block changes the number of channels or the image size, the shortcut contains a 1x1 convolution with BatchNorm.
    """

    def __init__(self, channels_in: int, channels_out: int, stride: int):
        super().__init__()
        self.conv1 = _conv3x3(channels_in, channels_out, stride)
        self.norm1 = nn.BatchNorm2d(channels_out)
        self.conv2 = _conv3x3(channels_out, channels_out)
        self.norm2 = nn.BatchNorm2d(channels_out)
        self.shortcut = nn.Identity()
        if stride != 1 or channels_in != channels_out:
            self.shortcut = nn.Sequential(
                nn.Conv2d(channels_in, channels_out, kernel_size=1, stride=stride, bias=False), nn.BatchNorm2d(channels_out)
            )

    def forward(self, x_BCYX: Tensor) -> Tensor:
        y_BCYX = F.relu(self.norm1(self.conv1(x_BCYX)))
        # The second ReLU comes after the sum, as in the paper.
        return F.relu(self.norm2(self.conv2(y_BCYX)) + self.shortcut(x_BCYX))


class ResNet18(nn.Module):
    """ResNet-18 for small images (see the module's docstring).

    Args:
        num_classes: K, the number of classes.
        width: w, the number of channels of the first stage.

    Attributes:
        name: `resnet18` for the paper's width of 64, else `resnet18_w<width>`, so that a network of another width is never
            reported as ResNet-18.
    """

    def __init__(self, num_classes: int, width: int):
        super().__init__()
        if num_classes < 1 or width < 1:
            raise HyperionError(
                f"num_classes is {num_classes} and width is {width}", where="resnet18", next_step="make both at least 1"
            )
        self.name = "resnet18" if width == 64 else f"resnet18_w{width}"
        self.conv1 = _conv3x3(3, width)
        self.norm1 = nn.BatchNorm2d(width)
        self.blocks = nn.ModuleList(BasicBlock(*shape) for shape in block_shapes(width))
        self.classifier = nn.Linear(8 * width, num_classes)
        self.initialize()

    def initialize(self) -> None:
        """Initialise the convolutions with kaiming_normal_ (He et al.) for ReLU, with mode "fan_out".

        BatchNorm and the classifier keep torch's default initialisation.
        """
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, images_BCYX: Tensor) -> Tensor:
        """Return logits_BK for normalised float images [B, 3, 32, 32]. Other image sizes from 8 x 8 pixels also work."""
        x_BCYX = F.relu(self.norm1(self.conv1(images_BCYX)))
        for block in self.blocks:
            x_BCYX = block(x_BCYX)
        # Average over all pixels, so that other image sizes also work.
        return self.classifier(x_BCYX.mean(dim=(2, 3)))

    def layout(self) -> Layout:
        """Return the names of the stem, the eight residual blocks and the head."""
        return Layout(stem=("conv1", "norm1"), blocks=tuple(f"blocks.{i}" for i in range(len(self.blocks))), head=("classifier",))


def block_shapes(width: int) -> Iterator[tuple[int, int, int]]:
    """Yield (input channels, output channels, stride) of each block.

    Every stage except the first halves the size of the image and doubles the number of channels.
    """
    channels = width
    for stage, blocks in enumerate(BLOCKS_PER_STAGE):
        for block in range(blocks):
            out = width * 2**stage
            yield channels, out, 2 if stage > 0 and block == 0 else 1
            channels = out


def resnet18(num_classes: int = 10, width: int = 64) -> ResNet18:
    """Return a ResNet-18 with the CIFAR stem. It has 11,173,962 parameters at width 64 with 10 classes."""
    return ResNet18(num_classes, width)


def flops_per_image(num_classes: int = 10, width: int = 64, image_size: int = IMAGE_SIZE) -> ModelFlops:
    """Return the FLOPs per image of the convolutions and the classifier. A multiply-add counts as 2.

    At width 64 the forward pass has 1.1108e9 FLOPs. For each operation of the forward pass, the backward pass computes two
    of the same size: the gradients of the input and of the weight. The gradient of the image is not computed. Norms, ReLU
    and pooling are not counted. The result equals torch's FlopCounterMode (tested).
    """
    first = 2 * 9 * 3 * width * image_size**2
    forward, side = first, image_size
    for channels_in, channels_out, stride in block_shapes(width):
        side = -(-side // stride)  # the size is rounded up, because the convolution has padding 1
        shortcut = channels_in if stride != 1 or channels_in != channels_out else 0
        forward += 2 * side**2 * channels_out * (9 * channels_in + 9 * channels_out + shortcut)
    forward += 2 * 8 * width * num_classes
    # Each convolution has three products: forward, input gradient and weight gradient. The gradient of the image is not computed.
    return ModelFlops(forward, 3 * forward - first)
