"""Evaluation on held-out data: every token or image once, sums in float64."""

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hyperion.data.packing import IGNORE_INDEX
from hyperion.errors import HyperionError
from hyperion.hardware import Device
from hyperion.training.precision import Precision


@dataclass(frozen=True)
class LanguageEvaluation:
    """Negative log-likelihood of a text under a model.

    Attributes:
        total_nll_nats: sum over all scored tokens.
        tokens: tokens scored.
        standard_error_nats: of the mean per token, from the spread of the tokens taken as independent.
    """

    total_nll_nats: float
    tokens: int
    standard_error_nats: float

    @property
    def loss(self) -> float:
        """Mean negative log-likelihood in nats per token."""
        return self.total_nll_nats / self.tokens

    @property
    def perplexity_token(self) -> float:
        """exp(loss): depends on the tokenizer."""
        return math.exp(self.loss)

    def perplexity_word(self, words: int) -> float:
        """exp(total / words), comparable between tokenizers; `words` counts one <eos> per line."""
        return math.exp(self.total_nll_nats / words)


@dataclass(frozen=True)
class ImageEvaluation:
    """Loss in nats per image, and accuracy with its binomial standard error, over `images` images."""

    loss: float
    accuracy: float
    standard_error: float
    images: int


@torch.no_grad()
def evaluate_language(
    model: nn.Module, windows: Iterable[tuple[Tensor, Tensor]], precision: Precision, device: Device
) -> LanguageEvaluation:
    """Score windows (inputs_BT, targets_BT) of token ids.

    Targets of IGNORE_INDEX (overlap between windows, padding) are context only. That each token is a target exactly
    once is up to the windows (hyperion.data.evaluation_windows).

    Raises:
        HyperionError: no window has a target.
    """
    was_training = model.training
    model.eval()
    total = squares = torch.zeros((), dtype=torch.float64, device=device.torch_device)
    tokens = torch.zeros((), dtype=torch.int64, device=device.torch_device)
    for inputs_BT, targets_BT in windows:
        with precision.autocast(device):
            nll_BT = model(inputs_BT, targets_BT).double()
        total, squares = total + nll_BT.sum(), squares + nll_BT.square().sum()
        tokens = tokens + (targets_BT != IGNORE_INDEX).sum()
    model.train(was_training)
    total_nats, n = total.item(), int(tokens.item())
    _require_some(n, "tokens")
    variance = max(0.0, squares.item() / n - (total_nats / n) ** 2)
    return LanguageEvaluation(total_nats, n, math.sqrt(variance / n))


@torch.no_grad()
def evaluate_images(
    model: nn.Module, batches: Iterable[tuple[Tensor, Tensor]], precision: Precision, device: Device
) -> ImageEvaluation:
    """Loss and accuracy over batches (images_BCYX, labels_B).

    Raises:
        HyperionError: there is no image.
    """
    was_training = model.training
    model.eval()
    total = torch.zeros((), dtype=torch.float64, device=device.torch_device)
    correct, images = torch.zeros((), dtype=torch.int64, device=device.torch_device), 0
    for images_BCYX, labels_B in batches:
        with precision.autocast(device):
            logits_BK = model(images_BCYX).float()
        total = total + F.cross_entropy(logits_BK, labels_B, reduction="none").double().sum()
        correct = correct + (logits_BK.argmax(dim=1) == labels_B).sum()
        images += len(labels_B)
    model.train(was_training)
    _require_some(images, "images")
    accuracy = correct.item() / images
    return ImageEvaluation(total.item() / images, accuracy, math.sqrt(accuracy * (1 - accuracy) / images), images)


def _require_some(count: int, what: str) -> None:
    if count == 0:
        raise HyperionError(
            f"there are no {what} to evaluate", where="evaluation", next_step="pass a split that is not empty"
        )
