"""Evaluate a model on held-out data. Every token or image is evaluated once, and sums are computed in float64.

With n ranks, every rank iterates over all batches of the split, so its loader must be created for rank 0 of 1. Each rank
evaluates every n-th batch. The results are computed from the sums over all ranks, and are the same on every rank.
"""

import math
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from hyperion.data.packing import IGNORE_INDEX
from hyperion.errors import HyperionError
from hyperion.hardware import Device
from hyperion.parallel import average_statistics, ranks_of, reshard, start_sum
from hyperion.training.rank_data import require_same_batch
from hyperion.training.recipe import Precision

# `next_step` of errors about labels.
ONE_CLASS_EACH = "pass one class per image, int64 [B]; use argmax(dim=1) for one-hot labels"


@dataclass(frozen=True)
class LanguageEvaluation:
    """Negative log-likelihood of a text under a model.

    Attributes:
        total_nll_nats: negative log-likelihood in nats, summed over all scored tokens.
        tokens: number of scored tokens.
        standard_error_nats: standard error of `loss` in nats per token. It allows for correlation between the tokens of a window.
        windows: number of windows with a scored token.
        independent_error_nats: standard error of `loss` if all tokens are independent, such as random tokens.

    Source of the standard error: Cameron and Miller, A Practitioner's Guide to Cluster-Robust Inference, J. Human Resources 50
    (2015) 317-372.
    """

    total_nll_nats: float
    tokens: int
    standard_error_nats: float
    windows: int
    independent_error_nats: float

    @property
    def loss(self) -> float:
        """Mean negative log-likelihood in nats per token."""
        return self.total_nll_nats / self.tokens

    @property
    def interval(self) -> tuple[float, float]:
        """95 % interval of `loss`, by Student's t distribution for the number of windows."""
        from scipy import stats  # slow to import

        half = float(stats.t.ppf(0.975, max(1, self.windows - 1))) * self.standard_error_nats
        return self.loss - half, self.loss + half

    @property
    def perplexity_token(self) -> float:
        """Perplexity per token, exp(loss). It depends on the tokenizer."""
        return math.exp(self.loss)

    def perplexity_word(self, words: int) -> float:
        """Return the perplexity per word, exp(total_nll_nats / words). It can be compared between tokenizers.

        Args:
            words: number of words of the text, including one <eos> per line.
        """
        return math.exp(self.total_nll_nats / words)


@dataclass(frozen=True)
class ImageEvaluation:
    """Loss and accuracy of a model on images.

    Attributes:
        loss: mean loss in nats per image.
        accuracy: fraction of images that are classified correctly.
        standard_error: binomial standard error of the accuracy.
        images: number of images.
    """

    loss: float
    accuracy: float
    standard_error: float
    images: int


@torch.no_grad()
def evaluate_language(
    model: nn.Module, windows: Iterable[tuple[Tensor, Tensor]], precision: Precision, device: Device
) -> LanguageEvaluation:
    """Compute the negative log-likelihood of windows (inputs_BT, targets_BT) of token ids.

    Positions whose target is IGNORE_INDEX are not scored. They are padding, or overlap between windows that serves only as
    context. The windows must contain each token exactly once as a target (see hyperion.data.batches.evaluation_windows).

    Raises:
        HyperionError: no window has a target, or the model does not return nll_BT, one value per target.
    """
    # Sums over tokens: nll, its square, 1. Sums over windows, which have n tokens with the nll s together: s², sn, n², 1.
    sums = torch.zeros(7, dtype=torch.float64, device=device.torch_device)
    with evaluating(model):
        for (inputs_BT, targets_BT), counts in _own(windows, ranks_of(model)):
            with precision.autocast(device):
                nll_BT = model(inputs_BT, targets_BT)
            require_nll(nll_BT, targets_BT)
            nll_BT = nll_BT.double()
            s_B, n_B = nll_BT.sum(dim=1), (targets_BT != IGNORE_INDEX).sum(dim=1).double()
            if counts:
                of_tokens = (s_B.sum(), nll_BT.square().sum(), n_B.sum())
                of_windows = (s_B.square().sum(), (s_B * n_B).sum(), n_B.square().sum(), (n_B > 0).sum().double())
                sums = sums + torch.stack((*of_tokens, *of_windows))
    # Results need only this one collective, after the last batch. The host waits for the device only here.
    total_nats, squares, n, window_squares, mixed, count_squares, clusters = start_sum(sums, ranks_of(model))().tolist()
    _require_some(int(n), "tokens")
    mean = total_nats / n
    # Clamp at 0, because rounding can make the difference of two nearly equal numbers slightly negative.
    independent = math.sqrt(max(0.0, squares / n - mean**2) / n)
    # Σ (s - mean · n)². A single window shows no variation between windows.
    between = max(0.0, window_squares - 2 * mean * mixed + mean**2 * count_squares)
    error = math.sqrt(clusters / (clusters - 1) * between) / n if clusters > 1 else independent
    return LanguageEvaluation(total_nats, int(n), error, int(clusters), independent)


