"""The three reference models of chapter 1.2: torchvision's ResNet-50 and ViT-B/16, and PyTorch's TransformerEncoder.

Shape suffixes: B batch, C channels, Y rows, X columns, T positions of a sequence, D width, K classes.

A configuration computes the name, the shapes, the number of parameters and the FLOPs of its model without building the model.
`build` checks the number of parameters. A configuration with other dimensions has another name, such as `resnet50_w16_64px`, so
that its results are never reported as those of ResNet-50.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hyperion.compat import import_torchvision
from hyperion.errors import HyperionError
from hyperion.models.layout import Layout, ModelFlops, parameter_count

HEAD_WIDTH = 64  # number of features of an attention head, in ViT-B/16 and in the encoder
PATCH = 16  # height and width of a patch of the ViT in pixels
_BOTTLENECKS = (3, 4, 6, 3)
_EXPANSION = 4  # the last convolution of a bottleneck block has 4 · 64 · 2^stage channels, for every width


class _Reference(ABC):
    """Base class of the three reference models.

    A subclass defines the shapes of inputs and outputs, the numbers of parameters and FLOPs, and the method `_make`, which
    builds the module.
    """

    name: str
    parameter_count: int

    def build(self) -> nn.Module:
        """Build the model on torch's default device. Its weights are drawn from torch's default random generator.

        Raises:
            HyperionError: torchvision is missing or broken, or the number of parameters of the model is not
                `parameter_count`.
        """
        model = self._make()
        built = parameter_count(model)
        if built != self.parameter_count:
            raise HyperionError(
                f"{self.name} has {self.parameter_count:,} parameters, but the built model has {built:,}",
                where=type(model).__module__,
                next_step="install the version of torchvision that matches this version of torch",
            )
        return model

    @abstractmethod
    def _make(self) -> nn.Module:
        """Build the model with torch or torchvision."""


class _Classifier(_Reference):
    """Image classifier, trained with cross-entropy."""

    image_size: int
    classes: int

    @property
    def sample_shape(self) -> tuple[int, ...]:
        """Shape of one input: channels, rows, columns."""
        return 3, self.image_size, self.image_size

    def targets(self, inputs_BCYX: Tensor, generator: torch.Generator) -> Tensor:
        """Return one random class per image, int64 [B]. The model can learn the classes only by memorising the images."""
        shape = (len(inputs_BCYX),)
        return torch.randint(self.classes, shape, generator=generator, device=inputs_BCYX.device)

    def loss(self, outputs_BK: Tensor, targets_B: Tensor) -> Tensor:
        """Return the mean cross-entropy in nats, in float32."""
        return F.cross_entropy(outputs_BK.float(), targets_B)


@dataclass(frozen=True)
class ResNet50(_Classifier):
    """ResNet-50 (He et al. 2015, arXiv 1512.03385). As in torchvision, the 3 x 3 convolution of a block has the stride.

    Args:
        width: number of channels of the 3 x 3 convolutions of the first stage; 64 in the paper.
        image_size: height and width of an image in pixels, a multiple of 32.
        classes: K, the number of classes.
    """

    width: int = 64
    image_size: int = 224
    classes: int = 1000

    @property
    def name(self) -> str:
        full = (self.width, self.image_size) == (64, 224)
        return "resnet50" if full else f"resnet50_w{self.width}_{self.image_size}px"

    def _make(self) -> nn.Module:
        resnet = import_torchvision().models.resnet
        return resnet.ResNet(resnet.Bottleneck, list(_BOTTLENECKS), num_classes=self.classes, width_per_group=self.width)

    def layout(self) -> Layout:
        """Return the names of the stem, the sixteen bottleneck blocks and the classifier."""
        blocks = (f"layer{stage + 1}.{block}" for stage, count in enumerate(_BOTTLENECKS) for block in range(count))
        return Layout(stem=("conv1", "bn1"), blocks=tuple(blocks), head=("fc",))

    @property
    def parameter_count(self) -> int:
        """Number of parameters: 25,557,032 at the default arguments.

        Each convolution is followed by a BatchNorm, which has two parameters per channel.
        """
        # The convolutions have no bias.
        kernels = sum(out * (inputs * size**2 + 2) for inputs, out, size, _ in self._convolutions())
        return kernels + (self._features + 1) * self.classes

    @property
    def flops(self) -> ModelFlops:
        """FLOPs per image of the convolutions and the classifier. A multiply-add counts as 2.

        The gradient with respect to the image is not computed and not counted.
        """
        work = [2 * inputs * out * (size * side) ** 2 for inputs, out, size, side in self._convolutions()]
        forward = sum(work) + 2 * self._features * self.classes
        return ModelFlops(forward, 3 * forward - work[0])

    @property
    def activations(self) -> int:
        """Number of output elements of all convolutions in the forward pass, per image."""
        return sum(out * side**2 for _, out, _, side in self._convolutions())

    @property
    def _features(self) -> int:
        return 512 * _EXPANSION

    def _convolutions(self) -> Iterator[tuple[int, int, int, int]]:
        """Yield (input channels, output channels, kernel size, output size) of every convolution, the stem first."""
        # The image is reduced twice by a factor of 2: the stem has stride 2, and so has the max-pool after it.
        yield 3, 64, 7, self.image_size // 2
        channels, side = 64, self.image_size // 4
        for stage, blocks in enumerate(_BOTTLENECKS):
            inner, out = self.width * 2**stage, 64 * _EXPANSION * 2**stage
            for block in range(blocks):
                before = side
                side = side // 2 if stage > 0 and block == 0 else side
                yield channels, inner, 1, before
                yield inner, inner, 3, side
                yield inner, out, 1, side
                if block == 0:
                    # The first block of each stage changes the number of channels, so its shortcut has a convolution.
                    yield channels, out, 1, side
                channels = out


@dataclass(frozen=True)
class VisionTransformer(_Classifier):
    """Vision Transformer over patches of 16 x 16 pixels (Dosovitskiy et al. 2020, arXiv 2010.11929), without dropout.

    Args:
        width, layers: D and the number of blocks. ViT-B has D = 768 and 12 blocks.
        image_size: height and width of an image in pixels, a multiple of 16.
        classes: K, the number of classes.
    """

    width: int = 768
    layers: int = 12
    image_size: int = 224
    classes: int = 1000

    @property
    def name(self) -> str:
        full = (self.width, self.layers, self.image_size) == (768, 12, 224)
        return "vit_b_16" if full else f"vit_d{self.width}_l{self.layers}_{self.image_size}px"

    def _make(self) -> nn.Module:
        transformer = import_torchvision().models.vision_transformer
        return transformer.VisionTransformer(
            image_size=self.image_size,
            patch_size=PATCH,
            num_layers=self.layers,
            num_heads=self.width // HEAD_WIDTH,
            hidden_dim=self.width,
            mlp_dim=4 * self.width,
            num_classes=self.classes,
        )

    def layout(self) -> Layout:
        """Return the names of the patch projection, the blocks, the norm and the classifier.

        The class token and the position embedding are parameters of the model itself and belong to none of these modules.
        """
        blocks = tuple(f"encoder.layers.encoder_layer_{i}" for i in range(self.layers))
        return Layout(stem=("conv_proj",), blocks=blocks, head=("encoder.ln", "heads"))

    @property
    def positions(self) -> int:
        """T: number of patches of an image, plus the class token."""
        return (self.image_size // PATCH) ** 2 + 1

    @property
    def parameter_count(self) -> int:
        """Number of parameters: 86,567,656 for ViT-B/16.

        The number includes the patch projection, the class token, the position embedding, the blocks, the last norm and the
        classifier.
        """
        D = self.width
        # Patch projection with bias, class token, and one position embedding for each position.
        embedding = (3 * PATCH**2 + 1) * D + (1 + self.positions) * D
        return embedding + _block_parameters(D, self.layers) + 2 * D + (D + 1) * self.classes

    @property
    def flops(self) -> ModelFlops:
        """FLOPs per image of the patch projection, the blocks and the classifier. A multiply-add counts as 2.

        The gradient with respect to the image is not computed and not counted.
        """
        patches = 2 * 3 * PATCH**2 * self.width * (self.positions - 1)
        forward = patches + _block_flops(self.width, self.layers, self.positions) + 2 * self.width * self.classes
        return ModelFlops(forward, 3 * forward - patches)

    @property
    def activations(self) -> int:
        """Number of output elements of all matrix products in the forward pass, per image.

        The number includes the patch projection, and the projections of each block: query, key, value, the output of
        attention (D each) and the MLP (4 D + D, and another D for the sum).
        """
        return self.positions * self.width * (1 + 10 * self.layers)


@dataclass(frozen=True)
class Encoder(_Reference):
    """torch.nn.TransformerEncoder (Vaswani et al. 2017) with post-norm, ReLU and an MLP of width 4 D, without dropout.

    The model has no position embeddings, so it does not know the order of the positions. The task is to output the mean of the
    sequence at every position, which the model can learn only with attention.

    Args:
        width, layers, positions: D, the number of blocks, and T.
    """

    width: int = 512
    layers: int = 6
    positions: int = 16

    @property
    def name(self) -> str:
        """Name with the width, heads and layers. The sequence length is not included, because the model accepts any length."""
        return f"encoder_d{self.width}_h{self.width // HEAD_WIDTH}_l{self.layers}"

    def _make(self) -> nn.Module:
        layer = nn.TransformerEncoderLayer(self.width, self.width // HEAD_WIDTH, 4 * self.width, dropout=0.0, batch_first=True)
        return nn.TransformerEncoder(layer, self.layers, enable_nested_tensor=False)

    def layout(self) -> Layout:
        """Return the names of the blocks. The model has no stem and no head."""
        return Layout(stem=(), blocks=tuple(f"layers.{i}" for i in range(self.layers)), head=())

    @property
    def sample_shape(self) -> tuple[int, ...]:
        """Shape of one input: positions, features."""
        return self.positions, self.width

    def targets(self, inputs_BTD: Tensor, generator: torch.Generator) -> Tensor:
        """Return the mean of each sequence, repeated at every position.

        The mean is multiplied by √T, so that the targets have unit variance for standard normal inputs.
        """
        mean_B1D = inputs_BTD.mean(dim=1, keepdim=True) * self.positions**0.5
        return mean_B1D.expand_as(inputs_BTD).contiguous()

    def loss(self, outputs_BTD: Tensor, targets_BTD: Tensor) -> Tensor:
        """Return the mean squared error, in float32."""
        return F.mse_loss(outputs_BTD.float(), targets_BTD)

    @property
    def parameter_count(self) -> int:
        """Number of parameters: 18,914,304 at width 512 with 6 blocks."""
        return _block_parameters(self.width, self.layers)

    @property
    def flops(self) -> ModelFlops:
        """FLOPs per sequence of the projections and of attention. A multiply-add counts as 2.

        The gradient with respect to the input of the model is not computed and not counted.
        """
        forward = _block_flops(self.width, self.layers, self.positions)
        # Subtract 6·T·D² FLOPs, because the input gradients of query, key and value of the first block are not needed.
        return ModelFlops(forward, 3 * forward - 6 * self.positions * self.width**2)

    @property
    def activations(self) -> int:
        """Number of output elements of all projections of the blocks in the forward pass, per sequence."""
        return 10 * self.layers * self.positions * self.width


def _block_parameters(width: int, layers: int) -> int:
    """Return the number of parameters of all blocks.

    A block has attention (4 D^2 + 4 D), an MLP (8 D^2 + 5 D) and two norms (4 D).
    """
    return layers * (12 * width**2 + 13 * width)


def _block_flops(width: int, layers: int, positions: int) -> int:
    """Return the FLOPs per sample of all blocks.

    A block has projections (24 T D^2) and two matrix products in attention (4 T^2 D).
    """
    return layers * (24 * positions * width**2 + 4 * positions**2 * width)


ReferenceModel = ResNet50 | VisionTransformer | Encoder
REFERENCE_MODELS: dict[str, ReferenceModel] = {
    model.name: model
    for model in (
        ResNet50(),
        VisionTransformer(),
        Encoder(),
        ResNet50(width=16, image_size=64),
        VisionTransformer(width=192, layers=4, image_size=64),
        Encoder(width=128, layers=2),
    )
}


def reference_model(name: str) -> ReferenceModel:
    """Return the configuration with this name.

    Raises:
        HyperionError: there is no configuration with this name.
    """
    if name not in REFERENCE_MODELS:
        raise HyperionError(
            f"no reference model is named {name!r}",
            where="hyperion/models/reference.py",
            next_step=f"choose one of {', '.join(REFERENCE_MODELS)}",
        )
    return REFERENCE_MODELS[name]
