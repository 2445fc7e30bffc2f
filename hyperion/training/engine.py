"""Engines: what turns a batch into an optimizer step. The loop drives any Engine and knows nothing of what is
inside.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

from hyperion.checkpoints import CheckpointError, read_sharded, write_sharded
from hyperion.data.packing import IGNORE_INDEX
from hyperion.hardware import Device
from hyperion.training.allocator import keep_freed_memory
from hyperion.training.evaluate import evaluate_images, evaluate_language
from hyperion.training.precision import Precision


@dataclass(frozen=True)
class StepMetrics:
    """Numbers of one optimizer step. The tensors stay on the device: reading one would wait for it.

    Attributes:
        loss: scalar, nats per token or image, before the step.
        gradient_norm: scalar, L2 norm over all gradients before clipping.
        items: scalar, tokens or images of the batch, padding not counted.
        learning_rate: of this step.
        rank_loss: as loss, of this rank's part of the batch; loss itself on one device.
        rank_items: items of this rank's part; items itself on one device.
    """

    loss: Tensor
    gradient_norm: Tensor
    items: Tensor
    learning_rate: float
    rank_loss: Tensor
    rank_items: Tensor


class Engine(Protocol):
    """What the training loop needs.

    Attributes:
        device: where it computes.
        item: 'token' or 'image': what is counted.
        tokens_seen: items of all steps so far (images for an image engine); reading it waits for the device.
    """

    device: Device
    item: str

    @property
    def tokens_seen(self) -> int: ...

    def train_step(self, batch: Any) -> StepMetrics:
        """One optimizer step on one batch of the loader."""

    def evaluate(self, batches: Iterable) -> dict[str, float]:
        """Numbers of held-out data by name, 'loss' among them; changes nothing that training uses."""

    def save(self, folder: Path) -> None:
        """Write the whole state into an existing, empty folder."""

    def load(self, folder: Path) -> None:
        """Take over the state that `save` wrote. Raises CheckpointError when it is bad or not of this model."""


class TorchEngine(ABC):
    """A module, an optimizer and a schedule on one device; subclasses say what a batch is.

    Args:
        model: on the device already.
        optimizer: over the model's parameters; its learning rate is set from the schedule at every step.
        schedule: learning rate of a step counted from 1.
        precision: what the forward pass computes in.
        clip_norm: gradients are scaled down to this L2 norm; math.inf for never.
    """

    item: str

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        schedule: Callable[[int], float],
        precision: Precision,
        device: Device,
        clip_norm: float = 1.0,
    ):
        self.model, self.optimizer, self.schedule = model, optimizer, schedule
        self.precision, self.device, self.clip_norm = precision, device, clip_norm
        self.steps = 0
        self._items_seen = torch.zeros((), dtype=torch.int64, device=device.torch_device)
        if device.kind == "cpu":
            keep_freed_memory()

    @property
    def tokens_seen(self) -> int:
        """Tokens (or images) of all steps so far."""
        return int(self._items_seen)

    @abstractmethod
    def batch_loss(self, batch: Any) -> tuple[Tensor, Tensor]:
        """Mean loss of a batch (scalar with gradient), and how many items it is the mean of (int64 scalar)."""

    def train_step(self, batch: Any) -> StepMetrics:
        """Forward, backward, clip, update."""
        learning_rate = self.schedule(self.steps + 1)
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate
        self.model.train()
        with self.precision.autocast(self.device):
            loss, items = self.batch_loss(batch)
        loss.backward()
        norm = nn.utils.clip_grad_norm_(self.model.parameters(), self.clip_norm)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.steps += 1
        self._items_seen += items
        loss = loss.detach()
        return StepMetrics(loss, norm, items, learning_rate, rank_loss=loss, rank_items=items)

    def save(self, folder: Path) -> None:
        """Model and optimizer state by parameter name, each rank its shards: any layout of the same model can read it.
        All ranks call it.
        """
        write_sharded(folder, self._state())

    def load(self, folder: Path) -> None:
        """Take over the state that `save` wrote on any number of ranks. All ranks call it.

        Raises:
            CheckpointError: on all ranks: the files are bad, or belong to a model or optimizer of another shape.
        """
        state = read_sharded(folder, self._state())
        try:
            set_model_state_dict(self.model, state["model"])
            set_optimizer_state_dict(self.model, self.optimizer, state["optimizer"])
            self.steps = int(state["steps"])
            self._items_seen.fill_(int(state["items_seen"]))
        except (RuntimeError, KeyError, ValueError, AttributeError) as error:  # the same on all ranks: groups of other
            raise CheckpointError(  # parameters, or a file without the numbers
                f"the checkpoint does not fit this model and optimizer: {error}",
                where=folder,
                next_step="use the configuration it was saved with, or another checkpoint folder",
            ) from error

    def _state(self) -> dict[str, Any]:
        return {
            "model": get_model_state_dict(self.model),
            "optimizer": get_optimizer_state_dict(self.model, self.optimizer),
            "steps": self.steps,
            "items_seen": self.tokens_seen,
        }


class LanguageEngine(TorchEngine):
    """Batches (inputs_BT, targets_BT) for a model that returns nll_BT when given targets (TransformerLM)."""

    item = "token"

    def batch_loss(self, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        inputs_BT, targets_BT = batch
        tokens = (targets_BT != IGNORE_INDEX).sum()
        return self.model(inputs_BT, targets_BT).sum() / tokens, tokens

    def evaluate(self, batches: Iterable[tuple[Tensor, Tensor]]) -> dict[str, float]:
        """See evaluate_language; 'loss' in nats per token, 'perplexity_token', 'total_nll_nats', 'tokens', …"""
        result = evaluate_language(self.model, batches, self.precision, self.device)
        return {"loss": result.loss, "perplexity_token": result.perplexity_token} | asdict(result)


class ImageEngine(TorchEngine):
    """Batches (images_BCYX, labels_B) for a classifier; its kernels are laid out channels-last, which convolutions
    prefer.
    """

    item = "image"

    def __init__(self, model: nn.Module, *args: Any, **kwargs: Any):
        super().__init__(model.to(memory_format=torch.channels_last), *args, **kwargs)

    def batch_loss(self, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        images_BCYX, labels_B = batch
        loss = F.cross_entropy(self.model(images_BCYX).float(), labels_B)
        # torch.full is a kernel; torch.tensor would copy from the host and wait for the device in every step.
        return loss, torch.full((), len(labels_B), dtype=torch.int64, device=labels_B.device)

    def evaluate(self, batches: Iterable[tuple[Tensor, Tensor]]) -> dict[str, float]:
        """See evaluate_images; 'loss' in nats per image, 'accuracy', 'standard_error', 'images'."""
        return asdict(evaluate_images(self.model, batches, self.precision, self.device))
