"""The three reference models of chapter 1.2: ResNet-50 and ViT-B/16 as torchvision builds them, and a plain encoder.

Shape suffixes: B batch, C channels, Y rows, X columns, T positions of a sequence, D width, K classes.

A configuration knows name, shapes, parameters and FLOPs of its model without building it, and checks the model that it
builds. A smaller configuration has its own name: `resnet50_w16_64px` is not ResNet-50.
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

HEAD_WIDTH = 64  # features of one attention head, in ViT-B/16 and in the encoder
PATCH = 16  # pixels on a side of a ViT's patch
_BOTTLENECKS = (3, 4, 6, 3)
_EXPANSION = 4  # a bottleneck block's last convolution has four times the channels of its stage's base width


class _Reference(ABC):
    """Common part of the three models; each adds its shapes, its counts and `_make`."""

    name: str
    parameter_count: int

    def build(self) -> nn.Module:
        """Return the model, initialised from torch's current seed on the current default device.

        Raises:
            HyperionError: torchvision is missing or broken, or the built model has another number of parameters.
        """
        model = self._make()
        built = parameter_count(model)
        if built != self.parameter_count:
            raise HyperionError(
                f"{self.name} has {self.parameter_count:,} parameters, but the built model has {built:,}",
                where=type(model).__module__,
                next_step="install a torchvision that matches this torch; no other model is used instead",
            )
        return model

    @abstractmethod
    def _make(self) -> nn.Module:
        """Build the model with its library."""


class _Classifier(_Reference):
    """Image classifier, trained with cross-entropy."""

    image_size: int
    classes: int

    @property
    def sample_shape(self) -> tuple[int, ...]:
        """Shape of one input: channels, rows, columns."""
        return 3, self.image_size, self.image_size

    def targets(self, inputs_BCYX: Tensor, generator: torch.Generator) -> Tensor:
        """Return one random class per image, int64 [B]. They are fixed, so that a model can memorise them."""
        shape = (len(inputs_BCYX),)
        return torch.randint(self.classes, shape, generator=generator, device=inputs_BCYX.device)

    def loss(self, outputs_BK: Tensor, targets_B: Tensor) -> Tensor:
        """Return the mean cross-entropy in nats, in float32."""
        return F.cross_entropy(outputs_BK.float(), targets_B)


@dataclass(frozen=True)
class ResNet50(_Classifier):
    """ResNet-50 (He et al. 2015, arXiv 1512.03385), with the stride on the 3 x 3 convolution as in torchvision.

    Args:
        width: channels of the first stage's 3 x 3 convolutions; 64 in the published net.
        image_size: pixels on a side, a multiple of 32.
        classes: K.
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
        """25,557,032 at the published width. Each convolution is followed by a BatchNorm with two parameters per channel."""
        kernels = sum(out * (inputs * size**2 + 2) for inputs, out, size, _ in self._convolutions())
        return kernels + (self._features + 1) * self.classes

    @property
    def flops(self) -> ModelFlops:
        """FLOPs per image of convolutions and classifier, a multiply-add being 2; no gradient of the image itself."""
        work = [2 * inputs * out * (size * side) ** 2 for inputs, out, size, side in self._convolutions()]
        forward = sum(work) + 2 * self._features * self.classes
        return ModelFlops(forward, 3 * forward - work[0])

    @property
    def activations(self) -> int:
        """Elements per image that convolutions write in the forward pass."""
        return sum(out * side**2 for _, out, _, side in self._convolutions())

    @property
    def _features(self) -> int:
        return 512 * _EXPANSION

    def _convolutions(self) -> Iterator[tuple[int, int, int, int]]:
        """Yield (channels in, channels out, kernel size, side of the output) of every convolution, the stem first."""
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
                    yield channels, out, 1, side
                channels = out


