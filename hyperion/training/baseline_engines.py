"""The engines of both baselines: what a batch of tokens or of images is, its loss, and how it is evaluated."""

from collections.abc import Iterable
from dataclasses import asdict
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hyperion.data.packing import IGNORE_INDEX
from hyperion.parallel import is_sharded
from hyperion.training.engine import TorchEngine
from hyperion.training.evaluate import evaluate_images, evaluate_language


class LanguageEngine(TorchEngine):
    """Batches (inputs_BT, targets_BT) for a model that returns nll_BT when given targets (TransformerLM)."""

    item = "token"

    def count_items(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        return (batch[1] != IGNORE_INDEX).sum()

    def summed_loss(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        inputs_BT, targets_BT = batch
        return self.model(inputs_BT, targets_BT).sum()

    def evaluate(self, batches: Iterable[tuple[Tensor, Tensor]]) -> dict[str, float]:
        """See evaluate_language; 'loss' in nats per token, 'perplexity_token', 'total_nll_nats', 'tokens', …"""
        result = evaluate_language(self.model, batches, self.precision, self.device)
        return {"loss": result.loss, "perplexity_token": result.perplexity_token} | asdict(result)


class ImageEngine(TorchEngine):
    """Batches (images_BCYX, labels_B) for a classifier; its kernels are laid out channels-last, which convolutions
    prefer.

    Args:
        label_smoothing: share of the target that is spread over all classes, in training only.
    """

    item = "image"

    def __init__(self, model: nn.Module, *args: Any, label_smoothing: float = 0.0, **kwargs: Any):
        self.label_smoothing = label_smoothing
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
        return F.cross_entropy(logits_BK, labels_B, reduction="sum", label_smoothing=self.label_smoothing)

    def evaluate(self, batches: Iterable[tuple[Tensor, Tensor]]) -> dict[str, float]:
        """See evaluate_images; 'loss' in nats per image, 'accuracy', 'standard_error', 'images'."""
        return asdict(evaluate_images(self.model, batches, self.precision, self.device))
