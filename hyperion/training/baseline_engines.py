"""The engines of the baselines: form, loss and evaluation of a batch of tokens and of images."""

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
    engine divides the sum of nll_BT by the number of targets of the whole batch, so the model must not return a mean loss.
    """

    item = "token"

    def check_batch(self, batch: tuple[Tensor, Tensor]) -> None:
        inputs_BT, targets_BT = _two_tensors(batch, "inputs_BT, targets_BT", self.device)
        shapes = f"inputs {_form(inputs_BT)} and targets {_form(targets_BT)}"
        if inputs_BT.ndim != 2 or inputs_BT.shape != targets_BT.shape:
            raise _batch_error(shapes, "pass token ids [B, T] for both, with targets one token ahead of inputs")
        if inputs_BT.dtype not in (torch.int32, torch.int64) or targets_BT.dtype != torch.int64:
            raise _batch_error(shapes, "pass token ids: inputs int32 or int64, targets int64")
        configs = (getattr(module, "config", None) for module in self.model.modules())
        vocabulary = next((size for config in configs if (size := getattr(config, "vocab_size", None))), None)
        scored_BT = targets_BT.masked_fill(targets_BT == IGNORE_INDEX, 0)
        least, most, least_target, most_target = _range(inputs_BT) + _range(scored_BT)
        for name, low, high in (("inputs", least, most), ("targets", least_target, most_target)):
            if low < 0 or (vocabulary is not None and high >= vocabulary):
                allowed = "0 .." if vocabulary is None else f"0 .. {vocabulary - 1}, the model's vocabulary"
                raise _batch_error(
                    f"token ids of the {name} are from {low} to {high}, outside {allowed}",
                    f"tokenize with the model's tokenizer; set targets that are not scored to {IGNORE_INDEX}",
                )

    def count_items(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        return (batch[1] != IGNORE_INDEX).sum()

    def summed_loss(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        inputs_BT, targets_BT = batch
        nll_BT = self.model(inputs_BT, targets_BT)
        require_nll(nll_BT, targets_BT)
        return nll_BT.sum()

    def evaluate(self, batches: Iterable[tuple[Tensor, Tensor]]) -> dict[str, float]:
        """Return evaluate_language's results: 'loss' in nats per token, 'perplexity_token', 'total_nll_nats', 'tokens', …"""
        result = evaluate_language(self.model, batches, self.precision, self.device)
        return {"loss": result.loss, "perplexity_token": result.perplexity_token} | asdict(result)


class ImageEngine(TorchEngine):
    """Batches (images_BCYX, labels_B) for a classifier.

    Images are floating-point, normalised, [B, C, Y, X]; labels are int64 classes [B]; both on the engine's device. Weights
    are converted to the channels-last format, for which convolutions are fastest.

    Args:
        label_smoothing: probability that training spreads over all classes instead of the label.
    """

    item = "image"

    def check_batch(self, batch: tuple[Tensor, Tensor]) -> None:
        images_BCYX, labels_B = _two_tensors(batch, "images_BCYX, labels_B", self.device)
        first = next((module for module in self.model.modules() if isinstance(module, nn.Conv2d)), None)
        channels = None if first is None else first.in_channels
        last = images_BCYX.ndim == 4 and images_BCYX.shape[1] != channels == images_BCYX.shape[3]
        if images_BCYX.ndim != 4 or last:
            raise _batch_error(
                f"images {_form(images_BCYX)}, but the model takes [B, {channels or 'C'}, Y, X]",
                "put channels first: images.permute(0, 3, 1, 2) if they are [B, Y, X, C]",
            )
        if not images_BCYX.is_floating_point():
            raise _batch_error(
                f"images {_form(images_BCYX)}: not floating-point",
                "pass normalised floating-point images: (images / 255 - mean) / deviation, as ImageBatches does",
            )
        if labels_B.shape != images_BCYX.shape[:1] or labels_B.dtype != torch.int64:
            raise _batch_error(
                f"labels {_form(labels_B)} for images {_form(images_BCYX)}",
                "pass one class per image, int64 [B]; use argmax(dim=1) for one-hot labels",
            )
        lowest, highest = _range(images_BCYX)
        if lowest >= 0 and highest > 100:  # normalised values are a few deviations from 0, and no deviation is below 1/100
            raise _batch_error(
                f"images have values from {lowest:g} to {highest:g}: bytes that are not normalised",
                "normalise them: (images / 255 - mean) / deviation, as ImageBatches does",
            )
        least, self._highest_label = _range(labels_B)
        if least < 0:
            raise _batch_error(f"a label is {least}", "number the classes from 0")

    def __init__(self, model: nn.Module, *args: Any, label_smoothing: float = 0.0, **kwargs: Any):
        require_number("label_smoothing", label_smoothing, "ImageEngine", at_least=0, below=1)
        self.label_smoothing, self._highest_label = label_smoothing, 0
        if not is_sharded(model):  # FSDP2 gathers contiguous weights, whatever the format of their shards
            model = model.to(memory_format=torch.channels_last)  # pyright: ignore[reportCallIssue] - a private overload
        super().__init__(model, *args, **kwargs)

    def count_items(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        labels_B = batch[1]
        # torch.full launches a kernel; torch.tensor would copy from the host and wait for the device in every step.
        return torch.full((), len(labels_B), dtype=torch.int64, device=labels_B.device)

    def summed_loss(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        images_BCYX, labels_B = batch
        if is_sharded(self.model):  # otherwise contiguous weights would make all activations contiguous
            images_BCYX = images_BCYX.contiguous(memory_format=torch.channels_last)
        logits_BK = self.model(images_BCYX).float()
        if logits_BK.ndim != 2 or logits_BK.shape[1] <= self._highest_label:
            raise _batch_error(
                f"the model returned {_form(logits_BK)}, but labels go up to {self._highest_label}",
                "build the model with as many classes as the labels have, and let it return logits [B, K]",
            )
        return F.cross_entropy(logits_BK, labels_B, reduction="sum", label_smoothing=self.label_smoothing)

    def evaluate(self, batches: Iterable[tuple[Tensor, Tensor]]) -> dict[str, float]:
        """Return evaluate_images's results: 'loss' in nats per image, 'accuracy', 'standard_error', 'images'."""
        return asdict(evaluate_images(self.model, batches, self.precision, self.device))


def _two_tensors(batch: Any, names: str, device: Device) -> tuple[Tensor, Tensor]:
    """Return the two tensors of a batch.

    Raises:
        HyperionError: the batch is not a pair of tensors, is empty, or is on another device.
    """
    if not isinstance(batch, tuple | list) or [isinstance(part, Tensor) for part in batch] != [True, True]:
        raise _batch_error(f"the batch is a {type(batch).__name__}", f"pass a pair of tensors ({names})")
    expected = torch.device(device.torch_device)
    for part in batch:
        if part.device.type != expected.type or expected.index not in (None, part.device.index):
            raise _batch_error(f"the batch is on {part.device}", f"create it on {expected}, the engine's device")
        if not part.numel():
            raise _batch_error(f"the batch holds {_form(part)}", "skip empty batches")
    first, second = batch
    return first, second


def _form(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"


def _range(tensor: Tensor) -> list[float]:
    return torch.stack(torch.aminmax(tensor)).tolist()


def _batch_error(what: str, next_step: str) -> HyperionError:
    return HyperionError(what, where="the first batch", next_step=next_step)
