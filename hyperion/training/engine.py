"""Engines: what turns a batch into an optimizer step. The loop drives any Engine and knows nothing of what is
inside.
"""

import contextlib
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

from hyperion import processes
from hyperion.checkpoints import CheckpointError, agreed, read_sharded, write_sharded
from hyperion.checkpoints.states import EARLIER
from hyperion.errors import HyperionError, require_number
from hyperion.hardware import Device
from hyperion.parallel import average_statistics, clip_gradients, is_sharded, local_gradient_norm, ranks_of, start_sum
from hyperion.processes import World
from hyperion.training.accumulation import micro_batches
from hyperion.training.allocator import keep_freed_memory
from hyperion.training.captured import CapturedStep, same_tensors, why_not_captured
from hyperion.training.nonfinite import NonFiniteError, require_finite
from hyperion.training.precision import Precision


@dataclass(frozen=True)
class StepMetrics:
    """Numbers of one optimizer step. The tensors stay on the device: reading one would wait for it.

    Attributes:
        loss: scalar, nats per token or image over the whole batch, before the step.
        gradient_norm: scalar, L2 norm over all gradients of the whole batch before clipping.
        items: scalar, tokens or images of the whole batch, padding not counted.
        learning_rate: of this step.
        rank_loss: as loss, of this rank's part of the batch; loss itself on one device.
        rank_items: items of this rank's part; items itself on one device.
        skipped: scalar, whether the update was left out because a gradient overflowed in fp16 (its norm is not finite).
    """

    loss: Tensor
    gradient_norm: Tensor
    items: Tensor
    learning_rate: float
    rank_loss: Tensor
    rank_items: Tensor
    skipped: Tensor


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
    """A module, an optimizer and a schedule on one device or on one of many ranks; subclasses say what a batch is.

    On many ranks each gets its part of the batch, parts need not have the same number of items, and the step is the one
    that one device would make with the whole batch. Two small sums over the ranks run beside the forward pass and the
    backward pass; the host waits for neither.

    Args:
        model: on the device already; on many ranks what hyperion.parallel.parallelize returned.
        optimizer: over the model's parameters; its learning rate is set from the schedule at every step.
        schedule: learning rate of a step counted from 1.
        precision: what the forward pass computes in.
        clip_norm: gradients are scaled down to this L2 norm; math.inf for never.
        world: the ranks that share each batch; those of this process's group when left out.
        capture: record the whole step as one graph of the device at the first batch, and replay it for every batch of its
            shapes; where there is no such graph, steps are done as ever and `uncaptured` says why.
        micro_batches: parts that a rank takes its batch in, one after the other, in a fraction of the memory. It is the same
            step up to rounding: each item weighs the same, whatever part it is in. (But dropout draws others, and a batch
            norm sees one part at a time.)

    Attributes:
        scaler: what keeps fp16 gradients from vanishing; it is part of the engine's state.
        uncaptured: why steps are not replayed, "" where they are.
        unchecked: the first batch has still to be checked by `check_batch`.
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
        world: World | None = None,
        capture: bool = False,
        micro_batches: int = 1,
    ):
        _require_settings(schedule, clip_norm, micro_batches, type(self).__name__)
        self.model, self.optimizer, self.schedule = model, optimizer, schedule
        self.precision, self.device, self.clip_norm = precision, device, clip_norm
        self.scaler, self.micro_batches = precision.loss_scaler(device), micro_batches
        self.steps, self.ranks = 0, ranks_of(model)
        if self.ranks != (sharing := (world or processes.world()).size):
            raise HyperionError(
                f"{sharing} ranks are to share a batch, and this {type(model).__name__} is laid over {self.ranks}",
                where=type(self).__name__,
                next_step="give it what hyperion.parallel.parallelize returned, or, to train alone beside other ranks, the "
                "world of one rank",
            )
        self.uncaptured = why_not_captured(device, self.ranks, precision.dtype) if capture else "not asked for"
        self._captured: CapturedStep | None = None
        self.unchecked = True
        self._items_seen = torch.zeros((), dtype=torch.int64, device=device.torch_device)
        if device.kind == "cpu":
            keep_freed_memory()

    @property
    def tokens_seen(self) -> int:
        """Tokens (or images) of all steps so far."""
        return int(self._items_seen)

    @property
    def capture_time_s(self) -> float | None:
        """Seconds that recording the step took, None before; the first step waits for it."""
        return None if self._captured is None else self._captured.time_s

    def capture(self) -> None:
        """Record the step at the next batch, where it can be recorded, and replay it from then on."""
        self.uncaptured = why_not_captured(self.device, self.ranks, self.precision.dtype)

    @abstractmethod
    def count_items(self, batch: Any) -> Tensor:
        """Items of this rank's batch that the loss is taken over (int64 scalar, made on the device)."""

    @abstractmethod
    def summed_loss(self, batch: Any) -> Tensor:
        """Sum of the losses of this rank's items (scalar with gradient)."""

    @abstractmethod
    def check_batch(self, batch: Any) -> None:
        """Refuse a batch that the model would take and that is not in the engine's form; called before the first step
        alone, because it waits for the device.

        Raises:
            HyperionError: says what form is expected.
        """

    def train_step(self, batch: Any) -> StepMetrics:
        """Forward, backward, clip, update. All ranks call it.

        Raises:
            HyperionError: the first batch, or a batch's loss, is not in the engine's form (see `check_batch`).
        """
        if self.unchecked:
            self.check_batch(batch)
            self.unchecked = False
        learning_rate = self.schedule(self.steps + 1)
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate
        if not self.model.training:  # telling all modules takes the host as long as some kernels do
            self.model.train()
        if not self.uncaptured and self._captured is None:
            counters = (self._items_seen,)
            self._captured = CapturedStep(self._step, batch, self.model, self.optimizer, counters, self.device)
        # A batch of other shapes, such as the last of an epoch, is done as ever.
        replayed = self._captured is not None and self._captured.fits(batch)
        loss, norm, items, rank_loss, rank_items, skipped = (
            self._captured(batch, learning_rate) if replayed else self._step(batch)
        )
        self.steps += 1
        return StepMetrics(loss, norm, items, learning_rate, rank_loss, rank_items, skipped)

    def _step(self, batch: Any) -> tuple[Tensor, ...]:
        """All that a step does on the device, at the learning rate of the optimizer's groups. Nothing here waits for the
        device or asks for a value, so that it can be recorded.
        """
        rank_items = self.count_items(batch)
        finish_count = start_sum(rank_items, self.ranks)  # runs beside the forward pass
        sums, items = [], None
        with self.precision.products():
            for part, exchange in micro_batches(batch, self.micro_batches, self.model):
                with exchange:
                    with self.precision.autocast(self.device):
                        total = self.summed_loss(part)
                    items = finish_count() if items is None else items
                    share = total / items  # of the mean over the whole batch: those of all parts and ranks add up to it
                    # DDP and FSDP average the ranks' gradients, where the gradient of the mean is their sum.
                    self.scaler.backward(share if self.ranks == 1 else share * self.ranks)
                sums.append(total.detach())
        total = sums[0] if len(sums) == 1 else torch.stack(sums).sum()
        share = total / items
        self.scaler.unscale(self.optimizer)
        norm, finish_loss = self._norm_and_loss(share)
        if math.isfinite(self.clip_norm):
            clip_gradients(self.model, self.clip_norm, norm)
        skipped = self.scaler.step(self.optimizer, norm)
        self.optimizer.zero_grad()
        self._items_seen += items
        loss = finish_loss()
        rank_loss = loss if self.ranks == 1 else total / rank_items.clamp(min=1)
        return loss, norm, items, rank_loss, rank_items, skipped

    def _norm_and_loss(self, share: Tensor) -> tuple[Tensor, Callable[[], Tensor]]:
        """Norm of the gradient of the whole batch, and a function that gives the loss of the whole batch."""
        norm = local_gradient_norm(self.model)
        if self.ranks == 1 or not is_sharded(self.model):  # each rank holds the whole gradient
            return norm, start_sum(share, self.ranks)
        squared, loss = start_sum(torch.stack((norm.square(), share)), self.ranks)()
        return squared.sqrt(), lambda: loss

    def save(self, folder: Path) -> None:
        """Model and optimizer state by parameter name, each rank its shards: any layout of the same model can read it.
        All ranks call it.

        Raises:
            NonFiniteError: a weight or moment is infinite or no number (CheckpointError on many ranks): a checkpoint with
                it would be one that nobody can go on from. Nothing was written.
        """
        average_statistics(self.model)  # buffers are stored once, so they must be the same on all ranks
        state = self._state()
        advice = "nothing was saved; start again: the run goes on from the checkpoint before, or train more carefully"
        agreed(lambda: require_finite(state, f"after step {self.steps}", NonFiniteError, advice))
        write_sharded(folder, state)

    def load(self, folder: Path) -> None:
        """Take over the state that `save` wrote on any number of ranks. All ranks call it.

        Raises:
            CheckpointError: on all ranks: the files are bad, hold a number that is none, or belong to a model or optimizer
                of another shape.
        """
        here = self._state()
        state = read_sharded(folder, here)
        agreed(lambda: require_finite(state, folder, CheckpointError, EARLIER))
        agreed(lambda: _require_fitting(state, here, folder))
        set_model_state_dict(self.model, state["model"])
        with contextlib.nullcontext() if self._captured is None else same_tensors(self.optimizer):
            set_optimizer_state_dict(self.model, self.optimizer, state["optimizer"])
        self.steps = state["steps"]
        self._items_seen.fill_(state["items_seen"])
        self.scaler.load_state_dict(state["scaler"])

    def _state(self) -> dict[str, Any]:
        return {
            "model": get_model_state_dict(self.model),
            "optimizer": get_optimizer_state_dict(self.model, self.optimizer),
            "steps": self.steps,
            "items_seen": self.tokens_seen,
            "scaler": self.scaler.state_dict(),
        }


