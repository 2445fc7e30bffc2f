"""The engines of both baselines: what a batch of tokens or of images is, its loss, and how it is evaluated."""

from collections.abc import Iterable
from dataclasses import asdict
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hyperion.data.batches.packing import IGNORE_INDEX
from hyperion.errors import HyperionError, require_number
from hyperion.hardware import Device
from hyperion.parallel import is_sharded
from hyperion.training.engine import TorchEngine
from hyperion.training.evaluate import evaluate_images, evaluate_language, require_nll


class LanguageEngine(TorchEngine):
    """Batches (inputs_BT, targets_BT) for a model that returns nll_BT when given targets (TransformerLM).

    Inputs are int32 or int64 token ids, targets int64 token ids or IGNORE_INDEX, both [B, T] on the engine's device. The
    engine divides the sum of nll_BT by the number of targets of the whole batch: a mean loss is refused.
    """

    item = "token"

    def check_batch(self, batch: tuple[Tensor, Tensor]) -> None:
        inputs_BT, targets_BT = _two_tensors(batch, "inputs_BT, targets_BT", self.device)
        shapes = f"inputs {_form(inputs_BT)} and targets {_form(targets_BT)}"
        if inputs_BT.ndim != 2 or inputs_BT.shape != targets_BT.shape:
            raise _batch_error(shapes, "give both as token ids [B, T], targets one token ahead of inputs")
        if inputs_BT.dtype not in (torch.int32, torch.int64) or targets_BT.dtype != torch.int64:
            raise _batch_error(shapes, "give token ids: inputs int32 or int64, targets int64")
        configs = (getattr(module, "config", None) for module in self.model.modules())
        vocabulary = next((found for config in configs if (found := getattr(config, "vocab_size", None))), None)
        scored_BT = targets_BT.masked_fill(targets_BT == IGNORE_INDEX, 0)
        least, most, least_target, most_target = _range(inputs_BT) + _range(scored_BT)
        for what, low, high in (("inputs", least, most), ("targets", least_target, most_target)):
            if low < 0 or (vocabulary is not None and high >= vocabulary):
                allowed = "0 .." if vocabulary is None else f"0 .. {vocabulary - 1}, the model's vocabulary"
                raise _batch_error(
                    f"token ids of the {what} are from {low} to {high}, outside {allowed}",
                    f"tokenize with the model's tokenizer; targets that are not scored are {IGNORE_INDEX}",
                )

    def count_items(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        return (batch[1] != IGNORE_INDEX).sum()

    def summed_loss(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        inputs_BT, targets_BT = batch
        nll_BT = self.model(inputs_BT, targets_BT)
        require_nll(nll_BT, targets_BT)
        return nll_BT.sum()

    def evaluate(self, batches: Iterable[tuple[Tensor, Tensor]]) -> dict[str, float]:
        """See evaluate_language; 'loss' in nats per token, 'perplexity_token', 'total_nll_nats', 'tokens', …"""
        result = evaluate_language(self.model, batches, self.precision, self.device)
        return {"loss": result.loss, "perplexity_token": result.perplexity_token} | asdict(result)


class ImageEngine(TorchEngine):
    """Batches (images_BCYX, labels_B) for a classifier; its kernels are laid out channels-last, which convolutions
    prefer.

    Images are floating-point, normalised, [B, C, Y, X]; labels int64 classes [B]; both on the engine's device.

    Args:
        label_smoothing: share of the target that is spread over all classes, in training only.
    """

    item = "image"

    def check_batch(self, batch: tuple[Tensor, Tensor]) -> None:
        images_BCYX, labels_B = _two_tensors(batch, "images_BCYX, labels_B", self.device)
        first = next((module for module in self.model.modules() if isinstance(module, nn.Conv2d)), None)
        channels = None if first is None else first.in_channels
        last = images_BCYX.ndim == 4 and images_BCYX.shape[1] != channels == images_BCYX.shape[3]
        if images_BCYX.ndim != 4 or last:
            raise _batch_error(
                f"images {_form(images_BCYX)}, and the model takes [B, {channels or 'C'}, Y, X]",
                "give channels first: images.permute(0, 3, 1, 2) if they are [B, Y, X, C]",
            )
        if not images_BCYX.is_floating_point():
            raise _batch_error(
                f"images {_form(images_BCYX)}: whole numbers",
                "give floating-point images, normalised: (images / 255 - mean) / deviation, as ImageBatches does",
            )
        if labels_B.shape != images_BCYX.shape[:1] or labels_B.dtype != torch.int64:
            raise _batch_error(
                f"labels {_form(labels_B)} of images {_form(images_BCYX)}",
                "give one class for each image, int64 [B]; argmax(dim=1) of one-hot labels",
            )
        lowest, highest = _range(images_BCYX)
        if lowest >= 0 and highest > 100:  # normalised images are a few deviations from 0; no deviation is below 1/100
            raise _batch_error(
                f"images from {lowest:g} to {highest:g}: bytes that are not normalised",
                "normalise them: (images / 255 - mean) / deviation, as ImageBatches does",
            )
        least, self._highest_label = _range(labels_B)
        if least < 0:
            raise _batch_error(f"a label of {least}", "number the classes from 0")

    def __init__(self, model: nn.Module, *args: Any, label_smoothing: float = 0.0, **kwargs: Any):
        require_number("label_smoothing", label_smoothing, "ImageEngine", at_least=0, below=1)
        self.label_smoothing, self._highest_label = label_smoothing, 0
        if not is_sharded(model):  # FSDP2 gathers contiguous kernels, whatever layout their shards have
            model = model.to(memory_format=torch.channels_last)
        super().__init__(model, *args, **kwargs)

    def count_items(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        labels_B = batch[1]
        # torch.full is a kernel; torch.tensor would copy from the host and wait for the device in every step.
        return torch.full((), len(labels_B), dtype=torch.int64, device=labels_B.device)

    def summed_loss(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        images_BCYX, labels_B = batch
        if is_sharded(self.model):  # contiguous kernels would lay out the whole net's activations like themselves
            images_BCYX = images_BCYX.contiguous(memory_format=torch.channels_last)
        logits_BK = self.model(images_BCYX).float()
        if logits_BK.ndim != 2 or logits_BK.shape[1] <= self._highest_label:
            raise _batch_error(
                f"the model returned {_form(logits_BK)}, and labels go up to {self._highest_label}",
                "build the model with as many classes as the labels have, and let it return their logits [B, K]",
            )
        return F.cross_entropy(logits_BK, labels_B, reduction="sum", label_smoothing=self.label_smoothing)

    def evaluate(self, batches: Iterable[tuple[Tensor, Tensor]]) -> dict[str, float]:
        """See evaluate_images; 'loss' in nats per image, 'accuracy', 'standard_error', 'images'."""
        return asdict(evaluate_images(self.model, batches, self.precision, self.device))


def _two_tensors(batch: Any, names: str, device: Device) -> tuple[Tensor, Tensor]:
    """The two tensors of a batch.

    Raises:
        HyperionError: it is no pair of tensors, an empty one, or one on another device.
    """
    if not isinstance(batch, tuple | list) or [isinstance(part, Tensor) for part in batch] != [True, True]:
        raise _batch_error(f"the batch is a {type(batch).__name__}", f"give a pair of tensors ({names})")
    expected = torch.device(device.torch_device)
    for part in batch:
        if part.device.type != expected.type or expected.index not in (None, part.device.index):
            raise _batch_error(f"the batch is on {part.device}", f"make it on {expected}, where the engine computes")
        if not part.numel():
            raise _batch_error(f"the batch holds {_form(part)}", "leave out empty batches")
    return tuple(batch)


def _form(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"


def _range(tensor: Tensor) -> list[float]:
    return torch.stack(torch.aminmax(tensor)).tolist()


def _batch_error(what: str, next_step: str) -> HyperionError:
    return HyperionError(what, where="the first batch", next_step=next_step)
