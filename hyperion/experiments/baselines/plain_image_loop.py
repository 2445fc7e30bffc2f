"""ResNet-18 trained as public scripts do it on a GPU, written down plainly: what our training path is compared with."""

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hyperion import compat
from hyperion.data import channel_statistics
from hyperion.data.images.device_images import require_form
from hyperion.hardware import Device
from hyperion.models import resnet18
from hyperion.training import Precision

CLASSES, MOMENTUM, PADDING = 10, 0.9, 4
PUBLISHED_WIDTH = 64


def plain_model(width: int) -> tuple[nn.Module, str]:
    """(torchvision's ResNet-18 with the CIFAR stem, "torchvision"), or at a width that it does not have (this library's,
    "hyperion").

    Raises:
        HyperionError: torchvision is needed and cannot be imported.
    """
    if width != PUBLISHED_WIDTH:
        return resnet18(CLASSES, width), "hyperion"
    compat.import_torchvision()
    from torchvision.models import resnet18 as published

    model = published(num_classes=CLASSES)
    model.conv1 = nn.Conv2d(3, width, kernel_size=3, stride=1, padding=1, bias=False)
    model.maxpool = nn.Identity()
    return model, "torchvision"


def copy_weights(source: nn.Module, target: nn.Module) -> None:
    """The same weights in a ResNet-18 of other names: both list the same tensors in the same order."""
    values = source.state_dict().values()
    target.load_state_dict(dict(zip(target.state_dict(), values, strict=True)))


class PlainLoop:
    """The whole set as normalised float32 images on the device; a batch is drawn and changed there by plain indexing, one
    line after another. Autocast, channels-last and torch.compile; SGD as torch.optim.SGD is without options, which is a few
    kernels over all parameters at once on a GPU; no loss is read.

    Args:
        model: not on the device yet.
        images, labels: uint8 [N, 3, 32, 32] and integers [N].
        augment: 'crop' and 'flip', see ImageSet.augmentations.
    """

    def __init__(
        self,
        model: nn.Module,
        images: np.ndarray,
        labels: np.ndarray,
        augment: tuple[str, ...],
        batch: int,
        learning_rate: float,
        precision: Precision,
        device: Device,
        compiled: bool,
    ):
        require_form(images, labels)
        where = torch.device(device.torch_device)
        mean, deviation = (torch.tensor(values, device=where)[:, None, None] for values in channel_statistics(images))
        self.images = (torch.from_numpy(images).to(where).float() / 255 - mean) / deviation
        self.labels = torch.from_numpy(labels).to(where).long()
        self.model = model.to(where, memory_format=torch.channels_last).train()
        self.forward = torch.compile(self.model) if compiled else self.model
        self.optimizer = torch.optim.SGD(self.model.parameters(), learning_rate, momentum=MOMENTUM, nesterov=True)
        self.augment, self.batch, self.precision, self.device = augment, batch, precision, device
        self.order, self.position = torch.randperm(len(labels), device=where), 0

    def next_batch(self) -> tuple[Tensor, Tensor]:
        """Images [B, 3, 32, 32] and labels [B], of a new order once all were seen."""
        if self.position + self.batch > len(self.labels):
            self.order, self.position = torch.randperm(len(self.labels), device=self.labels.device), 0
        chosen = self.order[self.position : self.position + self.batch]
        self.position += self.batch
        images = self.images[chosen]
        if "flip" in self.augment:
            mirrored = torch.rand(self.batch, device=images.device) < 0.5
            images = torch.where(mirrored[:, None, None, None], images.flip(3), images)
        if "crop" in self.augment:
            images = _cropped(images)
        return images.contiguous(memory_format=torch.channels_last), self.labels[chosen]

    def train_on(self, images: Tensor, labels: Tensor) -> Tensor:
        """One optimizer step; the loss before it."""
        self.optimizer.zero_grad(set_to_none=True)
        with self.precision.autocast(self.device):
            loss = F.cross_entropy(self.forward(images), labels)
        loss.backward()
        self.optimizer.step()
        return loss.detach()

    def step(self) -> Tensor:
        """The next batch, and one optimizer step on it."""
        return self.train_on(*self.next_batch())


def _cropped(images: Tensor) -> Tensor:
    count, channels, side, _ = images.shape
    padded = F.pad(images, [PADDING] * 4)
    tops, lefts = torch.randint(0, 2 * PADDING + 1, (2, count), device=images.device)
    pixels = torch.arange(side, device=images.device)
    rows, columns = tops[:, None] + pixels, lefts[:, None] + pixels
    image = torch.arange(count, device=images.device)[:, None, None, None]
    channel = torch.arange(channels, device=images.device)[:, None, None]
    return padded[image, channel, rows[:, None, :, None], columns[:, None, None, :]]