def _require_settings(schedule: Any, clip_norm: float, micro_batches: int, where: str) -> None:
    def refused(what: str, next_step: str) -> HyperionError:
        return HyperionError(what, where=where, next_step=next_step)

    if not callable(schedule):
        raise refused(
            f"the schedule is {schedule!r:.80}, not a function of the step",
            "give WarmupCosine(…), or lambda step: 1e-3 for a constant rate",
        )
    rate = schedule(1)
    if isinstance(rate, bool) or not isinstance(rate, int | float) or not 0 <= rate < math.inf:
        raise refused(f"the schedule gives the learning rate {rate!r} for step 1", "make it a finite number from 0")
    if isinstance(clip_norm, bool) or not isinstance(clip_norm, int | float) or not clip_norm > 0:
        raise refused(f"clip_norm is {clip_norm!r}", "give a number above 0, or math.inf to clip nothing")
    require_number("micro_batches", micro_batches, where, whole=True, at_least=1)


def _require_fitting(state: dict[str, Any], here: dict[str, Any], folder: Path) -> None:
    """Raises CheckpointError unless a stored state can be loaded where `here` is the state."""
    if state.get("scaler") and here["scaler"]:
        misfit = _misfit(state, here, "")
    else:  # one of them has no scale: LossScaler says that the precisions differ
        misfit = _misfit({**state, "scaler": {}}, {**here, "scaler": {}}, "") if "scaler" in state else "scaler is missing"
        misfit = misfit or ("" if isinstance(state["scaler"], dict) else "scaler is no object")
    for name in ("steps", "items_seen"):
        if not misfit and (type(state[name]) is not int or not 0 <= state[name] < 2**63):
            misfit = f"{name} is {state[name]!r}"
    if misfit:
        raise CheckpointError(
            f"the checkpoint does not fit this model and optimizer: {misfit}",
            where=folder,
            next_step="use the configuration it was saved with, or another checkpoint folder",
        )