@torch.no_grad()
def evaluate_images(
    model: nn.Module, batches: Iterable[tuple[Tensor, Tensor]], precision: Precision, device: Device
) -> ImageEvaluation:
    """Return the loss and the accuracy on batches (images_BCYX, labels_B).

    Raises:
        HyperionError: there are no images, or the labels are not int64 classes with shape [B].
    """
    sums = torch.zeros(3, dtype=torch.float64, device=device.torch_device)  # sums over images: loss, correct, number of images
    with evaluating(model):
        for (images_BCYX, labels_B), counts in _own(batches, ranks_of(model)):
            with precision.autocast(device):
                logits_BK = model(images_BCYX).float()
            _require_classes(logits_BK, labels_B)
            losses_B = F.cross_entropy(logits_BK, labels_B, reduction="none").double()
            correct_B = (logits_BK.argmax(dim=1) == labels_B).double()
            if counts:
                sums = sums + torch.stack((losses_B.sum(), correct_B.sum(), torch.ones_like(losses_B).sum()))
    total, correct, images = start_sum(sums, ranks_of(model))().tolist()
    images = int(images)
    _require_some(images, "images")
    accuracy = correct / images
    return ImageEvaluation(total / images, accuracy, math.sqrt(accuracy * (1 - accuracy) / images), images)


def require_nll(nll_BT: Tensor, targets_BT: Tensor) -> None:
    """Check that a language model returned one floating-point value per target.

    Raises:
        HyperionError: the model returned something else, such as a mean loss, logits, or an object of another library.
    """
    if isinstance(nll_BT, Tensor) and nll_BT.shape == targets_BT.shape and nll_BT.is_floating_point():
        return
    form = f"{nll_BT.dtype} {list(nll_BT.shape)}" if isinstance(nll_BT, Tensor) else f"a {type(nll_BT).__name__}"
    raise HyperionError(
        f"the model returned {form} for targets {list(targets_BT.shape)}",
        where="LanguageEngine",
        next_step="return the negative log-likelihood of each target in nats [B, T], and zero where a target is not scored: "
        "F.cross_entropy(…, reduction='none'); the engine computes the mean over the whole batch",
    )


def _require_classes(logits_BK: Tensor, labels_B: Tensor) -> None:
    if logits_BK.ndim != 2 or labels_B.shape != logits_BK.shape[:1] or labels_B.dtype != torch.int64:
        raise HyperionError(
            f"labels are {labels_B.dtype} {list(labels_B.shape)} for logits {list(logits_BK.shape)}",
            where="evaluate_images",
            next_step=ONE_CLASS_EACH,
        )


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Context manager that switches to evaluation mode, and makes the running statistics equal on all ranks.

    At the end, each module gets back its mode: a fine-tuning may keep some batch norms in evaluation mode.
    """
    modes = [(module, module.training) for module in model.modules()]
    average_statistics(model)
    model.eval()
    try:
        yield
    finally:
        # Free the gathered parameters. FSDP2 keeps some of them if no backward pass follows.
        reshard(model)
        for module, training in modes:
            module.training = training


def _own(batches: Iterable, ranks: int) -> Iterator[tuple[tuple[Tensor, Tensor], bool]]:
    """Yield this rank's batches as pairs (batch, counts). If `counts` is False, the batch must not be added to the sums.

    With FSDP2 a forward pass contains collectives, so all ranks must run the same number of forward passes. If fewer batches
    than ranks remain at the end, the ranks without a batch repeat the last batch, with `counts` False.

    Raises:
        HyperionError: the ranks got different first batches.
    """
    rank = dist.get_rank() if ranks > 1 else 0
    group: list = []
    for index, batch in enumerate(batches):
        if index == 0 and ranks > 1:
            require_same_batch(batch, "evaluation")
        group.append(batch)
        if len(group) == ranks:
            yield group[rank], True
            group = []
    if group:
        yield group[min(rank, len(group) - 1)], rank < len(group)


def _require_some(count: int, what: str) -> None:
    if count == 0:
        raise HyperionError(f"there are no {what} to evaluate", where="evaluation", next_step="use a split that is not empty")