@dataclass(frozen=True)
class VisionTransformer(_Classifier):
    """Vision Transformer over patches of 16 x 16 pixels (Dosovitskiy et al. 2020, arXiv 2010.11929), without dropout.

    Args:
        width, layers: D and the number of blocks; 768 and 12 are ViT-B.
        image_size: pixels on a side, a multiple of 16.
        classes: K.
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
        """Return the names of patch projection, blocks, norm and classifier; class token and positions are in no block."""
        blocks = tuple(f"encoder.layers.encoder_layer_{i}" for i in range(self.layers))
        return Layout(stem=("conv_proj",), blocks=blocks, head=("encoder.ln", "heads"))

    @property
    def positions(self) -> int:
        """T: number of patches of an image, plus the class token."""
        return (self.image_size // PATCH) ** 2 + 1

    @property
    def parameter_count(self) -> int:
        """86,567,656 for ViT-B/16: patches, class token and positions, blocks, last norm, classifier."""
        D = self.width
        embedding = (3 * PATCH**2 + 1) * D + (1 + self.positions) * D
        return embedding + _block_parameters(D, self.layers) + 2 * D + (D + 1) * self.classes

    @property
    def flops(self) -> ModelFlops:
        """FLOPs per image of patches, blocks and classifier, a multiply-add being 2; no gradient of the image itself."""
        patches = 2 * 3 * PATCH**2 * self.width * (self.positions - 1)
        forward = patches + _block_flops(self.width, self.layers, self.positions) + 2 * self.width * self.classes
        return ModelFlops(forward, 3 * forward - patches)

    @property
    def activations(self) -> int:
        """Elements per image that products write in the forward pass: patches, and each block's five projections."""
        return self.positions * self.width * (1 + 10 * self.layers)


@dataclass(frozen=True)
class Encoder(_Reference):
    """torch.nn.TransformerEncoder: post-norm, ReLU, MLP four times as wide (Vaswani et al. 2017), without dropout.

    It has no position embeddings, so its output does not depend on the order of positions. The task is to output the mean of
    the sequence at every position: it can be learned, and it needs attention.

    Args:
        width, layers, positions: D, the number of blocks, and T.
    """

    width: int = 512
    layers: int = 6
    positions: int = 16

    @property
    def name(self) -> str:
        """Name with width, heads and layers; the length of the sequence belongs to the input, not to the model."""
        return f"encoder_d{self.width}_h{self.width // HEAD_WIDTH}_l{self.layers}"

    def _make(self) -> nn.Module:
        layer = nn.TransformerEncoderLayer(self.width, self.width // HEAD_WIDTH, 4 * self.width, dropout=0.0, batch_first=True)
        return nn.TransformerEncoder(layer, self.layers, enable_nested_tensor=False)

    def layout(self) -> Layout:
        """Return the names of the blocks; there is no stem and no head."""
        return Layout(stem=(), blocks=tuple(f"layers.{i}" for i in range(self.layers)), head=())

    @property
    def sample_shape(self) -> tuple[int, ...]:
        """Shape of one input: positions, features."""
        return self.positions, self.width

    def targets(self, inputs_BTD: Tensor, generator: torch.Generator) -> Tensor:
        """Return the mean of each sequence at every position, scaled to unit variance for standard normal inputs."""
        mean_B1D = inputs_BTD.mean(dim=1, keepdim=True) * self.positions**0.5
        return mean_B1D.expand_as(inputs_BTD).contiguous()

    def loss(self, outputs_BTD: Tensor, targets_BTD: Tensor) -> Tensor:
        """Return the mean squared error, in float32."""
        return F.mse_loss(outputs_BTD.float(), targets_BTD)

    @property
    def parameter_count(self) -> int:
        """18,914,304 at d512 l6."""
        return _block_parameters(self.width, self.layers)

    @property
    def flops(self) -> ModelFlops:
        """FLOPs per sequence of projections and attention; no gradient of the input through the first projection."""
        forward = _block_flops(self.width, self.layers, self.positions)
        return ModelFlops(forward, 3 * forward - 6 * self.positions * self.width**2)

    @property
    def activations(self) -> int:
        """Elements per sequence that products write in the forward pass: each block's five projections."""
        return 10 * self.layers * self.positions * self.width


def _block_parameters(width: int, layers: int) -> int:
    """Return the parameters of all blocks, each with attention (4 D^2 + 4 D), MLP (8 D^2 + 5 D) and two norms (4 D)."""
    return layers * (12 * width**2 + 13 * width)


def _block_flops(width: int, layers: int, positions: int) -> int:
    """Return the FLOPs of all blocks per sample, each with projections (24 T D^2) and attention's two products (4 T^2 D)."""
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
    """Return the configuration of that name.

    Raises:
        HyperionError: there is none. No other model is used instead.
    """
    if name not in REFERENCE_MODELS:
        raise HyperionError(
            f"no reference model is named {name!r}",
            where="hyperion/models/reference.py",
            next_step=f"choose one of {', '.join(REFERENCE_MODELS)}",
        )
    return REFERENCE_MODELS[name]