def _misfit(stored: Any, here: Any, path: str) -> str:
    """Where two nested states differ in keys, lengths, kinds of values or texts; "" where they do not.

    Tensors were compared by read_sharded. Versions of PyTorch give groups of parameters other options: those that are in
    both are compared.
    """
    if isinstance(here, dict) and isinstance(stored, dict):
        options = path.startswith("optimizer/param_groups/") and "params" in stored
        if not options and (others := sorted(stored.keys() ^ here.keys())):
            return f"{path or 'the state'} has not the same entries: {others[0]}"
        pairs = [(f"{path}/{key}" if path else key, stored[key], here[key]) for key in here if key in stored]
    elif isinstance(here, list | tuple) and isinstance(stored, list) and len(here) == len(stored):
        pairs = [(f"{path}/{index}", *pair) for index, pair in enumerate(zip(stored, here, strict=True))]
    elif isinstance(here, Tensor) or isinstance(stored, Tensor):
        fits = isinstance(here, Tensor) and isinstance(stored, Tensor)
        return "" if fits else f"{path} is a tensor in one of the two only"
    else:
        fits = _kind(stored) == _kind(here) or None in (stored, here)
        fits = fits and not isinstance(stored, dict | list) and (not isinstance(here, str) or stored == here)
        return "" if fits else f"{path} is {stored!r:.80} there and {here!r:.80} here"
    return next((found for name, theirs, ours in pairs if (found := _misfit(theirs, ours, name))), "")


def _kind(value: Any) -> type:
    return float if isinstance(value, int) and not isinstance(value, bool) else type(value)
