"""Training loops in the style of public GPU scripts, one for a ResNet-18 and one for a GPT-2.

Shape suffixes are the same as in hyperion.models.transformer. P is the vocabulary size V rounded up to a multiple of 64, so that
rows of the logits are aligned in memory. The padded classes take part in the softmax but are never a target.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, cast

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hyperion import compat
from hyperion.data.images.device_images import require_form
from hyperion.data.images.imageset import CLASS_COUNT
from hyperion.hardware import Device
from hyperion.kernels.token_loss import padded_classes, token_loss
from hyperion.models import TransformerConfig, TransformerLM, resnet18
from hyperion.parallel import image_memory_format
from hyperion.training import Precision, adamw
from hyperion.training.captured import WARM_UP_STEPS, restored

_MOMENTUM, _PADDING = 0.9, 4
_PUBLISHED_WIDTH = 64  # the only width of torchvision's ResNet-18


def plain_model(width: int) -> tuple[nn.Module, str]:
    """Return a ResNet-18 with the CIFAR stem, and the name of the library that defines it.

    At a width of 64 the model comes from torchvision, and the name is "torchvision". At other widths it comes from this library,
    and the name is "hyperion".

    Raises:
        HyperionError: torchvision is needed but cannot be imported.
    """
    if width != _PUBLISHED_WIDTH:
        return resnet18(CLASS_COUNT, width), "hyperion"
    compat.import_torchvision()
    from torchvision.models import resnet18 as published

    model = published(num_classes=CLASS_COUNT)
    # The CIFAR stem: images of 32 x 32 pixels are too small for a 7 x 7 convolution with stride 2 and a pooling layer.
    model.conv1 = nn.Conv2d(3, width, kernel_size=3, stride=1, padding=1, bias=False)
    model.maxpool = nn.Identity()  # pyright: ignore[reportAttributeAccessIssue] declared as MaxPool2d
    return model, "torchvision"


def copy_weights(source: nn.Module, target: nn.Module) -> None:
    """Copy the weights of a ResNet-18 to a ResNet-18 with other parameter names.

    Both state dicts must have the same tensors in the same order.
    """
    values = source.state_dict().values()
    target.load_state_dict(dict(zip(target.state_dict(), values, strict=True)))


class PlainImageLoop:
    """A plain training loop for a ResNet-18.

    All images are on the device, as normalised float32. Batches are drawn and augmented by indexing. The loop uses autocast, the
    channels-last memory format, torch.compile, and torch.optim.SGD. By default it uses SGD's default implementation, which on a
    GPU updates all parameters with a few kernels. The loop never reads a loss, so it never waits for the device.

    Args:
        model: a ResNet-18 on the CPU.
        images: training images, uint8 of shape [N, 3, 32, 32].
        labels: class of each image, integers of shape [N].
        normalisation: means and standard deviations of the channels, from `channel_statistics`.
        augment: augmentations to apply, "crop" and "flip", see `ImageSet.augmentations`.
        batch: number of images in a batch.
        learning_rate: constant learning rate.
        precision: number format of the training.
        device: device of the training.
        compiled: whether to compile the model.
        fused: whether one kernel updates the parameters. If False, PyTorch chooses the implementation.
    """

    def __init__(
        self,
        model: nn.Module,
        images: np.ndarray,
        labels: np.ndarray,
        normalisation: tuple[tuple[float, ...], tuple[float, ...]],
        augment: tuple[str, ...],
        batch: int,
        learning_rate: float,
        precision: Precision,
        device: Device,
        compiled: bool,
        fused: bool = False,
    ):
        require_form(images, labels)
        where = torch.device(device.torch_device)
        mean, deviation = (torch.tensor(values, device=where)[:, None, None] for values in normalisation)
        self.images = (torch.from_numpy(images).to(where).float() / 255 - mean) / deviation
        self.labels = torch.from_numpy(labels).to(where).long()
        # PyTorch's type annotations of `to` have no overload with memory_format, hence the pyright comment.
        self.memory_format = image_memory_format(model)
        self.model = model.to(where, memory_format=self.memory_format).train()  # pyright: ignore[reportCallIssue]
        self.forward = torch.compile(self.model) if compiled else self.model
        parameters = self.model.parameters()
        self.optimizer = torch.optim.SGD(parameters, learning_rate, momentum=_MOMENTUM, nesterov=True, fused=fused or None)
        self.augment, self.batch, self.precision, self.device = augment, batch, precision, device
        self.order, self.position = torch.randperm(len(labels), device=where), 0

    def next_batch(self) -> tuple[Tensor, Tensor]:
        """Return the next batch: images of shape [B, 3, 32, 32] and labels of shape [B].

        At the end of an epoch the images are reshuffled.
        """
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
        return images.contiguous(memory_format=self.memory_format), self.labels[chosen]

    def train_on(self, images: Tensor, labels: Tensor) -> Tensor:
        """Run one optimizer step. Return the loss before the update."""
        images = images.contiguous(memory_format=self.memory_format)  # copies nothing if the batch comes from `next_batch`
        self.optimizer.zero_grad(set_to_none=True)
        with self.precision.autocast(self.device):
            loss = F.cross_entropy(self.forward(images), labels)
        loss.backward()
        self.optimizer.step()
        return loss.detach()

    def step(self) -> Tensor:
        """Run one optimizer step on the next batch. Return the loss before the update."""
        return self.train_on(*self.next_batch())


def _cropped(images: Tensor) -> Tensor:
    count, channels, side, _ = images.shape
    padded = F.pad(images, [_PADDING] * 4)
    tops, lefts = torch.randint(0, 2 * _PADDING + 1, (2, count), device=images.device)
    pixels = torch.arange(side, device=images.device)
    rows, columns = tops[:, None] + pixels, lefts[:, None] + pixels
    image = torch.arange(count, device=images.device)[:, None, None, None]
    channel = torch.arange(channels, device=images.device)[:, None, None]
    # The four index tensors broadcast to [B, 3, Y, X], so one gather crops all images.
    return padded[image, channel, rows[:, None, :, None], columns[:, None, None, :]]


class StepGraph:
    """CUDA graph of a training step of a plain loop.

    The step is captured as PyTorch's CUDA-graph documentation describes. The capture does not change weights, running statistics
    or random generators.

    Args:
        step: function that runs one optimizer step on a batch on a GPU and returns the loss.
        batch: tensors with the shapes of all batches.
        model, optimizer: model and optimizer that the step modifies.
        sharing: another graph whose memory this graph also uses. Both graphs must be replayed on the same stream. None gives the
            graph its own memory.
    """

    def __init__(
        self,
        step: Callable[..., Tensor],
        batch: Sequence[Tensor],
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        sharing: "StepGraph | None" = None,
    ):
        self._batch = [part.clone(memory_format=torch.preserve_format) for part in batch]
        # The allocator reuses memory only on the stream that freed it.
        self._stream = torch.cuda.Stream() if sharing is None else sharing._stream
        self._graph = torch.cuda.CUDAGraph()
        with restored(model, optimizer, ()):
            # The side stream must not read the weights before earlier work on the current stream has written them.
            self._stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self._stream):  # warm-up steps compile code and allocate optimizer state
                for _ in range(WARM_UP_STEPS):
                    step(*self._batch)
            # The current stream continues only after the warm-up steps, whose changes `restored` then reverts.
            torch.cuda.current_stream().wait_stream(self._stream)
        # Two graphs can share memory, because nothing that a replay leaves in it is read after the next replay begins.
        pool = None if sharing is None else sharing._graph.pool()
        # With "thread_local", only unsafe calls of this thread invalidate the capture, not those of other threads.
        with torch.cuda.graph(self._graph, pool=pool, stream=self._stream, capture_error_mode="thread_local"):
            self._loss = step(*self._batch)

    def replay(self, *batch: Tensor) -> Tensor:
        """Run the step on a batch. Return the loss before the update."""
        # A graph reads its inputs at fixed addresses, so each batch is copied there before the replay.
        for own, part in zip(self._batch, batch, strict=True):
            own.copy_(part)
        self._graph.replay()
        return self._loss.clone()  # the next replay overwrites the original


class CapturedImageLoop:
    """A plain loop for a ResNet-18 whose step is captured as a graph.

    The graph contains the step but not the loader. The host launches the graph once per step, so it does not limit the speed at
    small batches. Comparing it with the plain loop shows how much time a graph alone saves.

    Args:
        loop: the plain loop, on a GPU. After this object's first step, only this object may run steps.
    """

    def __init__(self, loop: PlainImageLoop):
        self.loop = loop
        self._graph: StepGraph | None = None

    def train_on(self, images: Tensor, labels: Tensor) -> Tensor:
        """Run one optimizer step and return the loss before the update. The first call captures the step."""
        if self._graph is None:
            self._graph = StepGraph(self.loop.train_on, (images, labels), self.loop.model, self.loop.optimizer)
        return self._graph.replay(images, labels)

    def step(self) -> Tensor:
        """Run one optimizer step on the next batch. Return the loss before the update."""
        return self.train_on(*self.loop.next_batch())


class PlainBlock(nn.Module):
    """Pre-norm attention and MLP with residual connections. A single matrix product computes query, key and value."""

    def __init__(self, width: int, heads: int):
        super().__init__()
        self.heads = heads
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.projection = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x_BTD: Tensor) -> Tensor:
        B, T, D = x_BTD.shape
        q, k, v = (
            part.view(B, T, self.heads, D // self.heads).transpose(1, 2) for part in self.qkv(self.norm_1(x_BTD)).split(D, dim=2)
        )
        y_BNTH = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x_BTD = x_BTD + self.projection(y_BNTH.transpose(1, 2).contiguous().view(B, T, D))
        return x_BTD + self.down(F.gelu(self.up(self.norm_2(x_BTD)), approximate="tanh"))


class PlainTransformer(nn.Module):
    """A GPT-2 with P classes. The head shares its weight with the token embedding.

    Args:
        config: configuration of the model. P follows from its vocabulary.
        bf16_stream: whether the residual stream is bfloat16. If False, it has the dtype of the embeddings.
        loss_kernel: whether `hyperion.kernels.token_loss` computes the loss. If False, PyTorch's cross-entropy is used.
    """

    def __init__(self, config: TransformerConfig, bf16_stream: bool = False, loss_kernel: bool = False):
        super().__init__()
        self.bf16_stream, self.loss_kernel = bf16_stream, loss_kernel
        self.classes = padded_classes(config.vocab_size)
        self.tokens = nn.Embedding(self.classes, config.width)
        self.positions = nn.Embedding(config.context, config.width)
        self.blocks = nn.ModuleList(PlainBlock(config.width, config.heads) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.width)
        self.head = nn.Linear(config.width, self.classes, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, inputs_BT: Tensor, targets_BT: Tensor | None = None) -> Tensor:
        """Return logits_BTP, or the mean negative log-likelihood in nats if targets are given."""
        positions_T = torch.arange(inputs_BT.shape[1], device=inputs_BT.device)
        x_BTD = self.tokens(inputs_BT) + self.positions(positions_T)
        if self.bf16_stream:
            x_BTD = x_BTD.bfloat16()
        for block in self.blocks:
            x_BTD = block(x_BTD)
        x_BTD = self.norm(x_BTD)
        if self.loss_kernel and targets_BT is not None:
            return token_loss(x_BTD.flatten(0, 1), self.head.weight, targets_BT.flatten()).mean()
        logits_BTP = self.head(x_BTD)
        if targets_BT is None:
            return logits_BTP
        return F.cross_entropy(logits_BTP.view(-1, self.classes), targets_BT.reshape(-1))


@torch.no_grad()
def with_weights_of(source: TransformerLM, bf16_stream: bool = False, loss_kernel: bool = False) -> PlainTransformer:
    """Return a plain model with the weights of `source`, on its device and in its dtype.

    The embedding rows of padded tokens are zero.

    Args:
        source: model whose weights are copied.
        bf16_stream, loss_kernel: as for `PlainTransformer`.
    """
    weight = source.token_embedding.weight
    with torch.device(weight.device):
        plain = PlainTransformer(source.config, bf16_stream, loss_kernel).to(weight.dtype)
    plain.tokens.weight.zero_()[: len(weight)] = weight
    pairs = [(plain.positions, source.position_embedding), (plain.norm, source.final_norm)]
    for block, theirs in zip(plain.blocks, cast(Iterable[Any], source.blocks), strict=True):
        attention = theirs.attention
        pairs += [
            (block.norm_1, theirs.attention_norm),
            (block.norm_2, theirs.mlp_norm),
            (block.projection, attention.output),
            (block.up, theirs.mlp.up),
            (block.down, theirs.mlp.down),
        ]
        for name in ("weight", "bias"):
            parts = [getattr(layer, name) for layer in (attention.query, attention.key, attention.value)]
            getattr(block.qkv, name).copy_(torch.cat(parts))
    for layer, other in pairs:
        layer.load_state_dict(other.state_dict())
    return plain


class PlainLanguageLoop:
    """A plain training loop for a GPT-2.

    The loop uses autocast, torch.compile of the whole model and fused AdamW, and clips gradients to norm 1. It never reads a
    loss, so it never waits for the device.

    Args:
        model: the model, on the device.
        schedule: function that takes a step number, counted from 1, and returns the learning rate of this step.
        precision: number format of the training.
        device: device of the training.
        compiled: whether to compile the model.
    """

    def __init__(
        self, model: PlainTransformer, schedule: Callable[[int], float], precision: Precision, device: Device, compiled: bool
    ):
        self.model, self.schedule, self.precision, self.device = model.train(), schedule, precision, device
        self.forward = torch.compile(model) if compiled else model
        self.optimizer = adamw(model, schedule(1))
        self.steps = 0

    def train_on(self, inputs_BT: Tensor, targets_BT: Tensor) -> Tensor:
        """Run one optimizer step. Return the loss before the update."""
        self.steps += 1
        for group in self.optimizer.param_groups:
            group["lr"] = self.schedule(self.steps)
        return self.update(inputs_BT, targets_BT)

    def update(self, inputs_BT: Tensor, targets_BT: Tensor) -> Tensor:
        """Run one optimizer step at the current learning rate. Return the loss before the update."""
        with self.precision.autocast(self.device):
            loss = self.forward(inputs_BT, targets_BT)
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return loss.detach()


class CapturedLanguageLoop:
    """A plain loop for a GPT-2 whose step is captured as a graph: forward pass, backward pass, clipping and update.

    The graph reads the learning rate from a tensor, so that the schedule can change it; this requires the optimizer option
    `capturable`. Nothing else differs from the plain loop.

    Args:
        loop: the plain loop, on a GPU. From now on, only this object may run steps.
        sharing: another captured loop that has run its first step. Both loops then share memory for activations and gradients.
            None gives this loop its own memory.
    """

    def __init__(self, loop: PlainLanguageLoop, sharing: "CapturedLanguageLoop | None" = None):
        self.loop, self._sharing = loop, sharing
        self.learning_rate = torch.tensor(loop.schedule(1), device=loop.device.torch_device)
        for group in loop.optimizer.param_groups:
            group.update(lr=self.learning_rate, capturable=True)
        self._graph: StepGraph | None = None

    def train_on(self, inputs_BT: Tensor, targets_BT: Tensor) -> Tensor:
        """Run one optimizer step and return the loss before the update. The first call captures the step."""
        loop = self.loop
        if self._graph is None:
            shared = None if self._sharing is None else self._sharing._graph
            self._graph = StepGraph(loop.update, (inputs_BT, targets_BT), loop.model, loop.optimizer, shared)
        loop.steps += 1
        self.learning_rate.fill_(loop.schedule(loop.steps))
        return self._graph.replay(inputs_BT, targets_BT)


def wait_for(device: Device) -> None:
    """Wait until the device has finished all queued work. A CPU has no queue, so the function returns at once."""
    if device.kind != "cpu":
        torch.cuda.synchronize(device.torch_device)
